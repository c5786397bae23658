#include "cuda/linear_tensor_launch.cuh"

namespace kvpager::gpu::linear {

template int launch_tensor<DType::kFloat16>(const LinearParams& p, void* stream);

}  // namespace kvpager::gpu::linear
