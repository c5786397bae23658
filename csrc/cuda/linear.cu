// Products of linear layers: 16-bit elements on tensor cores (linear_tensor.cuh), float32 in the
// processor's order (linear_lanes.cuh).
#include "cuda/kernels.h"
#include "cuda/linear_launch.h"

namespace kvpager::gpu {
namespace linear {

template <DType kType>
int launch_tensor(const LinearParams& p, void* stream);  // linear_bf16.cu, linear_fp16.cu

namespace {

template <int kRows, int kOutputs>
int launch_lanes(const LinearParams& p, void* stream) {
  return launch(in_lanes<kRows, kOutputs>,
                {lane_blocks<kRows, kOutputs>(p), kLaneThreads, 0, stream}, p);
}

}  // namespace
}  // namespace linear

int multiply(const LinearParams& params, void* stream) {
  if (params.rows == 0 || params.outputs == 0) return 0;
  switch (params.dtype) {
    case DType::kBFloat16:
      return linear::launch_tensor<DType::kBFloat16>(params, stream);
    case DType::kFloat16:
      return linear::launch_tensor<DType::kFloat16>(params, stream);
    default:
      return params.rows <= linear::kRowTile ? linear::launch_lanes<4, 2>(params, stream)
                                             : linear::launch_lanes<8, 8>(params, stream);
  }
}

}  // namespace kvpager::gpu
