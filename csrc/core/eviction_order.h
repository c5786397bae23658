// Which of many leaves first: facts of records as they were noted, in a heap that is made when one
// first has to leave and thrown away when many facts change at once.
//
//   stale --fill--> made --invalidate, or no room for another note--> stale
//
// A note goes out of date silently, and is looked at when it comes up: `judge` says what has become of
// its record. So a record that may leave from now on has to be noted with add() (or the order
// invalidated); for one that may not any more nothing has to be done. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/policy.h"
#include "kvpager/require.h"

namespace kvpager {

enum class Verdict : uint8_t {
  kGoes,      // it is the one
  kStays,     // not now, but it may leave later as it is noted
  kOutdated,  // the note does not hold any more
};

class EvictionOrder {
 public:
  explicit EvictionOrder(Policy policy) : policy_(policy) {}

  bool stale() const { return stale_; }
  void invalidate() { stale_ = true; }
  // All there are, in any order.
  void fill(std::vector<VictimFacts> notes);
  // One more. Allocates nothing: where there is no room the order becomes stale.
  void add(const VictimFacts& note);

  const std::vector<VictimFacts>& notes() const { return notes_; }

  // The first that `judge` lets leave; it stays noted. Each note is judged once, in order. REQUIRES:
  // !stale().
  template <class Judge>
  std::optional<VictimFacts> first(const Judge& judge) {
    KVPAGER_REQUIRE(!stale());
    std::optional<VictimFacts> found;
    aside_.clear();
    while (!notes_.empty()) {
      const VictimFacts next = notes_.front();
      const bool noted_twice = !aside_.empty() && aside_.back().record == next.record;
      const Verdict verdict = noted_twice ? Verdict::kOutdated : judge(next);
      if (verdict == Verdict::kGoes) {
        found = next;
        break;
      }
      pop();
      if (verdict == Verdict::kStays) aside_.push_back(next);
    }
    for (const VictimFacts& note : aside_) push(note);
    return found;
  }

 private:
  void pop();
  void push(const VictimFacts& note);  // REQUIRES: room

  const Policy policy_;
  bool stale_ = true;
  std::vector<VictimFacts> notes_;  // a heap, the first to leave at its front
  std::vector<VictimFacts> aside_;  // of the search at hand
};

}  // namespace kvpager
