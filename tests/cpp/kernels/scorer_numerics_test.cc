// Summaries and scores have one set of bits: in every tier, in every mode of the calling thread, for
// keys and queries of any size, in any company and at any address.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/half.h"
#include "bits2_score.h"
#include "elements.h"
#include "float_mode.h"
#include "kernels/kernel_table.h"
#include "kvpager/selection.h"
#include "noise.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Keys {
  std::string what;
  float scale;
  std::vector<float> sprinkled;  // every few elements one of these, in turn
};

const Keys kKinds[] = {
    {"ordinary", 1.0f, {}},
    {"zeros of either sign among ordinary", 1.0f, {0.0f, -0.0f}},
    {"zeros of either sign alone", 0.0f, {0.0f, -0.0f}},
    {"denormals", 0x1p-130f, {0x1p-149f, -0x1p-149f}},
    {"denormals among ordinary", 1.0f, {0x1p-140f, -0x1p-127f}},
    {"near what counts as zero", 1e-30f, {}},
    {"near the greatest", 3e38f, {std::numeric_limits<float>::max(), 0.0f}},
    {"not finite", 1.0f, {kNaN, kInfinity, -kInfinity, -kNaN}},
};

std::vector<std::byte> tile_of(const Layout& layout, const Keys& keys, uint64_t seed) {
  const size_t count = static_cast<size_t>(layout.k_dim * layout.chunk_tokens);
  std::vector<std::byte> tile(count * static_cast<size_t>(dtype_bytes(layout.k_dtype)));
  size_t turn = seed;
  for (size_t i = 0; i < count; ++i) {
    float x = keys.scale * noise(seed, i);
    if (!keys.sprinkled.empty() && i % 3 == 0) x = keys.sprinkled[turn++ % keys.sprinkled.size()];
    round_to(layout.k_dtype, x, tile.data(), static_cast<int64_t>(i));
  }
  return tile;
}

// Everything that is made of some chunks and a query.
struct Made {
  std::vector<std::vector<std::byte>> summaries;
  std::vector<std::byte> query;
  double scale = 0;
  std::vector<double> scores;
};

constexpr int kGroup = 3;

Made make(const Layout& layout, const Keys& keys, const std::vector<float>& q) {
  Made made;
  std::vector<const std::byte*> pointers;
  for (uint64_t chunk = 0; chunk < 5; ++chunk) {
    const std::vector<std::byte> tile = tile_of(layout, keys, chunk);
    made.summaries.emplace_back(static_cast<size_t>(bits2::summary_bytes(layout)), std::byte{0x5A});
    bits2::summarize(layout, tile.data(), made.summaries.back().data());
  }
  made.query.assign(static_cast<size_t>(bits2::query_bytes(layout, kGroup)), std::byte{0x5A});
  bits2::prepare(layout, kGroup, q.data(), made.query.data());
  made.scale = bits2::query_scale(made.query.data());
  for (const auto& summary : made.summaries) pointers.push_back(summary.data());
  made.scores.assign(pointers.size(), -1.0);
  bits2::score(layout, kGroup, made.query.data(), pointers.data(),
               static_cast<int64_t>(pointers.size()), made.scores.data());
  return made;
}

bool same_bits(const Made& a, const Made& b) {
  return a.summaries == b.summaries && a.query == b.query &&
         std::memcmp(&a.scale, &b.scale, sizeof a.scale) == 0 &&
         std::memcmp(a.scores.data(), b.scores.data(), a.scores.size() * sizeof(double)) == 0;
}

TEST_CASE("summaries, prepared queries and scores are the same in every tier and thread mode") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Keys& keys : kKinds) {
      for (const float size : {0.0f, 1.0f, 0x1p-140f, 1e-30f, 3e38f}) {
        CAPTURE(std::string(dtype_name(dtype)));
        CAPTURE(keys.what);
        CAPTURE(size);
        const Layout layout = key_layout(size == 1.0f ? 64 : 16, 48, dtype);
        std::vector<float> q(static_cast<size_t>(kGroup * layout.k_dim));
        for (size_t i = 0; i < q.size(); ++i) q[i] = size * noise(99, i);
        q[7] = -0.0f;
        const Made expected = [&] {
          const KernelOverride tier(*runnable_kernels().front());
          return make(layout, keys, q);
        }();
        in_every_tier([&](const KernelTable&) {
          for (const NamedMode& mode : kModes) {
            CAPTURE(std::string(mode.name));
            // The tiles are made outside: a flushing thread would make others.
            Made got = expected;
            std::vector<std::vector<std::byte>> tiles;
            for (uint64_t chunk = 0; chunk < 5; ++chunk) {
              tiles.push_back(tile_of(layout, keys, chunk));
            }
            std::vector<const std::byte*> pointers;
            for (auto& summary : got.summaries) {
              std::fill(summary.begin(), summary.end(), std::byte{0xC3});
              pointers.push_back(summary.data());
            }
            std::fill(got.query.begin(), got.query.end(), std::byte{0xC3});
            {
              const FloatMode scope(mode.bits);
              for (size_t i = 0; i < tiles.size(); ++i) {
                bits2::summarize(layout, tiles[i].data(), got.summaries[i].data());
              }
              bits2::prepare(layout, kGroup, q.data(), got.query.data());
              bits2::score(layout, kGroup, got.query.data(), pointers.data(), 5, got.scores.data());
            }
            got.scale = bits2::query_scale(got.query.data());
            CHECK(same_bits(got, expected));
          }
        });
      }
    }
  }
}

TEST_CASE("the score of a summary is its own, whatever is scored beside it and in what order") {
  for (const int tokens : {16, 64, 256}) {
    const Layout layout = key_layout(tokens, 80, DType::kBFloat16);
    std::vector<float> q(static_cast<size_t>(kGroup * layout.k_dim));
    for (size_t i = 0; i < q.size(); ++i) q[i] = noise(99, i);
    const Made made = make(layout, kKinds[0], q);
    in_every_tier([&](const KernelTable&) {
      std::vector<const std::byte*> backwards;
      for (size_t i = made.summaries.size(); i-- > 0;) {
        backwards.push_back(made.summaries[i].data());
        double alone = -1;
        bits2::score(layout, kGroup, made.query.data(), &backwards.back(), 1, &alone);
        CHECK(std::memcmp(&alone, &made.scores[i], sizeof alone) == 0);
      }
      std::vector<double> scores(backwards.size());
      bits2::score(layout, kGroup, made.query.data(), backwards.data(), 5, scores.data());
      for (size_t i = 0; i < 5; ++i) CHECK(scores[i] == made.scores[4 - i]);
    });
  }
}

TEST_CASE("rows that are scored together have the scores they have alone, in every tier") {
  constexpr int kChunks = 9;
  for (const Layout& layout :
       {key_layout(64, 128, DType::kBFloat16), key_layout(16, 48, DType::kFloat32),
        key_layout(256, 80, DType::kFloat16)}) {
    std::vector<std::vector<std::byte>> summaries;
    std::vector<const std::byte*> pointers;
    for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::vector<std::byte> tile = tile_of(layout, kKinds[chunk % 3], chunk);
      summaries.emplace_back(static_cast<size_t>(bits2::summary_bytes(layout)));
      bits2::summarize(layout, tile.data(), summaries.back().data());
    }
    for (const auto& summary : summaries) pointers.push_back(summary.data());
    for (const int group : {1, 2, 3, 4, 5, 8, 9, 16}) {
      for (const int64_t rows : {1, 2, 3, 7, 33}) {
        if (rows * group > 150) continue;
        CAPTURE(group);
        CAPTURE(rows);
        const size_t numbers = static_cast<size_t>(group * layout.k_dim);
        std::vector<std::vector<std::byte>> queries;
        std::vector<const std::byte*> prepared;
        for (int64_t row = 0; row < rows; ++row) {
          std::vector<float> q(numbers);
          for (size_t i = 0; i < numbers; ++i) q[i] = noise(7 + static_cast<uint64_t>(row), i);
          queries.emplace_back(static_cast<size_t>(bits2::query_bytes(layout, group)));
          bits2::prepare(layout, group, q.data(), queries.back().data());
        }
        for (const auto& query : queries) prepared.push_back(query.data());
        std::vector<std::vector<double>> alone(queries.size(), std::vector<double>(kChunks));
        {
          const KernelOverride tier(*runnable_kernels().front());
          for (size_t row = 0; row < queries.size(); ++row) {
            bits2::score(layout, group, prepared[row], pointers.data(), kChunks, alone[row].data());
          }
        }
        in_every_tier([&](const KernelTable&) {
          std::vector<std::vector<double>> together(queries.size(),
                                                    std::vector<double>(kChunks, -1.0));
          std::vector<double*> scores;
          for (auto& row : together) scores.push_back(row.data());
          bits2::score_rows(layout, group, rows, prepared.data(), pointers.data(), kChunks,
                            scores.data());
          for (size_t row = 0; row < queries.size(); ++row) {
            CHECK(std::memcmp(together[row].data(), alone[row].data(), kChunks * sizeof(double)) ==
                  0);
          }
        });
      }
    }
  }
}

TEST_CASE(
    "zeros of either sign tie and denormal scores rank, in every mode of the calling thread") {
  Selection selection;
  selection.kind = Selection::Kind::kTopK;
  selection.chunks = 2;
  selection.sinks = 0;
  selection.recent = 16;
  const double tiny = std::numeric_limits<double>::denorm_min();
  struct Ranking {
    std::vector<double> scores;
    std::vector<int32_t> chosen;
  };
  for (const Ranking& ranking :
       {Ranking{{-1.0, -0.0, 0.0, -0.0, 0.0}, {1, 2}},
        Ranking{{-1.0, 0.0, -0.0, 0.0, -0.0}, {1, 2}},
        Ranking{{0.0, -0.0, tiny, 0.0, tiny}, {2, 4}},
        Ranking{{-tiny, -0.0, -tiny, 0.0, -1.0}, {1, 3}},
        Ranking{{std::nan(""), -tiny, -std::nan(""), -1e300, std::nan("")}, {1, 3}},
        Ranking{{-std::numeric_limits<double>::infinity(), std::nan(""), 1e308,
                 std::numeric_limits<double>::infinity(), 0.0},
                {2, 3}}}) {
    for (const NamedMode& mode : kModes) {
      CAPTURE(std::string(mode.name));
      std::vector<int32_t> out;
      {
        const FloatMode scope(mode.bits);
        select_chunks(selection, 16, 5 * 16 + 15, 0, ranking.scores.data(), &out);
      }
      std::vector<int32_t> expected = ranking.chosen;
      expected.push_back(5);
      CHECK(out == expected);
    }
  }
}

}  // namespace
}  // namespace kvpager::testing
