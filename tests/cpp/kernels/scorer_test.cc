#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "base/half.h"
#include "bits2_score.h"
#include "elements.h"
#include "kernels/kernel_table.h"
#include "kvpager/selection.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

std::vector<std::byte> summary_of(const Layout& layout, const std::vector<float>& tile,
                                  std::byte fill = std::byte{0}) {
  std::vector<std::byte> bytes(tile.size() * static_cast<size_t>(dtype_bytes(layout.k_dtype)));
  for (size_t i = 0; i < tile.size(); ++i) {
    round_to(layout.k_dtype, tile[i], bytes.data(), static_cast<int64_t>(i));
  }
  std::vector<std::byte> out(static_cast<size_t>(bits2::summary_bytes(layout)), fill);
  bits2::summarize(layout, bytes.data(), out.data());
  return out;
}

std::vector<double> scores_of(const Layout& layout, int group, const std::vector<float>& q,
                              const std::vector<std::vector<std::byte>>& summaries) {
  std::vector<std::byte> query(static_cast<size_t>(bits2::query_bytes(layout, group)));
  bits2::prepare(layout, group, q.data(), query.data());
  std::vector<const std::byte*> pointers;
  for (const auto& summary : summaries) pointers.push_back(summary.data());
  std::vector<double> scores(summaries.size());
  bits2::score(layout, group, query.data(), pointers.data(), static_cast<int64_t>(pointers.size()),
               scores.data());
  return scores;
}

std::vector<float> normal_floats(size_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;  // whose own width must not be 0
  std::vector<float> out(count);
  for (float& x : out) x = normal(random) * scale;
  return out;
}

// Chunks whose dimensions differ in mean and width, as trained keys' do.
std::vector<std::vector<float>> chunks_of(const Layout& layout, int count, uint32_t seed) {
  const size_t dims = static_cast<size_t>(layout.k_dim);
  const std::vector<float> mean = normal_floats(dims, seed);
  std::vector<std::vector<float>> chunks;
  for (int c = 0; c < count; ++c) {
    const std::vector<float> shift = normal_floats(dims, seed + 1 + static_cast<uint32_t>(c), 0.5f);
    std::vector<float> tile = normal_floats(dims * static_cast<size_t>(layout.chunk_tokens),
                                            seed + 1000 + static_cast<uint32_t>(c));
    for (size_t i = 0; i < tile.size(); ++i) {
      const size_t d = i / static_cast<size_t>(layout.chunk_tokens);
      tile[i] = tile[i] * (0.3f + static_cast<float>(d % 5) * 0.3f) + mean[d] + shift[d];
    }
    chunks.push_back(tile);
  }
  return chunks;
}

double spearman(const std::vector<double>& a, const std::vector<double>& b) {
  const auto ranks = [](const std::vector<double>& x) {
    std::vector<size_t> order(x.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t i, size_t j) { return x[i] < x[j]; });
    std::vector<double> rank(x.size());
    for (size_t i = 0; i < order.size(); ++i) rank[order[i]] = static_cast<double>(i);
    return rank;
  };
  const auto ra = ranks(a);
  const auto rb = ranks(b);
  const double n = static_cast<double>(a.size());
  double squares = 0;
  for (size_t i = 0; i < ra.size(); ++i) squares += (ra[i] - rb[i]) * (ra[i] - rb[i]);
  return 1 - 6 * squares / (n * (n * n - 1));
}

int16_t read16(const std::byte* p) {
  int16_t x;
  std::memcpy(&x, p, 2);
  return x;
}
float read_float(const std::byte* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

// The int8 codes of a group's queries, as documented: round(q * (127 / largest)), ties to even.
std::vector<int> query_codes(const std::vector<float>& q) {
  float largest = 0;
  for (const float x : q) largest = std::max(largest, std::fabs(x));
  std::vector<int> codes;
  const float inverse = 127.0f / largest;
  for (const float x : q) codes.push_back(static_cast<int>(std::nearbyint(x * inverse)));
  return codes;
}

double plain_sketch_score(const Layout& layout, int group, const std::vector<int>& q,
                          const std::byte* summary) {
  constexpr int bits = 2;
  const int padded = (layout.k_dim + 31) / 32 * 32;
  const int per_byte = 8 / bits;
  const std::byte* low = summary + padded * layout.chunk_tokens * bits / 8;
  const std::byte* step = low + 2 * padded;
  const double low_scale = double{read_float(step + padded)};
  const double step_scale = double{read_float(step + padded + 4)};
  double best = -std::numeric_limits<double>::infinity();
  for (int h = 0; h < group; ++h) {
    for (int t = 0; t < layout.chunk_tokens; ++t) {
      int64_t base = 0;
      int64_t sum = 0;
      for (int d = 0; d < layout.k_dim; ++d) {
        const int dims = 4 * per_byte;
        const int byte =
            static_cast<int>(summary[(d / dims * layout.chunk_tokens + t) * 4 + d % 4]);
        const int code = byte >> (d % dims / 4 * bits) & ((1 << bits) - 1);
        const int x = q[static_cast<size_t>(h * layout.k_dim + d)];
        base += int64_t{x} * read16(low + 2 * d);
        const int product = x * static_cast<int>(step[d]) + 128;
        sum += static_cast<int64_t>(std::floor(product / 256.0)) * code;
      }
      best = std::max(best, low_scale * static_cast<double>(base) +
                                256.0 * step_scale * static_cast<double>(sum));
    }
  }
  return best;
}

TEST_CASE(
    "summaries are whole cache lines, every byte written, and equal for equal keys of any dtype") {
  for (const int tokens : {16, 64, 256}) {
    for (const int k_dim : {16, 48, 128, 512}) {
      const Layout layout = key_layout(tokens, k_dim);
      CHECK(bits2::summary_bytes(layout) % 64 == 0);
      std::vector<float> tile = chunks_of(layout, 1, 3)[0];
      for (float& x : tile) x = bfloat16_to_float(float_to_bfloat16(x));
      const auto zeros = summary_of(layout, tile, std::byte{0});
      CHECK(zeros == summary_of(layout, tile, std::byte{0xFF}));
      CHECK(zeros == summary_of(key_layout(tokens, k_dim, DType::kBFloat16), tile));
    }
  }
}

TEST_CASE("integer scores equal plain integer arithmetic, in every tier, for every group") {
  for (const int tokens : {16, 32, 64, 128, 256}) {
    for (const int k_dim : {16, 64, 80, 128, 512}) {
      for (const int group : {1, 2, 3, 4, 5, 8}) {
        CAPTURE(tokens);
        CAPTURE(k_dim);
        CAPTURE(group);
        const Layout layout = key_layout(tokens, k_dim);
        std::vector<std::vector<std::byte>> summaries;
        for (const auto& tile : chunks_of(layout, 3, 5))
          summaries.push_back(summary_of(layout, tile));
        const std::vector<float> q = normal_floats(static_cast<size_t>(group * k_dim), 9);
        const std::vector<int> codes = query_codes(q);
        std::vector<double> expected;
        for (const auto& summary : summaries)
          expected.push_back(plain_sketch_score(layout, group, codes, summary.data()));
        in_every_tier(
            [&](const KernelTable&) { CHECK(scores_of(layout, group, q, summaries) == expected); });
      }
    }
  }
}

// The largest dot product of any query head and token, of tiles in binary64.
std::vector<double> exact_scores(const Layout& layout, size_t group, const std::vector<float>& q,
                                 const std::vector<std::vector<float>>& tiles) {
  const auto dims = static_cast<size_t>(layout.k_dim);
  const auto tokens = static_cast<size_t>(layout.chunk_tokens);
  std::vector<double> scores;
  for (const std::vector<float>& tile : tiles) {
    double best = -std::numeric_limits<double>::infinity();
    for (size_t h = 0; h < group; ++h) {
      for (size_t t = 0; t < tokens; ++t) {
        double dot = 0;
        for (size_t d = 0; d < dims; ++d)
          dot += double{q[h * dims + d]} * double{tile[d * tokens + t]};
        best = std::max(best, dot);
      }
    }
    scores.push_back(best);
  }
  return scores;
}

// A tile with every key replaced by its four-valued sketch, in binary64 and without integer
// scales.
std::vector<float> ideal_sketch(const Layout& layout, const std::vector<float>& tile) {
  const size_t tokens = static_cast<size_t>(layout.chunk_tokens);
  std::vector<float> out = tile;
  for (size_t first = 0; first < tile.size(); first += tokens) {
    const float* keys = tile.data() + first;
    const auto range = std::minmax_element(keys, keys + tokens);
    const double low = double{*range.first};
    const double step = (double{*range.second} - low) / 3;
    for (size_t t = 0; t < tokens; ++t) {
      const double code = std::clamp(std::nearbyint((double{keys[t]} - low) / step), 0.0, 3.0);
      out[first + t] = static_cast<float>(low + step * code);
    }
  }
  return out;
}

TEST_CASE(
    "sketches rank chunks as their real-valued sketch does, follow all keys, and two bits find a "
    "needle") {
  for (const int k_dim : {64, 128}) {
    const Layout layout = key_layout(64, k_dim);
    auto chunks = chunks_of(layout, 200, 31);
    {
      double worst_ideal = 1;
      double worst_exact = 1;
      for (uint32_t seed = 0; seed < 8; ++seed) {
        const std::vector<float> q = normal_floats(static_cast<size_t>(2 * k_dim), 100 + seed);
        auto tiles = chunks;
        for (size_t d = 0; d < static_cast<size_t>(k_dim); ++d) tiles[77][d * 64 + 5] = 1.5f * q[d];
        std::vector<std::vector<float>> ideals;
        std::vector<std::vector<std::byte>> sketches;
        for (const auto& tile : tiles) {
          ideals.push_back(ideal_sketch(layout, tile));
          sketches.push_back(summary_of(layout, tile));
        }
        const auto truth = exact_scores(layout, 2, q, tiles);
        const auto ideal = exact_scores(layout, 2, q, ideals);
        auto scores = scores_of(layout, 2, q, sketches);
        worst_ideal = std::min(worst_ideal, spearman(scores, ideal));
        worst_exact = std::min(worst_exact, spearman(scores, truth));
        CHECK(std::max_element(scores.begin(), scores.end()) - scores.begin() == 77);

        std::vector<std::byte> query(static_cast<size_t>(bits2::query_bytes(layout, 2)));
        bits2::prepare(layout, 2, q.data(), query.data());
        double error = 0;
        double size = 0;
        for (size_t c = 0; c < scores.size(); ++c) {
          error += std::fabs(scores[c] * bits2::query_scale(query.data()) - ideal[c]);
          size += std::fabs(ideal[c]);
        }
        CHECK(error / size < 0.04);
      }
      MESSAGE("worst Spearman, k_dim " << k_dim << ": with the real-valued sketch " << worst_ideal
                                       << ", with all keys " << worst_exact);
      CHECK(worst_ideal > 0.97);
      CHECK(worst_exact > 0.7);
    }
  }
}

TEST_CASE("scores are finite for zero, equal, huge, denormal and non-finite keys and queries") {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Layout layout = key_layout(64, 64);
  for (const std::vector<float>& values : {std::vector<float>{0.0f},
                                           {2.5f},
                                           {1e30f, -1e30f},
                                           {3.4e38f, -3.4e38f},
                                           {1e-40f, -3e-42f},
                                           {1e-31f, 1e30f},
                                           {nan, inf, -inf, 1.0f}}) {
    std::vector<float> tile(64 * 64);
    for (size_t i = 0; i < tile.size(); ++i) tile[i] = values[i * 7 / 3 % values.size()];
    const std::vector<std::vector<std::byte>> summaries = {summary_of(layout, tile)};
    for (const float size : {0.0f, 1e-42f, 1e-20f, 1.0f, 3.4e38f}) {
      const std::vector<float> q = normal_floats(128, 51, std::min(size, 1e38f));
      for (const double score : scores_of(layout, 2, q, summaries)) CHECK(std::isfinite(score));
    }
    std::vector<float> q(128, nan);
    q[3] = inf;
    for (const double score : scores_of(layout, 2, q, summaries)) CHECK(std::isfinite(score));
  }
}

}  // namespace
}  // namespace kvpager::testing
