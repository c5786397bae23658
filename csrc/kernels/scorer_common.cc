#include "kernels/scorer_common.h"

#include <cfloat>
#include <cmath>

#include "kernels/half.h"
#include "kernels/kernel_table.h"

namespace kvpager {
namespace {

constexpr double kNegligible = 1e-30;

float finite(float x) {
  if (x != x) return 0.0f;
  if (x > FLT_MAX) return FLT_MAX;
  if (x < -FLT_MAX) return -FLT_MAX;
  return x;
}

}  // namespace

void load_finite_keys(const Layout& layout, const std::byte* k_tile, std::vector<float>* keys) {
  const int64_t count = int64_t{layout.k_dim} * layout.chunk_tokens;
  keys->resize(static_cast<size_t>(count));
  const KernelTable& table = kernels();
  table.read_tile({k_tile, layout.k_dtype, Side::kKeys, layout.chunk_tokens, layout.k_dim},
                  keys->data());
  if (table.all_fit(keys->data(), DType::kFloat32, DType::kFloat32, count)) return;
  for (float& key : *keys) key = finite(key);
}

float short_scale(double largest, int levels) {
  if (!(largest >= kNegligible)) return 0.0f;
  const uint32_t bits = float_bits(static_cast<float>(largest / levels));
  const float shortened = bits_float((bits + 0xFFu) & ~0xFFu);
  return static_cast<double>(shortened) * levels >= largest
             ? shortened
             : bits_float(((bits + 0xFFu) & ~0xFFu) + 0x100u);
}

int32_t quantize(double value, float scale, int32_t limit) {
  if (scale == 0.0f) return 0;
  const double code = std::nearbyint(value / static_cast<double>(scale));
  if (code > limit) return limit;
  if (code < -limit) return -limit;
  return static_cast<int32_t>(code);
}

void quantize_query(int64_t count, const float* q, QuantizedQuery* out) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(finite(q[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  out->codes.assign(static_cast<size_t>(count), 0);
  out->scale = 0.0;
  if (static_cast<double>(largest) < kNegligible) return;
  out->scale = static_cast<double>(largest) / 127.0;
  const float inverse = 127.0f / largest;
  for (int64_t i = 0; i < count; ++i) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
    const float shifted = finite(q[i]) * inverse + 12582912.0f;
    const int32_t code = static_cast<int32_t>(float_bits(shifted)) - 0x4B400000;
    out->codes[static_cast<size_t>(i)] = static_cast<int8_t>(code > 127    ? 127
                                                             : code < -127 ? -127
                                                                           : code);
  }
}

}  // namespace kvpager
