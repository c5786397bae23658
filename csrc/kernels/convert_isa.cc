// Runs of elements between float32 and the stored dtypes, and the check that all fit one.
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
  if (dtype == DType::kFloat16) return store_float16(source, count, to);
  store_bfloat16(source, count, to);
}

namespace {

// The bits of the least magnitude of `dtype` that is not finite or rounds to infinity in `stored`:
// for a narrower format half-way between its greatest finite value and the next power of two.
int32_t least_unfit(DType dtype, DType stored) {
  const bool coded = is_coded(stored);
  if (dtype == DType::kFloat32) {
    if (coded) return 0x7A000000;                       // 2^117
    if (stored == DType::kFloat16) return 0x477FF000;   // 65520
    if (stored == DType::kBFloat16) return 0x7F7F8000;  // 0x1.FFp127
    return 0x7F800000;
  }
  if (dtype == DType::kFloat16) return 0x7C00;
  if (coded) return 0x7A00;                            // 2^117
  return stored == DType::kFloat16 ? 0x4780 : 0x7F80;  // 65536, the next after 65280
}

// Magnitudes order floats as their bits do. Signed words: every tier can compare those.
template <class Word>
bool magnitudes_below(const void* source, int64_t count, Word limit) {
  constexpr Word kMagnitude = static_cast<Word>(~(Word{1} << (8 * sizeof(Word) - 1)));
  const char* bytes = static_cast<const char*>(source);
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes + i * static_cast<int64_t>(sizeof word), sizeof word);
    found = static_cast<Word>(found | static_cast<Word>((word & kMagnitude) >= limit));
  }
  return found == 0;
}

}  // namespace

bool all_fit(const void* source, DType dtype, DType stored, int64_t count) {
  const int32_t limit = least_unfit(dtype, stored);
  if (dtype == DType::kFloat32) return magnitudes_below<int32_t>(source, count, limit);
  return magnitudes_below<int16_t>(source, count, static_cast<int16_t>(limit));
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
