#include "memory/slab.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>

#include "kvpager/error.h"

namespace kvpager {
namespace {

std::atomic<int64_t> mapped_total{0};

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

Slab::Slab(const char* what, int64_t slots, int64_t slot_bytes)
    : slots_(slots), slot_bytes_(slot_bytes) {
  if (slots == 0) return;
  if (slots > std::numeric_limits<int64_t>::max() / slot_bytes) {
    throw CapacityError(str(what, ": ", slots, " slots of ", slot_bytes, " bytes overflow"));
  }
  const int64_t bytes = slots * slot_bytes;
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw CapacityError(str(what, ": cannot map ", bytes, " bytes of memory (",
                            std::strerror(errno), "); expected what this machine can hold"));
  }
  // Fewer page faults on the sealing path; a system that declines loses nothing.
  if (bytes >= kHugePage) madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  base_ = static_cast<std::byte*>(memory);
  mapped_ = bytes;
  mapped_total += bytes;
}

Slab::~Slab() {
  if (base_ == nullptr) return;
  munmap(base_, static_cast<size_t>(mapped_));
  mapped_total -= mapped_;
}

void Slab::discard(int64_t slot) noexcept {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(this->slot(slot));
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + static_cast<uintptr_t>(slot_bytes_)) / page * page;
  // Where the system declines, the pages stay.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

int64_t total_mapped_bytes() { return mapped_total.load(); }

}  // namespace kvpager
