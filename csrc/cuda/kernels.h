// The kernels' host side: each function checks nothing, launches on `stream` and returns kOk or the
// runtime's error code. Implemented once, in *.cu files that compile for a GPU and for the shim.
#pragma once

#include <cstdint>

#include "cuda/params.h"
#include "kvpager/linear.h"

namespace kvpager::gpu {

int write_rows(const WriteParams& params, void* stream);     // write_rows.cu
int summarize(const SummarizeParams& params, void* stream);  // summarize.cu

int rotate(const RotateParams& params, void* stream);  // rotate.cu

int multiply(const LinearParams& params, void* stream);  // linear.cu

int select(const SelectParams& params, void* stream);  // select.cu
int64_t select_scratch_bytes(const Shape& shape, const Bounds& bounds);

int attend_reference(const AttendParams& params, void* stream);  // attend_reference.cu
int64_t reference_scratch_bytes(const Shape& shape, const Bounds& bounds);

int attend_tensor(const AttendParams& params, void* stream);  // attend_tensor.cu
int64_t tensor_attention_shared_bytes(const Shape& shape);    // of a block; 0: no kernel
int64_t tensor_scratch_bytes(const Shape& shape, const Bounds& bounds);

inline int attend(const AttendParams& params, void* stream) {
  return params.attention == Attention::kTensor ? attend_tensor(params, stream)
                                                : attend_reference(params, stream);
}
inline int64_t attend_scratch_bytes(const Shape& shape, const Bounds& bounds, Attention attention) {
  return attention == Attention::kTensor ? tensor_scratch_bytes(shape, bounds)
                                         : reference_scratch_bytes(shape, bounds);
}

}  // namespace kvpager::gpu
