// Which of the two attentions runs is the caller's to say; here it is only looked up.
#include "cuda/kernels.h"

namespace kvpager::gpu {

int attend(const AttendParams& params, void* stream) {
  if (params.attention == Attention::kTensor) return attend_tensor(params, stream);
  return attend_reference(params, stream);
}

int64_t attend_scratch_bytes(const Shape& shape, const Bounds& bounds, Attention attention) {
  return attention == Attention::kTensor ? tensor_scratch_bytes(shape, bounds)
                                         : reference_scratch_bytes(shape, bounds);
}

}  // namespace kvpager::gpu
