// The shim's device: streams, events, memory and graphs as CUDA defines them, on the processor,
// with an adversary for a scheduler.
//
// A stream made here is a queue, and nothing in it runs until something forces it: a host wait, a
// wait of the caller's stream, or the scheduler, which now and then runs what nothing holds back.
// How often and in which order is drawn from KVPAGER_SHIM_SEED (default 1: as late as possible). A
// copy begins as soon as it may, and from then on its destination holds 0xFF; it reads its source
// and writes its destination when it ends. Work of streams made elsewhere (torch's, or null) is
// complete when the call that enqueued it returns, with as much of the other streams as its waits
// demand. Misuse that a GPU would answer with undefined behaviour ends the process with a message.
//
// Thread-safe: one lock, held while work runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "device/api.h"

namespace kvpager::shim {

// Codes beside device::kOk, kNoDevice and kOutOfMemory.
inline constexpr int kInvalidValue = 1;
inline constexpr int kCaptureUnsupported = 900;  // allocation or host wait while capturing
inline constexpr int kCaptureInvalidated = 901;  // the capture failed before
inline constexpr int kCaptureUnjoined = 904;     // a stream that joined was not waited for
inline constexpr int kCaptureIsolation = 905;    // a wait on an event from outside the capture
inline constexpr int kCapturedEvent = 907;       // the event stands for a node of a graph
const char* error_text(int code);

// A launch: `work` runs when the stream gets to it. Words of `params` that point into memory
// allocated here keep it from being released before.
int enqueue(void* stream, std::function<void()> work, const void* params = nullptr,
            size_t params_bytes = 0);

// Settings are read anew: KVPAGER_SHIM_SEED, KVPAGER_SHIM_MEMORY and KVPAGER_SHIM_PINNED (limits in
// bytes of memory in use in the process; the machine's by default).
void configure();
// So is KVPAGER_SHIM_SHARED (bytes of shared memory a block can have; an H100's by default), which is
// returned.
int64_t configure_shared_memory();
int64_t memory_bytes();  // of the machine

// As in device/api.h.
int allocate(int64_t bytes, bool pinned, void** memory);
int release(void* memory, bool pinned);
int create_stream(device::Stream* stream);
int destroy_stream(device::Stream stream);  // its work is done some day all the same
int create_event(device::Event* event);
int destroy_event(device::Event event);
int record(device::Event event, device::Stream stream);
int wait(device::Stream stream, device::Event event);
int done(device::Event event, bool* yes);
int synchronize(device::Event event);
int capturing(device::Stream stream, bool* yes);
int copy(void* to, const void* from, int64_t bytes, device::Direction direction,
         device::Stream stream);
int copy_pieces(const device::Pieces* runs, int64_t count, device::Direction direction,
                device::Stream stream);
int fill(void* to, int32_t byte, int64_t bytes, device::Stream stream);

}  // namespace kvpager::shim

// For tests: what torch.cuda.graph does on a GPU, and a look inside. Found with dlsym.
#pragma GCC visibility push(default)
extern "C" {
// From here to end_capture nothing of the stream runs; what it is given becomes nodes of a graph,
// and so does what streams are given that wait for an event recorded in it.
int kvpager_shim_begin_capture(void* stream);
int kvpager_shim_end_capture(void* stream, void** graph);
int kvpager_shim_replay(void* graph, void* stream);
int kvpager_shim_release(void* graph);
// Operations enqueued and not finished, of all streams.
int64_t kvpager_shim_unfinished();
// Finishes them, in an order of the scheduler's choice.
void kvpager_shim_drain();
}
#pragma GCC visibility pop
