// How rows and outputs of a product are cut: by kernels, and by the launches that size their grids.
#pragma once

#include <cstdint>

#include "cuda/portable.h"

namespace kvpager::gpu::linear {

KVP_HOST_DEVICE int64_t tiles_of(int64_t count, int64_t tile) { return (count + tile - 1) / tile; }

}  // namespace kvpager::gpu::linear
