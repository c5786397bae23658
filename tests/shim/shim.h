// The processor's side of portable.h: the twin of portable_cuda.h, on fibers.
//
// Stricter than a GPU: shared memory starts as 0xFF bytes in every block, the destination of an
// asynchronous copy is 0xFF until its group has been waited for and the copy happens only then.
// mma_*: exact products, added in float32 with ascending k. A GPU adds them with other roundings; on
// both, a row of d depends on its own row of a and d alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/half.h"
#include "shim/fibers.h"
#include "shim/runtime.h"

#define KVP_KERNEL void
#define KVP_BOUNDS(threads, blocks)
#define KVP_DEVICE inline
#define KVP_HOST_DEVICE inline
#define KVP_UNROLL
#define KVP_UNROLL_4
#define KVP_NO_UNROLL

// Last parameters of what can go wrong: where the kernel calls it.
#define KVP_SHIM_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace kvpager::gpu {

KVP_DEVICE int thread_index() { return shim::current->thread; }
KVP_DEVICE int block_threads() { return shim::current->threads; }
KVP_DEVICE int64_t block_index() { return shim::current->block; }
KVP_DEVICE int64_t grid_blocks() { return shim::current->blocks; }
KVP_DEVICE int lane_index() { return shim::current->lane; }
KVP_DEVICE int warp_index() { return shim::current->thread >> 5; }
KVP_DEVICE unsigned char* shared_memory() { return shim::current->shared; }

KVP_DEVICE void sync_block(KVP_SHIM_PLACE) {
  shim::collect(shim::Collective::kSyncBlock, {file, line});
}
KVP_DEVICE void sync_warp(KVP_SHIM_PLACE) {
  shim::collect(shim::Collective::kSyncWarp, {file, line});
}
template <class T>
KVP_DEVICE T shuffle(T value, int lane, KVP_SHIM_PLACE) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shim::exchange(bits, lane & 31, {file, line});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
KVP_DEVICE T shuffle_xor(T value, int mask, KVP_SHIM_PLACE) {
  return shuffle(value, lane_index() ^ mask, file, line);
}
KVP_DEVICE uint32_t ballot(bool yes, KVP_SHIM_PLACE) { return shim::vote(yes, {file, line}); }

KVP_DEVICE float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
KVP_DEVICE float div_rn(float a, float b) { return a / b; }
KVP_DEVICE float exp2_approximate(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
KVP_DEVICE uint32_t float_to_bits(float x) { return float_bits(x); }
KVP_DEVICE float bits_to_float(uint32_t x) { return bits_float(x); }
KVP_DEVICE int64_t double_to_bits(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
KVP_DEVICE float bfloat16_bits_to_float(uint16_t x) { return bfloat16_to_float(x); }
KVP_DEVICE float float16_bits_to_float(uint16_t x) { return float16_to_float(x); }
KVP_DEVICE uint16_t float_to_bfloat16_bits(float x) { return float_to_bfloat16(x); }
KVP_DEVICE uint16_t float_to_float16_bits(float x) { return float_to_float16(x); }
KVP_DEVICE uint32_t pack_bfloat16(float low, float high) {
  return float_to_bfloat16(low) | static_cast<uint32_t>(float_to_bfloat16(high)) << 16;
}
KVP_DEVICE uint32_t pack_float16(float low, float high) {
  return float_to_float16(low) | static_cast<uint32_t>(float_to_float16(high)) << 16;
}

KVP_DEVICE int32_t dot4(uint32_t codes, int32_t weights, int32_t sum) {
  uint32_t total = static_cast<uint32_t>(sum);
  for (int i = 0; i < 32; i += 8) {
    const int32_t code = static_cast<int32_t>((codes >> i) & 0xFFu);
    const int32_t weight = static_cast<int8_t>((static_cast<uint32_t>(weights) >> i) & 0xFFu);
    total += static_cast<uint32_t>(code * weight);
  }
  return static_cast<int32_t>(total);
}
KVP_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xFu;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7u))) & 0xFFu;
    if ((nibble & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xFFu : 0;
    out |= byte << (8 * i);
  }
  return out;
}

KVP_DEVICE void atomic_min(uint64_t* at, uint64_t value) {
  uint64_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value < old &&
         !__atomic_compare_exchange_n(at, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
KVP_DEVICE void atomic_add(uint64_t* at, uint64_t value) {
  __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
KVP_DEVICE int32_t atomic_add(int32_t* at, int32_t value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
KVP_DEVICE uint32_t atomic_or(uint32_t* at, uint32_t value) {
  return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}

KVP_DEVICE void copy_async16(void* shared, const void* global, bool valid, KVP_SHIM_PLACE) {
  shim::copy_async(shared, global, valid, {file, line});
}
KVP_DEVICE void copy_async_commit() { shim::commit_copies(); }
template <int kPending>
KVP_DEVICE void copy_async_wait() {
  static_assert(kPending >= 0);
  shim::wait_copies(kPending);
}

KVP_DEVICE void load_once(uint32_t (&out)[4], const void* from) {
  std::memcpy(out, from, sizeof out);
}

KVP_DEVICE void load_matrix_x4(uint32_t (&out)[4], const void* row, KVP_SHIM_PLACE) {
  shim::load_matrix(out, row, false, {file, line});
}
KVP_DEVICE void load_matrix_x4_trans(uint32_t (&out)[4], const void* row, KVP_SHIM_PLACE) {
  shim::load_matrix(out, row, true, {file, line});
}
KVP_DEVICE void mma_bfloat16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             KVP_SHIM_PLACE) {
  shim::multiply(d, a, b0, b1, shim::Collective::kMmaBFloat16, {file, line});
}
KVP_DEVICE void mma_float16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                            KVP_SHIM_PLACE) {
  shim::multiply(d, a, b0, b1, shim::Collective::kMmaFloat16, {file, line});
}
KVP_DEVICE void mma_uint8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                          KVP_SHIM_PLACE) {
  shim::multiply(d, a, b0, b1, shim::Collective::kMmaUint8, {file, line});
}

template <class Params>
int launch(void (*kernel)(Params), const Grid& grid, const Params& params) {
  if (grid.blocks == 0) return 0;
  if (!shim::is_valid(grid.blocks, grid.threads, grid.shared_bytes)) return shim::kInvalidLaunch;
  struct Closure {
    void (*kernel)(Params);
    Params params;
  };
  const Closure closure{kernel, params};
  const auto work = [closure, grid] {
    shim::Launch launch;
    launch.blocks = grid.blocks;
    launch.threads = grid.threads;
    launch.shared_bytes = grid.shared_bytes;
    launch.closure = &closure;
    launch.kernel = reinterpret_cast<const void*>(closure.kernel);
    launch.body = [](const void* data) {
      const Closure& closure = *static_cast<const Closure*>(data);
      closure.kernel(closure.params);
    };
    shim::run_blocks(launch, shim::next_seed());
  };
  return shim::enqueue(grid.stream, work, &params, sizeof params);
}

inline int multiprocessors() { return shim::kMultiprocessors; }

}  // namespace kvpager::gpu
