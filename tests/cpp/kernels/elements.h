// Elements of float32, float16 and bfloat16 in memory, one at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "kvpager/types.h"

namespace kvpager::testing {

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

inline float widen(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t code = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kFloat16 ? float16_to_float(code) : bfloat16_to_float(code);
}

inline void round_to(DType dtype, float value, void* data, int64_t i) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<uint16_t*>(data)[i] =
        dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
  }
}

}  // namespace kvpager::testing
