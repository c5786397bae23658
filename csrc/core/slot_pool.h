// Hands out slot numbers. Integers only: the bytes behind them belong to the memory room.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "kvpager/require.h"
#include "kvpager/types.h"

namespace kvpager {

template <class Id>
class SlotPool {
 public:
  // shuffle_seed not 0: slots come in a random order, so that no result can depend on placement by
  // luck.
  explicit SlotPool(int64_t slots, uint64_t shuffle_seed = 0)
      : taken_(static_cast<size_t>(slots), false),
        shuffle_(shuffle_seed != 0),
        random_(shuffle_seed) {
    free_.reserve(taken_.size());
    for (int64_t i = slots; i-- > 0;) free_.push_back(Id(static_cast<typename Id::rep>(i)));
  }

  std::optional<Id> take() {
    if (free_.empty()) return std::nullopt;
    if (shuffle_) std::swap(free_[random_() % free_.size()], free_.back());
    const Id id = free_.back();
    free_.pop_back();
    taken_[static_cast<size_t>(id.value())] = true;
    return id;
  }

  // REQUIRES: taken(id).
  void give_back(Id id) {
    KVPAGER_REQUIRE(taken(id));
    taken_[static_cast<size_t>(id.value())] = false;
    free_.push_back(id);
    ++returns_;
  }

  // REQUIRES: 0 <= id < slots().
  bool taken(Id id) const {
    KVPAGER_REQUIRE(id.value() >= 0 && id.value() < slots());
    return taken_[static_cast<size_t>(id.value())];
  }
  int64_t slots() const { return static_cast<int64_t>(taken_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return slots() - free(); }
  // Slots given back so far. While it stands still, what lay in a slot lies there yet.
  uint64_t returns() const { return returns_; }

 private:
  std::vector<Id> free_;
  std::vector<bool> taken_;
  uint64_t returns_ = 0;
  bool shuffle_;
  std::mt19937_64 random_;
};

}  // namespace kvpager
