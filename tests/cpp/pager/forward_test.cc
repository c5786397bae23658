#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

PAGER_TEST("rows become positions, chunk by chunk, whatever the split into forwards") {
  const std::vector<TokenId> tokens = some_tokens(70, 3);
  for (const int64_t step : {1, 3, 15, 16}) {
    Pager pager(small_options(4, 16));
    Known sequence = create(pager);
    for (int64_t first = 0; first < 70; first += step) {
      const int64_t last = std::min<int64_t>(70, first + step);
      append(pager, &sequence, cut(tokens, first, last));
      pager.check_invariants();
      CHECK(pager.stats().chunks_sealed == last / 16);
    }
    require_intact(pager, sequence);
    CHECK(pager.stats().rows_committed == 70);
  }
}

PAGER_TEST(
    "several sequences share a forward, their rows in any interleaving, with padding between") {
  Pager pager(small_options(8, 16));
  Known a = create(pager, 14, 1);
  Known b = create(pager, 30, 2);
  const std::vector<TokenId> more_a = some_tokens(5, 3);
  const std::vector<TokenId> more_b = some_tokens(4, 4);
  std::vector<RowDescriptor> rows(kRows);
  const std::vector<int> slots_a = {1, 2, 7, 9, 15};
  const std::vector<int> slots_b = {0, 3, 8, 12};
  for (size_t i = 0; i < 5; ++i) {
    rows[static_cast<size_t>(slots_a[i])] = {a.id, 14 + static_cast<int64_t>(i), more_a[i],
                                             RowKind::kCommit};
  }
  for (size_t i = 0; i < 4; ++i) {
    rows[static_cast<size_t>(slots_b[i])] = {b.id, 30 + static_cast<int64_t>(i), more_b[i],
                                             RowKind::kCommit};
  }
  pager.begin(rows);
  a = a.with(more_a);
  b = b.with(more_b);
  const std::vector<uint64_t> history_a = histories(a.tokens);
  const std::vector<uint64_t> history_b = histories(b.tokens);
  const std::vector<float> outputs = run_layers_of(pager, rows, [&](const RowDescriptor& row) {
    return (row.sequence == a.id ? history_a : history_b)[static_cast<size_t>(row.position)];
  });
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool padding = rows[i / 64 % kRows].kind == RowKind::kPadding;
    REQUIRE((padding ? outputs[i] == 0 : std::isfinite(outputs[i])));
  }
  pager.commit_all();
  require_intact(pager, a);
  require_intact(pager, b);
}

PAGER_TEST("rows that do not continue their sequence in order are refused and nothing begins") {
  Pager pager(small_options(6, 16));
  Known a = create(pager, 20, 1);
  const auto refusal = [&](std::vector<RowDescriptor> rows) {
    const std::string message = error_of<InvalidArgumentError>(pager, [&] { pager.begin(rows); });
    CHECK_FALSE(pager.forward_running());
    require_intact(pager, a);
    return message;
  };
  const auto commit = [&](int64_t position, TokenId token = 1) {
    return RowDescriptor{a.id, position, token, RowKind::kCommit};
  };
  const std::string of_it = str(" of sequence ", a.id.value(), ", expected ");
  CHECK(contains(refusal({commit(21)}), "position 21" + of_it + "20"));
  CHECK(contains(refusal({commit(19)}), "expected 20"));
  CHECK(contains(refusal({commit(20), commit(22)}), "row 1: position 22" + of_it + "21"));
  CHECK(contains(refusal({commit(21), commit(20)}), "row 0"));
  CHECK(contains(refusal({commit(20), commit(20)}), "row 1"));
  CHECK(contains(refusal({commit(20, -1)}), "token id -1 is negative"));
  CHECK(contains(refusal({{a.id, 20, 0, RowKind::kRead}}), "which holds 20"));
  CHECK(contains(refusal({{a.id, -1, 0, RowKind::kRead}}), "reads position -1"));
  CHECK(
      contains(refusal({{SequenceId(-9), 0, 0, RowKind::kCommit}}), "sequence -9 does not exist"));
  CHECK(contains(refusal({}), "rows: 0 given, expected 1 to 16"));
  CHECK(contains(refusal(std::vector<RowDescriptor>(17)), "rows: 17 given"));
  CHECK(contains(refusal(std::vector<RowDescriptor>(16)), "every row is padding"));
}

PAGER_TEST("calls out of order are refused and change nothing") {
  Pager pager(small_options(6, 16));
  Known a = create(pager, 20, 1);
  Tensors t(kRows);
  const auto is_refused = [&](auto step) {
    return error_of<InvalidArgumentError>(pager, step) != "no error";
  };
  CHECK(is_refused([&] { write_on_device(pager, 0, t.k.view(), t.v.view()); }));
  CHECK(is_refused([&] { t.attend(pager, 0); }));
  CHECK(is_refused([&] { pager.commit_all(); }));
  CHECK(is_refused([&] { pager.commit({a.id}, {0}); }));
  pager.abort();  // nothing to abort: nothing happens
  const std::vector<TokenId> more = some_tokens(4, 2);
  const auto rows = a.rows(more);
  pager.begin(rows);
  CHECK(pager.forward_running());
  CHECK(is_refused([&] { pager.begin(rows); }));
  CHECK(is_refused([&] { pager.trim(a.id, 3); }));
  CHECK(is_refused([&] { pager.fork(a.id); }));
  CHECK(is_refused([&] { pager.destroy_sequence(a.id); }));
  CHECK(is_refused([&] { save(pager, a.id, "/tmp/never-written", "{}"); }));
  CHECK(is_refused([&] { pager.commit_all(); }));  // no layer written
  CHECK(pager.forward_running());
  const std::vector<TokenId> all = joined(a.tokens, more);
  run_layers(pager, rows, all);
  CHECK(is_refused([&] { pager.commit({a.id, a.id}, {1, 2}); }));
  CHECK(is_refused([&] { pager.commit({a.id}, {5}); }));
  CHECK(is_refused([&] { pager.commit({a.id}, {-1}); }));
  CHECK(is_refused([&] { pager.commit({a.id}, {}); }));
  CHECK(is_refused([&] { pager.commit({SequenceId(-7)}, {0}); }));
  CHECK(pager.forward_running());
  pager.commit({a.id}, {4});
  a.tokens = all;
  require_intact(pager, a);
}

PAGER_TEST("what is for a forward that has ended does not reach the one that runs") {
  Pager pager(small_options(4, 16));
  Known sequence = create(pager, 8, 1);
  const std::vector<TokenId> more = some_tokens(3, 2);
  const auto rows = sequence.rows(more);
  const uint64_t ended = pager.begin(rows);
  pager.abort();
  Tensors t(kRows);
  const auto refused = [&](const std::function<void()>& step) {
    CHECK(contains(error_of<InvalidArgumentError>(pager, step), "this forward has ended"));
  };
  const auto all_refused = [&] {
    refused([&] { pager.attend(0, t.q.view(), t.k.view(), t.v.view(), t.out.view(), {}, ended); });
    refused([&] { pager.write(0, t.k.view(), t.v.view(), nullptr, ended); });
    refused([&] { pager.give({}, {}, nullptr, ended); });
    refused([&] { pager.mark_replayed(0, nullptr, ended); });
    refused([&] { pager.commit({}, {}, Provenance::kExact, ended); });
    refused([&] { pager.commit_all(Provenance::kExact, ended); });
  };
  all_refused();  // none runs
  const uint64_t runs = pager.begin(rows);
  all_refused();
  CHECK(pager.running_forward() == runs);
  const std::vector<TokenId> all = joined(sequence.tokens, more);
  run_layers(pager, rows, all);
  all_refused();
  pager.commit_all(Provenance::kExact, runs);
  require_intact(pager, {sequence.id, all});
}

PAGER_TEST("tensors of another shape, layer or range are refused while the forward goes on") {
  Pager pager(small_options(6, 16));
  Known a = create(pager, 20, 1);
  const std::vector<TokenId> more = some_tokens(4, 2);
  const auto rows = a.rows(more);
  pager.begin(rows);
  Tensors t(kRows);
  Rows narrow(kRows, 2, 15, 0);
  Rows few(kRows - 1, 2, 16, 0);
  Rows odd_heads(kRows, 3, 16, 0);
  const auto refusal = [&](auto step) { return error_of<InvalidArgumentError>(pager, step); };
  const auto attend = [&](Rows& q, Rows& k, Rows& v, Rows& out, AttendOptions options = {},
                          int layer = 0) {
    return refusal(
        [&] { attend_on_device(pager, layer, q.view(), k.view(), v.view(), out.view(), options); });
  };
  CHECK(contains(attend(t.q, narrow, t.v, t.out), "k: shape [16, 2, 15], expected [16, 2, 16]"));
  CHECK(contains(attend(t.q, t.k, few, t.out), "v: shape [15, 2, 16]"));
  CHECK(contains(attend(odd_heads, t.k, t.v, t.out), "q: 3 heads"));
  CHECK(contains(attend(t.q, t.k, t.v, t.k), "out: shape"));
  CHECK(contains(attend(t.q, t.k, t.v, t.out, {}, 2), "layer: 2 is not in [0, 2)"));
  AttendOptions options;
  options.scaling = 0;
  CHECK(contains(attend(t.q, t.k, t.v, t.out, options), "scaling: 0"));
  options = {};
  options.window = -1;
  CHECK(contains(attend(t.q, t.k, t.v, t.out, options), "window: -1"));
  CHECK(pager.forward_running());
  const std::vector<TokenId> all = joined(a.tokens, more);
  run_layers(pager, rows, all);
  pager.commit_all();
  a.tokens = all;
  require_intact(pager, a);
}

PAGER_TEST("rejected rows are as if they had never been, and the next forward overwrites them") {
  Pager pager(small_options(6, 16));
  Known sequence = create(pager, 13, 1);
  for (int64_t accepted = 0; accepted <= 8; ++accepted) {
    const std::vector<TokenId> draft = some_tokens(8, 100 + static_cast<uint64_t>(accepted));
    run_to_commit(pager, sequence, draft);
    pager.commit({sequence.id}, {accepted});
    sequence = sequence.with(cut(draft, 0, accepted));
    require_intact(pager, sequence);
  }
  Pager plain(small_options(6, 16));
  Known same = create(plain);
  append(plain, &same, sequence.tokens);
  CHECK(same_bits(probe(pager, sequence), probe(plain, same)));
}

PAGER_TEST("a sequence that commit does not name keeps nothing of the forward") {
  Pager pager(small_options(8, 16));
  Known a = create(pager, 15, 1);
  Known b = create(pager, 15, 1);
  std::vector<RowDescriptor> rows(kRows);
  rows[0] = {a.id, 15, 7, RowKind::kCommit};
  rows[1] = {b.id, 15, 7, RowKind::kCommit};
  std::vector<TokenId> all = a.tokens;
  all.push_back(7);
  pager.begin(rows);
  run_layers(pager, rows, all);
  pager.commit({b.id}, {1});
  b.tokens = all;
  require_intact(pager, a);
  require_intact(pager, b);
  CHECK(pager.ledger(a.id).size() == 1);
  CHECK_FALSE(pager.ledger(a.id)[0].sealed);
  CHECK(pager.ledger(b.id)[0].sealed);
}

PAGER_TEST("an abort at any point leaves every sequence as it was, and a retry succeeds") {
  for (int written = 0; written <= 2; ++written) {
    Pager pager(small_options(6, 16));
    Known sequence = create(pager, 27, 1);
    const std::vector<ChunkInfo> before = pager.ledger(sequence.id);
    const std::vector<TokenId> more = some_tokens(16, 9);
    const std::vector<TokenId> all = joined(sequence.tokens, more);
    const auto rows = sequence.rows(more);
    pager.begin(rows);
    for (int layer = 0; layer < written; ++layer) {
      Tensors t(kRows);
      for (int i = 0; i < kRows; ++i) {
        t.fill(i, 1, layer);
      }
      t.attend(pager, layer);
    }
    pager.abort();
    CHECK_FALSE(pager.forward_running());
    CHECK(pager.stats().aborted_forwards == 1);
    CHECK(pager.ledger(sequence.id).size() == before.size());
    CHECK(pager.stats().open_blocks == 1);
    require_intact(pager, sequence);
    append(pager, &sequence, more);
    require_intact(pager, sequence);
  }
}

PAGER_TEST("keys and values that are not finite abort the forward, naming layer and position") {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const bool in_key : {true, false}) {
      Pager pager(small_options(6, 16));
      Known sequence = create(pager, 27, 1);
      const std::vector<TokenId> more = some_tokens(6, 9);
      pager.begin(sequence.rows(more));
      Tensors t(kRows);
      for (int i = 0; i < 6; ++i) {
        t.fill(i, 1, 0);
      }
      t.attend(pager, 0);
      (in_key ? t.k : t.v).row(4)[31] = bad;
      const std::string message = error_of<NonFiniteError>(pager, [&] {
        t.attend(pager, 1);
        if (on_device()) pager.commit_all();  // where the host looks
      });
      CHECK(contains(message, "layer 1"));
      CHECK(contains(message, "position 31"));
      CHECK_FALSE(pager.forward_running());
      require_intact(pager, sequence);
      append(pager, &sequence, more);
      require_intact(pager, sequence);
    }
  }
}

PAGER_TEST("a finite value that overflows the dtype it is kept in is not finite") {
  const std::pair<DType, float> cases[] = {{DType::kFloat16, 65520.0f},
                                           {DType::kBFloat16, 0x1.FFp127f}};
  for (const auto& [dtype, limit] : cases) {
    PagerOptions options = small_options(4, 8);
    options.layout.k_dtype = dtype;
    options.layout.v_dtype = dtype;
    Pager pager(options);
    const SequenceId id = pager.create_sequence("");
    for (const bool over : {false, true}) {
      const TokenId token = 1;
      pager.begin(commit_rows(id, 0, &token, 1));
      Rows k(kRows, 2, 16, 0.5f);
      Rows v(kRows, 2, 16, 0.5f);
      v.row(0)[3] = -(over ? limit : std::nextafter(limit, 0.0f));
      const std::string message = error_of<NonFiniteError>(pager, [&] {
        write_on_device(pager, 0, k.view(), v.view());
        if (on_device()) write_on_device(pager, 1, k.view(), v.view());
        if (on_device()) pager.commit_all();
      });
      CHECK((message != "no error") == over);
      if (over) CHECK(contains(message, dtype_name(dtype)));
      pager.abort();
      if (on_device() && !over) pager.trim(id, 0);
    }
  }
}

PAGER_TEST("read-only rows attend to their own position and write nothing") {
  Pager pager(small_options(6, 16));
  const Known sequence = create(pager, 40, 1);
  const auto rows = read_rows_at(sequence.id, {39, 5, 20});
  const std::vector<float> outputs = run_forward(pager, rows, sequence.tokens);
  CHECK(pager.stats().rows_committed == 40);
  require_intact(pager, sequence);

  Pager shorter(small_options(6, 16));
  const Known prefix = create(shorter, 6, 1);
  const std::vector<float> alone = probe(shorter, prefix);
  CHECK(std::memcmp(outputs.data() + 64, alone.data(), 64 * 4) == 0);
}

PAGER_TEST(
    "a forward of fewer than M rows makes chunks of provenance decode, which nobody adopts") {
  Pager pager(small_options(6, 16));
  Known sequence = create(pager);
  const std::vector<TokenId> tokens = some_tokens(16, 1);
  append_with(pager, &sequence, cut(tokens, 0, 8), 8);
  append(pager, &sequence, cut(tokens, 8));
  CHECK(pager.ledger(sequence.id)[0].provenance == Provenance::kDecode);
  const SequenceId other = pager.create_sequence("");
  CHECK(pager.adopt_prefix(other, tokens) == 0);
  require_intact(pager, sequence);
}

PAGER_TEST("a forward is exact if its row count is M or listed, and decode otherwise") {
  PagerOptions options = small_options(40, 64);
  options.smaller_rows = {1, 4, 8};
  Pager pager(options);
  for (int64_t total = 1; total <= kRows; ++total) {
    CAPTURE(total);
    const std::vector<TokenId> tokens = some_tokens(16, 100 + static_cast<uint64_t>(total));
    Known sequence = create(pager);
    append_with(pager, &sequence, cut(tokens, 0, 1), total);
    append(pager, &sequence, cut(tokens, 1));
    const bool exact = total == 1 || total == 4 || total == 8 || total == 16;
    CHECK(pager.ledger(sequence.id)[0].provenance ==
          (exact ? Provenance::kExact : Provenance::kDecode));
    CHECK(pager.adopt_prefix(create(pager).id, tokens) == (exact ? 16 : 0));
    require_intact(pager, sequence);
  }
}

PAGER_TEST("chunks of listed smaller forwards are found by hash and shared with those of M rows") {
  PagerOptions options = small_options(10, 32);
  options.smaller_rows = {4, 8};
  Pager pager(options);
  const std::vector<TokenId> tokens = some_tokens(48, 5);
  Known small = create(pager);
  for (int64_t first = 0, count = 0; first < 48; first += count) {
    // 5 and 3 tokens, padded to 8 and 4 rows.
    count = std::min<int64_t>(first % 16 == 0 ? 5 : 3, 48 - first);
    append_with(pager, &small, cut(tokens, first, first + count), first % 16 == 0 ? 8 : 4);
  }
  REQUIRE(pager.ledger(small.id).size() == 3);
  for (const ChunkInfo& chunk : pager.ledger(small.id)) {
    CHECK(chunk.sealed);
    CHECK(chunk.provenance == Provenance::kExact);
  }
  CHECK(pager.adopt_prefix(create(pager).id, tokens) == 48);
  // The same text through forwards of M rows seals the same chunks: the records become one.
  const int64_t shared = pager.stats().chunks_shared;
  Known large = create(pager);
  append(pager, &large, tokens);
  CHECK(pager.stats().chunks_shared == shared + 3);
  CHECK(same_bits(probe(pager, small), probe(pager, large)));
  require_intact(pager, small);
  require_intact(pager, large);
}

PAGER_TEST("one unlisted forward makes what follows it decode, and nothing before it") {
  PagerOptions options = small_options(10, 32);
  options.smaller_rows = {4};
  Pager pager(options);
  const std::vector<TokenId> tokens = some_tokens(48, 6);
  Known sequence = create(pager);
  append(pager, &sequence, cut(tokens, 0, 18));
  append_with(pager, &sequence, cut(tokens, 18, 20), 5);
  for (int64_t first = 20; first < 48; first += 4) {
    append_with(pager, &sequence, cut(tokens, first, first + 4), 4);
  }
  const std::vector<ChunkInfo> chunks = pager.ledger(sequence.id);
  CHECK(chunks[0].provenance == Provenance::kExact);
  CHECK(chunks[1].provenance == Provenance::kDecode);
  CHECK(chunks[2].provenance == Provenance::kDecode);
  CHECK(pager.adopt_prefix(create(pager).id, tokens) == 16);
  require_intact(pager, sequence);
}

PAGER_TEST(
    "an unlisted forward that commits no row, by choice or because it only reads, taints none") {
  PagerOptions options = small_options(10, 32);
  options.smaller_rows = {4};
  Pager pager(options);
  const std::vector<TokenId> tokens = some_tokens(16, 7);
  Known sequence = create(pager);
  append(pager, &sequence, cut(tokens, 0, 8));
  run_to_commit(pager, sequence, cut(tokens, 8, 11), 3);
  pager.commit({sequence.id}, {0});
  std::vector<RowDescriptor> reading = {{sequence.id, 7, 0, RowKind::kRead}, {}};
  run_forward(pager, reading, sequence.tokens);
  append_with(pager, &sequence, cut(tokens, 8, 12), 4);
  append_with(pager, &sequence, cut(tokens, 12), 4);
  CHECK(pager.ledger(sequence.id)[0].provenance == Provenance::kExact);
  require_intact(pager, sequence);
}

PAGER_TEST("what a caller calls decode stays decode at a listed row count") {
  PagerOptions options = small_options(10, 32);
  options.smaller_rows = {8};
  Pager pager(options);
  const std::vector<TokenId> tokens = some_tokens(16, 8);
  Known sequence = create(pager);
  append_with(pager, &sequence, cut(tokens, 0, 8), 8, Provenance::kDecode);
  append_with(pager, &sequence, cut(tokens, 8), 8);
  CHECK(pager.ledger(sequence.id)[0].provenance == Provenance::kDecode);
  CHECK(pager.adopt_prefix(create(pager).id, tokens) == 0);
}

PAGER_TEST("with exactness off no forward is exact, of M rows or of a listed count") {
  PagerOptions options = small_options(10, 32);
  options.smaller_rows = {8};
  options.exact = false;
  Pager pager(options);
  const std::vector<TokenId> tokens = some_tokens(32, 9);
  Known whole = create(pager);
  append(pager, &whole, tokens);
  Known halves = create(pager);
  for (int64_t first = 0; first < 32; first += 8) {
    append_with(pager, &halves, cut(tokens, first, first + 8), 8);
  }
  for (const Known* sequence : {&whole, &halves}) {
    for (const ChunkInfo& chunk : pager.ledger(sequence->id)) {
      CHECK(chunk.sealed);
      CHECK(chunk.provenance == Provenance::kDecode);
    }
  }
  CHECK(pager.adopt_prefix(create(pager).id, tokens) == 0);
  CHECK(pager.stats().chunks_shared == 0);
  require_intact(pager, whole);
  require_intact(pager, halves);
}

PAGER_TEST(
    "an output whose rows or heads overlap is refused, and transposed or spaced ones are not") {
  Pager pager(small_options(6, 16));
  Known sequence = create(pager, 20, 1);
  const std::vector<TokenId> more = some_tokens(4, 2);
  const auto rows = sequence.rows(more);
  const std::vector<TokenId> all = joined(sequence.tokens, more);
  pager.begin(rows);
  const std::vector<float> expected = run_layers(pager, rows, all);
  Tensors t(kRows);
  for (int i = 0; i < 4; ++i) {
    const uint64_t h = histories(all)[static_cast<size_t>(20 + i)];
    t.fill(i, h, 1);
  }
  std::vector<float> memory(8192);
  const auto attend = [&](int64_t row_stride, int64_t head_stride) {
    AttendOptions options;
    options.scaling = 0.25f;
    TensorView out = t.out.view();
    out.data = memory.data() + 4096;
    out.row_stride = row_stride;
    out.head_stride = head_stride;
    return error_of<InvalidArgumentError>(pager, [&] {
      attend_on_device(pager, 1, t.q.view(), t.k.view(), t.v.view(), out, options);
    });
  };
  CHECK(contains(attend(0, 16), "out: strides 0 and 16 of rows and heads let them overlap"));
  CHECK(contains(attend(64, 0), "out: strides 64 and 0"));
  CHECK(contains(attend(64, 15), "overlap"));
  CHECK(contains(attend(63, 16), "overlap"));
  CHECK(contains(attend(16, 255), "overlap"));
  CHECK(pager.forward_running());
  for (const auto& [row, head] :
       {std::pair<int64_t, int64_t>{64, 16}, {70, 17}, {16, 256}, {-64, 16}}) {
    CAPTURE(row);
    CHECK(attend(row, head) == "no error");
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t h = 0; h < kQueryHeads; ++h) {
        const float* wanted = expected.data() + kRows * 64 + i * 64 + h * 16;  // layer 1
        const float* got = memory.data() + 4096 + i * row + h * head;
        CHECK(std::memcmp(got, wanted, 64) == 0);
      }
    }
  }
  pager.commit_all();
}

PAGER_TEST("a selection that was not run is the one a row would get") {
  PagerOptions options = top_k(small_options(6, 32), 2, 16);
  Pager pager(options);
  const Known sequence = create(pager, 200, 1);
  Rows q(1, kQueryHeads, 16, 0);
  fill_row(histories(sequence.tokens).back(), 1, kQuery, 64, q.row(0));
  const auto chosen = pager.select(sequence.id, 1, q.view(), 199, 0);
  REQUIRE(chosen.size() == 2);
  for (const auto& chunks : chosen) {
    CHECK(std::is_sorted(chunks.begin(), chunks.end()));
    CHECK(chunks.front() == 0);
    CHECK(chunks.back() == 12);
    CHECK(chunks.size() == 5);  // the sink, two by score, and chunks 11 and 12 of the recent window
  }
  pager.evict_all();
  CHECK(pager.select(sequence.id, 1, q.view(), 199, 0) == chosen);
  const auto refused = [&](int layer, int64_t position, Rows& queries) {
    return error_of<InvalidArgumentError>(
        pager, [&] { pager.select(sequence.id, layer, queries.view(), position, 0); });
  };
  Rows odd(1, 3, 16, 0);
  CHECK(contains(refused(2, 5, q), "layer: 2"));
  CHECK(contains(refused(0, 201, q), "position: 201"));
  CHECK(contains(refused(0, 5, odd), "q: shape"));
}

PAGER_TEST("what a forward looked up for its sequence is nothing to the next one's") {
  PagerOptions options = top_k(small_options(30, 64), 2);
  const int64_t length = 12 * 16 + 3;  // as many summaries, other ones
  std::vector<std::vector<float>> alone;
  for (const uint64_t seed : {1, 2}) {
    Pager pager(options);
    alone.push_back(probe(pager, create(pager, length, seed)));
  }
  Pager pager(options);
  const Known known[] = {create(pager, length, 1), create(pager, length, 2)};
  for (const size_t i : {0, 1, 0, 0, 1}) CHECK(same_bits(probe(pager, known[i]), alone[i]));
}

PAGER_TEST("reading K/V outside what is committed is refused") {
  Pager pager(small_options(6, 16));
  const Known sequence = create(pager, 20, 1);
  std::vector<std::byte> k(32 * 4 * 32), v(k.size());
  const auto refused = [&](int layer, int64_t start, int64_t stop) {
    return error_of<InvalidArgumentError>(
        pager, [&] { pager.read_kv(sequence.id, layer, start, stop, k.data(), v.data()); });
  };
  CHECK(contains(refused(2, 0, 1), "layer: 2"));
  CHECK(contains(refused(-1, 0, 1), "layer: -1"));
  CHECK(contains(refused(0, 0, 21), "[0, 21)"));
  CHECK(contains(refused(0, -1, 2), "[-1, 2)"));
  CHECK(contains(refused(0, 3, 2), "[3, 2)"));
  CHECK(refused(0, 20, 20) == "no error");
}

}  // namespace
}  // namespace kvpager::pager_test
