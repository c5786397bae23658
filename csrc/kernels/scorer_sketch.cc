// Two bits per key dimension: every token is scored, the best one counts.
//
// A key is about low[d] + code * step[d]: low is the chunk's minimum, step a third of its range.
//
//   summary = codes, int16 low [D], uint8 step [D], float32 low scale, float32 step scale, zeros
//             up to a multiple of 64;  D = k_dim rounded up to 32
//   codes   = [D / 16][tokens][4] bytes of 4 codes: byte b of token t in group g holds at bit (2 s)
//             the code of dimension 16 g + 4 s + b, so that a shift and a mask leave four dimensions
//             of each token in one 32-bit lane
//   score   = low scale * (q . low) + 256 step scale * (w . code), w = (q * step + 128) >> 8, the
//             best token of the best query head
#include <cmath>
#include <cstring>

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kernels/scorer_common.h"
#include "kernels/scorers.h"

namespace kvpager {
namespace {

constexpr int kBits = 2;
constexpr int kLowLevels = 32767;
constexpr int kStepLevels = 255;

struct Levels {
  double low = 0.0;
  double step = 0.0;
};

// Minimum and a third of the range. Lane-wise first; minima and maxima have no order.
Levels range_levels(const float* keys, int tokens) {
  float low[16];
  float high[16];
  std::memcpy(low, keys, sizeof low);
  std::memcpy(high, keys, sizeof high);
  for (int t = 16; t < tokens; t += 16) {
    for (int i = 0; i < 16; ++i) {
      const float key = keys[t + i];
      low[i] = key < low[i] ? key : low[i];
      high[i] = key > high[i] ? key : high[i];
    }
  }
  for (int i = 1; i < 16; ++i) {
    low[0] = low[i] < low[0] ? low[i] : low[0];
    high[0] = high[i] > high[0] ? high[i] : high[0];
  }
  return {static_cast<double>(low[0]),
          (static_cast<double>(high[0]) - static_cast<double>(low[0])) / 3};
}

class SketchScorer : public Scorer {
 public:
  const char* name() const override { return "bits2"; }
  const char* description() const override {
    return "two bits per key dimension, within the chunk's range, best token";
  }

  int64_t summary_bytes(const Layout& layout) const override {
    return code_bytes(layout) + round_up(3 * padded(layout) + 8, 64);
  }

  void summarize(const Layout& layout, const std::byte* k_tile, std::byte* out) const override {
    const FloatEnvironment environment;
    thread_local std::vector<float> keys;
    thread_local std::vector<Levels> levels;
    load_finite_keys(layout, k_tile, &keys);
    levels.resize(static_cast<size_t>(layout.k_dim));
    double largest_low = 0.0;
    double largest_step = 0.0;
    const int tokens = layout.chunk_tokens;
    for (int64_t d = 0; d < layout.k_dim; ++d) {
      const float* row = keys.data() + d * tokens;
      Levels& level = levels[static_cast<size_t>(d)];
      level = range_levels(row, tokens);
      largest_low = std::fmax(largest_low, std::fabs(level.low));
      largest_step = std::fmax(largest_step, level.step);
    }
    const float scales[2] = {short_scale(largest_low, kLowLevels),
                             short_scale(largest_step, kStepLevels)};

    std::memset(out, 0, static_cast<size_t>(summary_bytes(layout)));
    int16_t* low = reinterpret_cast<int16_t*>(out + code_bytes(layout));
    uint8_t* step = reinterpret_cast<uint8_t*>(low + padded(layout));
    std::memcpy(step + padded(layout), scales, sizeof scales);
    for (int64_t d = 0; d < layout.k_dim; ++d) {
      const Levels& level = levels[static_cast<size_t>(d)];
      low[d] = static_cast<int16_t>(quantize(level.low, scales[0], kLowLevels));
      step[d] = static_cast<uint8_t>(quantize(level.step, scales[1], kStepLevels));
      if (step[d] == 0) continue;
      // Codes follow the levels as they are stored, not as they were measured.
      const float base = static_cast<float>(low[d] * static_cast<double>(scales[0]));
      const float inverse = static_cast<float>(1.0 / (step[d] * static_cast<double>(scales[1])));
      write_codes(layout, d, keys.data() + d * tokens, base, inverse, out);
    }
  }

  // Header, then codes as int16 [group][D].
  int64_t query_bytes(const Layout& layout, int group) const override {
    return static_cast<int64_t>(sizeof(QueryHeader)) + 2 * group * padded(layout);
  }

  void prepare(const Layout& layout, int group, const float* q, std::byte* query) const override {
    const FloatEnvironment environment;
    thread_local QuantizedQuery quantized;
    quantize_query(int64_t{group} * layout.k_dim, q, &quantized);
    std::memset(query, 0, static_cast<size_t>(query_bytes(layout, group)));
    std::memcpy(query, &quantized.scale, sizeof quantized.scale);
    int16_t* codes = reinterpret_cast<int16_t*>(query + sizeof(QueryHeader));
    for (int64_t head = 0; head < group; ++head) {
      for (int64_t d = 0; d < layout.k_dim; ++d) {
        codes[head * padded(layout) + d] =
            quantized.codes[static_cast<size_t>(head * layout.k_dim + d)];
      }
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
    thread_local std::vector<const int16_t*> codes;
    codes.clear();
    for (int64_t row = 0; row < rows; ++row) {
      codes.push_back(reinterpret_cast<const int16_t*>(queries[row] + sizeof(QueryHeader)));
    }
    SketchParams params;
    params.tokens = layout.chunk_tokens;
    params.padded_dim = static_cast<int32_t>(padded(layout));
    params.rows = static_cast<int32_t>(rows);
    params.group = group;
    params.q = codes.data();
    kernels().score_sketches(params, summaries, count, scores);
  }

 private:
  static int64_t padded(const Layout& layout) { return round_up(layout.k_dim, kSketchDims); }
  int64_t code_bytes(const Layout& layout) const {
    return padded(layout) * layout.chunk_tokens * kBits / 8;
  }

  void write_codes(const Layout& layout, int64_t d, const float* keys, float base, float inverse,
                   std::byte* out) const {
    const int64_t dims = 4 * (8 / kBits);
    const int shift = static_cast<int>(d % dims / 4) * kBits;
    const float top = static_cast<float>((1 << kBits) - 1);
    uint8_t* bytes = reinterpret_cast<uint8_t*>(out) + d / dims * layout.chunk_tokens * 4 + d % 4;
    for (int64_t t = 0; t < layout.chunk_tokens; ++t) {
      float level = (keys[t] - base) * inverse;
      level = level > 0.0f ? level : 0.0f;
      level = level < top ? level : top;
      const uint8_t code = static_cast<uint8_t>(static_cast<int>(level + 0.5f));
      bytes[4 * t] = static_cast<uint8_t>(bytes[4 * t] | (code << shift));
    }
  }
};

}  // namespace

std::unique_ptr<Scorer> make_sketch_scorer() { return std::make_unique<SketchScorer>(); }

}  // namespace kvpager
