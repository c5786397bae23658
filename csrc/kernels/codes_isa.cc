// Rows to codes and tiles back to numbers: kvpager/codes.h says what they mean.
#include "kernels/functions_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// Rows whose largest magnitude is below this are kept as zeros: its scale has an inverse.
constexpr float kNegligible = 1e-30f;
// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
constexpr float kRounding = 12582912.0f;
constexpr uint32_t kRoundingBits = 0x4B400000u;

// Magnitudes are ordered as their bits are.
float largest_magnitude(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return bits_float(static_cast<uint32_t>(largest));
}

void encode_q8(const float* x, int64_t dim, uint8_t* codes, uint16_t* scale) {
  const float largest = largest_magnitude(x, dim);
  if (largest < kNegligible) {
    *scale = 0;
    std::memset(codes, 0, static_cast<size_t>(dim));
    return;
  }
  *scale = float_to_bfloat16(largest / 127.0f);  // off by 1 / 512 at most: `largest` becomes 127
  const float inverse = 1.0f / bfloat16_to_float(*scale);
  for (int64_t i = 0; i < dim; ++i) {
    codes[i] = static_cast<uint8_t>(float_bits(x[i] * inverse + kRounding) - kRoundingBits);
  }
}

constexpr float level_of(int code) { return static_cast<float>(kQ4Levels[code]); }

// Where a number of a group lies between two levels, the nearer one is taken.
constexpr float half_way(int code) { return 0.5f * (level_of(code) + level_of(code + 1)); }

// Scales tried for a group: its number of largest magnitude falls on the last level of either sign, or
// this much beyond it. Either way it has that level, so that the group is found again from its numbers.
constexpr float kBeyond = 1.05f;
constexpr int kQ4Zero = 8;

struct Group {
  Vec x[2];
};

// Level and code of every number over `scale`.
KVPAGER_INLINE Vec nearest_level(Vec y, Vec* code) {
  Vec level = splat(level_of(0));
  Vec index = splat(0.0f);
  for (int i = 0; i < 15; ++i) {
    level = add(level, zero_below(y, half_way(i), splat(level_of(i + 1) - level_of(i))));
    index = add(index, zero_below(y, half_way(i), splat(1.0f)));
  }
  *code = index;
  return level;
}

// The squared error of a group with this scale, and its codes.
KVPAGER_INLINE float group_error(const Group& group, float scale, Vec* codes) {
  const Vec inverse = splat(1.0f / scale);
  const Vec step = splat(scale);
  Vec sum = splat(0.0f);
  for (int half = 0; half < 2; ++half) {
    const Vec level = nearest_level(mul(group.x[half], inverse), &codes[half]);
    const Vec off = sub(group.x[half], mul(level, step));
    sum = add(sum, mul(off, off));
  }
  return tree_sum(sum);
}

// The first number of largest magnitude, with its sign.
float extreme(const float* x, float largest) {
  for (int i = 0; i < kQ4Group; ++i) {
    if (x[i] == largest || x[i] == -largest) return x[i];
  }
  return largest;
}

void encode_q4_group(const float* x, uint8_t* codes, uint16_t* scale) {
  const float largest = largest_magnitude(x, kQ4Group);
  *scale = 0;
  if (largest < kNegligible) {
    std::memset(codes, kQ4Zero, kQ4Group);
    return;
  }
  const float top = extreme(x, largest);
  const Group group = {{load(x), load(x + 16)}};
  float least = 0.0f;
  Vec best[2] = {splat(0.0f), splat(0.0f)};
  for (int i = 0; i < 4; ++i) {
    const float end = level_of(i < 2 ? 0 : 15) * (i % 2 == 0 ? 1.0f : kBeyond);
    const uint16_t candidate = float_to_bfloat16(top / end);
    Vec tried[2];
    const float error = group_error(group, bfloat16_to_float(candidate), tried);
    if (i > 0 && !(error < least)) continue;
    least = error;
    *scale = candidate;
    best[0] = tried[0];
    best[1] = tried[1];
  }
  float wide[kQ4Group];
  store(wide, best[0]);
  store(wide + 16, best[1]);
  for (int i = 0; i < kQ4Group; ++i) codes[i] = static_cast<uint8_t>(static_cast<int>(wide[i]));
}

// The level of dimension d of a token.
int level_at(const Tile& tile, int64_t token, int64_t d) {
  const uint8_t* codes = static_cast<const uint8_t*>(tile.data);
  const int64_t tokens = tile.tokens;
  const bool keys = tile.side == Side::kKeys;
  if (tile.dtype == DType::kQ8) {
    const int64_t at =
        keys ? (d / 2 * tokens + token) * 2 + d % 2 : (token / 2 * tile.dim + d) * 2 + token % 2;
    return static_cast<int8_t>(codes[at]);
  }
  if (keys) {
    const uint8_t both = codes[d / 2 * tokens + token];
    return kQ4Levels[d % 2 == 0 ? both & 15 : both >> 4];
  }
  const uint8_t both = codes[token * tile.dim / 2 + d / kQ4Group * 16 + d % 16];
  return kQ4Levels[d % kQ4Group < 16 ? both & 15 : both >> 4];
}

}  // namespace

namespace {

// Numbers kStep apart are added and subtracted.
template <int kStep>
void add_and_subtract(float* x, int64_t dim) {
  for (int64_t first = 0; first < dim; first += 2 * kStep) {
    float* low = x + first;
    float* high = low + kStep;
    if constexpr (kStep >= 16) {
      for (int i = 0; i < kStep; i += 16) {
        const Vec a = load(low + i);
        const Vec b = load(high + i);
        store(low + i, add(a, b));
        store(high + i, sub(a, b));
      }
    } else {
      for (int i = 0; i < kStep; ++i) {
        const float a = low[i];
        const float b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
}

// 1 / sqrt(block) for a power of two.
float rotation_factor(int64_t block) {
  float factor = 1.0f;
  for (; block >= 4; block /= 4) factor *= 0.5f;
  return block == 2 ? factor * 0x1.6A09E6p-1f : factor;
}

}  // namespace

void rotate(float* x, int64_t dim) {
  const int64_t block = dim & -dim;
  add_and_subtract<1>(x, dim);
  add_and_subtract<2>(x, dim);
  add_and_subtract<4>(x, dim);
  add_and_subtract<8>(x, dim);
  if (block >= 32) add_and_subtract<16>(x, dim);
  if (block >= 64) add_and_subtract<32>(x, dim);
  if (block >= 128) add_and_subtract<64>(x, dim);
  if (block >= 256) add_and_subtract<128>(x, dim);
  if (block >= 512) add_and_subtract<256>(x, dim);
  const Vec factor = splat(rotation_factor(block));
  for (int64_t i = 0; i < dim; i += 16) store(x + i, mul(load(x + i), factor));
}

float round_query(const float* q, int64_t count, int16_t* out) {
  const float largest = largest_magnitude(q, count);
  if (!(largest >= kNegligible && largest < __builtin_inff())) {
    std::memset(out, 0, static_cast<size_t>(count) * sizeof(int16_t));
    return largest < kNegligible ? 0.0f : __builtin_nanf("");
  }
  const Vec factor = splat(32767.0f / largest);
  for (int64_t i = 0; i < count; i += 16) store_rounded(out + i, load(q + i), factor);
  return largest / 32767.0f;
}

void encode(const float* source, DType dtype, int64_t dim, uint8_t* codes, uint16_t* scales) {
  if (dtype == DType::kQ8) return encode_q8(source, dim, codes, scales);
  for (int64_t i = 0; i < dim; i += kQ4Group) {
    encode_q4_group(source + i, codes + i, scales + i / kQ4Group);
  }
}

void read_tile(const Tile& tile, float* out) {
  if (!is_coded(tile.dtype)) {
    return to_float(tile.data, tile.dtype, int64_t{tile.dim} * tile.tokens, out);
  }
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(
      static_cast<const uint8_t*>(tile.data) + tile.tokens * row_code_bytes(tile.dtype, tile.dim));
  const bool keys = tile.side == Side::kKeys;
  const int64_t group = tile.dtype == DType::kQ4 ? kQ4Group : tile.dim;
  for (int64_t token = 0; token < tile.tokens; ++token) {
    for (int64_t d = 0; d < tile.dim; ++d) {
      const float scale = bfloat16_to_float(scales[d / group * tile.tokens + token]);
      out[keys ? d * tile.tokens + token : token * tile.dim + d] =
          static_cast<float>(level_at(tile, token, d)) * scale;
    }
  }
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
