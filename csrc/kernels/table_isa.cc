#include "kernels/functions_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr const char* kName = KVPAGER_ISA_LEVEL == 4   ? "v4"
                              : KVPAGER_ISA_LEVEL == 3 ? "v3"
                                                       : "base";

constexpr KernelTable kPlain = {kName,        KVPAGER_ISA_LEVEL, attend_tile, merge_state,
                                finish_state, exp_lanes,         to_float,    from_float,
                                rotate,       read_tile,         round_query, encode,
                                all_fit,      score_sketches,    score_means, score_exact};

#if KVPAGER_ISA_LEVEL == 4
constexpr KernelTable kVnni = {kName,        KVPAGER_ISA_LEVEL,   attend_tile_vnni, merge_state,
                               finish_state, exp_lanes,           to_float,         from_float,
                               rotate,       read_tile,           round_query,      encode,
                               all_fit,      score_sketches_vnni, score_means_vnni, score_exact};
#endif

}  // namespace

const KernelTable& table(bool vnni) {
#if KVPAGER_ISA_LEVEL == 4
  if (vnni) return kVnni;
#endif
  (void)vnni;
  return kPlain;
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
