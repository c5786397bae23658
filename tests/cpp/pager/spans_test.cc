// A forward whose rows are named in spans, and whom residency lets go of meanwhile.
#include <map>
#include <optional>
#include <random>
#include <set>

#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

struct Named {
  std::vector<RowSpan> spans;
  std::vector<TokenId> tokens;
};

// The same rows, cut into spans wherever `cut` says so beside where they have to be.
template <class Cut>
Named name(const std::vector<RowDescriptor>& rows, const Cut& cut) {
  Named named;
  for (const RowDescriptor& row : rows) {
    named.tokens.push_back(row.token);
    RowSpan* last = named.spans.empty() ? nullptr : &named.spans.back();
    const bool same =
        last != nullptr && last->kind == row.kind && last->sequence == row.sequence &&
        (row.kind == RowKind::kPadding || last->position + last->count == row.position);
    if (!same || cut()) {
      named.spans.push_back({row.sequence, row.position, 1, row.kind});
    } else {
      ++last->count;
    }
  }
  return named;
}

std::vector<float> layers_of(Pager& pager, const std::vector<RowDescriptor>& rows,
                             const std::map<int64_t, std::vector<TokenId>>& texts) {
  return run_layers_of(pager, rows, [&](const RowDescriptor& row) {
    return histories(texts.at(row.sequence.value()))[static_cast<size_t>(row.position)];
  });
}

PAGER_TEST("a forward is the same however its rows are cut into spans") {
  Pager by_rows(small_options(16, 64));
  Pager by_spans(small_options(16, 64));
  Pager in_pieces(small_options(16, 64));
  std::mt19937 random(3);
  std::map<int64_t, std::vector<TokenId>> texts;
  std::vector<SequenceId> ids;                                 // of by_rows
  std::map<const Pager*, std::map<int64_t, SequenceId>> same;  // what each pager calls them
  for (int i = 0; i < 3; ++i) {
    ids.push_back(by_rows.create_sequence(""));
    same[&by_rows][ids.back().value()] = ids.back();
    same[&by_spans][ids.back().value()] = by_spans.create_sequence("");
    same[&in_pieces][ids.back().value()] = in_pieces.create_sequence("");
    texts[ids.back().value()] = {};
  }
  const auto begin = [&](Pager& pager, Named named) {
    for (RowSpan& span : named.spans) {
      if (span.kind == RowKind::kPadding) continue;
      span.sequence = same[&pager].at(span.sequence.value());
    }
    pager.begin(named.spans, named.tokens);
  };
  for (int forward = 0; forward < 40; ++forward) {
    std::vector<RowDescriptor> rows;
    // Sequences take turns: runs of rows of one, in between rows of others, reading rows and padding.
    while (static_cast<int>(rows.size()) < kRows) {
      const SequenceId id = ids[random() % ids.size()];
      std::vector<TokenId>& text = texts[id.value()];
      const auto dice = random() % 6;
      const int64_t begun = static_cast<int64_t>(text.size());
      if (dice == 0) {
        rows.emplace_back();
      } else if (dice == 1 && by_rows.length(id) > 0) {
        rows.push_back(
            {id, static_cast<int64_t>(random()) % by_rows.length(id), 0, RowKind::kRead});
      } else {
        const auto room = kRows - static_cast<int64_t>(rows.size());
        const auto count = std::min<int64_t>(room, 1 + static_cast<int64_t>(random() % 20));
        for (int64_t i = 0; i < count; ++i) {
          text.push_back(static_cast<TokenId>(random() % 1000));
          rows.push_back({id, begun + i, text.back(), RowKind::kCommit});
        }
      }
    }
    if (std::all_of(rows.begin(), rows.end(),
                    [](const RowDescriptor& row) { return row.kind == RowKind::kPadding; })) {
      continue;
    }
    by_rows.begin(rows);
    const Named whole = name(rows, [] { return false; });
    begin(by_spans, whole);
    const Named pieces = name(rows, [&] { return random() % 3 == 0; });
    begin(in_pieces, pieces);
    const std::vector<float> outputs = layers_of(by_rows, rows, texts);
    CHECK(same_bits(outputs, layers_of(by_spans, rows, texts)));
    CHECK(same_bits(outputs, layers_of(in_pieces, rows, texts)));
    for (Pager* pager : {&by_rows, &by_spans, &in_pieces}) {
      pager->commit_all();
      pager->check_invariants();
      for (const SequenceId id : ids) {
        const SequenceId its = same[pager].at(id.value());
        REQUIRE(pager->tokens(its) == texts[id.value()]);
        const auto names = pager->chain_hashes(texts[id.value()], "");
        const auto infos = pager->ledger(its);
        for (size_t c = 0; c < names.size(); ++c) REQUIRE(infos[c].chain_hash == names[c]);
      }
    }
  }
  for (const SequenceId id : ids) {
    CHECK(by_rows.length(id) > 64);
    require_intact(by_spans, Known{same[&by_spans].at(id.value()), texts[id.value()]});
    require_intact(in_pieces, Known{same[&in_pieces].at(id.value()), texts[id.value()]});
  }
}

PAGER_TEST(
    "spans that do not fit their tokens or their sequence are refused, and nothing is taken") {
  Pager pager(small_options(8, 32));
  Known a = create(pager, 20, 1);
  const PagerStats before = pager.stats();
  const auto refusal = [&](const std::vector<RowSpan>& spans, size_t tokens) {
    return error_of<InvalidArgumentError>(
        pager, [&] { pager.begin(spans, std::vector<TokenId>(tokens, 5)); });
  };
  const RowSpan four{a.id, 20, 4, RowKind::kCommit};
  CHECK(contains(refusal({four}, 3), "spans: 4 rows from row 0 on, expected 1 to 3"));
  CHECK(contains(refusal({four}, 5), "of 4 rows, expected as many as tokens, 5"));
  CHECK(contains(refusal({four, {a.id, 24, 0, RowKind::kCommit}}, 4), "spans: 0 rows from row 4"));
  CHECK(contains(refusal({{a.id, 20, -1, RowKind::kCommit}}, 4), "spans: -1 rows"));
  CHECK(contains(refusal({{a.id, 20, INT64_MAX, RowKind::kCommit}}, 4), "spans: "));
  CHECK(contains(refusal({{a.id, 21, 4, RowKind::kCommit}}, 4), "position 21 of sequence"));
  CHECK(contains(refusal({four, {a.id, 25, 2, RowKind::kCommit}}, 6), "row 4: position 25"));
  CHECK(contains(refusal({four, {a.id, 20, 2, RowKind::kCommit}}, 6), "expected 24"));
  CHECK(contains(refusal({{a.id, 18, 3, RowKind::kRead}}, 3), "row 2: reads position 20"));
  CHECK(contains(refusal({{a.id, INT64_MAX, 3, RowKind::kRead}}, 3), "row 0: reads position"));
  CHECK(contains(refusal({{a.id, -2, 3, RowKind::kRead}}, 3), "row 0: reads position -2"));
  CHECK(contains(refusal({}, 0), "rows: 0 given"));
  CHECK(contains(refusal({{SequenceId(-99), 0, 1, RowKind::kCommit}}, 1), "does not exist"));
  CHECK(contains(refusal({{SequenceId(), 0, 4, RowKind::kPadding}}, 4), "every row is padding"));
  CHECK(pager.stats().open_blocks == before.open_blocks);
  CHECK(pager.stats().forwards == before.forwards);
  append(pager, &a, some_tokens(16, 2));  // as if nothing had been tried
  require_intact(pager, a);
}

TEST_CASE("whoever leaves the pool is whom the policy names, whatever has happened since it came") {
  for (const Policy policy : {Policy::kLru, Policy::kQk}) {
    PagerOptions options = small_options(9, 64);
    options.policy = policy;
    Pager pager(options);
    std::mt19937 random(policy == Policy::kLru ? 5 : 6);
    std::vector<Known> known;
    for (uint64_t i = 0; i < 2; ++i) known.push_back(create(pager, 5 * 16, 10 + i));
    std::optional<PinId> pinned;
    int left = 0;
    for (int step = 0; step < 800; ++step) {
      Known& one = known[random() % known.size()];
      const auto dice = random() % 8;
      if (dice < 3) {
        const auto length = static_cast<int64_t>(one.tokens.size());
        std::vector<RowDescriptor> rows = {{one.id, length - 1, 0, RowKind::kRead}};
        rows.resize(kRows);
        pager.begin(rows);
        run_layers(pager, rows, one.tokens);
        // Whoever goes for this one goes by what is known before the forward ends.
        const auto at = static_cast<int64_t>(random()) % length;
        pager.unpin(pager.pin(one.id, at, at + 1));
        pager.commit_all();
      } else if (dice == 3 && one.tokens.size() < 16 * 16) {
        append(pager, &one, some_tokens(1 + static_cast<int64_t>(random() % 20), random()));
      } else if (dice == 4) {
        if (pinned) pager.unpin(*pinned);
        const auto at = static_cast<int64_t>(random() % (one.tokens.size() - 16));
        pinned = pager.pin(one.id, at, at + 1);
      } else if (dice == 5 && random() % 4 == 0) {
        pager.evict_all();
      }
      pager.check_invariants();
      // A chunk that is not there comes: who goes?
      struct Chunk {
        SequenceId sequence;
        ChunkInfo info;
        bool sheltered;
      };
      std::vector<Chunk> here, elsewhere;
      for (const Known& each : known) {
        const auto infos = pager.ledger(each.id);
        const size_t sealed = each.tokens.size() / 16;
        for (size_t c = 0; c < sealed; ++c) {
          auto& side = infos[c].block.value() >= 0 ? here : elsewhere;
          if (infos[c].pins == 0) side.push_back({each.id, infos[c], c + 1 == sealed});
        }
      }
      if (pager.stats().free_blocks > 0 || here.empty() || elsewhere.empty()) continue;
      const auto key = [&](const Chunk& chunk) {
        return std::tuple(chunk.sheltered, policy == Policy::kQk ? chunk.info.qk_score : 0.0,
                          chunk.info.last_use);
      };
      auto least = key(here[0]);
      for (const Chunk& chunk : here) least = std::min(least, key(chunk));
      const Chunk& comes = elsewhere[random() % elsewhere.size()];
      const PinId pin = pager.pin(comes.sequence, comes.info.start, comes.info.stop);
      for (const Chunk& chunk : here) {
        const ChunkInfo now = pager.ledger(chunk.sequence)[static_cast<size_t>(chunk.info.chunk)];
        if (now.block.value() >= 0) continue;
        CHECK(key(chunk) == least);
        ++left;
      }
      pager.unpin(pin);
    }
    CHECK(left > 100);
  }
}

}  // namespace
}  // namespace kvpager::pager_test
