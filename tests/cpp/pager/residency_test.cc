#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

struct Case {
  const char* name;
  int64_t pool, host, disk;
  Policy policy = Policy::kQk;
  int32_t recall = 0;
  uint64_t seed = 11;
};

const Case kHostCases[] = {
    {"everything resident", 24, 24, 0},
    {"host only", 4, 24, 0},
    {"host and disk", 4, 3, 24},
    {"disk only", 4, 0, 24},
    {"disk only, LRU", 4, 0, 24, Policy::kLru},
    {"host, LRU, recalls", 4, 24, 0, Policy::kLru, 4},
    {"host, QK, recalls", 4, 24, 0, Policy::kQk, 4, 99},
    {"host and disk, recalls, no shuffle", 5, 2, 24, Policy::kQk, 2, 0},
    {"the pool is home", 24, 0, 0},
};

// All that a forward may see is in the pool or the host arena.
const Case kDeviceCases[] = {
    {"everything resident", 24, 24, 0},
    {"host only", 4, 24, 0},
    {"host and disk", 6, 10, 24},
    {"disk only", 16, 0, 24},
    {"disk only, LRU", 18, 0, 24, Policy::kLru},
    {"host, LRU, recalls", 5, 24, 0, Policy::kLru, 4},
    {"host, QK, recalls", 4, 24, 0, Policy::kQk, 4, 99},
    {"host and disk, recalls, no shuffle", 7, 9, 24, Policy::kQk, 2, 0},
    {"the pool is home", 24, 0, 0},
};

std::vector<Case> cases() {
  if (on_device()) return {std::begin(kDeviceCases), std::end(kDeviceCases)};
  return {std::begin(kHostCases), std::end(kHostCases)};
}

PagerOptions options_of(const Case& c, const std::string& folder, Selection::Kind kind) {
  PagerOptions options = small_options(c.pool, c.host, c.disk, c.disk > 0 ? folder : "");
  options.policy = c.policy;
  options.recall_chunks = c.recall;
  options.shuffle_seed = c.seed;
  options.selection.kind = kind;
  options.selection.chunks = 3;
  options.selection.sinks = 16;
  options.selection.recent = 32;
  return options;
}

TEST_CASE("layers that load and evict keep the orders of eviction, and evict by them") {
  const Folder folder;
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    // Fewer places in memory than a layer reads, so that each loads and evicts.
    Case c{"disk only", 14, 0, 40, policy};
    Pager pager(options_of(c, folder.path(), Selection::Kind::kTopK));
    Known sequence = create(pager, 30 * 16, 1);
    const PagerStats before = pager.stats();
    const std::vector<TokenId> more = some_tokens(12, 7);
    for (const TokenId token : more) append(pager, &sequence, {token});
    const PagerStats after = pager.stats();
    CHECK(after.chunks_evicted - before.chunks_evicted > 4 * 12);
    // One for each forward, not one for each layer; and one that was under way.
    CHECK(after.eviction_orders_made - before.eviction_orders_made <= 12 + 1);
    require_intact(pager, sequence);
  }
}

PAGER_TEST("attention outputs have the same bits wherever chunks live and whatever was evicted" *
           doctest::test_suite("long")) {
  for (const Selection::Kind kind : {Selection::Kind::kDense, Selection::Kind::kTopK}) {
    std::vector<std::vector<float>> first;
    for (const Case& c : cases()) {
      for (const bool storms : {false, true}) {
        CAPTURE(c.name);
        CAPTURE(storms);
        const Folder folder;
        Pager pager(options_of(c, folder.path(), kind));
        std::vector<std::vector<float>> outputs;
        Known a = create(pager);
        Known b = create(pager);
        for (int round = 0; round < 9; ++round) {
          if (storms) pager.evict_all();
          outputs.push_back(append(pager, &a, some_tokens(19, static_cast<uint64_t>(round))));
          if (storms && round % 2 == 0) pager.evict_all();
          outputs.push_back(append(pager, &b, some_tokens(11, 50 + static_cast<uint64_t>(round))));
        }
        if (storms) pager.evict_all();
        outputs.push_back(probe(pager, a, 16));
        outputs.push_back(probe(pager, b, 3));
        require_intact(pager, a);
        require_intact(pager, b);
        if (first.empty()) first = outputs;
        for (size_t i = 0; i < outputs.size(); ++i) REQUIRE(same_bits(outputs[i], first[i]));
      }
    }
  }
}

PAGER_TEST("chunks that leave the pool between two layers of a forward are found elsewhere") {
  Pager pager(small_options(16, 8));
  const Known sequence = create(pager, 4 * 16 + 5);
  const std::vector<float> expected = probe(pager, sequence);
  const int64_t last = static_cast<int64_t>(sequence.tokens.size()) - 1;
  std::vector<RowDescriptor> rows = {{sequence.id, last, 0, RowKind::kRead}};
  rows.resize(kRows);
  pager.begin(rows);
  const std::vector<float> outputs = run_layers(pager, rows, sequence.tokens, true, [&](int layer) {
    // What they leave is NaN. A device's forward holds its chunks.
    if (layer == 1) CHECK(pager.evict_all() == (on_device() ? 0 : 4));
  });
  pager.commit_all();
  CHECK(same_bits(outputs, expected));
}

PAGER_TEST("bytes paged out are those that went from host memory to disk, and nothing else") {
  const Folder folder;
  Pager pager(small_options(6, 4, 60, folder.path()));
  const Known sequence = create(pager, 9 * 16, 1);
  const PagerStats stats = pager.stats();
  CHECK(stats.chunks_spilled >= 5);
  CHECK(stats.bytes_paged_out == stats.chunks_spilled * kChunkBytes);
  CHECK(stats.bytes_written_through == 9 * kChunkBytes);
  CHECK(pager.evict_all() > 0);  // out of the pool, which takes no copy
  CHECK(pager.stats().bytes_paged_out == stats.bytes_paged_out);
  require_intact(pager, sequence);
}

PAGER_TEST("evicting a clean chunk moves no bytes, recalling it is one copy") {
  Pager pager(small_options(6, 24));
  Known sequence = create(pager, 20 * 16, 1);
  PagerStats stats = pager.stats();
  CHECK(stats.chunks_evicted >= 14);
  CHECK(stats.bytes_written_through == 20 * kChunkBytes);
  const int64_t resident = stats.pool_blocks - stats.free_blocks;
  CHECK(pager.evict_all() == resident);
  CHECK(pager.evict_all() == 0);
  pager.pin(sequence.id, 0, 3 * 16);
  stats = pager.stats();
  CHECK(stats.chunks_recalled == 3);
  CHECK(stats.bytes_paged_in == 3 * kChunkBytes);
  CHECK(stats.bytes_written_through == 20 * kChunkBytes);
  for (const ChunkInfo& info : pager.ledger(sequence.id)) {
    CHECK(info.recalled == (info.chunk < 3 ? 1 : 0));
    CHECK((info.tiers & kTierHost) != 0);
    CHECK(((info.tiers & kTierResident) != 0) == (info.chunk < 3));
    CHECK((info.block.value() >= 0) == (info.chunk < 3));
  }
}

TEST_CASE("host memory that is full spills to disk, and every byte comes back") {
  const Folder folder;
  Pager pager(small_options(4, 3, 20, folder.path()));
  Known sequence = create(pager, 20 * 16, 1);
  const PagerStats stats = pager.stats();
  CHECK(stats.chunks_spilled == 17);
  CHECK(stats.host_bytes_used == 3 * kChunkBytes);
  CHECK(stats.disk_bytes_used == 17 * kChunkBytes);
  CHECK(folder.names().empty());
  for (const ChunkInfo& info : pager.ledger(sequence.id)) {
    CHECK(((info.tiers & kTierHost) != 0) != ((info.tiers & kTierDisk) != 0));
  }
  require_intact(pager, sequence);
  pager.evict_all();
  require_intact(pager, sequence);
}

TEST_CASE("more disk chunks than blocks are streamed slice by slice through staging") {
  const Folder folder;
  Pager pager(small_options(4, 0, 40, folder.path()));
  Pager plain(small_options(48, 40));
  Known sequence = create(pager, 30 * 16 + 5, 1);
  Known same = create(plain, 30 * 16 + 5, 1);
  pager.evict_all();
  const int64_t before = pager.stats().slices_streamed;
  const std::vector<float> outputs = probe(pager, sequence, 16);
  CHECK(pager.stats().slices_streamed == before + 2 * 30);
  CHECK(same_bits(outputs, probe(plain, same, 16)));
  require_intact(pager, sequence);
}

TEST_CASE("waves of staging are cut at splits when a forward of many sequences fills it") {
  const Folder folder;
  PagerOptions options = small_options(20, 0, 200, folder.path());
  Pager pager(options);
  options.host_bytes = 200 * kChunkBytes;
  options.disk_bytes = 0;
  options.disk_path = "";
  options.pool_blocks = 220;
  Pager plain(options);
  std::vector<RowDescriptor> rows, plain_rows;
  std::vector<TokenId> tokens;
  for (int i = 0; i < 16; ++i) {
    Known a = create(pager, 12 * 16, 7, str(i));
    Known b = create(plain, 12 * 16, 7, str(i));
    tokens = a.tokens;
    rows.push_back({a.id, 12 * 16 - 1, 0, RowKind::kRead});
    plain_rows.push_back({b.id, 12 * 16 - 1, 0, RowKind::kRead});
  }
  pager.evict_all();
  const auto run = [&](Pager& p, const std::vector<RowDescriptor>& its) {
    const std::vector<float> outputs = run_forward(p, its, tokens);
    return outputs;
  };
  const std::vector<float> expected = run(plain, plain_rows);
  CHECK(same_bits(run(pager, rows), expected));
  CHECK(pager.stats().slices_streamed > 0);
  CHECK(plain.stats().slices_streamed == 0);
}

PAGER_TEST(
    "a forward's new chunks never evict each other: they are promised before the first is taken") {
  Pager pager(small_options(3, 24));
  Known sequence = create(pager, 15, 1);
  // Rows 15..30 lie in two chunks; the pool of 3 holds one more, sealed and evictable.
  append(pager, &sequence, some_tokens(16, 2));
  append(pager, &sequence, some_tokens(16, 3));
  require_intact(pager, sequence);
  const Known other = create(pager, 3, 4);
  const PagerStats before = pager.stats();
  const std::vector<TokenId> more = some_tokens(16, 5);
  std::vector<RowDescriptor> rows = commit_rows(sequence.id, 47, more.data(), 16);
  rows.resize(8);
  Known third = create(pager, 0);
  Known fourth = create(pager, 0);
  std::vector<RowDescriptor> too_many = rows;
  too_many.push_back({third.id, 0, 1, RowKind::kCommit});
  too_many.push_back({fourth.id, 0, 1, RowKind::kCommit});
  const std::string message = error_of<CapacityError>(pager, [&] { pager.begin(too_many); });
  CHECK(contains(message, "blocks of the pool"));
  CHECK(pager.stats().open_blocks == before.open_blocks);
  CHECK(pager.stats().reserved_chunks == before.reserved_chunks);
  CHECK(pager.stats().forwards == before.forwards);
  require_intact(pager, sequence);
  require_intact(pager, other);
}

PAGER_TEST("the policy decides what stays: LRU what was read last, QK what scored best") {
  PagerOptions options = small_options(8, 32);
  options.policy = Policy::kLru;
  Pager lru(options);
  Known sequence = create(lru, 6 * 16, 1);
  Known other = create(lru, 0);
  probe(lru, sequence);
  append(lru, &other, some_tokens(16 * 6, 3));
  // Dense rows read all of `sequence` before `other` grew, so its chunks are the older ones.
  int64_t kept = 0;
  for (const ChunkInfo& info : lru.ledger(other.id)) kept += info.block.value() >= 0 ? 1 : 0;
  CHECK(kept == 6);
}

PAGER_TEST(
    "recalls ahead of need bring back what was read, no more than they may, and only for a worse "
    "chunk") {
  PagerOptions options = small_options(6, 32);
  options.recall_chunks = 2;
  Pager pager(options);
  const Known sequence = create(pager, 10 * 16, 1);
  pager.evict_all();
  const int64_t before = pager.stats().chunks_recalled;
  probe(pager, sequence);
  CHECK(pager.stats().chunks_recalled == before + 2);
  probe(pager, sequence);
  CHECK(pager.stats().chunks_recalled == before + 4);
  for (int i = 0; i < 20; ++i) probe(pager, sequence);
  // With the pool full, near-ties do not swap for ever.
  const int64_t settled = pager.stats().chunks_recalled;
  for (int i = 0; i < 20; ++i) probe(pager, sequence);
  CHECK(pager.stats().chunks_recalled == settled);
  CHECK(pager.stats().bytes_paged_in == pager.stats().chunks_recalled * kChunkBytes);
}

PAGER_TEST(
    "the ledger's scores are finite shares that add up, and a write without attention leaves "
    "them") {
  Pager pager(small_options(6, 32));
  Known sequence = create(pager, 10 * 16, 1);
  for (int i = 0; i < 8; ++i) probe(pager, sequence);
  double sum = 0;
  const std::vector<ChunkInfo> before = pager.ledger(sequence.id);
  for (const ChunkInfo& info : before) {
    CHECK(std::isfinite(info.qk_score));
    CHECK(info.qk_score >= 0);
    CHECK(info.selected > 0);
    CHECK(info.last_use > 0);
    sum += info.qk_score;
  }
  CHECK(sum > 0.8);
  CHECK(sum < 1.0001);
  append(pager, &sequence, some_tokens(16, 3), Provenance::kExact, false);
  const std::vector<ChunkInfo> after = pager.ledger(sequence.id);
  for (size_t i = 0; i < before.size(); ++i) CHECK(after[i].qk_score == before[i].qk_score);
}

PAGER_TEST("scores of a sequence that is gone do not steer the eviction of the next one's chunks") {
  PagerOptions options = small_options(8, 64);
  options.policy = Policy::kQk;
  Pager pager(options);
  Known old = create(pager, 5 * 16, 1);
  for (int i = 0; i < 20; ++i) probe(pager, old);
  const std::vector<TokenId> tokens = old.tokens;
  pager.destroy_sequence(old.id);
  CHECK(pager.stats().cached_records == 5);
  // The next one reads more chunks than the pool holds; nobody reads the cached ones.
  Known fresh = create(pager, 12 * 16, 2);
  for (const ChunkInfo& info : pager.ledger(fresh.id)) CHECK(info.qk_score < 1);
  Known adopter = create(pager);
  CHECK(pager.adopt_prefix(adopter.id, tokens) == 5 * 16);
  for (const ChunkInfo& info : pager.ledger(adopter.id)) {
    CHECK(info.qk_score == 0);
    CHECK((info.tiers & kTierResident) == 0);
  }
}

}  // namespace
}  // namespace kvpager::pager_test
