// Happens-before as in FastTrack (Flanagan and Freund, 2009): the last write of a byte, and of the reads
// as many as can still be part of a race. Vector clocks shrink to two counts here, since a barrier is
// of a whole block or of a whole warp: an access happened before the running thread's if it is the
// thread's own, or the block has passed a barrier since, or both are of one warp which has. Shuffles,
// ballots and products order registers, not memory, so they count for nothing.
//
// The compiler's calls of __tsan_* come from -fsanitize=thread.
#include "shim/races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "shim/fibers.h"

namespace kvpager::shim {
namespace {

struct Event {
  uint32_t block_barriers = 0;  // passed before it; counted on over blocks and launches
  uint32_t warp_barriers = 0;
  uint16_t thread = 0;
  bool pending = false;  // a background copy nobody has waited for
  const void* code = nullptr;

  int warp() const { return thread / kWarp; }
};

// Accesses of one kind to one byte that no later write is known to follow. Three are enough for any
// later access to race with one of them if it races with any of all: of two warps, or two threads of one.
struct Accesses {
  Event events[3];
  int count = 0;

  const Event* of_other(const Event& now) const;
  void add(const Event& now);
};

struct Byte {
  Event write;  // block_barriers 0: none
  Accesses reads, atomics;
};

// Of the launch that runs on this host thread.
struct Shadow {
  std::vector<Byte> bytes;
  uint32_t block_barriers = 0;
  const void* kernel = nullptr;
};

Shadow& shadow() {
  thread_local Shadow of_thread;
  return of_thread;
}

bool is_ordered(const Event& before, const Event& now) {
  if (before.block_barriers < now.block_barriers) return true;
  if (before.pending) return false;
  if (before.thread == now.thread) return true;
  return before.warp() == now.warp() && before.warp_barriers < now.warp_barriers;
}

const Event* Accesses::of_other(const Event& now) const {
  for (int i = 0; i < count; ++i) {
    if (!is_ordered(events[i], now)) return &events[i];
  }
  return nullptr;
}

void Accesses::add(const Event& now) {
  int kept = 0;
  bool other_warp = false;
  for (int i = 0; i < count; ++i) {
    const Event& event = events[i];
    if (is_ordered(event, now)) continue;
    other_warp = other_warp || event.warp() != now.warp();
    events[kept++] = event;
  }
  count = kept;
  const bool one_warp = count < 2 || events[0].warp() == events[1].warp();
  if (count < 2 || (count == 2 && other_warp && one_warp)) events[count++] = now;
}

const char* verb(Access access) {
  switch (access) {
    case Access::kRead:
      return "reads it";
    case Access::kWrite:
      return "writes it";
    case Access::kAtomic:
      return "changes it";
  }
  return "?";
}

// The lines and functions of the instruction before `code`, and those it was inlined into.
std::string describe(const void* code) {
  Dl_info info{};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return "unknown code";
  const auto offset = static_cast<size_t>(static_cast<const char*>(code) -
                                          static_cast<const char*>(info.dli_fbase));
  char place[32];
  std::snprintf(place, sizeof place, "0x%zx", offset - 1);
  std::string text;
  const std::string command =
      std::string("addr2line -e '") + info.dli_fname + "' -f -C -i -s -p " + place + " 2>/dev/null";
  if (FILE* const lines = popen(command.c_str(), "r")) {
    char buffer[512];
    while (std::fgets(buffer, sizeof buffer, lines) != nullptr)
      text += std::string("    ") + buffer;
    pclose(lines);
  }
  if (text.empty()) text = std::string("    ") + info.dli_fname + "+" + place + "\n";
  return text;
}

[[noreturn]] void report(size_t byte, const Event& before, Access earlier, const Event& now,
                         Access access) {
  const char* const what = before.pending ? "is still copying to it" : verb(earlier);
  const void* kernel = shadow().kernel;
  if (kernel != nullptr) kernel = static_cast<const char*>(kernel) + 1;  // its first instruction
  fail(*current->warp,
       "race on byte %zu of %lld of shared memory: thread %d %s, and no barrier before thread %d "
       "%s\n"
       "  which is at\n%s  the other was at\n%s  in the kernel\n%s",
       byte, static_cast<long long>(current->shared_bytes), before.thread, what, now.thread,
       verb(access), describe(now.code).c_str(), describe(before.code).c_str(),
       describe(kernel).c_str());
}

Event event_now(const void* code) {
  Event now;
  now.block_barriers = shadow().block_barriers;
  now.warp_barriers = current->warp->barriers;
  now.thread = static_cast<uint16_t>(current->thread);
  now.code = code;
  return now;
}

void note(size_t at, const Event& now, Access access) {
  Byte& byte = shadow().bytes[at];
  if (!is_ordered(byte.write, now)) report(at, byte.write, Access::kWrite, now, access);
  if (access != Access::kAtomic) {
    if (const Event* other = byte.atomics.of_other(now)) {
      report(at, *other, Access::kAtomic, now, access);
    }
  }
  if (access != Access::kRead) {
    if (const Event* other = byte.reads.of_other(now)) {
      report(at, *other, Access::kRead, now, access);
    }
  }
  if (access == Access::kRead) {
    byte.reads.add(now);
  } else if (access == Access::kAtomic) {
    byte.atomics.add(now);
  } else {
    byte.write = now;
    byte.reads.count = 0;
    byte.atomics.count = 0;
  }
}

size_t offset_of(const void* address) {
  return static_cast<size_t>(reinterpret_cast<uintptr_t>(address) -
                             reinterpret_cast<uintptr_t>(current->shared));
}

}  // namespace

void note_access(const void* address, size_t bytes, Access access, const void* code) {
  if (current == nullptr) return;
  const size_t first = offset_of(address);
  const size_t size = static_cast<size_t>(current->shared_bytes);
  if (first >= size) return;
  const Event now = event_now(code);
  const size_t last = std::min(first + bytes, size);
  for (size_t at = first; at < last; ++at) note(at, now, access);
}

void note_copy(const void* address, const void* code) {
  note_access(address, 16, Access::kWrite, code);
  for (size_t i = 0; i < 16; ++i) shadow().bytes[offset_of(address) + i].write.pending = true;
}

void note_copied(const void* address, const void* code) {
  const Event now = event_now(code);
  for (size_t i = 0; i < 16; ++i) shadow().bytes[offset_of(address) + i].write = now;
}

void note_block_begins(int64_t shared_bytes, const void* kernel) {
  Shadow& of_block = shadow();
  of_block.kernel = kernel;
  ++of_block.block_barriers;
  if (of_block.bytes.size() < static_cast<size_t>(shared_bytes)) {
    of_block.bytes.resize(static_cast<size_t>(shared_bytes));
  }
}

void note_block_barrier() { ++shadow().block_barriers; }

void note_warp_barrier(Warp& warp) { ++warp.barriers; }

}  // namespace kvpager::shim

using kvpager::shim::Access;
using kvpager::shim::note_access;

#define KVP_CODE __builtin_return_address(0)
#define KVP_ACCESSES(bytes)                                                              \
  void __tsan_read##bytes(void* at) { note_access(at, bytes, Access::kRead, KVP_CODE); } \
  void __tsan_write##bytes(void* at) { note_access(at, bytes, Access::kWrite, KVP_CODE); }
#define KVP_UNALIGNED_ACCESSES(bytes)                                                              \
  void __tsan_unaligned_read##bytes(void* at) { note_access(at, bytes, Access::kRead, KVP_CODE); } \
  void __tsan_unaligned_write##bytes(void* at) { note_access(at, bytes, Access::kWrite, KVP_CODE); }
#define KVP_ATOMIC_UPDATE(bits, name)                                                           \
  uint##bits##_t __tsan_atomic##bits##_##name(volatile void* at, uint##bits##_t value, int) {   \
    note_access(const_cast<void*>(at), bits / 8, Access::kAtomic, KVP_CODE);                    \
    return __atomic_##name(static_cast<volatile uint##bits##_t*>(at), value, __ATOMIC_SEQ_CST); \
  }
#define KVP_ATOMICS(bits)                                                                       \
  KVP_ATOMIC_UPDATE(bits, fetch_add)                                                            \
  KVP_ATOMIC_UPDATE(bits, fetch_sub)                                                            \
  KVP_ATOMIC_UPDATE(bits, fetch_and)                                                            \
  KVP_ATOMIC_UPDATE(bits, fetch_or)                                                             \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile void* at, int) {                     \
    note_access(const_cast<void*>(at), bits / 8, Access::kAtomic, KVP_CODE);                    \
    return __atomic_load_n(static_cast<const volatile uint##bits##_t*>(at), __ATOMIC_SEQ_CST);  \
  }                                                                                             \
  void __tsan_atomic##bits##_store(volatile void* at, uint##bits##_t value, int) {              \
    note_access(const_cast<void*>(at), bits / 8, Access::kAtomic, KVP_CODE);                    \
    __atomic_store_n(static_cast<volatile uint##bits##_t*>(at), value, __ATOMIC_SEQ_CST);       \
  }                                                                                             \
  uint##bits##_t __tsan_atomic##bits##_exchange(volatile void* at, uint##bits##_t value, int) { \
    note_access(const_cast<void*>(at), bits / 8, Access::kAtomic, KVP_CODE);                    \
    return __atomic_exchange_n(static_cast<volatile uint##bits##_t*>(at), value,                \
                               __ATOMIC_SEQ_CST);                                               \
  }                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile void* at, void* expected,          \
                                                    uint##bits##_t value, int, int) {           \
    note_access(const_cast<void*>(at), bits / 8, Access::kAtomic, KVP_CODE);                    \
    return __atomic_compare_exchange_n(static_cast<volatile uint##bits##_t*>(at),               \
                                       static_cast<uint##bits##_t*>(expected), value, false,    \
                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                     \
  }                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile void* at, void* expected,            \
                                                  uint##bits##_t value, int, int) {             \
    note_access(const_cast<void*>(at), bits / 8, Access::kAtomic, KVP_CODE);                    \
    return __atomic_compare_exchange_n(static_cast<volatile uint##bits##_t*>(at),               \
                                       static_cast<uint##bits##_t*>(expected), value, false,    \
                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                     \
  }

extern "C" {

KVP_ACCESSES(1)
KVP_ACCESSES(2)
KVP_ACCESSES(4)
KVP_ACCESSES(8)
KVP_ACCESSES(16)
KVP_UNALIGNED_ACCESSES(2)
KVP_UNALIGNED_ACCESSES(4)
KVP_UNALIGNED_ACCESSES(8)
KVP_UNALIGNED_ACCESSES(16)
KVP_ATOMICS(8)
KVP_ATOMICS(32)
KVP_ATOMICS(64)

void __tsan_read_range(void* at, unsigned long bytes) {
  note_access(at, bytes, Access::kRead, KVP_CODE);
}
void __tsan_write_range(void* at, unsigned long bytes) {
  note_access(at, bytes, Access::kWrite, KVP_CODE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Clang's.
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  note_access(from, bytes, Access::kRead, KVP_CODE);
  note_access(to, bytes, Access::kWrite, KVP_CODE);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  note_access(from, bytes, Access::kRead, KVP_CODE);
  note_access(to, bytes, Access::kWrite, KVP_CODE);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int byte, unsigned long bytes) {
  note_access(to, bytes, Access::kWrite, KVP_CODE);
  return std::memset(to, byte, bytes);
}

}  // extern "C"
