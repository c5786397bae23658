#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

std::vector<int64_t> resident(const Pager& pager, const Known& sequence) {
  std::vector<int64_t> chunks;
  for (const ChunkInfo& info : pager.ledger(sequence.id)) {
    if (info.tiers & kTierResident) chunks.push_back(info.chunk);
  }
  return chunks;
}

std::vector<int64_t> pinned(const Pager& pager, const Known& sequence) {
  std::vector<int64_t> chunks;
  for (const ChunkInfo& info : pager.ledger(sequence.id)) {
    if (info.pins > 0) chunks.push_back(info.chunk);
  }
  return chunks;
}

PAGER_TEST("a pin holds exactly the chunks its half-open range touches") {
  Pager pager(small_options(8, 32));
  const Known sequence = create(pager, 6 * 16, 1);
  const auto pins_of = [&](int64_t start, int64_t stop) {
    const PinId pin = pager.pin(sequence.id, start, stop);
    pager.check_invariants();
    const std::vector<int64_t> chunks = pinned(pager, sequence);
    pager.unpin(pin);
    CHECK(pinned(pager, sequence).empty());
    return chunks;
  };
  CHECK(pins_of(0, 16) == std::vector<int64_t>{0});
  CHECK(pins_of(0, 17) == std::vector<int64_t>{0, 1});
  CHECK(pins_of(15, 16) == std::vector<int64_t>{0});
  CHECK(pins_of(16, 32) == std::vector<int64_t>{1});
  CHECK(pins_of(31, 33) == std::vector<int64_t>{1, 2});
  CHECK(pins_of(95, 96) == std::vector<int64_t>{5});
}

PAGER_TEST("ranges outside the sequence are refused") {
  Pager pager(small_options(8, 32));
  const Known sequence = create(pager, 40, 1);
  const std::pair<int64_t, int64_t> ranges[] = {{0, 41}, {-1, 5}, {5, 5}, {6, 5}, {40, 41}};
  for (const auto& [start, stop] : ranges) {
    const int64_t a = start;
    const int64_t b = stop;
    CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.pin(sequence.id, a, b); }),
                   "pin range"));
  }
  CHECK_THROWS_AS(pager.pin(SequenceId(-5), 0, 1), InvalidArgumentError);
}

PAGER_TEST("pinned chunks stay under every policy, through eviction storms and pressure") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    PagerOptions options = small_options(6, 64);
    options.policy = policy;
    options.recall_chunks = 4;
    Pager pager(options);
    Known sequence = create(pager, 8 * 16, 1);
    const PinId pin = pager.pin(sequence.id, 16, 48);
    for (int round = 0; round < 6; ++round) {
      pager.evict_all();
      append(pager, &sequence, some_tokens(20, static_cast<uint64_t>(round)));
      probe(pager, sequence);
      const std::vector<ChunkInfo> ledger = pager.ledger(sequence.id);
      CHECK((ledger[1].tiers & kTierResident) != 0);
      CHECK((ledger[2].tiers & kTierResident) != 0);
    }
    CHECK(pager.stats().pinned_blocks == 2);
    pager.unpin(pin);
    pager.evict_all();
    for (const int64_t chunk : resident(pager, sequence)) {
      CHECK(chunk == static_cast<int64_t>(pager.ledger(sequence.id).size()) - 1);  // the tail
    }
    require_intact(pager, sequence);
  }
}

PAGER_TEST(
    "too many pins are refused, saying how many chunks are free to pin, and nothing is pinned") {
  Pager pager(small_options(6, 32));  // 6 blocks, 2 kept for the frontier of a forward
  const Known sequence = create(pager, 8 * 16, 1);
  pager.evict_all();
  const std::string message =
      error_of<CapacityError>(pager, [&] { pager.pin(sequence.id, 0, 5 * 16); });
  CHECK(contains(message, "needs 5 chunks; 4 of the pool's 6 are free to pin"));
  CHECK(pinned(pager, sequence).empty());
  CHECK(pager.stats().chunks_recalled == 0);
  pager.pin(sequence.id, 0, 4 * 16);
  CHECK(
      contains(error_of<CapacityError>(pager, [&] { pager.pin(sequence.id, 64, 80); }), "; 0 of"));
  pager.pin(sequence.id, 3, 60);  // chunks that are pinned already cost nothing
  Known longer = sequence;
  append(pager, &longer, some_tokens(33, 2));  // a forward still finds its blocks
  require_intact(pager, longer);
}

PAGER_TEST("tails of other sequences count as blocks that cannot be pinned over") {
  Pager pager(small_options(7, 32));
  const Known sequence = create(pager, 8 * 16, 1);
  create(pager, 3, 2);
  create(pager, 3, 3);
  const Known all = with_every_home(pager);
  CHECK(contains(error_of<CapacityError>(pager, [&] { pager.pin(sequence.id, 0, 4 * 16); }),
                 "3 of the pool's 7 are free to pin (0 pinned, 2 hold tails"));
  pager.pin(sequence.id, 0, 3 * 16);
  pager.destroy_sequence(all.id);
  pager.pin(sequence.id, 0, 5 * 16);  // the tails can leave
  pager.check_invariants();
}

PAGER_TEST("pins nest: the chunk stays until the last one is gone") {
  Pager pager(small_options(6, 32));
  const Known sequence = create(pager, 4 * 16, 1);
  const PinId a = pager.pin(sequence.id, 0, 16);
  const PinId b = pager.pin(sequence.id, 0, 32);
  pager.unpin(a);
  pager.evict_all();
  CHECK(resident(pager, sequence) == std::vector<int64_t>{0, 1});
  pager.unpin(b);
  pager.evict_all();
  CHECK(resident(pager, sequence).empty());
  pager.unpin(b);  // already gone
  pager.check_invariants();
}

PAGER_TEST(
    "a pin on a tail lives on when the tail is sealed, and on a shared chunk when one user goes") {
  Pager pager(small_options(8, 32));
  Known sequence = create(pager, 20, 1);
  pager.pin(sequence.id, 16, 20);
  append(pager, &sequence, some_tokens(30, 2));
  pager.evict_all();
  CHECK(pager.ledger(sequence.id)[1].pins == 1);
  CHECK((pager.ledger(sequence.id)[1].tiers & kTierResident) != 0);
  Known child = forked(pager, sequence);
  CHECK(pager.ledger(child.id)[1].pins == 0);
  CHECK(pager.ledger(child.id)[1].references == 2);
  pager.destroy_sequence(sequence.id);
  pager.check_invariants();
  pager.evict_all();
  CHECK((pager.ledger(child.id)[1].tiers & kTierResident) == 0);
  require_intact(pager, child);
}

PAGER_TEST("a pin survives the sealing of a chunk that somebody else has, evicted") {
  Pager pager(small_options(8, 32));
  const Known first = create(pager, 32, 1);
  Known second = create(pager, 0);
  append(pager, &second, cut(first.tokens, 0, 20));
  CHECK(pager.stats().chunks_shared == 1);
  pager.pin(second.id, 16, 20);
  pager.evict_all();
  CHECK((pager.ledger(first.id)[1].tiers & kTierResident) == 0);
  append(pager, &second, cut(first.tokens, 20));
  CHECK(pager.stats().chunks_shared == 2);
  pager.evict_all();
  CHECK((pager.ledger(second.id)[1].tiers & kTierResident) != 0);
  CHECK(pager.ledger(second.id)[1].pins == 1);
  require_intact(pager, first);
  require_intact(pager, second);
}

PAGER_TEST("trimming drops the pins of what is gone and keeps those of what stays") {
  Pager pager(small_options(8, 32));
  Known sequence = create(pager, 5 * 16 + 3, 1);
  const PinId pin = pager.pin(sequence.id, 16, 64);
  trim(pager, &sequence, 40);  // chunk 2 becomes a tail
  require_intact(pager, sequence);
  CHECK(pinned(pager, sequence) == std::vector<int64_t>{1, 2});
  append(pager, &sequence, some_tokens(40, 7));
  CHECK(pinned(pager, sequence) == std::vector<int64_t>{1, 2});
  trim(pager, &sequence, 8);
  CHECK(pinned(pager, sequence).empty());
  append(pager, &sequence, some_tokens(60, 8));
  pager.unpin(pin);
  require_intact(pager, sequence);
  CHECK(pager.stats().pinned_blocks == 0);
}

PAGER_TEST(
    "a pin whose chunk cannot be read is refused, nothing stays pinned and nothing came in") {
  const Disarm disarm;
  const Folder folder;
  Pager pager(small_options(8, 0, 32, folder.path()));
  const Known sequence = create(pager, 5 * 16, 1);
  pager.evict_all();
  for (int64_t nth = 0; nth < 3; ++nth) {
    fault::arm("disk.read", nth, EIO);
    const std::string message =
        error_of<StorageError>(pager, [&] { pager.pin(sequence.id, 0, 48); });
    CHECK(contains(message, "cannot read"));
    CHECK(pinned(pager, sequence).empty());
    CHECK(resident(pager, sequence).empty());
    pager.check_invariants();
  }
  pager.pin(sequence.id, 0, 48);
  CHECK(resident(pager, sequence) == std::vector<int64_t>{0, 1, 2});
  require_intact(pager, sequence);
}

}  // namespace
}  // namespace kvpager::pager_test
