// What was taken and does not belong to a record yet: blocks, slots of the host arena and of
// summaries. A lease owns as many as it was asked for from its constructor on, or the constructor
// throws; what nobody has taken over goes back with the lease. So an error on the way needs no
// undoing by hand.
//
// A constructor that throws has forgotten no cached chunk. Clean chunks may have left the pool and
// host copies may be gone: that changes no result and needs no undoing either.
//
// Used under the pager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpager/require.h"
#include "pager/impl.h"

namespace kvpager {

// How to take one and how to return it; room for `count` of them was checked before.
struct BlockKind {
  using Item = BlockId;
  static void require(Pager::Impl& pager, int64_t count, const char* action);
  static BlockId take(Pager::Impl& pager);
  static void give_back(Pager::Impl& pager, BlockId block) noexcept;
};
// Slots of the host arena for copies of what is below.
struct HostSlotKind {
  using Item = SlotId;
  static void give_back(Pager::Impl& pager, SlotId slot) noexcept;
};
// REQUIRES: they were promised.
struct SummaryKind {
  using Item = SlotId;
  static void require(Pager::Impl&, int64_t, const char*) {}
  static SlotId take(Pager::Impl& pager);
  static void give_back(Pager::Impl& pager, SlotId slot) noexcept;
};

template <class Kind>
class Lease {
 public:
  using Item = typename Kind::Item;

  // Of none yet.
  explicit Lease(Pager::Impl& pager) : pager_(pager) {}
  // CapacityError naming `action` if there is no room for `count`. Delegates, so that the destructor
  // runs when it throws.
  Lease(Pager::Impl& pager, int64_t count, const char* action) : Lease(pager) {
    if (count == 0) return;
    Kind::require(pager, count, action);
    items_.reserve(static_cast<size_t>(count));
    while (static_cast<int64_t>(items_.size()) < count) items_.push_back(Kind::take(pager));
  }
  ~Lease() {
    for (; next_ < items_.size(); ++next_) Kind::give_back(pager_, items_[next_]);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // One more, which the caller has taken. Gives it back if there is no memory to keep it.
  void add(const Item& item) {
    try {
      items_.push_back(item);
    } catch (...) {
      Kind::give_back(pager_, item);
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
  Pager::Impl& pager_;
  std::vector<Item> items_;
  size_t next_ = 0;
};

using BlockLease = Lease<BlockKind>;
using HostSlotLease = Lease<HostSlotKind>;
using SummaryLease = Lease<SummaryKind>;

}  // namespace kvpager
