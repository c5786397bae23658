// Which of the two attentions runs is the caller's to say; here it is only looked up.
#include <algorithm>

#include "cuda/kernels.h"

namespace kvpager::gpu {

int attend(const AttendParams& params, void* stream) {
  if (params.attention == Attention::kTensor) return attend_tensor(params, stream);
  return attend_reference(params, stream);
}

int64_t attend_scratch_bytes(const Shape& shape, const Bounds& bounds) {
  const int64_t reference = reference_scratch_bytes(shape, bounds);
  if (!has_tensor_attention(shape)) return reference;
  return std::max(reference, tensor_scratch_bytes(shape, bounds));
}

}  // namespace kvpager::gpu
