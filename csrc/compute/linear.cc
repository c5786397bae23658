// Divides y = x W^T + b among threads: each gets outputs of all rows, so that weights are read once.
#include "kvpager/linear.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/float_environment.h"
#include "base/workspaces.h"
#include "compute/compute_table.h"
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
constexpr int64_t kCopiedRows = 32 * kLinearGroupRows;  // at a time; a prompt of 256 is
constexpr int64_t kCopiedFloats = 4;                    // in a nanosecond, by one thread

// About how long it takes one thread, in nanoseconds: its weights at 16 GB/s or its operations at 64
// GFLOP/s. Decides how many threads are worth waking, and nothing else.
int64_t estimated_nanoseconds(const LinearParams& params) {
  const int64_t elements = params.outputs * params.depth;
  return std::max(elements * dtype_bytes(params.dtype) / 16, elements * params.rows * 2 / 64);
}

// Products of as many rows, each divided into panels of outputs, which threads take by turns.
class Panels {
 public:
  // inputs: copies of each product's rows; null: the kernel reads them as they lie.
  Panels(const LinearParams* products, int64_t count, const float* const* inputs, int threads)
      : products_(products), count_(count), inputs_(inputs), threads_(threads) {
    for (int64_t i = 0; i < count; ++i) panels_ += panels_of(products[i]);
  }

  int64_t count() const { return panels_; }

  // Of each thread, on cache lines of its own; none where rows are read as they lie.
  int64_t scratch_floats(const ComputeTable& table) const {
    if (inputs_ == nullptr) return 0;
    int64_t most = 0;
    for (int64_t i = 0; i < count_; ++i) {
      most = std::max(most, table.linear_packing(products_[i]).scratch_floats);
    }
    return (most + kLineFloats - 1) / kLineFloats * kLineFloats;
  }

  // scratch: [scratch_floats]
  void run(const ComputeTable& table, int64_t item, float* scratch) const {
    const Panel panel = panel_of(item);
    const bool copied = inputs_ != nullptr;
    const void* next =
        copied && item + threads_ < panels_ ? panel_of(item + threads_).params.w : nullptr;
    const FloatEnvironment environment(panel.params.dtype == DType::kBFloat16);
    table.linear_panel(panel.params, next, copied ? inputs_[panel.product] : nullptr, scratch);
  }

 private:
  struct Panel {
    int64_t product;
    LinearParams params;
  };

  int64_t outputs_of(const LinearParams& params) const {
    if (threads_ == 1) return std::max<int64_t>(1, params.outputs);
    const int64_t row = std::max<int64_t>(1, params.depth * dtype_bytes(params.dtype));
    const int64_t shared = params.outputs / (kPanelsPerThread * threads_);
    const int64_t wanted =
        inputs_ != nullptr ? kLinearBlockOutputs : std::max<int64_t>(1, kPanelBytes / row);
    const int64_t most = std::min(wanted, shared);
    return std::max<int64_t>(1, most / kPanelOutputs) * kPanelOutputs;
  }

  int64_t panels_of(const LinearParams& params) const {
    return params.rows == 0 ? 0 : (params.outputs + outputs_of(params) - 1) / outputs_of(params);
  }

  // Each thread goes through a part of the memory from front to back, which prefetching follows.
  Panel panel_of(int64_t item) const {
    const int64_t thread = item % threads_;
    int64_t place =
        thread * (panels_ / threads_) + std::min(thread, panels_ % threads_) + item / threads_;
    int64_t product = 0;
    for (; place >= panels_of(products_[product]); ++product)
      place -= panels_of(products_[product]);
    LinearParams part = products_[product];
    const int64_t bytes = dtype_bytes(part.dtype);
    const int64_t step = outputs_of(part);
    const int64_t first = place * step;
    part.outputs = std::min(step, part.outputs - first);
    part.w = static_cast<const char*>(part.w) + first * part.w_stride * bytes;
    part.compressed = part.compressed.from(first);
    if (part.bias != nullptr) part.bias = static_cast<const char*>(part.bias) + first * bytes;
    part.y = static_cast<char*>(part.y) + first * bytes;
    return {product, part};
  }

  static constexpr int64_t kLineFloats = 32;

  const LinearParams* products_;
  const int64_t count_;
  const float* const* inputs_;
  const int threads_;
  int64_t panels_ = 0;
};

void run_panels(const Panels& panels, int threads, int64_t rows, ThreadPool& pool) {
  const ComputeTable& table = linear_kernels();
  const auto next =
      rows <= kDecodedRows ? ThreadPool::NextRun::kSoon : ThreadPool::NextRun::kUnknown;
  const int64_t each = panels.scratch_floats(table);
  const Workspace scratch(pool.workspaces(), each * pool.threads());
  const auto run = [&](int64_t item, int thread) {
    panels.run(table, item, scratch.data() + each * thread);
  };
  pool.run(panels.count(), std::cref(run), threads, next);  // small enough to need no memory
}

// Rows are copied once for all panels, in the order in which they are multiplied.
void run_copied(const std::vector<LinearParams>& products, int threads, ThreadPool& pool) {
  const ComputeTable& table = linear_kernels();
  struct Input {
    const LinearParams* of;
    int64_t group_floats;
    int64_t offset;
  };
  const int64_t groups = (products[0].rows + kLinearGroupRows - 1) / kLinearGroupRows;
  std::vector<Input> inputs;
  std::vector<size_t> input_of;
  int64_t floats = 0;
  for (const LinearParams& one : products) {
    const LinearParams* last = inputs.empty() ? nullptr : inputs.back().of;
    const bool shared = last != nullptr && last->x == one.x && last->x_stride == one.x_stride &&
                        last->depth == one.depth;
    if (!shared) {
      inputs.push_back({&one, table.linear_packing(one).group_floats, floats});
      floats += groups * inputs.back().group_floats;
    }
    input_of.push_back(inputs.size() - 1);
  }
  const Workspace room(pool.workspaces(), floats);
  float* const copies = room.data();
  const auto copy = [&](int64_t item, int) {
    const Input& input = inputs[static_cast<size_t>(item / groups)];
    const int64_t group = item % groups;
    table.linear_pack(*input.of, group, copies + input.offset + group * input.group_floats);
  };
  const int64_t items = static_cast<int64_t>(inputs.size()) * groups;
  pool.run(items, copy, std::min(threads, pool.worth_waking(floats / kCopiedFloats)));
  std::vector<const float*> places;
  for (const size_t input : input_of) places.push_back(copies + inputs[input].offset);
  const Panels panels(products.data(), static_cast<int64_t>(products.size()), places.data(),
                      threads);
  run_panels(panels, threads, products[0].rows, pool);
}

void multiply(const LinearParams* products, int64_t count, ThreadPool& pool) {
  int64_t nanoseconds = 0;
  for (const LinearParams* one = products; one != products + count; ++one) {
    if (!is_float(one->dtype)) {
      throw InvalidArgumentError(
          str("x is ", dtype_name(one->dtype), "; expected float32, float16 or bfloat16"));
    }
    nanoseconds += estimated_nanoseconds(*one);
  }
  const int threads = pool.worth_waking(nanoseconds);
  const ComputeTable& table = linear_kernels();
  const int64_t rows = products->rows;
  if (table.linear_packing(*products).group_floats == 0) {
    run_panels(Panels(products, count, nullptr, threads), threads, rows, pool);
    return;
  }
  std::vector<LinearParams> part(products, products + count);
  for (int64_t row = 0; row < rows; row += kCopiedRows) {
    for (int64_t i = 0; i < count; ++i) {
      const LinearParams& whole = products[i];
      LinearParams& one = part[static_cast<size_t>(i)];
      const int64_t bytes = dtype_bytes(whole.dtype);
      one.rows = std::min(kCopiedRows, rows - row);
      one.x = static_cast<const char*>(whole.x) + row * whole.x_stride * bytes;
      one.y = static_cast<char*>(whole.y) + row * whole.y_stride * bytes;
    }
    if (table.linear_packing(part[0]).group_floats == 0) {
      multiply(part.data(), count, pool);  // the few that are left
    } else {
      run_copied(part, threads, pool);
    }
  }
}

}  // namespace

void linear(const LinearParams* products, int64_t count, ThreadPool& pool,
            const CompressedWeights* compressed) {
  if (count == 0) return;
  if (compressed == nullptr ||
      products->rows > linear_kernels().linear_compressed_rows(products->dtype)) {
    return multiply(products, count, pool);
  }
  std::vector<LinearParams> found(products, products + count);
  for (LinearParams& one : found) one.compressed = compressed->find(one);
  // How rows are copied depends on it.
  const auto others = std::stable_partition(
      found.begin(), found.end(),
      [](const LinearParams& one) { return one.compressed.groups != nullptr; });
  if (others != found.begin()) multiply(found.data(), others - found.begin(), pool);
  if (others != found.end()) multiply(&*others, found.end() - others, pool);
}

}  // namespace kvpager
