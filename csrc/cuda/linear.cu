// Products of linear layers: 16-bit elements on tensor cores (linear_tensor.cuh), float32 in the
// processor's order (linear_lanes.cuh).
#include "cuda/kernels.h"
#include "cuda/linear_launch.h"

namespace kvpager::gpu {
namespace linear {
namespace {

template <DType kType, int kM, int kN, bool kWide>
int launch_few(const LinearParams& p, void* stream) {
  return launch(few_rows<kType, kM, kN, kWide>,
                {few_blocks<kM, kN>(p), kThreads, FewShape<kM, kN>::kSharedBytes, stream}, p);
}

template <DType kType>
int launch_tensor(const LinearParams& p, void* stream) {
  if (!is_wide(p)) return launch_few<kType, 1, 2, false>(p, stream);
  if (p.rows <= kRowTile) return launch_few<kType, 1, 2, true>(p, stream);
  if (p.rows <= kFewRows) return launch_few<kType, 4, 4, true>(p, stream);
  return launch(many_rows<kType>, {many_blocks(p), kThreads, ManyShape::kSharedBytes, stream}, p);
}

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
