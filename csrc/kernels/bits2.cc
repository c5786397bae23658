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
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/float_environment.h"
#include "base/half.h"
#include "kernels/kernel_table.h"
#include "kvpager/selection.h"

namespace kvpager::bits2 {
namespace {

constexpr int kBits = 2;
constexpr int kLowLevels = 32767;
constexpr int kStepLevels = 255;
constexpr double kNegligible = 1e-30;

float finite(float x) {
  if (x != x) return 0.0f;
  if (x > FLT_MAX) return FLT_MAX;
  if (x < -FLT_MAX) return -FLT_MAX;
  return x;
}

// The keys of a tile in float32 [k_dim][tokens]; NaN becomes 0 and infinity the largest finite
// value.
std::vector<float> finite_keys(const Layout& layout, const std::byte* k_tile) {
  const int64_t count = int64_t{layout.k_dim} * layout.chunk_tokens;
  std::vector<float> keys(static_cast<size_t>(count));
  const KernelTable& table = kernels();
  table.read_tile({k_tile, layout.k_dtype, Side::kKeys, layout.chunk_tokens, layout.k_dim},
                  keys.data());
  if (table.all_fit(keys.data(), DType::kFloat32, DType::kFloat32, count)) return keys;
  for (float& key : keys) key = finite(key);
  return keys;
}

// The least float with 16 significant bits that is >= largest / levels, so that a product with a
// 32-bit integer is exact in binary64. 0 when `largest` is below 1e-30: such values count as zero.
float short_scale(double largest, int levels) {
  if (!(largest >= kNegligible)) return 0.0f;
  const uint32_t bits = float_bits(static_cast<float>(largest / levels));
  const float shortened = bits_float((bits + 0xFFu) & ~0xFFu);
  return static_cast<double>(shortened) * levels >= largest
             ? shortened
             : bits_float(((bits + 0xFFu) & ~0xFFu) + 0x100u);
}

// value / scale to the nearest integer, ties to even, within [-limit, limit]; 0 for scale 0.
int32_t quantize(double value, float scale, int32_t limit) {
  if (scale == 0.0f) return 0;
  const double code = std::nearbyint(value / static_cast<double>(scale));
  if (code > limit) return limit;
  if (code < -limit) return -limit;
  return static_cast<int32_t>(code);
}

// Queries of one kv group as int8 with one scale, which is returned: q[head][d] is about scale * code,
// |code| <= 127. codes: zeros, [group][padded].
double quantize_query(int64_t group, int64_t dim, int64_t padded, const float* q, int16_t* codes) {
  float largest = 0.0f;
  for (int64_t i = 0; i < group * dim; ++i) {
    const float magnitude = std::fabs(finite(q[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  if (static_cast<double>(largest) < kNegligible) return 0.0;
  const float inverse = 127.0f / largest;
  for (int64_t head = 0; head < group; ++head) {
    for (int64_t d = 0; d < dim; ++d) {
      // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
      const float shifted = finite(q[head * dim + d]) * inverse + 12582912.0f;
      const int32_t code = static_cast<int32_t>(float_bits(shifted)) - 0x4B400000;
      codes[head * padded + d] = static_cast<int16_t>(code > 127 ? 127 : code < -127 ? -127 : code);
    }
  }
  return static_cast<double>(largest) / 127.0;
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

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

int64_t padded(const Layout& layout) { return round_up(layout.k_dim, kSketchDims); }
int64_t code_bytes(const Layout& layout) {
  return padded(layout) * layout.chunk_tokens * kBits / 8;
}

void write_codes(const Layout& layout, int64_t d, const float* keys, float base, float inverse,
                 std::byte* out) {
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

}  // namespace

int64_t summary_bytes(const Layout& layout) {
  return code_bytes(layout) + round_up(3 * padded(layout) + 8, 64);
}

void summarize(const Layout& layout, const std::byte* k_tile, std::byte* out) {
  const FloatEnvironment environment;
  const std::vector<float> keys = finite_keys(layout, k_tile);
  Levels levels[kMostDim];
  double largest_low = 0.0;
  double largest_step = 0.0;
  const int tokens = layout.chunk_tokens;
  for (int64_t d = 0; d < layout.k_dim; ++d) {
    const float* row = keys.data() + d * tokens;
    Levels& level = levels[d];
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
    const Levels& level = levels[d];
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
int64_t query_bytes(const Layout& layout, int group) {
  return kQueryHeaderBytes + 2 * group * padded(layout);
}

void prepare(const Layout& layout, int group, const float* q, std::byte* query) {
  const FloatEnvironment environment;
  std::memset(query, 0, static_cast<size_t>(query_bytes(layout, group)));
  auto* codes = reinterpret_cast<int16_t*>(query + kQueryHeaderBytes);
  const double scale = quantize_query(group, layout.k_dim, padded(layout), q, codes);
  std::memcpy(query, &scale, sizeof scale);
}

double query_scale(const std::byte* query) {
  double scale;
  std::memcpy(&scale, query, sizeof scale);
  return scale;
}

void score_rows(const Layout& layout, int group, int64_t rows, const std::byte* const* queries,
                const std::byte* const* summaries, int64_t count, double* const* scores) {
  const FloatEnvironment environment;
  SketchParams params;
  params.tokens = layout.chunk_tokens;
  params.padded_dim = static_cast<int32_t>(padded(layout));
  params.rows = static_cast<int32_t>(rows);
  params.group = group;
  params.queries = queries;
  kernels().score_sketches(params, summaries, count, scores);
}

}  // namespace kvpager::bits2
