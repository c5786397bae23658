// What kernel sources are written in: CUDA on a GPU, the shim's fibers on a processor. A kernel file
// includes this and nothing of CUDA, and compiles as either. Only one-dimensional grids and blocks.
//
//   template <int kDim> KVP_KERNEL void double_rows(const Params p) { ... }
//   return launch(double_rows<128>, {blocks, threads, shared_bytes, stream}, p);
//
// A warp-wide function (shuffle_*, ballot, load_matrix_*, mma_*, sync_warp) is called by all 32
// threads of a warp; sync_block by all threads of the block that have not returned.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/params.h"

namespace kvpager::gpu {

struct Grid {
  int64_t blocks = 1;
  int threads = 128;         // a multiple of 32, up to 1024
  int64_t shared_bytes = 0;  // dynamic shared memory, got with shared_memory()
  void* stream = nullptr;
};

}  // namespace kvpager::gpu

#ifdef KVPAGER_SHIM
#include "shim/shim.h"
#else
#include "cuda/portable_cuda.h"
#endif
