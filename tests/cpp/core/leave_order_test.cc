#include "core/leave_order.h"

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

Verdict leaves(const VictimFacts&) { return Verdict::kLeaves; }

TEST_CASE("what was forgotten is stale until it is filled again") {
  LeaveOrder order(Policy::kQk);
  CHECK(order.stale());
  order.add(note(1, 0.5));  // nothing to add to
  CHECK(order.stale());
  order.fill({note(1, 0.5)});
  CHECK_FALSE(order.stale());
  CHECK(order.first(leaves)->record == RecordId(1));
  order.forget();
  CHECK(order.stale());
  order.fill({});
  CHECK_FALSE(order.first(leaves).has_value());
}

TEST_CASE("who stays is asked again the next time, who is gone is not") {
  LeaveOrder order(Policy::kQk);
  order.fill({note(3, 0.3), note(1, 0.1), note(2, 0.2)});
  std::vector<int32_t> asked;
  const auto judge = [&](const VictimFacts& who) {
    asked.push_back(who.record.value());
    return who.record.value() == 1   ? Verdict::kStays
           : who.record.value() == 2 ? Verdict::kGone
                                     : Verdict::kLeaves;
  };
  CHECK(order.first(judge)->record == RecordId(3));
  CHECK(asked == std::vector<int32_t>{1, 2, 3});
  asked.clear();
  CHECK(order.first(judge)->record == RecordId(3));
  CHECK(asked == std::vector<int32_t>{1, 3});
}

TEST_CASE("who is noted twice is counted once") {
  LeaveOrder order(Policy::kLru);
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

TEST_CASE("an order that has no room left forgets itself and loses nobody silently") {
  LeaveOrder order(Policy::kLru);
  order.fill({});
  for (int32_t i = 0; i < 100000 && !order.stale(); ++i) order.add(note(i, 0));
  CHECK(order.stale());
}

TEST_CASE("the first to leave is the one the policy names, whatever changed since it was noted") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    std::mt19937 random(11);
    std::map<int32_t, VictimFacts> may_leave;
    LeaveOrder order(policy);
    for (int step = 0; step < 20000; ++step) {
      const auto id = static_cast<int32_t>(random() % 40);
      const auto dice = random() % 8;
      if (dice < 3) {  // it may leave, and somebody says so
        may_leave[id] = note(id, static_cast<double>(random() % 4), random() % 4);
        may_leave[id].sheltered = random() % 4 == 0;
        order.add(may_leave[id]);
      } else if (dice < 5) {  // it may not any more, and nobody says so
        may_leave.erase(id);
      } else if (dice == 5 && step % 16 == 0) {  // many change at once
        for (auto& [other, facts] : may_leave) facts.last_use = random() % 4;
        order.forget();
      }
      if (order.stale()) {
        std::vector<VictimFacts> notes;
        for (const auto& [other, facts] : may_leave) notes.push_back(facts);
        order.fill(std::move(notes));
      }
      const auto found = order.first([&](const VictimFacts& who) {
        const auto now = may_leave.find(who.record.value());
        return now != may_leave.end() && now->second == who ? Verdict::kLeaves : Verdict::kGone;
      });
      REQUIRE(found.has_value() == !may_leave.empty());
      if (!found) continue;
      for (const auto& [other, facts] : may_leave) {
        REQUIRE((facts == *found || leaves_before(policy, *found, facts)));
      }
    }
  }
}

}  // namespace
}  // namespace kvpager
