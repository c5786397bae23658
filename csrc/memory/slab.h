// Equal slots of 64-byte aligned memory in one mapping made up front. The resident pool, the host
// arena, the summaries and the staging area are slabs; nothing on the paging path allocates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpager/require.h"

namespace kvpager {

class Slab {
 public:
  // Maps slots * slot_bytes. CapacityError with `what`, an option's name, and the bytes if the
  // system refuses. slots may be 0.
  Slab(const char* what, int64_t slots, int64_t slot_bytes);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // REQUIRES: 0 <= slot < slots().
  const std::byte* slot(int64_t slot) const {
    KVPAGER_REQUIRE(slot >= 0 && slot < slots_);
    return base_ + slot * slot_bytes_;
  }
  std::byte* slot(int64_t slot) {
    KVPAGER_REQUIRE(slot >= 0 && slot < slots_);
    return base_ + slot * slot_bytes_;
  }

  // Gives a slot's pages back to the system; its contents are lost. Of use where slots are large.
  void discard(int64_t slot) noexcept;

  int64_t slots() const { return slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t mapped_bytes() const { return mapped_; }

 private:
  std::byte* base_ = nullptr;
  int64_t slots_;
  int64_t slot_bytes_;
  int64_t mapped_ = 0;
};

// Bytes in all live slabs of this process, counted where they are mapped.
int64_t total_mapped_bytes();

}  // namespace kvpager
