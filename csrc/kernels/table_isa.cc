#include "kernels/functions_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr const char* kName = KVPAGER_ISA_LEVEL == 4   ? "v4"
                              : KVPAGER_ISA_LEVEL == 3 ? "v3"
                                                       : "base";

constexpr KernelTable kPlain = {kName,       KVPAGER_ISA_LEVEL, attend_tile,
                                merge_state, finish_state,      exp_lanes,
                                to_float,    from_float,        rotate,
                                read_tile,   round_query,       encode,
                                all_fit,     score_sketches,    score_means,
                                score_exact, linear_packing,    linear_compressed_rows,
                                linear_pack, linear_panel,      combine,
                                mean};

#if KVPAGER_ISA_LEVEL == 4
constexpr KernelTable with_vnni() {
  KernelTable table = kPlain;
  table.attend_tile = attend_tile_vnni;
  table.score_sketches = score_sketches_vnni;
  table.score_means = score_means_vnni;
  return table;
}
constexpr KernelTable kVnni = with_vnni();

constexpr KernelTable with_vnni_and_bf16() {
  KernelTable table = kVnni;
  table.linear_panel = linear_panel_dots;
  return table;
}
constexpr KernelTable kVnniBf16 = with_vnni_and_bf16();
#endif

}  // namespace

const KernelTable& table(Extensions extensions) {
#if KVPAGER_ISA_LEVEL == 4
  if (extensions == Extensions::kVnni) return kVnni;
  if (extensions == Extensions::kVnniBf16) return kVnniBf16;
#endif
  (void)extensions;
  return kPlain;
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
