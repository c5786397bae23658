// Tensor cores by element type, and vectors of elements that are read and written at once.
#pragma once

#include "cuda/portable.h"

namespace kvpager::gpu::tensor {

struct alignas(16) Word4 {
  uint32_t x[4];
};
struct alignas(16) Float4 {
  float x[4];
};
struct alignas(8) Float2 {
  float x[2];
};

template <DType kType>
KVP_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kType == DType::kBFloat16) {
    mma_bfloat16(d, a, b0, b1);
  } else {
    mma_float16(d, a, b0, b1);
  }
}

template <DType kType>
KVP_DEVICE uint32_t pack(float low, float high) {
  if constexpr (kType == DType::kBFloat16) {
    return pack_bfloat16(low, high);
  } else {
    return pack_float16(low, high);
  }
}

}  // namespace kvpager::gpu::tensor
