// Fork, adoption and deduplication: one record for one chunk, whoever uses it.
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

PAGER_TEST("a fork shares sealed chunks, copies the tail, and the two go their own ways") {
  Pager pager(small_options(8, 32));
  Known parent = create(pager, 45, 1);
  Known child = forked(pager, parent);
  CHECK(pager.stats().records == 2 + 2);
  CHECK(pager.ledger(child.id)[0].references == 2);
  CHECK(pager.ledger(child.id)[2].references == 1);
  append(pager, &child, some_tokens(20, 5));
  append(pager, &parent, some_tokens(20, 6));
  require_intact(pager, parent);
  require_intact(pager, child);
  pager.destroy_sequence(parent.id);
  require_intact(pager, child);
  CHECK(pager.ledger(child.id)[0].references == 1);
}

PAGER_TEST("a fork at a chunk boundary, of nothing, and of a fork") {
  Pager pager(small_options(8, 32));
  const Known empty = create(pager);
  Known none{pager.fork(empty.id), {}};
  CHECK(pager.length(none.id) == 0);
  const Known whole = create(pager, 32, 1);
  Known child = forked(pager, whole);
  Known grandchild{pager.fork(child.id), whole.tokens};
  CHECK(pager.ledger(whole.id)[1].references == 3);
  pager.destroy_sequence(child.id);
  append(pager, &grandchild, some_tokens(17, 3));
  require_intact(pager, whole);
  require_intact(pager, grandchild);
}

PAGER_TEST(
    "what is forgotten is found no more, nor what came after it, and what others use stays") {
  Pager pager(small_options(8, 64));
  const Known deleted = create(pager, 6 * 16, 1);
  Known regenerated = forked(pager, deleted);
  append(pager, &regenerated, some_tokens(3 * 16, 2));
  const Known other = create(pager, 4 * 16, 3);
  std::vector<TokenId> shared = deleted.tokens;
  shared.resize(2 * 16);
  Known beside = create(pager);
  REQUIRE(pager.adopt_prefix(beside.id, shared) == 32);
  beside.tokens = shared;
  pager.destroy_sequence(regenerated.id);
  pager.destroy_sequence(other.id);
  REQUIRE(pager.stats().cached_records == 3 + 4);
  pager.destroy_sequence(deleted.id, true);
  CHECK(pager.stats().cached_records == 4);  // of the other one
  CHECK(pager.stats().records == 4 + 2);
  require_intact(pager, beside);
  const Known again = create(pager);
  CHECK(pager.adopt_prefix(again.id, regenerated.tokens) == 32);
  pager.destroy_sequence(again.id, true);
  require_intact(pager, beside);
  const Known found = create(pager);
  CHECK(pager.adopt_prefix(found.id, other.tokens) == 4 * 16);
  create(pager, 40 * 16, 5);  // in memory that was given back
  require_intact(pager, {found.id, other.tokens});
}

PAGER_TEST("a fork that finds no block for its tail is refused and leaves no sequence behind") {
  Pager pager(small_options(3, 16));
  const Known a = create(pager, 3, 1);
  const Known b = create(pager, 3, 2);
  const Known c = create(pager, 3, 3);
  with_every_home(pager);
  const int64_t before = pager.stats().sequences;
  CHECK(
      contains(error_of<CapacityError>(pager, [&] { pager.fork(a.id); }), "fork: needs 1 blocks"));
  CHECK(pager.stats().sequences == before);
  pager.destroy_sequence(c.id);
  Known child = forked(pager, a);
  require_intact(pager, child);
  require_intact(pager, b);
}

PAGER_TEST("a prefix is adopted up to the last sealed chunk that has the same tokens") {
  Pager pager(small_options(8, 32));
  const Known source = create(pager, 60, 1);
  std::vector<TokenId> tokens = source.tokens;
  tokens.resize(50);
  Known same = create(pager);
  CHECK(pager.adopt_prefix(same.id, tokens) == 48);
  same.tokens.assign(tokens.begin(), tokens.begin() + 48);
  require_intact(pager, same);
  CHECK(pager.stats().prefix_tokens_reused == 48);

  tokens[20] += 1;  // in chunk 1
  Known differs = create(pager);
  CHECK(pager.adopt_prefix(differs.id, tokens) == 16);
  tokens[0] += 1;
  CHECK(pager.adopt_prefix(create(pager).id, tokens) == 0);
  CHECK(pager.adopt_prefix(create(pager).id, {}) == 0);
  tokens = source.tokens;
  tokens.resize(15);
  CHECK(pager.adopt_prefix(create(pager).id, tokens) == 0);
}

PAGER_TEST("an adopted prefix outlives its source, and is found after its source is closed") {
  Pager pager(small_options(8, 32));
  const Known source = create(pager, 48, 1);
  pager.destroy_sequence(source.id);
  CHECK(pager.stats().cached_records == 3);
  Known next = create(pager);
  CHECK(pager.adopt_prefix(next.id, source.tokens) == 48);
  next.tokens = source.tokens;
  CHECK(pager.stats().cached_records == 0);
  append(pager, &next, some_tokens(20, 9));
  require_intact(pager, next);
}

PAGER_TEST("salts, tenants, do not share") {
  Pager pager(small_options(8, 32));
  const Known a = create(pager, 48, 1, "alice");
  CHECK(pager.adopt_prefix(create(pager, 0, 0, "carol").id, a.tokens) == 0);
  CHECK(pager.adopt_prefix(create(pager).id, a.tokens) == 0);
  CHECK(pager.adopt_prefix(create(pager, 0, 0, "alice").id, a.tokens) == 48);
  const Known b = create(pager, 48, 1, "carol");
  CHECK(pager.stats().chunks_shared == 0);
  require_intact(pager, b);
}

PAGER_TEST("only exact chunks are adopted, and what follows another kind is never exact") {
  for (const Provenance worth : {Provenance::kDecode, Provenance::kApproximate}) {
    Pager pager(small_options(8, 32));
    Known mixed = create(pager, 16, 1);
    append(pager, &mixed, some_tokens(16, 2), worth);
    append(pager, &mixed, some_tokens(16, 3), Provenance::kExact);
    const std::vector<ChunkInfo> ledger = pager.ledger(mixed.id);
    CHECK(ledger[0].provenance == Provenance::kExact);
    CHECK(ledger[1].provenance == worth);
    CHECK(ledger[2].provenance == worth);
    CHECK(pager.adopt_prefix(create(pager).id, mixed.tokens) == 16);
    trim(pager, &mixed, 16);
    append(pager, &mixed, some_tokens(16, 4));
    CHECK(pager.ledger(mixed.id)[1].provenance == Provenance::kExact);
    require_intact(pager, mixed);
  }
}

PAGER_TEST("a tail with rows of lesser worth makes its chunk of that worth") {
  Pager pager(small_options(8, 32));
  Known sequence = create(pager, 4, 1);
  append(pager, &sequence, some_tokens(4, 2), Provenance::kDecode);
  append(pager, &sequence, some_tokens(8, 3));
  CHECK(pager.ledger(sequence.id)[0].provenance == Provenance::kDecode);
  trim(pager, &sequence, 2);  // which rows are left cannot be told: conservative
  append(pager, &sequence, some_tokens(14, 3));
  CHECK(pager.ledger(sequence.id)[0].provenance == Provenance::kDecode);
}

PAGER_TEST("adopting needs an empty, existing sequence") {
  Pager pager(small_options(8, 32));
  const Known held = create(pager, 5, 1);
  CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.adopt_prefix(held.id, {1}); }),
                 "already holds 5"));
  CHECK_THROWS_AS(pager.adopt_prefix(SequenceId(-44), {1}), InvalidArgumentError);
}

PAGER_TEST("chunks that two sequences compute alike are kept once") {
  Pager pager(small_options(8, 32));
  const Known a = create(pager, 40, 1);
  const Known b = create(pager, 40, 1);
  CHECK(pager.stats().chunks_shared == 2);
  CHECK(pager.stats().chunks_sealed == 2);
  CHECK(pager.stats().host_bytes_used == 2 * kChunkBytes);
  pager.destroy_sequence(a.id);
  require_intact(pager, b);
}

PAGER_TEST("two sequences that seal the same chunk in the same forward both keep their bytes") {
  Pager pager(small_options(8, 32));
  Known a = create(pager, 15, 1);
  Known b = create(pager, 15, 1);
  std::vector<RowDescriptor> rows(kRows);
  rows[3] = {a.id, 15, 4, RowKind::kCommit};
  rows[4] = {b.id, 15, 4, RowKind::kCommit};
  a.tokens.push_back(4);
  b.tokens.push_back(4);
  run_forward(pager, rows, a.tokens);
  require_intact(pager, a);
  pager.destroy_sequence(a.id);
  require_intact(pager, b);
  pager.destroy_sequence(b.id);
  pager.check_invariants();
  CHECK(pager.adopt_prefix(create(pager).id, b.tokens) == 16);
}

PAGER_TEST(
    "a chunk with the same tokens but other bytes is never swapped for the one that was there") {
  Pager pager(small_options(8, 32));
  const Known a = create(pager, 32, 1);
  const SequenceId b = pager.create_sequence("");
  const std::vector<TokenId> tokens(a.tokens.begin(), a.tokens.begin() + 16);
  pager.begin(commit_rows(b, 0, tokens.data(), 16));
  Rows k(kRows, 2, 16, 0.25f);
  Rows v(kRows, 2, 16, 0.75f);
  for (int layer = 0; layer < 2; ++layer) write_on_device(pager, layer, k.view(), v.view());
  pager.commit_all();
  CHECK(pager.stats().chunks_shared == 0);
  std::vector<float> k_out(16 * 32), v_out(16 * 32);
  pager.read_kv(b, 1, 0, 16, reinterpret_cast<std::byte*>(k_out.data()),
                reinterpret_cast<std::byte*>(v_out.data()));
  CHECK(k_out[77] == 0.25f);
  CHECK(v_out[77] == 0.75f);
  require_intact(pager, a);
}

PAGER_TEST("what is sealed behind a chunk that two sequences sealed in one forward is kept once") {
  Pager pager(small_options(12, 32));
  const std::vector<TokenId> tokens = some_tokens(16, 3);
  const std::vector<TokenId> first(tokens.begin(), tokens.begin() + 8);
  Known a = create(pager);
  Known b = create(pager);
  append(pager, &a, first);
  append(pager, &b, first);
  std::vector<RowDescriptor> rows = commit_rows(a.id, 8, tokens.data() + 8, 8, 8);
  for (const RowDescriptor& row : commit_rows(b.id, 8, tokens.data() + 8, 8, 8)) {
    rows.push_back(row);
  }
  run_forward(pager, rows, tokens);
  a.tokens = b.tokens = tokens;
  CHECK(pager.stats().chunks_shared == 0);  // neither was there when the other was sealed
  append(pager, &b, some_tokens(16, 6));
  append(pager, &a, some_tokens(16, 6));
  CHECK(pager.stats().chunks_shared == 1);
  Known c = create(pager);
  CHECK(pager.adopt_prefix(c.id, a.tokens) == 32);
  pager.check_invariants();
  require_intact(pager, a);
  require_intact(pager, b);
}

PAGER_TEST("closing is final: the sequence is unknown to every call, and another one can be made") {
  Pager pager(small_options(8, 32));
  const Known a = create(pager, 20, 1);
  pager.destroy_sequence(a.id);
  CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.length(a.id); }),
                 "does not exist or is closed"));
  CHECK_THROWS_AS(pager.destroy_sequence(a.id), InvalidArgumentError);
  CHECK_THROWS_AS(pager.fork(a.id), InvalidArgumentError);
  CHECK_THROWS_AS(pager.trim(a.id, 0), InvalidArgumentError);
  CHECK_THROWS_AS(pager.reserve(a.id, 5), InvalidArgumentError);
  CHECK_THROWS_AS(pager.ledger(a.id), InvalidArgumentError);
  CHECK_THROWS_AS(pager.tokens(a.id), InvalidArgumentError);
  CHECK_FALSE(pager.create_sequence("") == a.id);
}

PAGER_TEST("closing everything leaves no reference, and the pool can be used up again") {
  Pager pager(small_options(6, 12));
  for (uint64_t round = 0; round < 5; ++round) {
    const Known a = create(pager, 70, round);
    Known b = forked(pager, a);
    append(pager, &b, some_tokens(40, 100 + round));
    pager.destroy_sequence(a.id);
    require_intact(pager, b);
    pager.destroy_sequence(b.id);
    const PagerStats stats = pager.stats();
    CHECK(stats.open_blocks == 0);
    CHECK(stats.records == stats.cached_records);
    CHECK(stats.reserved_chunks == 0);
  }
}

}  // namespace
}  // namespace kvpager::pager_test
