// The tables of a forward: rows put in order and cut into tiles, and one block of memory that holds
// every table, laid out alike in pinned and in device memory so that few copies move them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/params.h"

namespace kvpager::device {

// A part is cut into large tiles while more queries than this remain, then into small ones.
inline constexpr int32_t kSmallQueries = 2 * gpu::kSmallTile;

struct Arrangement {
  std::vector<int32_t> order;    // rows that are not padding, by part, then ascending positions
  std::vector<gpu::Tile> tiles;  // the small ones, then the large ones
  int32_t small_tiles = 0;
  int32_t large_tiles = 0;
};

// Orders the rows, cuts the tiles, and fills in first_row and rows of each part. `group` is query
// heads per kv head. REQUIRES: rows[i].part < part_count.
void arrange(const gpu::Row* rows, int32_t row_count, int32_t group, gpu::Part* parts,
             int32_t part_count, Arrangement* out, int32_t small_queries = kSmallQueries);

// The most tiles of either kind that a forward of up to `rows` rows can have.
int32_t most_small_tiles(int32_t rows, int32_t group, int32_t small_queries = kSmallQueries);
int32_t most_large_tiles(int32_t rows, int32_t group, int32_t small_queries = kSmallQueries);

// What HostCounts hold while a graph is captured: no forward within the bounds has more of anything.
gpu::HostCounts most_counts(const gpu::Bounds& bounds, int32_t group,
                            int32_t small_queries = kSmallQueries);

// Cuts the chunks of a forward into waves. They are given in their order: parts, then positions.
class WaveCutter {
 public:
  // The next chunks of a part, [its chunks so far, end); `end` is a multiple of gpu::kWaveChunks or all
  // that the part has. A wave is begun where none is.
  void add(int32_t part, int64_t end);
  void cut();  // what is added from here on is the next wave's
  // One that was never cut is the whole forward.
  std::vector<gpu::Wave> take();

 private:
  std::vector<gpu::Wave> waves_;
  bool open_ = false;
  int32_t part_ = -1;  // of the last chunks
  int64_t end_ = 0;    // and where they end
};

// gpu::Tables, writable.
struct TableArrays {
  gpu::Header* header = nullptr;
  gpu::Row* rows = nullptr;       // [bounds.rows]
  gpu::Part* parts = nullptr;     // [bounds.rows]: a part has at least one row
  int32_t* order = nullptr;       // [bounds.rows]
  gpu::Tile* tiles = nullptr;     // [most tiles of either kind]
  uint64_t* chunks = nullptr;     // [bounds.entries]
  uint64_t* summaries = nullptr;  // [bounds.entries]
  std::vector<uint64_t*> staged;  // [sets] of [bounds.entries]
};

class TableLayout {
 public:
  // `staged_sets`: how many arrays Tables::staged may point to in turn, layer by layer.
  TableLayout(const gpu::Bounds& bounds, int32_t group, int32_t staged_sets,
              int32_t small_queries = kSmallQueries);

  int64_t bytes() const { return bytes_; }
  TableArrays arrays(std::byte* base) const;
  // `set` -1: nothing is staged.
  gpu::Tables tables(std::byte* base, int32_t set = -1) const;

  // Half-open ranges of bytes, to be copied before a forward. All but the entries lie together.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };
  Range fixed() const { return {0, chunks_}; }
  Range chunks(int64_t entries) const { return range(chunks_, entries); }
  Range summaries(int64_t entries) const { return range(summaries_, entries); }
  Range staged(int32_t set, int64_t entries) const {
    return range(staged_ + set * entry_bytes_, entries);
  }

 private:
  static Range range(int64_t begin, int64_t entries) {
    return {begin, begin + entries * static_cast<int64_t>(sizeof(uint64_t))};
  }
  int64_t rows_ = 0, parts_ = 0, order_ = 0, tiles_ = 0;
  int64_t chunks_ = 0, summaries_ = 0, staged_ = 0;
  int64_t entry_bytes_ = 0;  // of one array of entries
  int32_t staged_sets_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace kvpager::device
