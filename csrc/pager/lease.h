// What was allocated and does not belong to a record yet: blocks, slots of the host arena and of
// summaries. A lease owns as many as it was asked for from its constructor on, or the constructor throws;
// what no record has taken over goes back with the lease. So an error on the way needs no undoing by
// hand.
//
// A constructor that throws has forgotten no cached chunk. Clean chunks may have left the pool and host
// copies may be gone: that changes no result and needs no undoing either.
//
// Used under the pager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/residency.h"

namespace kvpager {

// How to allocate one and how to free it; room for `count` of them was checked before.
struct BlockKind {
  using Item = BlockId;
  static void require(Residency& residency, int64_t count, const char* action) {
    residency.require_blocks(count, action);
  }
  static BlockId allocate(Residency& residency) {
    const auto block = residency.allocate_block();
    if (!block) throw CapacityError("no block is free, though there was room for one");
    return *block;
  }
  static void free(Residency& residency, BlockId block) noexcept { residency.free_block(block); }
};
// Slots of the host arena for copies of what is below, which the owner allocates one by one.
struct HostSlotKind {
  using Item = SlotId;
  static void free(Residency& residency, SlotId slot) noexcept { residency.free_host_slot(slot); }
};
// REQUIRES: they were reserved.
struct SummaryKind {
  using Item = SlotId;
  static void require(Residency&, int64_t, const char*) {}
  static SlotId allocate(Residency& residency) { return residency.allocate_summary(); }
  static void free(Residency& residency, SlotId slot) noexcept { residency.free_summary(slot); }
};

template <class Kind>
class Lease {
 public:
  using Item = typename Kind::Item;

  // Of none yet.
  explicit Lease(Residency& residency) : residency_(residency) {}
  // CapacityError naming `action` if there is no room for `count`. Delegates, so that the destructor
  // runs when it throws.
  Lease(Residency& residency, int64_t count, const char* action) : Lease(residency) {
    if (count == 0) return;
    Kind::require(residency, count, action);
    items_.reserve(static_cast<size_t>(count));
    while (static_cast<int64_t>(items_.size()) < count) items_.push_back(Kind::allocate(residency));
  }
  ~Lease() {
    for (; next_ < items_.size(); ++next_) Kind::free(residency_, items_[next_]);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // One more, which the caller has allocated. Frees it if there is no memory to keep it.
  void add(const Item& item) {
    try {
      items_.push_back(item);
    } catch (...) {
      Kind::free(residency_, item);
      throw;
    }
  }
  // Those left, in the order in which release() hands them over.
  int64_t count() const { return static_cast<int64_t>(items_.size() - next_); }
  bool empty() const { return count() == 0; }
  // REQUIRES: 0 <= i < count().
  const Item& operator[](int64_t i) const {
    KVPAGER_REQUIRE(i >= 0 && i < count());
    return items_[next_ + static_cast<size_t>(i)];
  }
  // The next one is the caller's from now on. REQUIRES: count() > 0.
  Item release() noexcept {
    KVPAGER_REQUIRE(!empty());
    return items_[next_++];
  }

 private:
  Residency& residency_;
  std::vector<Item> items_;
  size_t next_ = 0;
};

using BlockLease = Lease<BlockKind>;
using HostSlotLease = Lease<HostSlotKind>;
using SummaryLease = Lease<SummaryKind>;

}  // namespace kvpager
