// The CUDA plug-in: the runtime's memory, streams and events behind the table of device/api.h. It
// works in the device's primary context, which it shares with torch.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "device/api.h"

namespace kvpager {

namespace {

using device::Context;
using device::Event;
using device::kOk;
using device::Stream;

// Beside cudaError_t, which is positive.
constexpr int kNoUnifiedAddressing = -10;

struct Opened {
  int ordinal = 0;
  int priority = 0;  // of copy streams: the highest there is
};

// What the thread's last kNoDevice was for.
thread_local char no_device_text[160] = "no CUDA device";

int least_driver() { return CUDART_VERSION / 1000 * 1000; }  // of the same major version

void explain_no_device(cudaError_t error) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (error == cudaErrorNoDevice) {
    std::snprintf(no_device_text, sizeof no_device_text,
                  "the NVIDIA driver is there, but no device that it may use");
  } else if (driver == 0) {
    std::snprintf(no_device_text, sizeof no_device_text, "no NVIDIA driver is installed");
  } else {
    std::snprintf(no_device_text, sizeof no_device_text,
                  "the NVIDIA driver supports CUDA %d.%d, expected %d.%d or newer", driver / 1000,
                  driver % 1000 / 10, least_driver() / 1000, least_driver() % 1000 / 10);
  }
}

// The table's code for an error, which is reported from here on and no longer pending.
int code_of(cudaError_t error) {
  if (error == cudaSuccess) return kOk;
  (void)cudaGetLastError();
  switch (error) {
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      explain_no_device(error);
      (void)cudaGetLastError();
      return device::kNoDevice;
    case cudaErrorMemoryAllocation:
      return device::kOutOfMemory;
    default:
      return static_cast<int>(error);
  }
}

const char* error_text(int code) {
  switch (code) {
    case device::kNoDevice:
      return no_device_text;
    case device::kOutOfMemory:
      return "out of memory";
    case kNoUnifiedAddressing:
      return "the device has no unified addressing";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

// Makes the context's device current, and the caller's again.
class Current {
 public:
  explicit Current(Context context) : Current(static_cast<const Opened*>(context)->ordinal) {}
  explicit Current(int ordinal) {
    error_ = cudaGetDevice(&before_);
    if (error_ != cudaSuccess || before_ == ordinal) return;
    error_ = cudaSetDevice(ordinal);
    changed_ = error_ == cudaSuccess;
  }
  ~Current() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  // The code of `call`, if the device could be made current.
  template <class Call>
  int run(const Call& call) const {
    return code_of(error_ == cudaSuccess ? call() : error_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(Event event) { return static_cast<cudaEvent_t>(event); }

// --- devices ---

int count(int32_t* devices) {
  int found = 0;
  const int code = code_of(cudaGetDeviceCount(&found));
  if (code == kOk) *devices = found;
  return code;
}

int describe(int32_t ordinal, device::Info* info) {
  cudaDeviceProp properties;
  device::Info out;
  cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&out.driver);
  if (error == cudaSuccess) error = cudaRuntimeGetVersion(&out.runtime);
  if (error != cudaSuccess) return code_of(error);
  std::snprintf(out.name, sizeof out.name, "%s", properties.name);
  out.major = properties.major;
  out.minor = properties.minor;
  out.multiprocessors = properties.multiProcessorCount;
  out.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  out.cache_bytes = properties.l2CacheSize;
  out.shared_block_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  *info = out;
  return kOk;
}

int open(int32_t ordinal, Context* context) {
  const Current current(ordinal);
  int unified = 0;
  int priority = 0;
  const int code = current.run([&] {
    cudaError_t error = cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, ordinal);
    if (error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(nullptr, &priority);
    if (error == cudaSuccess) error = cudaFree(nullptr);  // makes the context, or says why not
    return error;
  });
  if (code != kOk) return code;
  if (!unified) return kNoUnifiedAddressing;
  *context = new Opened{ordinal, priority};
  return kOk;
}

int close(Context context) {
  delete static_cast<Opened*>(context);
  return kOk;
}

// --- memory ---

int allocate(Context context, int64_t bytes, void** memory) {
  return Current(context).run([&] { return cudaMalloc(memory, static_cast<size_t>(bytes)); });
}

int release(Context context, void* memory) {
  return Current(context).run([&] { return cudaFree(memory); });
}

int allocate_pinned(Context context, int64_t bytes, void** memory) {
  // With unified addressing kernels read it at the address the host has.
  return Current(context).run([&] {
    return cudaHostAlloc(memory, static_cast<size_t>(bytes),
                         cudaHostAllocPortable | cudaHostAllocMapped);
  });
}

int release_pinned(Context context, void* memory) {
  return Current(context).run([&] { return cudaFreeHost(memory); });
}

// --- streams and events ---

int create_stream(Context context, Stream* stream) {
  const int priority = static_cast<const Opened*>(context)->priority;
  cudaStream_t made = nullptr;
  const int code = Current(context).run(
      [&] { return cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority); });
  if (code == kOk) *stream = made;
  return code;
}

int destroy_stream(Context context, Stream stream) {
  return Current(context).run([&] { return cudaStreamDestroy(as_stream(stream)); });
}

int create_event(Context context, Event* event) {
  cudaEvent_t made = nullptr;
  const int code =
      Current(context).run([&] { return cudaEventCreateWithFlags(&made, cudaEventDisableTiming); });
  if (code == kOk) *event = made;
  return code;
}

int destroy_event(Context context, Event event) {
  return Current(context).run([&] { return cudaEventDestroy(as_event(event)); });
}

int record(Context context, Event event, Stream stream) {
  return Current(context).run([&] { return cudaEventRecord(as_event(event), as_stream(stream)); });
}

int wait(Context context, Stream stream, Event event) {
  return Current(context).run(
      [&] { return cudaStreamWaitEvent(as_stream(stream), as_event(event), 0); });
}

int done(Context context, Event event, bool* yes) {
  return Current(context).run([&] {
    const cudaError_t error = cudaEventQuery(as_event(event));
    if (error != cudaSuccess && error != cudaErrorNotReady) return error;
    if (error == cudaErrorNotReady) (void)cudaGetLastError();  // an answer, but kept as an error
    *yes = error == cudaSuccess;
    return cudaSuccess;
  });
}

int synchronize(Context context, Event event) {
  return Current(context).run([&] { return cudaEventSynchronize(as_event(event)); });
}

int capturing(Context context, Stream stream, bool* yes) {
  return Current(context).run([&] {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(as_stream(stream), &status);
    if (error == cudaSuccess) *yes = status != cudaStreamCaptureStatusNone;
    return error;
  });
}

constexpr cudaMemcpyKind kKinds[] = {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
                                     cudaMemcpyDeviceToDevice};

int copy(Context context, void* to, const void* from, int64_t bytes, device::Direction direction,
         Stream stream) {
  return Current(context).run([&] {
    return cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                           kKinds[static_cast<int>(direction)], as_stream(stream));
  });
}

cudaError_t copy_run(const device::Pieces& run, device::Direction direction, Stream stream) {
  return cudaMemcpy2DAsync(run.to, static_cast<size_t>(run.to_stride), run.from,
                           static_cast<size_t>(run.from_stride), static_cast<size_t>(run.bytes),
                           static_cast<size_t>(run.count), kKinds[static_cast<int>(direction)],
                           as_stream(stream));
}

// Of many runs, which the driver takes in one call from CUDA 13 on.
cudaError_t copy_batch(const device::Pieces* runs, int64_t count, device::Direction direction,
                       Stream stream) {
#if CUDART_VERSION >= 13000
  static_cast<void>(direction);  // the pointers say it
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> sizes;
  for (const device::Pieces* run = runs; run != runs + count; ++run) {
    for (int64_t i = 0; i < run->count; ++i) {
      to.push_back(static_cast<char*>(run->to) + i * run->to_stride);
      from.push_back(static_cast<const char*>(run->from) + i * run->from_stride);
      sizes.push_back(static_cast<size_t>(run->bytes));
    }
  }
  if (to.empty()) return cudaSuccess;
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &first,
                              1, as_stream(stream));
#else
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error = copy_run(runs[i], direction, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
#endif
}

int copy_pieces(Context context, const device::Pieces* runs, int64_t count,
                device::Direction direction, Stream stream) {
  return Current(context).run([&] {
    return count == 1 ? copy_run(runs[0], direction, stream)
                      : copy_batch(runs, count, direction, stream);
  });
}

int fill(Context context, void* to, int32_t byte, int64_t bytes, Stream stream) {
  return Current(context).run(
      [&] { return cudaMemsetAsync(to, byte, static_cast<size_t>(bytes), as_stream(stream)); });
}

// --- kernels ---

template <class Params, int (*kLaunch)(const Params&, void*)>
int launch_in(Context context, const Params* params, Stream stream) {
  return Current(context).run([&] { return static_cast<cudaError_t>(kLaunch(*params, stream)); });
}

int64_t tensor_attention_shared_bytes(const gpu::Shape* shape) {
  return gpu::tensor_attention_shared_bytes(*shape);
}
int64_t attend_scratch_bytes(const gpu::Shape* shape, const gpu::Bounds* bounds,
                             gpu::Attention attention) {
  return gpu::attend_scratch_bytes(*shape, *bounds, attention);
}
int64_t select_scratch_bytes(const gpu::Shape* shape, const gpu::Bounds* bounds) {
  return gpu::select_scratch_bytes(*shape, *bounds);
}

device::Api make_table() {
  device::Api t;
  t.name = "cuda";
  t.tensor_device = 2;  // kDLCUDA
  t.host_can_read = false;
  t.error_text = error_text;
  t.count = count;
  t.describe = describe;
  t.open = open;
  t.close = close;
  t.allocate = allocate;
  t.release = release;
  t.allocate_pinned = allocate_pinned;
  t.release_pinned = release_pinned;
  t.create_stream = create_stream;
  t.destroy_stream = destroy_stream;
  t.create_event = create_event;
  t.destroy_event = destroy_event;
  t.record = record;
  t.wait = wait;
  t.done = done;
  t.synchronize = synchronize;
  t.capturing = capturing;
  t.copy = copy;
  t.copy_pieces = copy_pieces;
  t.fill = fill;
  t.write_rows = launch_in<gpu::WriteParams, gpu::write_rows>;
  t.summarize = launch_in<gpu::SummarizeParams, gpu::summarize>;
  t.rotate = launch_in<gpu::RotateParams, gpu::rotate>;
  t.select = launch_in<gpu::SelectParams, gpu::select>;
  t.attend = launch_in<gpu::AttendParams, gpu::attend>;
  t.multiply = launch_in<LinearParams, gpu::multiply>;
  t.tensor_attention_shared_bytes = tensor_attention_shared_bytes;
  t.attend_scratch_bytes = attend_scratch_bytes;
  t.select_scratch_bytes = select_scratch_bytes;
  return t;
}

}  // namespace

namespace gpu {

int multiprocessors() {
  constexpr int kMost = 64;
  static std::atomic<int> known[kMost];
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess) return 1;
  if (ordinal < kMost && known[ordinal].load(std::memory_order_relaxed) > 0) return known[ordinal];
  int found = 1;
  if (cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, ordinal) != cudaSuccess)
    return 1;
  if (ordinal < kMost) known[ordinal].store(found, std::memory_order_relaxed);
  return found;
}

}  // namespace gpu

}  // namespace kvpager

extern "C" __attribute__((visibility("default"))) const kvpager::device::Api* kvpager_device_api() {
  static const kvpager::device::Api table = kvpager::make_table();
  return &table;
}
