#include "failing_new.h"

#include <cstdlib>
#include <new>

#include "pager/locked.h"

namespace {

// -1: none is to fail.
thread_local int64_t allocations_left = -1;

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left >= 0 && !kvpager::checking_invariants && allocations_left-- == 0) {
    throw std::bad_alloc();
  }
  const std::size_t size = bytes == 0 ? 1 : bytes;
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(size)
          : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, 0); }
void* operator new[](std::size_t bytes) { return allocate(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
// Does not fail: what asks this way, as std::stable_sort does, goes on without. Defined because memory of
// another operator new must not come to the operators delete below.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace kvpager::pager_test {

FailingNew::FailingNew(int64_t nth) { allocations_left = nth; }
FailingNew::~FailingNew() { allocations_left = -1; }
bool FailingNew::met() const { return allocations_left < 0; }

}  // namespace kvpager::pager_test
