#include "kernels/functions_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr KernelTable kPlain = {level_name(KVPAGER_ISA_LEVEL),
                                KVPAGER_ISA_LEVEL,
                                Extensions::kNone,
                                attend_tile,
                                merge_state,
                                finish_state,
                                exp_lanes,
                                to_float,
                                from_float,
                                rotate,
                                read_tile,
                                round_query,
                                encode,
                                all_fit,
                                score_sketches};

#if KVPAGER_ISA_LEVEL == 4
constexpr KernelTable with_vnni() {
  KernelTable table = kPlain;
  table.extensions = Extensions::kVnni;
  table.attend_tile = attend_tile_vnni;
  table.score_sketches = score_sketches_vnni;
  return table;
}
constexpr KernelTable kVnni = with_vnni();

constexpr KernelTable with_vnni_and_bf16() {
  KernelTable table = kVnni;
  table.extensions = Extensions::kVnniBf16;
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
