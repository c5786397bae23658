#include "device/tables.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace kvpager::device {
namespace {

struct Drawn {
  std::vector<gpu::Row> rows;
  std::vector<gpu::Part> parts;
};

// Parts of random sizes, every one with a row, in any order among padding.
Drawn draw(std::mt19937& random, int most_rows) {
  Drawn drawn;
  const int count = 1 + static_cast<int>(random() % static_cast<unsigned>(most_rows));
  const int parts = 1 + static_cast<int>(random() % static_cast<unsigned>(count));
  drawn.parts.resize(static_cast<size_t>(parts));
  for (int i = 0; i < count; ++i) {
    gpu::Row row;
    const unsigned skew = random() % 2 == 0 ? 1 : static_cast<unsigned>(parts);
    row.part = i < parts ? i : random() % 5 == 0 ? -1 : static_cast<int>(random() % skew);
    row.position = static_cast<int64_t>(random() % 1000);
    drawn.rows.push_back(row);
  }
  std::shuffle(drawn.rows.begin(), drawn.rows.end(), random);
  return drawn;
}

TEST_CASE("waves have every chunk of every part once, in order, and say the most of one part") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    CAPTURE(trial);
    const auto parts = static_cast<int32_t>(1 + random() % 5);
    const unsigned often = 1 + random() % 4;
    std::vector<int64_t> lengths;
    std::vector<std::pair<int32_t, int64_t>> expected;  // part, chunk
    std::vector<std::vector<int64_t>> counts;           // of every wave: chunks by part
    WaveCutter cutter;
    bool next = true;
    for (int32_t p = 0; p < parts; ++p) {
      const auto length = static_cast<int64_t>(1 + random() % 300);
      lengths.push_back(length);
      for (int64_t begin = 0; begin < length; begin += gpu::kWaveChunks) {
        const int64_t end = std::min(begin + gpu::kWaveChunks, length);
        if (next) counts.emplace_back(static_cast<size_t>(parts), 0);
        counts.back()[static_cast<size_t>(p)] += end - begin;
        cutter.add(p, end);
        for (int64_t c = begin; c < end; ++c) expected.push_back({p, c});
        if ((next = random() % often == 0)) cutter.cut();
      }
    }
    const std::vector<gpu::Wave> waves = cutter.take();
    REQUIRE(waves.size() == counts.size());
    if (waves.size() == 1) {
      CHECK(waves[0].most_chunks == 0);  // all there is, however much a later forward has
      continue;
    }
    std::vector<std::pair<int32_t, int64_t>> held;
    for (size_t w = 0; w < waves.size(); ++w) {
      const gpu::Wave& wave = waves[w];
      CHECK(wave.most_chunks == *std::max_element(counts[w].begin(), counts[w].end()));
      for (int32_t p = wave.first_part; p <= wave.last_part; ++p) {
        const int64_t length = lengths[static_cast<size_t>(p)];
        const int64_t begin = p == wave.first_part ? wave.first_chunk : 0;
        const int64_t end = p == wave.last_part ? wave.end_chunk : length;
        CHECK((end == length || end % gpu::kWaveChunks == 0));
        for (int64_t c = begin; c < end; ++c) held.push_back({p, c});
      }
    }
    CHECK(held == expected);
  }
}

TEST_CASE("rows are ordered by part and position, and tiles cover every query of every part once") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 400; ++trial) {
    CAPTURE(trial);
    Drawn drawn = draw(random, trial % 4 == 0 ? 300 : 12);
    const int32_t rows = static_cast<int32_t>(drawn.rows.size());
    const int32_t parts = static_cast<int32_t>(drawn.parts.size());
    const int32_t group = 1 + static_cast<int32_t>(random() % 40);
    const int32_t small = static_cast<int32_t>(random() % 100);
    Arrangement made;
    made.order = {77};  // of the forward before
    made.tiles = {{7, 7, 7}};
    arrange(drawn.rows.data(), rows, group, drawn.parts.data(), parts, &made, small);

    std::set<int32_t> seen(made.order.begin(), made.order.end());
    CHECK(seen.size() == made.order.size());
    int64_t wrong = 0;
    size_t next = 0;
    for (int32_t p = 0; p < parts; ++p) {
      const gpu::Part& part = drawn.parts[static_cast<size_t>(p)];
      wrong += part.first_row != static_cast<int32_t>(next);
      for (int32_t i = 0; i < part.rows; ++i, ++next) {
        const gpu::Row& row = drawn.rows[static_cast<size_t>(made.order[next])];
        wrong += row.part != p;
        wrong +=
            i > 0 && row.position < drawn.rows[static_cast<size_t>(made.order[next - 1])].position;
      }
    }
    CHECK(next == made.order.size());
    CHECK(static_cast<int64_t>(next) ==
          std::count_if(drawn.rows.begin(), drawn.rows.end(),
                        [](const gpu::Row& row) { return row.part >= 0; }));

    REQUIRE(static_cast<int32_t>(made.tiles.size()) == made.small_tiles + made.large_tiles);
    std::vector<std::vector<int>> covered(drawn.parts.size());
    for (size_t p = 0; p < covered.size(); ++p) {
      covered[p].resize(static_cast<size_t>(drawn.parts[p].rows * group));
    }
    for (size_t i = 0; i < made.tiles.size(); ++i) {
      const gpu::Tile& tile = made.tiles[i];
      const bool is_small = i < static_cast<size_t>(made.small_tiles);
      const int32_t most = is_small ? gpu::kSmallTile : gpu::kLargeTile;
      wrong += tile.begin >= tile.end || tile.end - tile.begin > most;
      // A large tile is not taken for what small ones should do.
      wrong += !is_small && tile.end - tile.begin <= std::min(small, gpu::kLargeTile - 1);
      for (int32_t q = tile.begin; q < tile.end; ++q) {
        ++covered[static_cast<size_t>(tile.part)].at(static_cast<size_t>(q));
      }
    }
    for (const auto& part : covered) {
      for (const int times : part) wrong += times != 1;
    }
    CHECK(wrong == 0);
    CHECK(made.small_tiles <= most_small_tiles(rows, group, small));
    CHECK(made.large_tiles <= most_large_tiles(rows, group, small));
  }
}

TEST_CASE("the tables of the largest forward fit their block and do not overlap") {
  for (const int32_t group : {1, 5, 16, 40, 200}) {
    for (const int32_t sets : {0, 2}) {
      const gpu::Bounds bounds{33, 1000, 4001};
      const TableLayout layout(bounds, group, sets);
      std::vector<uint64_t> words(static_cast<size_t>(layout.bytes()) / 8);
      auto* base = reinterpret_cast<std::byte*>(words.data());
      const TableArrays arrays = layout.arrays(base);
      std::vector<std::pair<std::byte*, std::byte*>> ranges;
      const auto add = [&](auto* array, int64_t count) {
        auto* begin = reinterpret_cast<std::byte*>(array);
        CHECK((begin - base) % 256 == 0);
        ranges.emplace_back(begin, begin + count * static_cast<int64_t>(sizeof(*array)));
      };
      add(arrays.header, 1);
      add(arrays.rows, bounds.rows);
      add(arrays.parts, bounds.rows);
      add(arrays.order, bounds.rows);
      add(arrays.tiles, most_small_tiles(33, group) + most_large_tiles(33, group));
      CHECK(ranges.back().second <= base + layout.fixed().end);
      add(arrays.chunks, bounds.entries);
      CHECK(ranges.back().second == base + layout.chunks(bounds.entries).end);
      add(arrays.summaries, bounds.entries);
      CHECK(ranges.back().first == base + layout.summaries(bounds.entries).begin);
      for (uint64_t* staged : arrays.staged) add(staged, bounds.entries);
      CHECK(arrays.staged.size() == static_cast<size_t>(sets));
      for (size_t i = 0; i < ranges.size(); ++i) {
        CHECK(ranges[i].second <=
              (i + 1 < ranges.size() ? ranges[i + 1].first : base + layout.bytes()));
      }
      const gpu::Tables tables = layout.tables(base, sets - 1);
      CHECK(tables.chunks == arrays.chunks);
      CHECK(tables.tiles == arrays.tiles);
      CHECK(tables.staged == (sets == 0 ? nullptr : arrays.staged.back()));
    }
  }
}

}  // namespace
}  // namespace kvpager::device
