#include "device/tables.h"

#include <algorithm>

#include "kvpager/require.h"

namespace kvpager::device {
namespace {

constexpr int64_t kArrayAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
}

template <class T>
int64_t array_bytes(int64_t count) {
  return aligned(count * static_cast<int64_t>(sizeof(T)));
}

int32_t tiles_of(int32_t queries, int32_t size) { return (queries + size - 1) / size; }

// Queries of `queries` that go into large tiles.
int32_t large_queries(int32_t queries, int32_t small_queries) {
  if (queries <= small_queries) return 0;
  const int32_t whole = (queries - small_queries) / gpu::kLargeTile * gpu::kLargeTile;
  return queries - whole > small_queries ? std::min(queries, whole + gpu::kLargeTile) : whole;
}

}  // namespace

void arrange(const gpu::Row* rows, int32_t row_count, int32_t group, gpu::Part* parts,
             int32_t part_count, Arrangement* out, int32_t small_queries) {
  out->order.clear();
  out->tiles.clear();
  for (int32_t i = 0; i < row_count; ++i) {
    KVPAGER_REQUIRE(rows[i].part < part_count);
    if (rows[i].part >= 0) out->order.push_back(i);
  }
  std::stable_sort(out->order.begin(), out->order.end(), [&](int32_t a, int32_t b) {
    if (rows[a].part != rows[b].part) return rows[a].part < rows[b].part;
    return rows[a].position < rows[b].position;
  });
  size_t next = 0;
  for (int32_t p = 0; p < part_count; ++p) {
    const size_t first = next;
    while (next < out->order.size() && rows[out->order[next]].part == p) ++next;
    parts[p].first_row = static_cast<int32_t>(first);
    parts[p].rows = static_cast<int32_t>(next - first);
    const int32_t queries = parts[p].rows * group;
    parts[p].large_queries = large_queries(queries, small_queries);
    for (int32_t q = parts[p].large_queries; q < queries; q += gpu::kSmallTile) {
      out->tiles.push_back({p, q, std::min(queries, q + gpu::kSmallTile)});
    }
  }
  out->small_tiles = static_cast<int32_t>(out->tiles.size());
  for (int32_t p = 0; p < part_count; ++p) {
    const int32_t end = parts[p].large_queries;
    for (int32_t q = 0; q < end; q += gpu::kLargeTile) {
      out->tiles.push_back({p, q, std::min(end, q + gpu::kLargeTile)});
    }
  }
  out->large_tiles = static_cast<int32_t>(out->tiles.size()) - out->small_tiles;
}

int32_t most_small_tiles(int32_t rows, int32_t group, int32_t small_queries) {
  return rows *
         std::min(tiles_of(small_queries, gpu::kSmallTile), tiles_of(group, gpu::kSmallTile));
}

int32_t most_large_tiles(int32_t rows, int32_t group, int32_t small_queries) {
  const int32_t queries = rows * group;
  // Each part that has one rounds up once, and has more than small_queries.
  return std::min(rows * tiles_of(group, gpu::kLargeTile),
                  queries / gpu::kLargeTile + queries / (small_queries + 1));
}

gpu::HostCounts most_counts(const gpu::Bounds& bounds, int32_t group, int32_t small_queries) {
  gpu::HostCounts counts;
  counts.rows = bounds.rows;
  counts.parts = bounds.rows;
  counts.small_tiles = most_small_tiles(bounds.rows, group, small_queries);
  counts.large_tiles = most_large_tiles(bounds.rows, group, small_queries);
  counts.max_visible = bounds.chunks;
  return counts;
}

void WaveCutter::add(int32_t part, int64_t end) {
  KVPAGER_REQUIRE(part >= part_);
  const int64_t begin = part == part_ ? end_ : 0;
  KVPAGER_REQUIRE(begin < end && begin % gpu::kWaveChunks == 0);
  if (!open_) {
    waves_.emplace_back();
    waves_.back().first_part = part;
    waves_.back().first_chunk = begin;
    open_ = true;
  }
  gpu::Wave& wave = waves_.back();
  const bool cut_part = part == wave.first_part;
  wave.last_part = part;
  wave.end_chunk = end;
  wave.most_chunks = std::max(wave.most_chunks, end - (cut_part ? wave.first_chunk : 0));
  part_ = part;
  end_ = end;
}

void WaveCutter::cut() { open_ = false; }

std::vector<gpu::Wave> WaveCutter::take() {
  if (waves_.size() <= 1) return {gpu::Wave()};
  return std::move(waves_);
}

TableLayout::TableLayout(const gpu::Bounds& bounds, int32_t group, int32_t staged_sets,
                         int32_t small_queries)
    : staged_sets_(staged_sets) {
  const int64_t tiles = int64_t{most_small_tiles(bounds.rows, group, small_queries)} +
                        most_large_tiles(bounds.rows, group, small_queries);
  entry_bytes_ = array_bytes<uint64_t>(bounds.entries);
  rows_ = array_bytes<gpu::Header>(1);
  parts_ = rows_ + array_bytes<gpu::Row>(bounds.rows);
  order_ = parts_ + array_bytes<gpu::Part>(bounds.rows);
  tiles_ = order_ + array_bytes<int32_t>(bounds.rows);
  chunks_ = tiles_ + array_bytes<gpu::Tile>(tiles);
  summaries_ = chunks_ + entry_bytes_;
  staged_ = summaries_ + entry_bytes_;
  bytes_ = staged_ + entry_bytes_ * staged_sets;
}

TableArrays TableLayout::arrays(std::byte* base) const {
  TableArrays arrays;
  arrays.header = reinterpret_cast<gpu::Header*>(base);
  arrays.rows = reinterpret_cast<gpu::Row*>(base + rows_);
  arrays.parts = reinterpret_cast<gpu::Part*>(base + parts_);
  arrays.order = reinterpret_cast<int32_t*>(base + order_);
  arrays.tiles = reinterpret_cast<gpu::Tile*>(base + tiles_);
  arrays.chunks = reinterpret_cast<uint64_t*>(base + chunks_);
  arrays.summaries = reinterpret_cast<uint64_t*>(base + summaries_);
  for (int32_t set = 0; set < staged_sets_; ++set) {
    arrays.staged.push_back(reinterpret_cast<uint64_t*>(base + staged_ + set * entry_bytes_));
  }
  return arrays;
}

gpu::Tables TableLayout::tables(std::byte* base, int32_t set) const {
  const TableArrays arrays = this->arrays(base);
  gpu::Tables tables;
  tables.header = arrays.header;
  tables.rows = arrays.rows;
  tables.parts = arrays.parts;
  tables.order = arrays.order;
  tables.tiles = arrays.tiles;
  tables.chunks = arrays.chunks;
  tables.summaries = arrays.summaries;
  tables.staged = set < 0 ? nullptr : arrays.staged[static_cast<size_t>(set)];
  return tables;
}

}  // namespace kvpager::device
