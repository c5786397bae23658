// The mean key of a chunk.
//
//   summary = mean + 128 as uint8 [D], D = k_dim rounded up to 64; then its float32 scale; zeros up to
//             a multiple of 64
//   score   = scale * (q . mean), of the best query head
#include <cmath>
#include <cstring>

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kernels/scorer_common.h"
#include "kernels/scorers.h"

namespace kvpager {
namespace {

constexpr int64_t kDims = 64;
constexpr int kLevels = 127;

double mean_of(const float* keys, int tokens) {
  double sum = 0.0;
  for (int t = 0; t < tokens; ++t) sum += static_cast<double>(keys[t]);
  return sum / tokens;
}

class MeanScorer : public Scorer {
 public:
  const char* name() const override { return "mean"; }
  const char* description() const override { return "mean key of the chunk"; }

  int64_t summary_bytes(const Layout& layout) const override { return padded(layout) + 64; }

  void summarize(const Layout& layout, const std::byte* k_tile, std::byte* out) const override {
    const FloatEnvironment environment;
    thread_local std::vector<float> keys;
    thread_local std::vector<double> means;
    load_finite_keys(layout, k_tile, &keys);
    means.resize(static_cast<size_t>(layout.k_dim));
    double largest = 0.0;
    for (int64_t d = 0; d < layout.k_dim; ++d) {
      double& mean = means[static_cast<size_t>(d)];
      mean = mean_of(keys.data() + d * layout.chunk_tokens, layout.chunk_tokens);
      largest = std::fmax(largest, std::fabs(mean));
    }
    const float scale = short_scale(largest, kLevels);
    std::memset(out, 0, static_cast<size_t>(summary_bytes(layout)));
    for (int64_t d = 0; d < layout.k_dim; ++d) {
      const double mean = means[static_cast<size_t>(d)];
      out[d] = static_cast<std::byte>(quantize(mean, scale, kLevels) + 128);
    }
    std::memcpy(out + padded(layout), &scale, sizeof scale);
  }

  // Header, then 128 * (sum of codes) as int32 [group], codes as int8 [group][D].
  int64_t query_bytes(const Layout& layout, int group) const override {
    return query_codes(group) + group * padded(layout);
  }

  void prepare(const Layout& layout, int group, const float* q, std::byte* query) const override {
    const FloatEnvironment environment;
    thread_local QuantizedQuery quantized;
    quantize_query(int64_t{group} * layout.k_dim, q, &quantized);
    std::memset(query, 0, static_cast<size_t>(query_bytes(layout, group)));
    std::memcpy(query, &quantized.scale, sizeof quantized.scale);
    int8_t* codes = reinterpret_cast<int8_t*>(query + query_codes(group));
    for (int64_t head = 0; head < group; ++head) {
      int32_t sum = 0;
      for (int64_t d = 0; d < layout.k_dim; ++d) {
        const int8_t code = quantized.codes[static_cast<size_t>(head * layout.k_dim + d)];
        codes[head * padded(layout) + d] = code;
        sum += code;
      }
      const int32_t bias = 128 * sum;
      std::memcpy(query + sizeof(QueryHeader) + head * 4, &bias, sizeof bias);
    }
  }

  double query_scale(const std::byte* query) const override { return query_header_scale(query); }

  void score(const Layout& layout, int group, const std::byte* query,
             const std::byte* const* summaries, int64_t count, double* scores) const override {
    score_rows(layout, group, 1, &query, summaries, count, &scores);
  }

  void score_rows(const Layout& layout, int group, int64_t rows, const std::byte* const* queries,
                  const std::byte* const* summaries, int64_t count,
                  double* const* scores) const override {
    const FloatEnvironment environment;
    thread_local std::vector<const int8_t*> codes;
    thread_local std::vector<const int32_t*> biases;
    codes.clear();
    biases.clear();
    for (int64_t row = 0; row < rows; ++row) {
      biases.push_back(reinterpret_cast<const int32_t*>(queries[row] + sizeof(QueryHeader)));
      codes.push_back(reinterpret_cast<const int8_t*>(queries[row] + query_codes(group)));
    }
    MeanParams params;
    params.padded_dim = static_cast<int32_t>(padded(layout));
    params.rows = static_cast<int32_t>(rows);
    params.group = group;
    params.bias = biases.data();
    params.q = codes.data();
    kernels().score_means(params, summaries, count, scores);
  }

 private:
  static int64_t padded(const Layout& layout) { return round_up(layout.k_dim, kDims); }
  static int64_t query_codes(int group) {
    return static_cast<int64_t>(sizeof(QueryHeader)) + round_up(int64_t{4} * group, 64);
  }
};

}  // namespace

std::unique_ptr<Scorer> make_mean_scorer() { return std::make_unique<MeanScorer>(); }

}  // namespace kvpager
