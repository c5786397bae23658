// Forwards in which keys and values of some positions are given, and no rows of the model.
#include <random>

#include "../cuda/shim_hooks.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

enum class Of : uint8_t { kModel, kGiven };

// A continuation of a sequence: whose each position is, as spans, and who attends.
struct Mix {
  std::vector<RowSpan> spans;
  std::vector<TokenId> tokens, given;
  std::vector<int64_t> rows;   // positions of the model's rows
  std::vector<int64_t> holes;  // positions that are given
};

Mix mix_of(SequenceId id, int64_t start, const std::vector<TokenId>& more,
           const std::vector<Of>& of) {
  Mix mix;
  for (size_t i = 0; i < more.size(); ++i) {
    const auto position = start + static_cast<int64_t>(i);
    const RowKind kind = of[i] == Of::kGiven ? RowKind::kGiven : RowKind::kCommit;
    if (i == 0 || of[i] != of[i - 1]) mix.spans.push_back({id, position, 0, kind});
    ++mix.spans.back().count;
    (kind == RowKind::kGiven ? mix.given : mix.tokens).push_back(more[i]);
    (kind == RowKind::kGiven ? mix.holes : mix.rows).push_back(position);
  }
  return mix;
}

// Keys and values of each layer.
struct Gift {
  Gift(const std::vector<int64_t>& positions, const std::vector<TokenId>& all) {
    const std::vector<uint64_t> history = histories(all);
    const auto count = static_cast<int64_t>(positions.size());
    for (int layer = 0; layer < small_layout().layers; ++layer) {
      k.emplace_back(count, 2, 16, 0.0f);
      v.emplace_back(count, 2, 16, 0.0f);
      for (int64_t i = 0; i < count; ++i) {
        const uint64_t h = history[static_cast<size_t>(positions[static_cast<size_t>(i)])];
        fill_row(h, layer, kKey, 32, k.back().row(i));
        fill_row(h, layer, kValue, 32, v.back().row(i));
      }
    }
  }
  static std::vector<TensorView> views(std::vector<Rows>& rows) {
    std::vector<TensorView> all;
    for (Rows& layer : rows) all.push_back(layer.view());
    return all;
  }
  void to(Pager& pager) { give_on_device(pager, views(k), views(v)); }
  std::vector<Rows> k, v;
};

// Layers of the forward that runs, for rows at these positions; outputs by layer, then row.
std::vector<float> layers_of(Pager& pager, const std::vector<int64_t>& positions,
                             const std::vector<TokenId>& all) {
  std::vector<RowDescriptor> rows;
  for (const int64_t position : positions) {
    rows.push_back({SequenceId(0), position, 0, RowKind::kCommit});
  }
  return rows.empty() ? std::vector<float>{} : run_layers(pager, rows, all);
}

// What the rows at these positions give in ordinary forwards of one sequence that holds `all`.
std::vector<float> expected_of(const std::vector<int64_t>& positions,
                               const std::vector<TokenId>& all, PagerOptions options) {
  options.pool_blocks = 40;
  options.selection.kind = Selection::Kind::kDense;
  Pager pager(options);
  Known known{pager.create_sequence(""), {}};
  append(pager, &known, all);
  std::vector<float> outputs[2];
  for (size_t first = 0; first < positions.size(); first += kRows) {
    const size_t n = std::min<size_t>(kRows, positions.size() - first);
    std::vector<RowDescriptor> rows;
    for (size_t i = 0; i < n; ++i) {
      rows.push_back({known.id, positions[first + i], 0, RowKind::kRead});
    }
    pager.begin(rows);
    const std::vector<float> found = run_layers(pager, rows, all);
    pager.abort();
    const auto half = static_cast<int64_t>(found.size() / 2);
    outputs[0].insert(outputs[0].end(), found.begin(), found.begin() + half);
    outputs[1].insert(outputs[1].end(), found.begin() + half, found.end());
  }
  outputs[0].insert(outputs[0].end(), outputs[1].begin(), outputs[1].end());
  return outputs[0];
}

// Appends `more`, of which the model computes what `of` says; outputs of those rows.
std::vector<float> append_mix(Pager& pager, Known* known, const std::vector<TokenId>& more,
                              const std::vector<Of>& of,
                              Provenance provenance = Provenance::kApproximate) {
  const Mix mix = mix_of(known->id, static_cast<int64_t>(known->tokens.size()), more, of);
  std::vector<TokenId> all = known->tokens;
  all.insert(all.end(), more.begin(), more.end());
  pager.begin(mix.spans, mix.tokens, {mix.given, true, nullptr});
  if (!mix.given.empty()) Gift(mix.holes, all).to(pager);
  const std::vector<float> outputs = layers_of(pager, mix.rows, all);
  pager.commit_all(provenance);
  known->tokens = std::move(all);
  return outputs;
}

std::vector<Of> drawn(std::mt19937* random, size_t count, int model_rows) {
  std::vector<Of> of(count, Of::kGiven);
  for (int i = 0; i < model_rows; ++i) {
    // Runs as well as single rows.
    size_t at = (*random)() % count;
    for (auto run = 1 + (*random)() % 4; run-- > 0 && at < count; ++at) of[at] = Of::kModel;
  }
  int rows = 0;
  for (Of& one : of) {
    if (one == Of::kModel && ++rows > kRows) one = Of::kGiven;
  }
  return of;
}

PAGER_TEST(
    "given keys and values are what rows would have written, and rows among them attend as in "
    "ordinary forwards") {
  const Folder folder;
  std::mt19937 random(17);
  for (const auto kind : {Selection::Kind::kDense, Selection::Kind::kTopK}) {
    for (const bool disk : {false, true}) {
      CAPTURE(disk);
      PagerOptions options = disk ? small_options(12, 12, 30, folder.path()) : small_options(9, 40);
      options.selection.kind = kind;
      options.selection.chunks = 1;
      options.recall_chunks = 2;
      Pager pager(options);
      Known known{pager.create_sequence(""), {}};
      uint64_t seed = 0;
      for (const size_t count : {1, 15, 70, 16, 17, 81, 33}) {
        CAPTURE(count);
        const auto of = drawn(&random, count, static_cast<int>(random() % 8));
        pager.evict_all();
        const auto start = static_cast<int64_t>(known.tokens.size());
        const std::vector<float> outputs =
            append_mix(pager, &known, some_tokens(static_cast<int64_t>(count), ++seed), of);
        const Mix mix = mix_of(known.id, start, std::vector<TokenId>(count), of);
        if (!mix.rows.empty()) {
          CHECK(same_bits(outputs, expected_of(mix.rows, known.tokens, options)));
        }
        require_intact(pager, known);
      }
      CHECK(pager.stats().chunks_evicted > 0);
      for (const ChunkInfo& info : pager.ledger(known.id)) {
        CHECK(info.provenance == Provenance::kApproximate);
      }
    }
  }
}

PAGER_TEST("what is given after a row is nothing to the row, nor to a chunk before it") {
  std::vector<Of> of(60, Of::kGiven);
  for (const size_t row : {0, 5, 20, 30, 31, 47}) of[row] = Of::kModel;
  const std::vector<TokenId> more = some_tokens(60, 3);
  std::vector<float> outputs[2];
  std::vector<std::byte> held[2];
  for (int other = 0; other < 2; ++other) {
    Pager pager(small_options(12, 40));
    Known known = create(pager, 21, 1);
    const Mix mix = mix_of(known.id, 21, more, of);
    const std::vector<TokenId> all = joined(known.tokens, more);
    pager.begin(mix.spans, mix.tokens, {mix.given, true, nullptr});
    Gift gift(mix.holes, all);
    for (size_t i = 0; other == 1 && i < mix.holes.size(); ++i) {
      if (mix.holes[i] <= 21 + 31) continue;
      for (int layer = 0; layer < 2; ++layer) {
        std::fill_n(gift.k[static_cast<size_t>(layer)].row(static_cast<int64_t>(i)), 32, 1e30f);
        std::fill_n(gift.v[static_cast<size_t>(layer)].row(static_cast<int64_t>(i)), 32, -1e30f);
      }
    }
    gift.to(pager);
    outputs[other] = layers_of(pager, mix.rows, all);
    pager.commit_all(Provenance::kApproximate);
    held[other].resize(static_cast<size_t>(52 + 1) * 128);
    std::vector<std::byte> v(held[other].size());
    pager.read_kv(known.id, 1, 0, 53, held[other].data(), v.data());
    held[other].insert(held[other].end(), v.begin(), v.end());
    pager.check_invariants();
  }
  CHECK(held[0] == held[1]);
  // Six rows of four heads at two layers, of which only the last one comes after what was changed.
  const size_t row = kQueryHeads * 16;
  for (size_t layer = 0; layer < 2; ++layer) {
    const float* a = outputs[0].data() + layer * 6 * row;
    const float* b = outputs[1].data() + layer * 6 * row;
    CHECK(std::memcmp(a, b, 5 * row * sizeof(float)) == 0);
    CHECK(std::memcmp(a + 5 * row, b + 5 * row, row * sizeof(float)) != 0);
  }
}

PAGER_TEST("sequences of one forward are given, compute and read, each for itself") {
  Pager pager(small_options(20, 60));
  Known given = create(pager, 20, 1);
  Known mixed = create(pager, 33, 2);
  const Known read = create(pager, 40, 3);
  const std::vector<TokenId> more = some_tokens(30, 4);
  std::vector<RowSpan> spans = {
      {given.id, 20, 10, RowKind::kGiven},     {mixed.id, 33, 2, RowKind::kCommit},
      {mixed.id, 35, 20, RowKind::kGiven},     {read.id, 38, 2, RowKind::kRead},
      {SequenceId(), 0, 3, RowKind::kPadding}, {given.id, 30, 20, RowKind::kGiven},
      {mixed.id, 55, 1, RowKind::kCommit}};
  const auto extend = [&](Known* known, int64_t count) {
    known->tokens.insert(known->tokens.end(), more.begin(), more.begin() + count);
  };
  extend(&given, 30);
  extend(&mixed, 23);
  std::vector<TokenId> ids(more.begin(), more.begin() + 10);
  ids.insert(ids.end(), more.begin() + 2, more.begin() + 22);
  ids.insert(ids.end(), more.begin() + 10, more.end());
  pager.begin(spans, {more[0], more[1], 0, 0, 0, 0, 0, more[22]}, {ids, true, nullptr});
  std::vector<int64_t> of_given(30), of_mixed(20);
  std::iota(of_given.begin(), of_given.end(), 20);
  std::iota(of_mixed.begin(), of_mixed.end(), 35);
  Gift a(of_given, given.tokens);
  Gift b(of_mixed, mixed.tokens);
  Gift all({}, mixed.tokens);
  for (size_t layer = 0; layer < 2; ++layer) {
    const auto join = [](Rows* to, Rows& first, Rows& between) {
      to->data.assign(first.data.begin(), first.data.begin() + 10 * 32);
      to->data.insert(to->data.end(), between.data.begin(), between.data.end());
      to->data.insert(to->data.end(), first.data.begin() + 10 * 32, first.data.end());
      to->rows = 50;
    };
    join(&all.k[layer], a.k[layer], b.k[layer]);
    join(&all.v[layer], a.v[layer], b.v[layer]);
  }
  all.to(pager);
  const std::vector<uint64_t> texts[2] = {histories(mixed.tokens), histories(read.tokens)};
  const std::vector<std::pair<int, size_t>> rows = {{0, 33}, {0, 34}, {1, 38}, {1, 39},
                                                    {2, 0},  {2, 0},  {2, 0},  {0, 55}};
  std::vector<float> of_mixed_rows, of_read_rows;
  for (int layer = 0; layer < 2; ++layer) {
    Tensors t(8);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].first == 2) continue;
      const uint64_t h = texts[rows[i].first][rows[i].second];
      const auto r = static_cast<int64_t>(i);
      fill_row(h, layer, kQuery, kQueryHeads * 16, t.q.row(r));
      if (rows[i].first == 1) continue;
      fill_row(h, layer, kKey, 32, t.k.row(r));
      fill_row(h, layer, kValue, 32, t.v.row(r));
    }
    AttendOptions options;
    options.scaling = 0.25f;
    t.attend(pager, layer, options);
    for (size_t i = 0; i < rows.size(); ++i) {
      float* const out = t.out.row(static_cast<int64_t>(i));
      std::vector<float>& to = rows[i].first == 0 ? of_mixed_rows : of_read_rows;
      if (rows[i].first == 2) {
        CHECK(std::all_of(out, out + 64, [](float x) { return x == 0.0f; }));
      } else {
        to.insert(to.end(), out, out + 64);
      }
    }
  }
  pager.commit_all();
  CHECK(same_bits(of_mixed_rows, expected_of({33, 34, 55}, mixed.tokens, pager.options())));
  CHECK(same_bits(of_read_rows, expected_of({38, 39}, read.tokens, pager.options())));
  require_intact(pager, given);
  require_intact(pager, mixed);
  require_intact(pager, read);
}

PAGER_TEST("as many given positions and rows as were accepted are kept, counted together") {
  for (const int64_t accepted : {0, 3, 4, 15, 22, 40, 41}) {
    CAPTURE(accepted);
    Pager pager(small_options(8, 40));
    Known known = create(pager, 10, 1);
    std::vector<Of> of(41, Of::kGiven);
    of[3] = of[4] = of[40] = Of::kModel;
    const std::vector<TokenId> more = some_tokens(41, 2);
    const Mix mix = mix_of(known.id, 10, more, of);
    const std::vector<TokenId> all = joined(known.tokens, more);
    pager.begin(mix.spans, mix.tokens, {mix.given, true, nullptr});
    Gift(mix.holes, all).to(pager);
    layers_of(pager, mix.rows, all);
    pager.commit({known.id}, {accepted});
    known.tokens = cut(all, 0, 10 + accepted);
    require_intact(pager, known);
    append(pager, &known, some_tokens(20, 3));
    require_intact(pager, known);
  }
}

PAGER_TEST(
    "what is given is worth what the caller says where no row of the model could change it") {
  const std::vector<TokenId> text = some_tokens(48, 1);
  const std::vector<Of> of(48, Of::kGiven);
  const auto worth = [&](const PagerOptions& options, Provenance provenance,
                         const std::vector<Of>& whose) {
    Pager pager(options);
    Known known{pager.create_sequence(""), {}};
    append_mix(pager, &known, text, whose, provenance);
    const auto infos = pager.ledger(known.id);
    const SequenceId finder = pager.create_sequence("");
    CHECK(pager.adopt_prefix(finder, text) == (infos[0].provenance == Provenance::kExact ? 48 : 0));
    return infos[2].provenance;
  };
  PagerOptions options = small_options(8, 40);
  CHECK(worth(options, Provenance::kExact, of) == Provenance::kExact);
  CHECK(worth(options, Provenance::kDecode, of) == Provenance::kDecode);
  CHECK(worth(options, Provenance::kApproximate, of) == Provenance::kApproximate);
  // A row of the model makes their number count.
  std::vector<Of> with_rows = of;
  with_rows[7] = with_rows[30] = Of::kModel;
  CHECK(worth(options, Provenance::kExact, with_rows) == Provenance::kDecode);
  options.smaller_rows = {2};
  CHECK(worth(options, Provenance::kExact, with_rows) == Provenance::kExact);
  options.exact = false;
  CHECK(worth(options, Provenance::kExact, of) == Provenance::kDecode);
}

PAGER_TEST("given chunks that are exact are shared with those that rows have filled") {
  Pager pager(small_options(12, 40));
  const Known first = create(pager, 48, 5);
  Known known{pager.create_sequence(""), {}};
  append_mix(pager, &known, some_tokens(48, 5), std::vector<Of>(48, Of::kGiven),
             Provenance::kExact);
  CHECK(pager.stats().chunks_shared == 3);
  CHECK(pager.stats().records == 3);
  require_intact(pager, known);
  require_intact(pager, first);
}

PAGER_TEST(
    "a number that is not finite is refused with its layer and position, and nothing stays") {
  for (const int bad_layer : {0, 1}) {
    for (const bool key : {true, false}) {
      Pager pager(small_options(8, 40));
      Known known = create(pager, 20, 1);
      const PagerStats before = pager.stats();
      const std::vector<TokenId> more = some_tokens(40, 2);
      std::vector<Of> of(40, Of::kGiven);
      of[0] = of[9] = Of::kModel;
      const Mix mix = mix_of(known.id, 20, more, of);
      const std::vector<TokenId> all = joined(known.tokens, more);
      Gift gift(mix.holes, all);
      std::vector<Rows>& rows = key ? gift.k : gift.v;
      rows[static_cast<size_t>(bad_layer)].row(30)[5] = std::numeric_limits<float>::infinity();
      const std::string message = error_of<NonFiniteError>(pager, [&] {
        pager.begin(mix.spans, mix.tokens, {mix.given, true, nullptr});
        gift.to(pager);
        layers_of(pager, mix.rows, all);  // on a device it is found out at the end
        pager.commit_all();
      });
      CHECK(contains(message, str("layer ", bad_layer, ": the key or value at position ",
                                  mix.holes[30], " of sequence ", known.id.value())));
      CHECK_FALSE(pager.forward_running());
      CHECK(pager.stats().open_blocks == before.open_blocks);
      require_intact(pager, known);
      append_mix(pager, &known, more, of);
      require_intact(pager, known);
    }
  }
}

PAGER_TEST("more open chunks than the pool can spare are refused before anything is taken") {
  Pager pager(small_options(6, 40));
  Known known = create(pager, 20, 1);
  const PagerStats before = pager.stats();
  // Five more blocks beside the tail there is: one more than there are, and then as many.
  const std::vector<TokenId> more = some_tokens(12 + 16 * 5 + 1, 2);
  const auto begin = [&](size_t count) {
    const std::vector<TokenId> ids(more.begin(), more.begin() + static_cast<int64_t>(count));
    pager.begin({{known.id, 20, static_cast<int64_t>(count), RowKind::kGiven}}, {},
                {ids, true, nullptr});
  };
  CHECK(contains(error_of<CapacityError>(pager, [&] { begin(more.size()); }),
                 "begin: needs 6 blocks of the pool, 5 can be had"));
  CHECK(pager.stats().open_blocks == before.open_blocks);
  CHECK(pager.stats().forwards == before.forwards);
  require_intact(pager, known);
  begin(more.size() - 1);
  pager.abort();
  CHECK(pager.stats().open_blocks == before.open_blocks);
  append_mix(pager, &known, some_tokens(12 + 16 * 5, 2), std::vector<Of>(12 + 16 * 5, Of::kGiven));
  require_intact(pager, known);
}

PAGER_TEST("an abort at any point leaves given positions as if they had never been named") {
  Pager pager(small_options(9, 40));
  Known known = create(pager, 25, 1);
  const std::vector<TokenId> more = some_tokens(50, 2);
  std::vector<Of> of(50, Of::kGiven);
  of[20] = Of::kModel;
  const Mix mix = mix_of(known.id, 25, more, of);
  const std::vector<TokenId> all = joined(known.tokens, more);
  for (int stage = 0; stage < 3; ++stage) {
    const PagerStats before = pager.stats();
    pager.begin(mix.spans, mix.tokens, {mix.given, true, nullptr});
    if (stage > 0) Gift(mix.holes, all).to(pager);
    if (stage > 1) layers_of(pager, mix.rows, all);
    pager.check_invariants();
    pager.abort();
    CHECK(pager.stats().open_blocks == before.open_blocks);
    CHECK(pager.stats().reserved_chunks == before.reserved_chunks);
    require_intact(pager, known);
  }
  append_mix(pager, &known, more, of);
  require_intact(pager, known);
}

PAGER_TEST("calls that do not fit a forward with given positions are refused, and it goes on") {
  PagerOptions options = top_k(small_options(12, 40), 2);
  Pager pager(options);
  Known a = create(pager, 20, 1);
  const auto refusal = [&](const auto& step) {
    return error_of<InvalidArgumentError>(pager, step);
  };
  const auto begin = [&](const std::vector<RowSpan>& spans, size_t tokens, size_t given,
                         bool dense = true) {
    pager.begin(spans, std::vector<TokenId>(tokens, 5),
                {std::vector<TokenId>(given, 6), dense, nullptr});
  };
  const RowSpan four{a.id, 20, 4, RowKind::kGiven};
  CHECK(contains(refusal([&] { begin({four}, 0, 4, false); }), "dense: false, but a forward"));
  CHECK(contains(refusal([&] { begin({four}, 0, 3); }),
                 "spans: 4 given rows from given row 0 on, expected 1 to 3"));
  CHECK(contains(refusal([&] { begin({four}, 0, 5); }),
                 "spans: of 4 given rows, expected as many as given tokens, 5"));
  CHECK(contains(refusal([&] { begin({four}, 4, 0); }), "spans: 4 given rows from given row 0"));
  CHECK(contains(refusal([&] { begin({four, {a.id, 24, 0, RowKind::kGiven}}, 0, 4); }),
                 "spans: 0 given rows from given row 4"));
  CHECK(contains(refusal([&] { begin({four, {a.id, 25, 2, RowKind::kCommit}}, 2, 4); }),
                 "row 0: position 25 of sequence"));
  CHECK(contains(refusal([&] { begin({four, {a.id, 20, 2, RowKind::kGiven}}, 0, 6); }),
                 "given row 4: position 20"));
  CHECK(contains(refusal([&] {
                   pager.begin({{a.id, 20, 1, RowKind::kCommit}, {a.id, 21, 3, RowKind::kGiven}},
                               {5}, {{6, -7, 6}, true, nullptr});
                 }),
                 "given row 1: token id -7 is negative"));
  CHECK(contains(refusal([&] { begin({}, 0, 0); }), "rows: 0 given, expected 1 to 16"));
  CHECK(contains(refusal([&] { pager.begin({{a.id, 20, 5, RowKind::kGiven}}); }),
                 "row 0: is given; name given positions in spans"));
  {
    std::vector<RowSpan> many;
    std::vector<SequenceId> ids;
    for (int i = 0; i <= kRows; ++i) {
      ids.push_back(pager.create_sequence(""));
      many.push_back({ids.back(), 0, 1, RowKind::kGiven});
    }
    CHECK(contains(refusal([&] { begin(many, 0, many.size()); }),
                   "spans: of 17 sequences, expected at most 16"));
    for (const SequenceId id : ids) pager.destroy_sequence(id);
  }
  require_intact(pager, a);

  Gift gift({20, 21, 22, 23}, some_tokens(30));
  CHECK(contains(refusal([&] { gift.to(pager); }), "give: no forward is running"));
  const TokenId token = 9;
  pager.begin(commit_rows(a.id, 20, &token, 1));
  CHECK(contains(refusal([&] { gift.to(pager); }), "give: this forward has no given positions"));
  pager.abort();

  begin({four}, 0, 4);
  Tensors none(0), one(1);
  const auto attend = [&](Tensors& t) {
    pager.attend(0, t.q.view(), t.k.view(), t.v.view(), t.out.view(), {});
  };
  CHECK(contains(refusal([&] { attend(none); }), "has given positions and no rows"));
  CHECK(contains(refusal([&] { pager.write(0, one.k.view(), one.v.view()); }), "and no rows"));
  CHECK(contains(refusal([&] { pager.commit_all(); }),
                 "commit: the keys and values of 4 given positions are missing"));
  const auto give = [&](std::vector<Rows> k, std::vector<Rows> v) {
    give_on_device(pager, Gift::views(k), Gift::views(v));
  };
  CHECK(contains(refusal([&] { give({gift.k[0]}, gift.v); }),
                 "give: keys of 1 layers and values of 2, expected 2 of each"));
  CHECK(contains(refusal([&] { give({gift.k[0], Rows(5, 2, 16, 0)}, gift.v); }),
                 "k[1]: shape [5, 2, 16], expected [4, 2, 16]"));
  CHECK(contains(refusal([&] { give(gift.k, {Rows(4, 2, 8, 0), gift.v[1]}); }),
                 "v[0]: shape [4, 2, 8], expected [4, 2, 16]"));
  gift.to(pager);
  CHECK(contains(refusal([&] { gift.to(pager); }), "has been given its keys and values already"));
  CHECK(pager.forward_running());
  pager.commit_all();
  CHECK(pager.length(a.id) == 24);
  pager.trim(a.id, 20);

  begin({four, {a.id, 24, 1, RowKind::kCommit}}, 1, 4);
  CHECK(contains(refusal([&] { attend(one); }), "which rows may see, are missing"));
  CHECK(pager.forward_running());
  pager.commit({a.id}, {0});
  require_intact(pager, a);
}

PAGER_TEST("a window lets go of what is given as of what was computed") {
  PagerOptions options = small_options(14, 60);
  options.window = 24;
  options.rewind = 16;
  Pager pager(options);
  Known known{pager.create_sequence(""), {}};
  std::mt19937 random(5);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    append_mix(pager, &known, some_tokens(50, seed), drawn(&random, 50, 3));
    require_intact(pager, known);
    CHECK(pager.released(known.id) >= static_cast<int64_t>(known.tokens.size()) - 24 - 16 - 32);
  }
  CHECK(pager.released(known.id) > 200);
}

DEVICE_TEST("tables of given positions grow by themselves: captured forwards stay what they were") {
  PagerOptions options = small_options(40, 60);
  Pager pager(options);
  const uint64_t generation = pager.generation();
  const PagerStats before = pager.stats();
  Known known{pager.create_sequence(""), {}};
  for (const int64_t count : {3, 40, 200}) {
    append_mix(pager, &known, some_tokens(count, 1), std::vector<Of>(count, Of::kGiven));
  }
  require_intact(pager, known);
  CHECK(pager.generation() == generation);
  CHECK(pager.stats().table_bytes > before.table_bytes);
  CHECK(pager.stats().pinned_bytes > before.pinned_bytes);
}

TEST_CASE("nothing is given into a graph, and no graph stands for a dense forward of a selection") {
  if (!has_shim()) return;
  const OnDevice on("shim");
  PagerOptions options = top_k(small_options(12, 40), 2);
  Pager pager(options);
  const testing::ShimHooks hooks;
  Caller& caller = Caller::current();
  Known known = create(pager, 30, 1);
  const std::vector<TokenId> more = some_tokens(4, 2);
  const std::vector<TokenId> all = joined(known.tokens, more);
  Gift gift({30, 31, 32}, all);
  void* graph = nullptr;
  const auto captured = [&](const auto& step) {
    REQUIRE(hooks.begin_capture(caller.stream()) == 0);
    const std::string message = error_of<InvalidArgumentError>(pager, step);
    REQUIRE(hooks.end_capture(caller.stream(), &graph) == 0);
    hooks.release(graph);
    CHECK(pager.forward_running());
    return message;
  };
  pager.begin({{known.id, 30, 3, RowKind::kGiven}, {known.id, 33, 1, RowKind::kCommit}}, {more[3]},
              {{more[0], more[1], more[2]}, true, caller.stream()});
  CHECK(contains(
      captured([&] { pager.give(Gift::views(gift.k), Gift::views(gift.v), caller.stream()); }),
      "give: stream is being captured"));
  gift.to(pager);
  Tensors t(1);
  CHECK(contains(captured([&] {
                   AttendOptions attend_options;
                   attend_options.stream = caller.stream();
                   pager.attend(0, t.q.view(), t.k.view(), t.v.view(), t.out.view(),
                                attend_options);
                 }),
                 "attend: this forward is dense, and a graph runs"));
  CHECK(contains(error_of<InvalidArgumentError>(
                     pager, [&] { pager.mark_replayed(pager.generation(), caller.stream()); }),
                 "mark_replayed: this forward is dense, and a graph runs"));
  const std::vector<float> outputs = layers_of(pager, {33}, all);
  pager.commit_all();
  known.tokens = all;
  require_intact(pager, known);
  CHECK(same_bits(outputs, expected_of({33}, all, options)));
}

TEST_CASE("a pager without bytes keeps the books of given positions") {
  const OnDevice on("meta");
  PagerOptions options = top_k(small_options(12, 40), 2);
  Pager pager(options);
  const SequenceId id = pager.create_sequence("");
  const std::vector<TokenId> text = some_tokens(60, 1);
  pager.begin({{id, 0, 60, RowKind::kGiven}}, {}, {text, true, nullptr});
  pager.mark_replayed(pager.generation());
  pager.commit_all();
  pager.check_invariants();
  CHECK(pager.tokens(id) == text);
  CHECK(pager.adopt_prefix(pager.create_sequence(""), text) == 48);
}

}  // namespace
}  // namespace kvpager::pager_test
