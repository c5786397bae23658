// Boxes of tokens: a centre and, for all but the mean, a spread per dimension; the best box counts.
//
//   summary = per box: centre + 128 as uint8 [D], then spread as uint8 [D] (not for mean), D =
//             k_dim up to 64; then float32 centre scale, float32 spread scale; zeros up to a
//             multiple of 64
//   score   = centre scale * (q . centre) + spread scale * (|q| . spread), the best box of the best
//             query head
#include <cmath>
#include <cstring>

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kernels/scorer_common.h"
#include "kernels/scorers.h"

namespace kvpager {
namespace {

constexpr int64_t kDims = 64;
constexpr int kCentreLevels = 127;
constexpr int kSpreadLevels = 255;

struct Box {
  double centre = 0.0;
  double spread = 0.0;
};

Box mean_box(const float* keys, int tokens, bool with_spread) {
  double sum = 0.0;
  for (int t = 0; t < tokens; ++t) sum += static_cast<double>(keys[t]);
  Box box;
  box.centre = sum / tokens;
  if (with_spread) {
    double squares = 0.0;
    for (int t = 0; t < tokens; ++t) {
      const double difference = static_cast<double>(keys[t]) - box.centre;
      squares += difference * difference;
    }
    box.spread = std::sqrt(squares / tokens);
  }
  return box;
}

Box range_box(const float* keys, int tokens) {
  float low = keys[0];
  float high = keys[0];
  for (int t = 1; t < tokens; ++t) {
    low = keys[t] < low ? keys[t] : low;
    high = keys[t] > high ? keys[t] : high;
  }
  const double bottom = static_cast<double>(low);
  const double top = static_cast<double>(high);
  return {(bottom + top) / 2, (top - bottom) / 2};
}

class BoxScorer : public Scorer {
 public:
  explicit BoxScorer(BoxKind kind) : kind_(kind) {}

  const char* name() const override {
    switch (kind_) {
      case BoxKind::kMean:
        return "mean";
      case BoxKind::kMeanStd:
        return "meanstd";
      case BoxKind::kMinMax:
        return "minmax";
      case BoxKind::kSub16:
        return "sub16";
    }
    return "";
  }
  const char* description() const override {
    switch (kind_) {
      case BoxKind::kMean:
        return "mean key of the chunk";
      case BoxKind::kMeanStd:
        return "mean key and standard deviation per dimension";
      case BoxKind::kMinMax:
        return "box around the chunk's keys: an upper bound of every score";
      case BoxKind::kSub16:
        return "boxes around every 16 keys, the best one";
    }
    return "";
  }

  int64_t summary_bytes(const Layout& layout) const override {
    return boxes(layout) * box_bytes(layout) + 64;
  }

  void summarize(const Layout& layout, const std::byte* k_tile, std::byte* out) const override {
    const FloatEnvironment environment;
    thread_local std::vector<float> keys;
    thread_local std::vector<Box> all;
    load_finite_keys(layout, k_tile, &keys);
    const int64_t count = boxes(layout);
    const int tokens = static_cast<int>(layout.chunk_tokens / count);
    all.resize(static_cast<size_t>(count * layout.k_dim));
    double largest_centre = 0.0;
    double largest_spread = 0.0;
    for (int64_t d = 0; d < layout.k_dim; ++d) {
      for (int64_t b = 0; b < count; ++b) {
        const float* first = keys.data() + d * layout.chunk_tokens + b * tokens;
        const Box box = ranged() ? range_box(first, tokens) : mean_box(first, tokens, spread());
        largest_centre = std::fmax(largest_centre, std::fabs(box.centre));
        largest_spread = std::fmax(largest_spread, box.spread);
        all[static_cast<size_t>(b * layout.k_dim + d)] = box;
      }
    }
    const float scales[2] = {short_scale(largest_centre, kCentreLevels),
                             short_scale(largest_spread, kSpreadLevels)};
    std::memset(out, 0, static_cast<size_t>(summary_bytes(layout)));
    const int64_t padded = round_up(layout.k_dim, kDims);
    for (int64_t b = 0; b < count; ++b) {
      std::byte* centre = out + b * box_bytes(layout);
      for (int64_t d = 0; d < layout.k_dim; ++d) {
        const Box& box = all[static_cast<size_t>(b * layout.k_dim + d)];
        centre[d] = static_cast<std::byte>(quantize(box.centre, scales[0], kCentreLevels) + 128);
        if (spread()) {
          centre[padded + d] =
              static_cast<std::byte>(quantize(box.spread, scales[1], kSpreadLevels));
        }
      }
    }
    std::memcpy(out + count * box_bytes(layout), scales, sizeof scales);
  }

  // Header, then 128 * (sum of codes) as int32 [group], codes and their magnitudes as int8
  // [group][D].
  int64_t query_bytes(const Layout& layout, int group) const override {
    return query_codes(group) + 2 * group * round_up(layout.k_dim, kDims);
  }

  void prepare(const Layout& layout, int group, const float* q, std::byte* query) const override {
    const FloatEnvironment environment;
    thread_local QuantizedQuery quantized;
    quantize_query(int64_t{group} * layout.k_dim, q, &quantized);
    std::memset(query, 0, static_cast<size_t>(query_bytes(layout, group)));
    std::memcpy(query, &quantized.scale, sizeof quantized.scale);
    const int64_t padded = round_up(layout.k_dim, kDims);
    int8_t* codes = reinterpret_cast<int8_t*>(query + query_codes(group));
    int8_t* magnitudes = codes + group * padded;
    for (int64_t head = 0; head < group; ++head) {
      int32_t sum = 0;
      for (int64_t d = 0; d < layout.k_dim; ++d) {
        const int8_t code = quantized.codes[static_cast<size_t>(head * layout.k_dim + d)];
        codes[head * padded + d] = code;
        magnitudes[head * padded + d] = static_cast<int8_t>(code < 0 ? -code : code);
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
    BoxParams params;
    params.boxes = static_cast<int32_t>(boxes(layout));
    params.padded_dim = static_cast<int32_t>(round_up(layout.k_dim, kDims));
    params.spread = spread();
    params.rows = static_cast<int32_t>(rows);
    params.group = group;
    params.bias = biases.data();
    params.q = codes.data();
    kernels().score_boxes(params, summaries, count, scores);
  }

 private:
  bool ranged() const { return kind_ == BoxKind::kMinMax || kind_ == BoxKind::kSub16; }
  bool spread() const { return kind_ != BoxKind::kMean; }
  int64_t boxes(const Layout& layout) const {
    return kind_ == BoxKind::kSub16 ? layout.chunk_tokens / 16 : 1;
  }
  int64_t box_bytes(const Layout& layout) const {
    return round_up(layout.k_dim, kDims) * (spread() ? 2 : 1);
  }
  static int64_t query_codes(int group) {
    return static_cast<int64_t>(sizeof(QueryHeader)) + round_up(int64_t{4} * group, 64);
  }

  BoxKind kind_;
};

}  // namespace

std::unique_ptr<Scorer> make_box_scorer(BoxKind kind) { return std::make_unique<BoxScorer>(kind); }

}  // namespace kvpager
