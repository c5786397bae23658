#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

PAGER_TEST(
    "a reservation the tiers cannot hold is refused with the bytes it needs, and holds nothing") {
  Pager pager(small_options(4, 6));
  const Known sequence = create(pager, 20);
  const PagerStats before = pager.stats();
  const std::string message =
      error_of<CapacityError>(pager, [&] { pager.reserve(sequence.id, 7 * 16); });
  CHECK(contains(message, str(7 * kChunkBytes, " bytes")));
  CHECK(contains(message, str("host_bytes=", 6 * kChunkBytes)));
  CHECK(contains(message, "Raise host_bytes"));
  CHECK(pager.stats().reserved_chunks == before.reserved_chunks);
  pager.reserve(sequence.id, 6 * 16);
  CHECK(pager.stats().reserved_chunks == 5);
  require_intact(pager, sequence);
}

PAGER_TEST("what is reserved for one sequence is not there for another") {
  Pager pager(small_options(4, 6));
  Known a = create(pager);
  Known b = create(pager);
  pager.reserve(a.id, 4 * 16);
  CHECK(contains(error_of<CapacityError>(pager, [&] { pager.reserve(b.id, 3 * 16); }), "reserve"));
  append(pager, &b, some_tokens(2 * 16, 2));
  CHECK(contains(error_of<CapacityError>(pager, [&] { append(pager, &b, some_tokens(16, 3)); }),
                 "begin"));
  require_intact(pager, b);
  append(pager, &a, some_tokens(4 * 16, 1));
  CHECK(pager.stats().reserved_chunks == 0);
  require_intact(pager, a);
}

PAGER_TEST(
    "a reservation below the sequence's length is refused, a later one replaces what was held") {
  Pager pager(small_options(4, 8));
  const Known sequence = create(pager, 40);
  CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.reserve(sequence.id, 39); }),
                 "total_tokens: 39"));
  pager.reserve(sequence.id, 6 * 16);
  CHECK(pager.stats().reserved_chunks == 4);
  pager.reserve(sequence.id, 3 * 16);
  CHECK(pager.stats().reserved_chunks == 1);
  pager.reserve(sequence.id, 40);
  CHECK(pager.stats().reserved_chunks == 0);
}

PAGER_TEST("closing a sequence gives its promises back") {
  Pager pager(small_options(4, 8));
  const Known a = create(pager);
  const Known b = create(pager);
  pager.reserve(a.id, 8 * 16);
  CHECK_THROWS_AS(pager.reserve(b.id, 16), CapacityError);
  pager.destroy_sequence(a.id);
  pager.reserve(b.id, 8 * 16);
  CHECK(pager.stats().reserved_chunks == 8);
}

PAGER_TEST("a forward that is aborted, or whose rows are rejected, keeps no promise it made") {
  Pager pager(small_options(4, 8));
  Known sequence = create(pager, 8);
  const std::vector<TokenId> more = some_tokens(16, 5);
  const auto rows = commit_rows(sequence.id, 8, more.data(), 16);
  const std::vector<TokenId> all = joined(sequence.tokens, more);
  pager.begin(rows);
  CHECK(pager.stats().reserved_chunks == 1);
  pager.abort();
  CHECK(pager.stats().reserved_chunks == 0);
  pager.begin(rows);
  run_layers(pager, rows, all);
  pager.commit({sequence.id}, {1});
  CHECK(pager.stats().reserved_chunks == 0);
  sequence.tokens.push_back(more[0]);
  require_intact(pager, sequence);
}

PAGER_TEST("a promise made before a forward survives it, also when made while it runs") {
  Pager pager(small_options(4, 8));
  Known sequence = create(pager, 8);
  pager.reserve(sequence.id, 64);
  const std::vector<TokenId> more = some_tokens(16, 5);
  pager.begin(commit_rows(sequence.id, 8, more.data(), 16));
  pager.abort();
  CHECK(pager.stats().reserved_chunks == 4);
  pager.begin(commit_rows(sequence.id, 8, more.data(), 16));
  pager.reserve(sequence.id, 96);
  pager.abort();
  CHECK(pager.stats().reserved_chunks == 6);
  require_intact(pager, sequence);
}

PAGER_TEST(
    "without lower tiers the pool is home: its chunks stay, and it refuses what does not fit") {
  Pager pager(small_options(6, 0));  // 4 homes beside a frontier of 2
  Known sequence = create(pager, 4 * 16);
  CHECK(pager.evict_all() == 0);
  CHECK(pager.stats().bytes_written_through == 0);
  for (const ChunkInfo& info : pager.ledger(sequence.id)) CHECK(info.tiers == kTierResident);
  const std::string message =
      error_of<CapacityError>(pager, [&] { append(pager, &sequence, some_tokens(16, 4)); });
  CHECK(contains(message, "Give a host_bytes"));
  require_intact(pager, sequence);
  append(pager, &sequence, some_tokens(15, 4));  // a tail needs no home
  require_intact(pager, sequence);
}

PAGER_TEST("chunks cached for reuse give their homes to whoever needs them") {
  Pager pager(small_options(6, 0));
  const Known old = create(pager, 4 * 16, 1);
  pager.destroy_sequence(old.id);
  CHECK(pager.stats().cached_records == 4);
  const Known fresh = create(pager, 4 * 16, 2);
  pager.check_invariants();
  require_intact(pager, fresh);
  Pager with_host(small_options(4, 5));
  const Known a = create(with_host, 5 * 16, 1);
  with_host.destroy_sequence(a.id);
  const Known b = create(with_host, 5 * 16, 2);
  require_intact(with_host, b);
  CHECK(with_host.stats().cached_records == 0);
}

PAGER_TEST("a summary budget is kept, and its refusal says so") {
  PagerOptions options = small_options(4, 8);
  Pager probe_pager(options);
  options.summary_bytes = 3 * probe_pager.stats().summary_bytes_per_chunk;
  Pager pager(options);
  Known sequence = create(pager, 3 * 16);
  CHECK(contains(
      error_of<CapacityError>(pager, [&] { append(pager, &sequence, some_tokens(16, 1)); }),
      "summary_bytes"));
  require_intact(pager, sequence);
}

PAGER_TEST("adopting a cached prefix cannot take the summaries that were promised to another") {
  PagerOptions options = small_options(4, 8);
  Pager probe_pager(options);
  options.summary_bytes = 4 * probe_pager.stats().summary_bytes_per_chunk;
  Pager pager(options);
  const Known old = create(pager, 2 * 16, 1);
  pager.destroy_sequence(old.id);
  Known promised = create(pager);
  pager.reserve(promised.id, 3 * 16);
  Known adopter = create(pager);
  CHECK(pager.adopt_prefix(adopter.id, old.tokens) == 16);  // one of the two
  pager.check_invariants();
  append(pager, &promised, some_tokens(3 * 16, 2));
  require_intact(pager, promised);
}

PAGER_TEST("a prefix adopted after a reservation uses it up rather than adding to it") {
  Pager pager(small_options(4, 6));
  const Known old = create(pager, 4 * 16, 1);
  pager.destroy_sequence(old.id);
  Known sequence = create(pager);
  pager.reserve(sequence.id, 6 * 16);
  CHECK(pager.adopt_prefix(sequence.id, old.tokens) == 4 * 16);
  CHECK(pager.stats().reserved_chunks == 2);
  sequence.tokens = old.tokens;
  append(pager, &sequence, some_tokens(2 * 16, 3));
  CHECK(pager.stats().reserved_chunks == 0);
  require_intact(pager, sequence);
}

}  // namespace
}  // namespace kvpager::pager_test
