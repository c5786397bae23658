// The scans again, for processors with AVX-512 VNNI; a table of tier v4 chooses between them at run
// time.
#if KVPAGER_ISA_LEVEL == 4

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512vnni")
#endif

#define KVPAGER_VNNI 1
#include "kernels/score_sketches_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {

void score_sketches_vnni(const SketchParams& params, const std::byte* const* summaries,
                         int64_t count, double* const* scores) {
  scan_sketches(params, summaries, count, scores);
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // KVPAGER_ISA_LEVEL
