#include "cuda/attend_tensor_launch.cuh"

namespace kvpager::gpu::tensor {

template int launch_tensor<DType::kBFloat16, 128, false>(const Launch& launch, void* stream);
template int launch_tensor<DType::kFloat16, 128, false>(const Launch& launch, void* stream);
template int launch_tensor<DType::kBFloat16, 128, true>(const Launch& launch, void* stream);

}  // namespace kvpager::gpu::tensor
