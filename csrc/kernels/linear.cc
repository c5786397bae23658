// Divides y = x W^T + b among threads: each gets outputs of all rows, so that weights are read once.
#include "kvpager/linear.h"

#include <algorithm>

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kvpager/error.h"
#include "kvpager/thread_pool.h"

namespace kvpager {
namespace {

constexpr int64_t kPanelBytes = int64_t{256} << 10;  // of weights: less than a core's cache
constexpr int64_t kPanelsPerThread = 4;
// Of so few rows torch computes everything else in one thread, and the others are free to wait for the
// next product; of more rows it needs them itself.
constexpr int64_t kDecodedRows = 8;
constexpr int64_t kPanelOutputs = 12;  // a multiple of these, so that tiles are whole

// About how long it takes one thread, in nanoseconds: its weights at 16 GB/s or its operations at 64
// GFLOP/s. Decides how many threads are worth waking, and nothing else.
int64_t estimated_nanoseconds(const LinearParams& params) {
  const int64_t elements = params.outputs * params.depth;
  return std::max(elements * dtype_bytes(params.dtype) / 16, elements * params.rows * 2 / 64);
}

int64_t panel_outputs(const LinearParams& params, int threads) {
  const int64_t row = std::max<int64_t>(1, params.depth * dtype_bytes(params.dtype));
  const int64_t shared = params.outputs / (kPanelsPerThread * threads);
  const int64_t most = std::min(std::max<int64_t>(1, kPanelBytes / row), shared);
  return std::max<int64_t>(1, most / kPanelOutputs) * kPanelOutputs;
}

}  // namespace

void linear(const LinearParams& params, ThreadPool& pool) {
  if (!is_float(params.dtype)) {
    throw InvalidArgumentError(
        str("x is ", dtype_name(params.dtype), "; expected float32, float16 or bfloat16"));
  }
  if (params.rows == 0 || params.outputs == 0) return;
  const KernelTable& table = kernels();
  const bool flush = params.dtype == DType::kBFloat16;
  const int wanted = pool.worth_waking(estimated_nanoseconds(params));
  const int64_t step = wanted == 1 ? params.outputs : panel_outputs(params, wanted);
  const int64_t bytes = dtype_bytes(params.dtype);
  const auto panel = [&](int64_t item, int) {
    LinearParams part = params;
    const int64_t first = item * step;
    part.outputs = std::min(step, params.outputs - first);
    part.w = static_cast<const char*>(params.w) + first * params.w_stride * bytes;
    if (params.bias != nullptr) part.bias = static_cast<const char*>(params.bias) + first * bytes;
    part.y = static_cast<char*>(params.y) + first * bytes;
    const FloatEnvironment environment(flush);
    table.linear_panel(part);
  };
  const auto next =
      params.rows <= kDecodedRows ? ThreadPool::NextRun::kSoon : ThreadPool::NextRun::kUnknown;
  pool.run((params.outputs + step - 1) / step, panel, wanted, next);
}

}  // namespace kvpager
