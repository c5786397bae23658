#include "kernels/score_sketches_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {

void score_sketches(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                    double* const* scores) {
  scan_sketches(params, summaries, count, scores);
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
