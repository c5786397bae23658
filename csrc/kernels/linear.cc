// Divides y = x W^T + b among threads: each gets outputs of all rows, so that weights are read once.
#include "kvpager/linear.h"

#include <algorithm>

#include "kernels/float_buffer.h"
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

// packed: the kernel copies what it multiplies, a block of outputs at a time.
int64_t panel_outputs(const LinearParams& params, int threads, bool packed) {
  const int64_t row = std::max<int64_t>(1, params.depth * dtype_bytes(params.dtype));
  const int64_t shared = params.outputs / (kPanelsPerThread * threads);
  const int64_t wanted = packed ? kLinearBlockOutputs : std::max<int64_t>(1, kPanelBytes / row);
  const int64_t most = std::min(wanted, shared);
  return std::max<int64_t>(1, most / kPanelOutputs) * kPanelOutputs;
}

}  // namespace

void linear(const LinearParams* products, int64_t count, ThreadPool& pool) {
  if (count == 0) return;
  int64_t nanoseconds = 0;
  for (const LinearParams* one = products; one != products + count; ++one) {
    if (!is_float(one->dtype)) {
      throw InvalidArgumentError(
          str("x is ", dtype_name(one->dtype), "; expected float32, float16 or bfloat16"));
    }
    nanoseconds += estimated_nanoseconds(*one);
  }
  const int wanted = pool.worth_waking(nanoseconds);
  const KernelTable& table = kernels();
  const int64_t scratch_floats = table.linear_scratch_floats(products->rows);
  const bool packed = scratch_floats > 0;
  const auto step_of = [&](const LinearParams& one) {
    return wanted == 1 ? std::max<int64_t>(1, one.outputs) : panel_outputs(one, wanted, packed);
  };
  const auto panels_of = [&](const LinearParams& one) {
    return one.rows == 0 ? 0 : (one.outputs + step_of(one) - 1) / step_of(one);
  };
  int64_t panels = 0;
  for (int64_t i = 0; i < count; ++i) panels += panels_of(products[i]);
  if (panels == 0) return;
  const bool flush = products->dtype == DType::kBFloat16;
  const int64_t bytes = dtype_bytes(products->dtype);
  // Threads take items by turns, so each goes through a part of the memory from front to back, which
  // prefetching follows.
  const auto place_of = [&](int64_t item) {
    const int64_t thread = item % wanted;
    return thread * (panels / wanted) + std::min(thread, panels % wanted) + item / wanted;
  };
  const auto part_of = [&](int64_t item) {
    item = place_of(item);
    const LinearParams* of = products;
    for (; item >= panels_of(*of); ++of) item -= panels_of(*of);
    LinearParams part = *of;
    const int64_t step = step_of(part);
    const int64_t first = item * step;
    part.outputs = std::min(step, part.outputs - first);
    part.w = static_cast<const char*>(part.w) + first * part.w_stride * bytes;
    if (part.bias != nullptr) part.bias = static_cast<const char*>(part.bias) + first * bytes;
    part.y = static_cast<char*>(part.y) + first * bytes;
    return part;
  };
  const auto panel = [&](int64_t item, int) {
    const void* next_w = packed && item + wanted < panels ? part_of(item + wanted).w : nullptr;
    const FloatEnvironment environment(flush);
    thread_local FloatBuffer scratch;
    table.linear_panel(part_of(item), next_w, scratch.reserve(scratch_floats));
  };
  const auto next =
      products->rows <= kDecodedRows ? ThreadPool::NextRun::kSoon : ThreadPool::NextRun::kUnknown;
  pool.run(panels, panel, wanted, next);
}

}  // namespace kvpager
