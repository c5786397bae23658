// The functions of linear layers and programs that exist once per instruction-set tier. Internal to
// this room and its tests. Every tier gives the same bits; the tests hold them against each other.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kvpager/linear.h"
#include "kvpager/program.h"
#include "kvpager/types.h"

namespace kvpager {

// What linear_panel multiplies, where it multiplies copies of rows and weights.
struct LinearPacking {
  int64_t group_floats = 0;    // of kLinearGroupRows rows; 0: nothing is copied
  int64_t scratch_floats = 0;  // of a thread
};
inline constexpr int64_t kLinearGroupRows = 9;
inline constexpr int64_t kLinearBlockOutputs = 48;  // that such a panel should have

struct ComputeTable {
  // Of `count` elements, one of kvpager/program.h's; b_is_one: b is one number for all. Not of means and
  // products.
  void (*combine)(Operation operation, const float* a, const float* b, bool b_is_one, int64_t count,
                  float* out) = nullptr;
  float (*mean)(const float* x, int64_t count) = nullptr;
  // Null in the base tier: linear_kernels().
  // All of params in one thread: kvpager/linear.h. The calling thread's floating-point unit is set as
  // the dtype wants it. next_w: weights that are probably read after these, as far apart, which may be
  // fetched meanwhile; null: not known. input: of x, every group's floats as linear_pack leaves them,
  // where there are any; else null. scratch: on a cache line.
  LinearPacking (*linear_packing)(const LinearParams& params) = nullptr;
  // Up to how many rows linear_panel multiplies with copies of weights, where there are any.
  int64_t (*linear_compressed_rows)(DType dtype) = nullptr;
  void (*linear_pack)(const LinearParams& params, int64_t group, float* out) = nullptr;
  void (*linear_panel)(const LinearParams& params, const void* next_w, const float* input,
                       float* scratch) = nullptr;
};

// The tier of `kernels`.
const ComputeTable& compute_table(const KernelTable& kernels);

// The tier whose linear_ functions are used: that of kernels() or, where it is the base tier, v3.
// Throws InvalidArgumentError on a processor without v3.
const ComputeTable& linear_kernels();

// One table per compilation of the *_isa.cc files.
namespace isa_base {
const ComputeTable& compute_table(Extensions extensions);
}
namespace isa_v3 {
const ComputeTable& compute_table(Extensions extensions);
}
namespace isa_v4 {
const ComputeTable& compute_table(Extensions extensions);
}

}  // namespace kvpager
