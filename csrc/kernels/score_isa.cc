#include "kernels/score_means_isa.h"
#include "kernels/score_sketches_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {

void score_sketches(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                    double* const* scores) {
  scan_sketches(params, summaries, count, scores);
}

void score_means(const MeanParams& params, const std::byte* const* summaries, int64_t count,
                 double* const* scores) {
  scan_means(params, summaries, count, scores);
}

// Products of two floats are exact in binary64, so that only the additions round, in ascending
// dimension.
void score_exact(int32_t tokens, int32_t k_dim, int32_t group, const float* q,
                 const std::byte* const* summaries, int64_t count, double* scores) {
  for (int64_t i = 0; i < count; ++i) {
    const float* keys = reinterpret_cast<const float*>(summaries[i]);
    double score = 0.0;
    for (int h = 0; h < group; ++h) {
      double sums[256] = {};
      for (int d = 0; d < k_dim; ++d) {
        const double factor = static_cast<double>(q[h * k_dim + d]);
        for (int t = 0; t < tokens; ++t) {
          sums[t] += factor * static_cast<double>(keys[int64_t{d} * tokens + t]);
        }
      }
      for (int t = 0; t < tokens; ++t) {
        if (h + t == 0 || sums[t] > score) score = sums[t];
      }
    }
    scores[i] = score;
  }
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
