// The launches of one element type; linear_bf16.cu and linear_fp16.cu instantiate one each, so that they
// compile side by side.
#pragma once

#include "cuda/linear_launch.h"

namespace kvpager::gpu::linear {

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

}  // namespace kvpager::gpu::linear
