#include "core/ledger.h"

#include <doctest/doctest.h>

#include <random>
#include <set>
#include <vector>

#include "core/chunk_namer.h"

namespace kvpager {
namespace {

const std::vector<TokenId> kTokens = {1, 2, 3, 4};
const ChunkNamer kNamer("model", "");

ChunkName name_of(const std::vector<TokenId>& tokens, const ChunkName& parent = {},
                  const ChunkNamer& namer = kNamer) {
  return namer.next(parent, tokens.data(), static_cast<int64_t>(tokens.size()), Provenance::kExact);
}

// The parent's name by value: a ledger that grows moves its records.
RecordId sealed(Ledger* ledger, const std::vector<TokenId>& tokens = kTokens,
                const ChunkName parent = {}) {
  const RecordId id = ledger->create(ChunkState::kSealed);
  ChunkRecord& record = (*ledger)[id];
  record.tokens = tokens;
  record.name = name_of(tokens, parent);
  return id;
}

std::optional<RecordId> find(const Ledger& ledger, const std::vector<TokenId>& tokens = kTokens,
                             const ChunkName& parent = {}) {
  return ledger.find(name_of(tokens, parent), tokens.data(), static_cast<int64_t>(tokens.size()));
}

TEST_CASE("a record goes from none to open to sealed to none") {
  Ledger ledger;
  const RecordId id = ledger.create(ChunkState::kOpen);
  CHECK(ledger[id].state == ChunkState::kOpen);
  CHECK(ledger.live() == 1);
  CHECK_FALSE(ledger[id].needs_home());
  ledger.seal(id);
  CHECK(ledger[id].state == ChunkState::kSealed);
  CHECK(ledger[id].needs_home());
  ledger.drop(id);
  CHECK(ledger[id].state == ChunkState::kFree);
  CHECK(ledger.live() == 0);
}

TEST_CASE("an open record can be dropped without ever being sealed") {
  Ledger ledger;
  ledger.drop(ledger.create(ChunkState::kOpen));
  CHECK(ledger.live() == 0);
}

TEST_CASE("a reused record remembers nothing of the chunk before it") {
  Ledger ledger;
  const RecordId id = sealed(&ledger);
  ChunkRecord& record = ledger[id];
  record.score = 0.9;
  record.last_use = 77;
  record.recalled = 3;
  record.summary = SlotId(4);
  record.summary_pending = true;
  record.provenance = Provenance::kApproximate;
  ledger.pin(id, 2);
  record.summary = SlotId();  // given back
  ledger.drop(id);
  const RecordId again = ledger.create(ChunkState::kOpen);
  CHECK(again == id);
  const ChunkRecord& fresh = ledger[again];
  CHECK(fresh.score == 0);
  CHECK(fresh.last_use == 0);
  CHECK(fresh.recalled == 0);
  CHECK(fresh.summary.value() == -1);
  CHECK_FALSE(fresh.summary_pending);
  CHECK(fresh.provenance == Provenance::kExact);
  CHECK(fresh.pins == 0);
  CHECK(fresh.tokens.empty());
  CHECK_FALSE(fresh.has_lower_copy());
  CHECK_FALSE(fresh.resident());
}

TEST_CASE("where a chunk's bytes are decides whether it has a copy below its block") {
  ChunkRecord record;
  record.state = ChunkState::kSealed;
  record.block = BlockId(0);
  CHECK(record.resident());
  CHECK_FALSE(record.has_lower_copy());
  record.host = SlotId(0);
  CHECK(record.on_host());
  CHECK(record.has_lower_copy());
  record.host = SlotId();
  record.disk = SlotId(0);
  CHECK(record.on_disk());
  CHECK(record.has_lower_copy());
}

TEST_CASE("only a published record is found, and only by its own name and tokens") {
  Ledger ledger;
  const RecordId id = sealed(&ledger);
  CHECK_FALSE(find(ledger).has_value());
  CHECK_FALSE(ledger.published(id));
  ledger.publish(id);
  CHECK(ledger.published(id));
  CHECK(find(ledger) == id);
  CHECK_FALSE(find(ledger, {1, 2, 3, 5}).has_value());
  CHECK_FALSE(find(ledger, kTokens, ledger[id].name).has_value());
  const ChunkName salted = name_of(kTokens, {}, ChunkNamer("model", "salt"));
  CHECK_FALSE(ledger.find(salted, kTokens.data(), 4).has_value());
  ledger.drop(id);
  CHECK_FALSE(find(ledger).has_value());
}

TEST_CASE("a name alone is not believed: tokens and their number are compared") {
  Ledger ledger;
  const RecordId id = sealed(&ledger);
  ledger.publish(id);
  const ChunkName name = ledger[id].name;
  const std::vector<TokenId> other = {1, 2, 3, 5};
  CHECK(ledger.find(name, kTokens.data(), 4) == id);
  CHECK_FALSE(ledger.find(name, other.data(), 4).has_value());
  CHECK_FALSE(ledger.find(name, kTokens.data(), 3).has_value());
}

TEST_CASE("the first record of a name stays the one that is found") {
  Ledger ledger;
  const RecordId first = sealed(&ledger);
  const RecordId second = sealed(&ledger);
  ledger.publish(first);
  ledger.publish(second);
  CHECK(find(ledger) == first);
  CHECK_FALSE(ledger.published(second));
  ledger.drop(second);
  CHECK(find(ledger) == first);
  ledger.drop(first);
  CHECK_FALSE(find(ledger).has_value());
}

TEST_CASE("what is open or pinned is counted, whatever happens to it first") {
  Ledger ledger;
  std::mt19937 random(5);
  std::vector<RecordId> live;
  for (int step = 0; step < 4000; ++step) {
    const auto dice = random() % 5;
    if (live.empty() || dice == 0) {
      live.push_back(ledger.create(random() % 2 == 0 ? ChunkState::kOpen : ChunkState::kSealed));
    } else {
      const size_t which = random() % live.size();
      const RecordId id = live[which];
      if (dice == 1) {
        ledger.drop(id);
        live[which] = live.back();
        live.pop_back();
      } else if (dice == 2 && ledger[id].state == ChunkState::kOpen) {
        ledger.seal(id);
      } else {
        ledger.pin(id, random() % 2 == 0 && ledger[id].pins > 0 ? -1 : 1);
      }
    }
    int64_t held = 0;
    ledger.each([&](RecordId, const ChunkRecord& record) {
      held += record.state == ChunkState::kOpen || record.pins > 0 ? 1 : 0;
    });
    REQUIRE(ledger.held() == held);
  }
}

TEST_CASE("cached records are listed in the order in which they were let go, whoever leaves") {
  Ledger ledger;
  std::mt19937 random(7);
  std::vector<RecordId> order;  // what the list has to be
  std::vector<RecordId> in_use;
  for (int i = 0; i < 40; ++i) in_use.push_back(ledger.create(ChunkState::kSealed));
  CHECK_FALSE(ledger.oldest_cached());
  for (int step = 0; step < 4000; ++step) {
    const auto pick = [&](std::vector<RecordId>* from) {
      const size_t i = random() % from->size();
      const RecordId id = (*from)[i];
      from->erase(from->begin() + static_cast<int64_t>(i));
      return id;
    };
    if (!in_use.empty() && random() % 2 == 0) {
      const RecordId id = pick(&in_use);
      ledger.cache(id);
      order.push_back(id);
    } else if (!order.empty()) {
      const RecordId id = pick(&order);
      if (random() % 2 == 0) {
        ledger.uncache(id);
        in_use.push_back(id);
      } else {
        ledger.drop(id);  // and another chunk takes its place
        in_use.push_back(ledger.create(ChunkState::kSealed));
        CHECK_FALSE(ledger[in_use.back()].cached);
      }
    }
    REQUIRE(ledger.cached() == static_cast<int64_t>(order.size()));
    std::vector<RecordId> listed;
    for (RecordId id = ledger.oldest_cached().value_or(RecordId()); id.value() >= 0;
         id = ledger[id].newer) {
      REQUIRE(listed.size() < order.size());
      listed.push_back(id);
    }
    REQUIRE(listed == order);
  }
}

TEST_CASE("each visits every live record and no other") {
  Ledger ledger;
  const RecordId a = ledger.create(ChunkState::kOpen);
  const RecordId b = sealed(&ledger);
  const RecordId c = ledger.create(ChunkState::kOpen);
  ledger.drop(b);
  std::set<int32_t> seen;
  ledger.each([&](RecordId id, const ChunkRecord& record) {
    CHECK(record.state != ChunkState::kFree);
    CHECK(seen.insert(id.value()).second);
  });
  CHECK(seen == std::set<int32_t>{a.value(), c.value()});
}

TEST_CASE("records are found whatever was dropped before, also those whose names begin alike") {
  Ledger ledger;
  std::mt19937_64 random(7);
  std::vector<RecordId> live;
  const auto found = [&](const ChunkName& name) { return ledger.find(name, kTokens.data(), 4); };
  uint64_t made = 0;
  for (int step = 0; step < 4000; ++step) {
    if (live.size() < 40 || (live.size() < 300 && random() % 2 == 0)) {
      const RecordId id = ledger.create(ChunkState::kSealed);
      ChunkRecord& record = ledger[id];
      record.tokens = kTokens;
      // Few beginnings: long runs of neighbours, most of whose tags are equal too.
      record.name = {{random() % 16 + (random() % 4 == 0 ? uint64_t{made} << 40 : 0), ++made}};
      ledger.publish(id);
      live.push_back(id);
    } else {
      const size_t which = random() % live.size();
      const ChunkName name = ledger[live[which]].name;
      ledger.drop(live[which]);
      live[which] = live.back();
      live.pop_back();
      CHECK_FALSE(found(name).has_value());
    }
    if (step % 16 == 0) {
      for (const RecordId id : live) REQUIRE(found(ledger[id].name) == id);
    }
  }
}

}  // namespace
}  // namespace kvpager
