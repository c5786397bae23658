#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>

#include "kvpager/error.h"
#include "kvpager/selection.h"

namespace kvpager {
namespace {

// Whether chunk c shares a token with [begin, end).
bool touches(int64_t c, int64_t tokens, int64_t begin, int64_t end) {
  return c * tokens < end && (c + 1) * tokens > begin;
}

// The definition, one chunk at a time, with a full sort.
std::vector<int32_t> plain_select(const Selection& selection, int64_t tokens, int64_t p,
                                  int64_t window, const std::vector<double>& score_of_chunk) {
  std::set<int32_t> in;
  std::vector<std::pair<double, int32_t>> candidates;
  const int64_t recent_start =
      p + 1 > selection.recent ? (p + 1 - selection.recent) / tokens * tokens : 0;
  for (int64_t c = 0; c <= p / tokens; ++c) {
    if (window > 0 && (c + 1) * tokens - 1 <= p - window) continue;
    bool fixed = selection.kind == Selection::Kind::kDense;
    if (!fixed)
      fixed = touches(c, tokens, 0, selection.sinks) || touches(c, tokens, recent_start, p + 1);
    if (selection.kind == Selection::Kind::kTopK) {
      for (const auto& range : selection.always)
        fixed = fixed || touches(c, tokens, range.first, range.second);
    }
    const int32_t id = static_cast<int32_t>(c);
    if (fixed) {
      in.insert(id);
    } else if (selection.kind == Selection::Kind::kTopK) {
      double score = score_of_chunk[static_cast<size_t>(c)];
      if (score != score) score = -std::numeric_limits<double>::infinity();
      candidates.emplace_back(-score, id);
    }
  }
  std::sort(candidates.begin(), candidates.end());
  for (size_t i = 0; i < candidates.size() && i < static_cast<size_t>(selection.chunks); ++i) {
    in.insert(candidates[i].second);
  }
  return {in.begin(), in.end()};
}

std::vector<int32_t> select(const Selection& selection, int64_t tokens, int64_t p, int64_t window,
                            const std::vector<double>& score_of_chunk) {
  std::vector<int32_t> out;
  const CandidateRange range = candidate_range(selection, tokens, p);
  CHECK(range.begin <= range.end);
  select_chunks(selection, tokens, p, window, score_of_chunk.data() + range.begin, &out);
  return out;
}

Selection top_k(int32_t chunks, int64_t sinks, int64_t recent) {
  Selection selection;
  selection.kind = Selection::Kind::kTopK;
  selection.chunks = chunks;
  selection.sinks = sinks;
  selection.recent = recent;
  return selection;
}

TEST_CASE("selection equals the definition at every position, window and configuration") {
  std::mt19937 random(1);
  for (const int64_t tokens : {16, 64}) {
    for (int round = 0; round < 60; ++round) {
      Selection selection =
          top_k(1 + static_cast<int32_t>(random() % 9), static_cast<int64_t>(random() % 100),
                64 + static_cast<int64_t>(random() % 150));
      if (round % 3 == 1) selection.kind = Selection::Kind::kWindow;
      if (round % 7 == 6) selection.kind = Selection::Kind::kDense;
      int64_t at = static_cast<int64_t>(random() % 300);
      for (uint32_t i = 0; i < random() % 4; ++i) {
        const int64_t length = 1 + static_cast<int64_t>(random() % 90);
        selection.always.emplace_back(at, at + length);
        at += length + static_cast<int64_t>(random() % 40);
      }
      selection.validate(tokens, 64);
      std::vector<double> scores(64 * 3);
      for (double& score : scores) score = static_cast<double>(random() % 12) - 6;  // many ties
      const int64_t window = round % 2 == 0 ? 0 : 1 + static_cast<int64_t>(random() % 700);
      for (int64_t p = 0; p < tokens * 30; p += 1 + static_cast<int64_t>(random() % 5)) {
        CAPTURE(p);
        CAPTURE(tokens);
        CAPTURE(window);
        const auto got = select(selection, tokens, p, window, scores);
        REQUIRE(got == plain_select(selection, tokens, p, window, scores));
      }
      for (const int64_t p : {tokens - 1, tokens, tokens + 1, int64_t{63}, int64_t{64}, int64_t{65},
                              selection.recent - 1, selection.recent, selection.recent + tokens}) {
        CAPTURE(p);
        REQUIRE(select(selection, tokens, p, window, scores) ==
                plain_select(selection, tokens, p, window, scores));
      }
    }
  }
}

TEST_CASE("equal scores are taken in order of chunk id") {
  const std::vector<double> scores(40, 1.0);
  CHECK(select(top_k(3, 16, 64), 16, 16 * 20 + 15, 0, scores) ==
        std::vector<int32_t>{0, 1, 2, 3, 17, 18, 19, 20});
}

TEST_CASE("both zeros are equal, NaN is the worst score and infinity the best") {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Selection selection = top_k(2, 0, 64);
  std::vector<double> scores(32, -1.0);
  scores[2] = -0.0;
  scores[5] = 0.0;
  scores[7] = 0.0;
  CHECK(select(selection, 64, 64 * 9, 0, scores) == std::vector<int32_t>{2, 5, 8, 9});
  scores[3] = nan;
  scores[6] = inf;
  scores[4] = -inf;
  CHECK(select(selection, 64, 64 * 9, 0, scores) == std::vector<int32_t>{2, 6, 8, 9});
  scores.assign(32, nan);
  scores[6] = -inf;
  CHECK(select(selection, 64, 64 * 9, 0, scores).size() == 4);
}

TEST_CASE(
    "candidates end where the recent window starts and are sealed for every row of a forward") {
  const int64_t rows = 64;
  for (const int64_t tokens : {16, 64, 128}) {
    const Selection selection = top_k(4, 64, 100);
    for (int64_t p = 0; p < 2000; ++p) {
      const CandidateRange range = candidate_range(selection, tokens, p);
      CHECK(range.end * tokens <= std::max<int64_t>(0, p + 1 - selection.recent));
      // The forward that holds p began at p - rows + 1 or later; what it began with is sealed up to
      // there.
      CHECK(range.end <= std::max<int64_t>(0, p - rows + 1) / tokens);
      if (range.begin < range.end) CHECK(range.begin == (64 + tokens - 1) / tokens);
    }
  }
}

TEST_CASE("selections are appended") {
  std::vector<int32_t> out = {7};
  select_chunks(Selection{}, 64, 100, 0, nullptr, &out);
  CHECK(out == std::vector<int32_t>{7, 0, 1});
}

TEST_CASE("a selection that cannot work is refused by the name of its field") {
  const auto refused = [](const Selection& selection, const char* field) {
    CHECK_THROWS_WITH_AS(selection.validate(64, 64), doctest::Contains(field),
                         InvalidArgumentError);
  };
  top_k(1, 0, 64).validate(64, 64);
  Selection{}.validate(64, 1000);
  refused(top_k(0, 0, 64), "selection.chunks is 0");
  refused(top_k(1, -1, 64), "selection.sinks is -1");
  refused(top_k(1, 0, 63), "selection.recent is 63");
  Selection selection = top_k(1, 0, 64);
  selection.always = {{4, 4}};
  refused(selection, "selection.always[0]");
  selection.always = {{-1, 4}};
  refused(selection, "selection.always[0]");
  selection.always = {{0, 10}, {9, 12}};
  refused(selection, "selection.always[1]");
  // Sums of these and a position would not fit 64 bits.
  constexpr int64_t kLast = INT64_MAX;
  selection.always = {{0, kLast}};
  refused(selection, "selection.always[0]");
  selection.always.clear();
  for (int64_t i = 0; i <= 65536; ++i) selection.always.push_back({i, i + 1});
  refused(selection, "selection.always has 65537 ranges");
  selection.always.pop_back();
  selection.validate(64, 64);
  refused(top_k(1, kLast, 64), "selection.sinks is 9223372036854775807");
  refused(top_k(1, 0, kLast), "selection.recent is 9223372036854775807");
}

}  // namespace
}  // namespace kvpager
