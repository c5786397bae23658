#include "core/slot_pool.h"

#include <doctest/doctest.h>

#include <set>

namespace kvpager {
namespace {

std::vector<int32_t> drain(SlotPool<BlockId>* pool) {
  std::vector<int32_t> order;
  while (const auto id = pool->take()) order.push_back(id->value());
  return order;
}

TEST_CASE("every slot is handed out exactly once, and then none") {
  for (const uint64_t seed : {0u, 1u, 7u}) {
    SlotPool<BlockId> pool(9, seed);
    const std::vector<int32_t> order = drain(&pool);
    CHECK(std::set<int32_t>(order.begin(), order.end()).size() == 9);
    CHECK(order.size() == 9);
    CHECK_FALSE(pool.take().has_value());
    CHECK(pool.free() == 0);
    CHECK(pool.used() == 9);
  }
}

TEST_CASE("slots go up in order without a seed and in another order with one") {
  SlotPool<BlockId> plain(16);
  const std::vector<int32_t> ascending = drain(&plain);
  CHECK(std::is_sorted(ascending.begin(), ascending.end()));
  SlotPool<BlockId> shuffled(16, 3);
  SlotPool<BlockId> same_seed(16, 3);
  const std::vector<int32_t> order = drain(&shuffled);
  CHECK(order != ascending);
  CHECK(order == drain(&same_seed));
}

TEST_CASE("a slot that was given back can be taken again, and counts add up at each step") {
  SlotPool<SlotId> pool(3, 5);
  const SlotId a = *pool.take();
  const SlotId b = *pool.take();
  CHECK(pool.taken(a));
  CHECK(pool.taken(b));
  pool.give_back(a);
  CHECK_FALSE(pool.taken(a));
  CHECK(pool.free() == 2);
  CHECK(pool.used() == 1);
  CHECK(pool.slots() == 3);
  std::set<int32_t> rest = {pool.take()->value(), pool.take()->value()};
  CHECK(rest.count(a.value()) == 1);
  CHECK(rest.count(b.value()) == 0);
}

TEST_CASE("a pool of no slots hands out nothing") {
  SlotPool<BlockId> pool(0, 1);
  CHECK_FALSE(pool.take().has_value());
  CHECK(pool.slots() == 0);
}

}  // namespace
}  // namespace kvpager
