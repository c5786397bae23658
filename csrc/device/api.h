// The contract between the pager and a device plug-in: one table of C functions, found through one
// exported symbol. There are two plug-ins. `cuda` drives a GPU. `shim` runs the same kernel sources
// on the processor, behind streams that delay and reorder whatever nothing orders, for tests.
//
// Thread-safety: the pager calls under its lock; a plug-in may be called from any thread.
// Every function returns kOk or a code that error_text() puts into words. A failed call has had no
// effect, but for kernels: what a failed launch would have written is unspecified.
#pragma once

#include <cstdint>

#include "cuda/params.h"

namespace kvpager {

struct LinearParams;  // kvpager/linear.h

}  // namespace kvpager

namespace kvpager::device {

inline constexpr uint32_t kAbi = 5;  // raised with any change of this file or of cuda/params.h
inline constexpr char kEntryPoint[] = "kvpager_device_api";

inline constexpr int kOk = 0;
inline constexpr int kNoDevice = -1;     // no driver, an older driver, or no device
inline constexpr int kOutOfMemory = -2;  // of the device, or of memory that can be pinned
// Other values are the plug-in's own.

using Context = void*;
using Stream = void*;  // of the plug-in, or the caller's (torch's current stream)
using Event = void*;

enum class Direction : int32_t { kUp = 0, kDown = 1, kWithin = 2 };  // host to device, and back

// A run of pieces of `bytes` each, which begin every so many bytes.
struct Pieces {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t to_stride = 0, from_stride = 0;  // at least `bytes`
  int64_t bytes = 0;
  int64_t count = 0;
};

struct Info {
  char name[256] = {};
  int32_t major = 0, minor = 0;  // compute capability
  int32_t multiprocessors = 0;
  int32_t driver = 0, runtime = 0;  // as CUDA numbers them: 13000 is 13.0
  int64_t memory_bytes = 0;
  int64_t cache_bytes = 0;  // L2
  // Most shared memory one block can have: CUDA's limit for kernels that opt in.
  int64_t shared_block_bytes = 0;
};

struct Api {
  uint32_t abi = kAbi;
  const char* name = nullptr;  // "cuda", "shim"
  int32_t tensor_device = 0;   // DLPack's device type of tensors it computes on
  bool host_can_read = false;  // device memory is host memory (shim)
  const char* (*error_text)(int code) = nullptr;

  int (*count)(int32_t* devices) = nullptr;
  int (*describe)(int32_t ordinal, Info* info) = nullptr;
  // A context binds one device; the caller's current device is left as it was by every function.
  int (*open)(int32_t ordinal, Context* context) = nullptr;
  int (*close)(Context context) = nullptr;

  int (*allocate)(Context, int64_t bytes, void** memory) = nullptr;  // 256-byte aligned
  int (*release)(Context, void* memory) = nullptr;
  int (*allocate_pinned)(Context, int64_t bytes, void** memory) = nullptr;  // kernels can read it
  int (*release_pinned)(Context, void* memory) = nullptr;

  int (*create_stream)(Context, Stream* stream) = nullptr;  // ordered with no other stream
  int (*destroy_stream)(Context, Stream stream) = nullptr;
  int (*create_event)(Context, Event* event) = nullptr;  // done until first recorded
  int (*destroy_event)(Context, Event event) = nullptr;
  int (*record)(Context, Event event, Stream stream) = nullptr;
  int (*wait)(Context, Stream stream, Event event) = nullptr;  // what follows in stream waits
  int (*done)(Context, Event event, bool* yes) = nullptr;
  int (*synchronize)(Context, Event event) = nullptr;  // the host waits
  // True while launches on the stream are recorded into a graph instead of run.
  int (*capturing)(Context, Stream stream, bool* yes) = nullptr;

  int (*copy)(Context, void* to, const void* from, int64_t bytes, Direction, Stream) = nullptr;
  // All pieces of `runs` runs in one call, which begin and end together. No piece is where another is
  // copied to.
  int (*copy_pieces)(Context, const Pieces*, int64_t runs, Direction, Stream) = nullptr;
  int (*fill)(Context, void* to, int32_t byte, int64_t bytes, Stream) = nullptr;

  // Kernels. Parameters are copied before the call returns. Each is launched on `stream`, allocates
  // nothing, waits for nothing, and takes nothing that changes from forward to forward but from
  // device memory, so that it can be part of a graph.
  int (*write_rows)(Context, const gpu::WriteParams*, Stream) = nullptr;
  int (*summarize)(Context, const gpu::SummarizeParams*, Stream) = nullptr;
  int (*rotate)(Context, const gpu::RotateParams*, Stream) = nullptr;
  int (*select)(Context, const gpu::SelectParams*, Stream) = nullptr;
  int (*attend)(Context, const gpu::AttendParams*, Stream) = nullptr;
  int (*multiply)(Context, const LinearParams*,
                  Stream) = nullptr;  // y = x W^T + b, in device memory
  // Shared memory that a block of `attend` takes for this shape on tensor cores, which only devices
  // that allow so much can run; 0: there is no such kernel.
  int64_t (*tensor_attention_shared_bytes)(const gpu::Shape*) = nullptr;
  // Scratch `attend` and `select` must be given for forwards within these bounds.
  int64_t (*attend_scratch_bytes)(const gpu::Shape*, const gpu::Bounds*, gpu::Attention) = nullptr;
  int64_t (*select_scratch_bytes)(const gpu::Shape*, const gpu::Bounds*) = nullptr;
};

using EntryPoint = const Api* (*)();

}  // namespace kvpager::device
