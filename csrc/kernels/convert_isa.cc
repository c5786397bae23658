// Runs of elements between float32 and the stored dtypes, and the check that all are finite.
#include "kernels/functions_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {

void to_float(const void* source, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const uint16_t* in = static_cast<const uint16_t*>(source);
  int64_t i = 0;
  if (dtype == DType::kFloat16) {
    for (; i + 16 <= count; i += 16) store(out + i, load_float16(in + i));
    for (; i < count; ++i) out[i] = float16_to_float(in[i]);
  } else {
    for (; i + 16 <= count; i += 16) store(out + i, load_bfloat16(in + i));
    for (; i < count; ++i) out[i] = bfloat16_to_float(in[i]);
  }
}

void from_float(const float* source, DType dtype, int64_t count, void* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out);
  int64_t i = 0;
  if (dtype == DType::kFloat16) {
#if KVPAGER_ISA_LEVEL >= 3
    for (; i + 8 <= count; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
#endif
    for (; i < count; ++i) to[i] = float_to_float16(source[i]);
  } else {
    for (; i < count; ++i) to[i] = float_to_bfloat16(source[i]);
  }
}

namespace {

// An element is not finite when its exponent bits are all ones.
template <class Word>
bool exponents_below(const Word* words, int64_t count, Word exponent) {
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found = static_cast<Word>(found | static_cast<Word>((words[i] & exponent) == exponent));
  }
  return found == 0;
}

}  // namespace

bool all_finite(const void* source, DType dtype, int64_t count) {
  if (dtype == DType::kFloat32) {
    return exponents_below(static_cast<const uint32_t*>(source), count, uint32_t{0x7F800000});
  }
  const uint16_t exponent = dtype == DType::kFloat16 ? 0x7C00 : 0x7F80;
  return exponents_below(static_cast<const uint16_t*>(source), count, exponent);
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
