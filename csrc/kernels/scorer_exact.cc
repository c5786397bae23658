// All keys in float32, dot products in binary64 in ascending dimension: what the sketches are
// measured against.
#include <cstring>

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kernels/scorer_common.h"
#include "kernels/scorers.h"

namespace kvpager {
namespace {

class ExactScorer : public Scorer {
 public:
  const char* name() const override { return "exact"; }
  const char* description() const override {
    return "all keys in float32, best token: an oracle for measurements";
  }

  int64_t summary_bytes(const Layout& layout) const override {
    return int64_t{layout.k_dim} * layout.chunk_tokens * 4;
  }

  void summarize(const Layout& layout, const std::byte* k_tile, std::byte* out) const override {
    const FloatEnvironment environment;
    thread_local std::vector<float> keys;
    load_finite_keys(layout, k_tile, &keys);
    std::memcpy(out, keys.data(), keys.size() * sizeof(float));
  }

  int64_t query_bytes(const Layout& layout, int group) const override {
    return round_up(int64_t{4} * group * layout.k_dim, 64);
  }

  void prepare(const Layout& layout, int group, const float* q, std::byte* query) const override {
    std::memset(query, 0, static_cast<size_t>(query_bytes(layout, group)));
    const int64_t count = int64_t{group} * layout.k_dim;
    std::memcpy(query, q, static_cast<size_t>(count) * sizeof(float));
  }

  double query_scale(const std::byte*) const override { return 1.0; }

  void score(const Layout& layout, int group, const std::byte* query,
             const std::byte* const* summaries, int64_t count, double* scores) const override {
    const FloatEnvironment environment;
    kernels().score_exact(layout.chunk_tokens, layout.k_dim, group,
                          reinterpret_cast<const float*>(query), summaries, count, scores);
  }
};

}  // namespace

std::unique_ptr<Scorer> make_exact_scorer() { return std::make_unique<ExactScorer>(); }

}  // namespace kvpager
