#include "core/eviction_order.h"

#include <algorithm>
#include <utility>

#include "kvpager/require.h"

namespace kvpager {

namespace {

// Of a heap whose front leaves first.
struct Later {
  Policy policy;
  bool operator()(const VictimFacts& a, const VictimFacts& b) const {
    return evicted_before(policy, b, a);
  }
};

constexpr size_t kMoreNotes = 64;

}  // namespace

void EvictionOrder::fill(std::vector<VictimFacts> notes) {
  const size_t room = 2 * notes.size() + kMoreNotes;
  aside_.reserve(room);
  notes_.swap(notes);
  notes_.reserve(room);
  std::make_heap(notes_.begin(), notes_.end(), Later{policy_});
  stale_ = false;
}

void EvictionOrder::add(const VictimFacts& note) {
  if (stale_) return;
  if (notes_.size() == notes_.capacity()) {
    invalidate();
  } else {
    push(note);
  }
}

void EvictionOrder::pop() {
  std::pop_heap(notes_.begin(), notes_.end(), Later{policy_});
  notes_.pop_back();
}

void EvictionOrder::push(const VictimFacts& note) {
  KVPAGER_REQUIRE(notes_.size() < notes_.capacity());
  notes_.push_back(note);
  std::push_heap(notes_.begin(), notes_.end(), Later{policy_});
}

}  // namespace kvpager
