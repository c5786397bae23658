#include "core/policy.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

namespace kvpager {
namespace {

VictimFacts facts(int32_t record, double score, uint64_t last_use, bool sheltered = false) {
  return {RecordId(record), sheltered, score, last_use};
}

TEST_CASE("LRU lets the oldest leave first and does not look at scores") {
  CHECK(evicted_before(Policy::kLru, facts(9, 0.9, 1), facts(1, 0.1, 2)));
  CHECK_FALSE(evicted_before(Policy::kLru, facts(1, 0.1, 2), facts(9, 0.9, 1)));
}

TEST_CASE("QK lets the lowest score leave first, then the oldest") {
  CHECK(evicted_before(Policy::kQk, facts(9, 0.1, 5), facts(1, 0.2, 1)));
  CHECK(evicted_before(Policy::kQk, facts(9, 0.1, 1), facts(1, 0.1, 2)));
}

TEST_CASE("a sheltered chunk leaves after every other one under both policies") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    CHECK(evicted_before(policy, facts(2, 0.9, 9), facts(1, 0.0, 1, true)));
    CHECK_FALSE(evicted_before(policy, facts(1, 0.0, 1, true), facts(2, 0.9, 9)));
  }
}

TEST_CASE("full ties are ordered by record, so that the order is total") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    CHECK(evicted_before(policy, facts(1, 0.5, 3), facts(2, 0.5, 3)));
    CHECK_FALSE(evicted_before(policy, facts(2, 0.5, 3), facts(1, 0.5, 3)));
    CHECK_FALSE(evicted_before(policy, facts(1, 0.5, 3), facts(1, 0.5, 3)));
  }
}

TEST_CASE("any starting order sorts to the same victims") {
  std::vector<VictimFacts> all;
  for (int32_t i = 0; i < 24; ++i) all.push_back(facts(i, (i % 3) * 0.25, i % 4, i % 5 == 0));
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    const auto order = [&](const VictimFacts& a, const VictimFacts& b) {
      return evicted_before(policy, a, b);
    };
    std::vector<VictimFacts> forwards = all;
    std::vector<VictimFacts> backwards(all.rbegin(), all.rend());
    std::sort(forwards.begin(), forwards.end(), order);
    std::sort(backwards.begin(), backwards.end(), order);
    for (size_t i = 0; i < all.size(); ++i) CHECK(forwards[i].record == backwards[i].record);
  }
}

TEST_CASE("a recall must beat its victim: by the hysteresis under QK, by age under LRU") {
  CHECK(worth_recalling(Policy::kQk, 0.1, facts(1, 0.12, 0), facts(2, 0.10, 9)));
  CHECK_FALSE(worth_recalling(Policy::kQk, 0.1, facts(1, 0.10, 9), facts(2, 0.10, 0)));
  CHECK_FALSE(worth_recalling(Policy::kQk, 0.1, facts(1, 0.105, 9), facts(2, 0.10, 0)));
  CHECK(worth_recalling(Policy::kLru, 0.1, facts(1, 0.0, 5), facts(2, 0.9, 4)));
  CHECK_FALSE(worth_recalling(Policy::kLru, 0.1, facts(1, 0.9, 4), facts(2, 0.0, 4)));
}

TEST_CASE("nothing is worth a sheltered victim") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    CHECK_FALSE(worth_recalling(policy, 0, facts(1, 1.0, 9), facts(2, 0.0, 0, true)));
  }
}

}  // namespace
}  // namespace kvpager
