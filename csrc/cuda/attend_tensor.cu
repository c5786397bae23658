// The host side of tensor attention. See attend_tensor.cuh for the arithmetic.
#include <algorithm>

#include "cuda/attend_tensor_large.cuh"
#include "cuda/attend_tensor_merge.cuh"
#include "cuda/attend_tensor_small.cuh"
#include "cuda/kernels.h"

namespace kvpager::gpu {
namespace tensor {

template <DType kType, int kDim, bool kCodes>
int launch_tensor(const Launch& launch, void* stream);  // attend_tensor_*.cu

namespace {

template <DType kType>
int launch_dim(const Launch& launch, void* stream) {
  switch (launch.attend.shape.k_dim) {
    case 64:
      return launch_tensor<kType, 64, false>(launch, stream);
    case 96:
      return launch_tensor<kType, 96, false>(launch, stream);
    default:
      return launch_tensor<kType, 128, false>(launch, stream);
  }
}

// Of q8.
int launch_codes(const Launch& launch, void* stream) {
  return launch.attend.shape.k_dim == 64
             ? launch_tensor<DType::kBFloat16, 64, true>(launch, stream)
             : launch_tensor<DType::kBFloat16, 128, true>(launch, stream);
}

// Whether neighbouring elements, the first of them even, can be read and written as one word.
bool in_words(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 4 == 0 && tensor.row_stride % 2 == 0 &&
         tensor.head_stride % 2 == 0;
}

// More scratch than this is not worth having: units of a split are for forwards with few queries, while
// those of a group keep many blocks busy with many queries.
constexpr int64_t kMostSplitBytes = int64_t{256} << 20;
constexpr int64_t kMostGroupBytes = int64_t{512} << 20;

// Of all its kernels, since any forward may need any of them.
template <int kDim, bool kCodes>
int64_t most_shared_bytes() {
  return std::max<int64_t>({SmallShape<kDim, kCodes>::kBlockBytes,
                            LargeShape<kDim, kCodes>::kBlockBytes, merge_shared_bytes(kDim)});
}

}  // namespace
}  // namespace tensor

int64_t tensor_attention_shared_bytes(const Shape& shape) {
  const bool codes = shape.k_dtype == DType::kQ8;
  const bool halves = shape.k_dtype == DType::kBFloat16 || shape.k_dtype == DType::kFloat16;
  const DType queries = codes ? DType::kBFloat16 : shape.k_dtype;
  const bool alike =
      shape.v_dtype == shape.k_dtype && shape.q_dtype == queries && shape.v_dim == shape.k_dim;
  if (!(codes || halves) || !alike || shape.chunk_tokens != tensor::kTokens) return 0;
  switch (shape.k_dim) {
    case 64:
      return codes ? tensor::most_shared_bytes<64, true>() : tensor::most_shared_bytes<64, false>();
    case 96:
      return codes ? 0 : tensor::most_shared_bytes<96, false>();
    case 128:
      return codes ? tensor::most_shared_bytes<128, true>()
                   : tensor::most_shared_bytes<128, false>();
    default:
      return 0;
  }
}

int64_t tensor_scratch_bytes(const Shape& shape, const Bounds& bounds) {
  if (tensor_attention_shared_bytes(shape) == 0) return 0;
  const int64_t state_bytes = (int64_t{shape.v_dim} + tensor::kSumFloats) * 4;
  const int64_t queries = int64_t{bounds.rows} * shape.q_heads;
  const auto bytes_of = [&](int64_t states) { return queries * states * state_bytes; };
  const auto units_of = [&](int64_t chunks) { return (bounds.chunks + chunks - 1) / chunks; };
  const int64_t splits =
      std::min(bytes_of(units_of(tensor::kSplitChunks)), tensor::kMostSplitBytes);
  const int64_t groups = bytes_of(units_of(tensor::kGroupChunks));
  const int64_t states = std::max(
      {bytes_of(tensor::kWalkStates), splits, groups <= tensor::kMostGroupBytes ? groups : 0});
  return bytes_of(1) + states;  // a total, then states
}

int attend_tensor(const AttendParams& params, void* stream) {
  if (params.counts.rows == 0) return 0;
  tensor::Launch launch;
  launch.attend = params;
  if (params.softcap == 0.0f) {
    launch.scale = params.scaling * tensor::kLog2E;
  } else {
    launch.scale = params.scaling / params.softcap;
    launch.cap = params.softcap * tensor::kLog2E;
  }
  launch.q_words = tensor::in_words(params.q);
  launch.out_words = params.out.dtype != DType::kFloat32 && tensor::in_words(params.out);
  if (params.shape.k_dtype == DType::kQ8) return tensor::launch_codes(launch, stream);
  return params.shape.k_dtype == DType::kBFloat16
             ? tensor::launch_dim<DType::kBFloat16>(launch, stream)
             : tensor::launch_dim<DType::kFloat16>(launch, stream);
}

}  // namespace kvpager::gpu
