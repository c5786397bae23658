// The CUDA side of portable.h. Every function here has a twin in shim/shim.h with the same meaning.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define KVP_KERNEL __global__ void
#define KVP_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define KVP_DEVICE __device__ __forceinline__
#define KVP_HOST_DEVICE __host__ __device__ __forceinline__
#define KVP_UNROLL _Pragma("unroll")
#define KVP_UNROLL_4 _Pragma("unroll 4")
#define KVP_NO_UNROLL _Pragma("unroll 1")

namespace kvpager::gpu {

KVP_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
KVP_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
KVP_DEVICE int64_t block_index() { return blockIdx.x; }
KVP_DEVICE int64_t grid_blocks() { return gridDim.x; }
KVP_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) & 31; }
KVP_DEVICE int warp_index() { return static_cast<int>(threadIdx.x) >> 5; }

// The block's dynamic shared memory, 128-byte aligned.
KVP_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char kvp_shared[];
  return kvp_shared;
}

KVP_DEVICE void sync_block() { __syncthreads(); }
KVP_DEVICE void sync_warp() { __syncwarp(); }
template <class T>
KVP_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}
template <class T>
KVP_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xFFFFFFFFu, value, lane);
}
KVP_DEVICE uint32_t ballot(bool yes) { return __ballot_sync(0xFFFFFFFFu, yes); }

// Each contracted operation is asked for by name; nothing else is contracted (-fmad=false).
KVP_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KVP_DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
// 2^x within two ulp, denormal results flushed; 1 for 0 and 0 for -infinity.
KVP_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVP_DEVICE uint32_t float_to_bits(float x) { return __float_as_uint(x); }
KVP_DEVICE float bits_to_float(uint32_t x) { return __uint_as_float(x); }
KVP_DEVICE int64_t double_to_bits(double x) { return __double_as_longlong(x); }
// Exact upwards, nearest even downwards, overflow to infinity; as base/half.h but for the payload
// of a NaN.
KVP_DEVICE float bfloat16_bits_to_float(uint16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}
KVP_DEVICE float float16_bits_to_float(uint16_t x) { return __half2float(__ushort_as_half(x)); }
KVP_DEVICE uint16_t float_to_bfloat16_bits(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
KVP_DEVICE uint16_t float_to_float16_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
// Both rounded so, `low` in bits 0 to 15.
KVP_DEVICE uint32_t pack_bfloat16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
KVP_DEVICE uint32_t pack_float16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// sum + the four products of unsigned bytes of `codes` and signed bytes of `weights`.
KVP_DEVICE int32_t dot4(uint32_t codes, int32_t weights, int32_t sum) {
  int32_t out;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(codes), "r"(weights), "r"(sum));
  return out;
}
// Byte i of the result is byte `nibble & 7` of high:low (0 to 3 are low's), nibble i of `selector`; with
// bit 3 of the nibble set, that byte's sign bit eight times.
KVP_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

KVP_DEVICE void atomic_min(uint64_t* at, uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
KVP_DEVICE void atomic_add(uint64_t* at, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
KVP_DEVICE int32_t atomic_add(int32_t* at, int32_t value) { return atomicAdd(at, value); }
KVP_DEVICE uint32_t atomic_or(uint32_t* at, uint32_t value) { return atomicOr(at, value); }

// 16 bytes from global to shared memory in the background; zeros, and no read, unless valid.
// Both addresses are multiples of 16.
KVP_DEVICE void copy_async16(void* shared, const void* global, bool valid) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}
KVP_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `kPending` of this thread's groups are unfinished. Other threads' bytes are seen
// after sync_block (or sync_warp).
template <int kPending>
KVP_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes at a multiple of 16, of memory that nothing writes meanwhile and this kernel reads once.
KVP_DEVICE void load_once(uint32_t (&out)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "l"(from));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8 in
// shared memory (16 bytes, aligned). Without _trans thread t gets elements (t / 4, 2 (t % 4)) and the
// one after it of matrix j in out[j]; with _trans elements (2 (t % 4), t / 4) and the one below it.
KVP_DEVICE void load_matrix_x4(uint32_t (&out)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
KVP_DEVICE void load_matrix_x4_trans(uint32_t (&out)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

// d += a b for a 16x16, b 16x8 and d 16x8, float32 sums; fragments as the PTX manual lays out
// mma.m16n8k16: g = lane / 4, t = lane % 4; a: rows g and g + 8 at columns 2t and 2t + 8 (a[0] row g
// low columns, a[1] row g + 8 low, a[2] row g high, a[3] row g + 8 high); b: rows 2t (b0) and 2t + 8
// (b1) of column g; d: row g columns 2t, 2t + 1 (d[0], d[1]), row g + 8 (d[2], d[3]).
KVP_DEVICE void mma_bfloat16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KVP_DEVICE void mma_float16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b for a 16x32 of unsigned bytes, b 32x8 of signed bytes and d 16x8, int32 sums that wrap:
// byte i of a[0] is row g column 4t + i, a[1] row g + 8, a[2] row g column 16 + 4t + i, a[3] row g + 8;
// byte i of b0 is row 4t + i of column g, b1 row 16 + 4t + i; d as above.
KVP_DEVICE void mma_uint8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Launches on grid.stream; returns kOk or the runtime's error code: of this launch, not of what went
// wrong before, and nothing is left for whoever asks for the last error.
template <class Params>
int launch(void (*kernel)(Params), const Grid& grid, const Params& params) {
  if (grid.blocks == 0) return 0;
  const void* const function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaSuccess;
  if (grid.shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(grid.shared_bytes));
  }
  if (error == cudaSuccess) {
    void* arguments[] = {const_cast<Params*>(&params)};
    error = cudaLaunchKernel(function, dim3(static_cast<unsigned>(grid.blocks)),
                             dim3(static_cast<unsigned>(grid.threads)), arguments,
                             static_cast<size_t>(grid.shared_bytes),
                             static_cast<cudaStream_t>(grid.stream));
  }
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<int>(error);
}

// Of the current device, to size persistent grids.
int multiprocessors();

}  // namespace kvpager::gpu
