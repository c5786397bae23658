#include "core/eviction_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvpager {
namespace {

VictimFacts note(int32_t record, double score, uint64_t last_use = 1) {
  return {RecordId(record), false, score, last_use};
}

Verdict leaves(const VictimFacts&) { return Verdict::kGoes; }

TEST_CASE("what was invalidated is stale until it is filled again") {
  EvictionOrder order(Policy::kQk);
  CHECK(order.stale());
  order.add(note(1, 0.5));  // nothing to add to
  CHECK(order.stale());
  order.fill({note(1, 0.5)});
  CHECK_FALSE(order.stale());
  CHECK(order.first(leaves)->record == RecordId(1));
  order.invalidate();
  CHECK(order.stale());
  order.fill({});
  CHECK_FALSE(order.first(leaves).has_value());
}

TEST_CASE("a note that stays is judged again the next time, an outdated one is not") {
  EvictionOrder order(Policy::kQk);
  order.fill({note(3, 0.3), note(1, 0.1), note(2, 0.2)});
  std::vector<int32_t> asked;
  const auto judge = [&](const VictimFacts& who) {
    asked.push_back(who.record.value());
    return who.record.value() == 1   ? Verdict::kStays
           : who.record.value() == 2 ? Verdict::kOutdated
                                     : Verdict::kGoes;
  };
  CHECK(order.first(judge)->record == RecordId(3));
  CHECK(asked == std::vector<int32_t>{1, 2, 3});
  asked.clear();
  CHECK(order.first(judge)->record == RecordId(3));
  CHECK(asked == std::vector<int32_t>{1, 3});
}

TEST_CASE("a record that is noted twice is counted once") {
  EvictionOrder order(Policy::kLru);
  order.fill({note(1, 0, 7), note(2, 0, 8)});
  for (int i = 0; i < 5; ++i) order.add(note(1, 0, 7));
  int count = 0;
  const auto all = order.first([&](const VictimFacts&) {
    ++count;
    return Verdict::kStays;
  });
  CHECK_FALSE(all.has_value());
  CHECK(count == 2);
}

TEST_CASE("an order that has no room left becomes stale and loses nothing silently") {
  EvictionOrder order(Policy::kLru);
  order.fill({});
  for (int32_t i = 0; i < 100000 && !order.stale(); ++i) order.add(note(i, 0));
  CHECK(order.stale());
}

TEST_CASE("the first to leave is the one the policy names, whatever changed since it was noted") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    std::mt19937 random(11);
    std::map<int32_t, VictimFacts> evictable;
    EvictionOrder order(policy);
    for (int step = 0; step < 20000; ++step) {
      const auto id = static_cast<int32_t>(random() % 40);
      const auto dice = random() % 8;
      if (dice < 3) {  // it may leave, and somebody says so
        evictable[id] = note(id, static_cast<double>(random() % 4), random() % 4);
        evictable[id].sheltered = random() % 4 == 0;
        order.add(evictable[id]);
      } else if (dice < 5) {  // it may not any more, and nobody says so
        evictable.erase(id);
      } else if (dice == 5 && step % 16 == 0) {  // many change at once
        for (auto& [other, facts] : evictable) facts.last_use = random() % 4;
        order.invalidate();
      }
      if (order.stale()) {
        std::vector<VictimFacts> notes;
        for (const auto& [other, facts] : evictable) notes.push_back(facts);
        order.fill(std::move(notes));
      }
      const auto found = order.first([&](const VictimFacts& who) {
        const auto now = evictable.find(who.record.value());
        return now != evictable.end() && now->second == who ? Verdict::kGoes : Verdict::kOutdated;
      });
      REQUIRE(found.has_value() == !evictable.empty());
      if (!found) continue;
      for (const auto& [other, facts] : evictable) {
        REQUIRE((facts == *found || evicted_before(policy, *found, facts)));
      }
    }
  }
}

}  // namespace
}  // namespace kvpager
