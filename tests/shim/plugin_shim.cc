// The shim as a plug-in: one device, whose memory is the host's.
#include <cstdio>

#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "shim/runtime.h"

namespace kvpager {

namespace {

using device::kNoDevice;
using device::kOk;

int context_tag = 0;  // all contexts are one

int count(int32_t* devices) {
  *devices = 1;
  return kOk;
}

int describe(int32_t ordinal, device::Info* info) {
  if (ordinal != 0) return kNoDevice;
  *info = device::Info();
  std::snprintf(info->name, sizeof(info->name), "CPU shim");
  info->multiprocessors = gpu::multiprocessors();
  info->memory_bytes = shim::memory_bytes();
  info->cache_bytes = int64_t{50} << 20;
  info->shared_block_bytes = shim::configure_shared_memory();
  return kOk;
}

int open(int32_t ordinal, device::Context* context) {
  if (ordinal != 0) return kNoDevice;
  shim::configure();
  *context = &context_tag;
  return kOk;
}

int close(device::Context) { return kOk; }

const device::Api& table() {
  static const device::Api api = [] {
    device::Api t;
    t.name = "shim";
    t.tensor_device = 1;  // kDLCPU
    t.host_can_read = true;
    t.error_text = shim::error_text;
    t.count = count;
    t.describe = describe;
    t.open = open;
    t.close = close;
    t.allocate = [](device::Context, int64_t bytes, void** memory) {
      return shim::allocate(bytes, false, memory);
    };
    t.release = [](device::Context, void* memory) { return shim::release(memory, false); };
    t.allocate_pinned = [](device::Context, int64_t bytes, void** memory) {
      return shim::allocate(bytes, true, memory);
    };
    t.release_pinned = [](device::Context, void* memory) { return shim::release(memory, true); };
    t.create_stream = [](device::Context, device::Stream* s) { return shim::create_stream(s); };
    t.destroy_stream = [](device::Context, device::Stream s) { return shim::destroy_stream(s); };
    t.create_event = [](device::Context, device::Event* e) { return shim::create_event(e); };
    t.destroy_event = [](device::Context, device::Event e) { return shim::destroy_event(e); };
    t.record = [](device::Context, device::Event e, device::Stream s) {
      return shim::record(e, s);
    };
    t.wait = [](device::Context, device::Stream s, device::Event e) { return shim::wait(s, e); };
    t.done = [](device::Context, device::Event e, bool* yes) { return shim::done(e, yes); };
    t.synchronize = [](device::Context, device::Event e) { return shim::synchronize(e); };
    t.capturing = [](device::Context, device::Stream s, bool* yes) {
      return shim::capturing(s, yes);
    };
    t.copy = [](device::Context, void* to, const void* from, int64_t bytes, device::Direction way,
                device::Stream s) { return shim::copy(to, from, bytes, way, s); };
    t.copy_pieces = [](device::Context, const device::Pieces* runs, int64_t count,
                       device::Direction way,
                       device::Stream s) { return shim::copy_pieces(runs, count, way, s); };
    t.fill = [](device::Context, void* to, int32_t byte, int64_t bytes, device::Stream s) {
      return shim::fill(to, byte, bytes, s);
    };
    t.write_rows = [](device::Context, const gpu::WriteParams* params, device::Stream s) {
      return gpu::write_rows(*params, s);
    };
    t.summarize = [](device::Context, const gpu::SummarizeParams* params, device::Stream s) {
      return gpu::summarize(*params, s);
    };
    t.rotate = [](device::Context, const gpu::RotateParams* params, device::Stream s) {
      return gpu::rotate(*params, s);
    };
    t.select = [](device::Context, const gpu::SelectParams* params, device::Stream s) {
      return gpu::select(*params, s);
    };
    t.attend = [](device::Context, const gpu::AttendParams* params, device::Stream s) {
      return gpu::attend(*params, s);
    };
    t.multiply = [](device::Context, const LinearParams* params, device::Stream s) {
      return gpu::multiply(*params, s);
    };
    t.tensor_attention_shared_bytes = [](const gpu::Shape* shape) {
      return gpu::tensor_attention_shared_bytes(*shape);
    };
    t.attend_scratch_bytes = [](const gpu::Shape* shape, const gpu::Bounds* bounds,
                                gpu::Attention attention) {
      return gpu::attend_scratch_bytes(*shape, *bounds, attention);
    };
    t.select_scratch_bytes = [](const gpu::Shape* shape, const gpu::Bounds* bounds) {
      return gpu::select_scratch_bytes(*shape, *bounds);
    };
    return t;
  }();
  return api;
}

}  // namespace

}  // namespace kvpager

extern "C" __attribute__((visibility("default"))) const kvpager::device::Api* kvpager_device_api() {
  return &kvpager::table();
}
