// What the scoring kernels share: how the work of a forward is cut, and the queries of a tile of
// rows in shared memory.
//
// An item is (tile of rows of one part, kv head, run of chunks), done by one block. Its warps read
// each summary once and score it for all rows of the tile. Items are numbered so that the heads of
// a chunk, whose summaries are neighbours, and the tiles of a run, which read the same ones, are
// close in time.
#pragma once

#include "cuda/portable.h"
#include "cuda/summarize_steps.cuh"

namespace kvpager::gpu::scoring {

inline constexpr int kScoreThreads = 256;
inline constexpr int kTileQueries = 64;  // most queries of a tile, unless one row has more
inline constexpr int kMostRun = 64;      // chunks
inline constexpr int kLeastRun = 16;

// Dense rows have no candidates; the ledger then wants the scores of one row of each part.
struct ScoreJob {
  SelectParams p;
  double* scores = nullptr;  // [slots][kv_heads][stride], by chunk
  int64_t stride = 0;
  // A slot is a place in Tables::order, or a part where only the ledger is served.
  int32_t first_slot = 0;
  int32_t slots = 0;
  int32_t tile_rows = 0;
  int32_t warps = 0;
  int32_t stages = 0;       // sketches: summaries in flight per warp
  int64_t stage_bytes = 0;  // of one of them
  int32_t query_pitch = 0;  // bytes from query to query
  int32_t query_lines = 0;  // queries of a full tile, padded
  // Offsets of arrays in shared memory.
  int32_t queries_at = 0, values_at = 0, addresses_at = 0, rows_at = 0, ends_at = 0;
};

KVP_DEVICE bool ledger_only(const SelectParams& p) { return p.kind == 0; }
KVP_DEVICE int group_of(const SelectParams& p) { return p.shape.q_heads / p.shape.kv_heads; }
KVP_DEVICE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
KVP_DEVICE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Half-open chunk ranges of a row, as kernels/select.cc has them.
struct Spans {
  int64_t end = 0;           // one past the row's own chunk
  int64_t low = 0;           // the first chunk a sliding window leaves in
  int64_t sinks_end = 0;     // [0, sinks_end)
  int64_t recent_begin = 0;  // [recent_begin, end)
};

KVP_DEVICE Spans spans_of(const SelectParams& p, int64_t position) {
  const int64_t tokens = p.shape.chunk_tokens;
  Spans spans;
  spans.end = position / tokens + 1;
  if (p.window > 0 && position >= p.window) spans.low = (position - p.window + 1) / tokens;
  if (p.kind != 0) {
    spans.sinks_end = (p.sinks + tokens - 1) / tokens;
    spans.recent_begin = most(0, position + 1 - p.recent) / tokens;
  }
  return spans;
}

// Chunks [begin, end) whose scores a row needs.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// What the ledger gets shares of: the window does not narrow it.
KVP_DEVICE Range ledger_range(const SelectParams& p, const Part& part, int64_t position) {
  if (p.kind == 0) return {part.held, least(part.sealed, position / p.shape.chunk_tokens)};
  const Spans spans = spans_of(p, position);
  return {least(most(spans.sinks_end, part.held), spans.recent_begin), spans.recent_begin};
}

KVP_DEVICE Range scored_range(const SelectParams& p, const Part& part, int32_t row,
                              int64_t position) {
  Range range = ledger_range(p, part, position);
  if (p.mass == nullptr || part.score_row != row) {
    range.begin = most(range.begin, spans_of(p, position).low);
  }
  return range;
}

// One of the job's rows while its tile is worked on.
struct TileRow {
  int32_t row = 0;
  int32_t begin = 0, end = 0;  // chunks to score
  int32_t slot = 0;            // within the job
};

struct PartWork {
  int32_t first_slot = 0;  // within the job
  int32_t rows = 0;
  int32_t tiles = 0;
  int32_t runs = 0;
};

KVP_DEVICE PartWork part_work(const ScoreJob& job, int32_t index, int32_t run) {
  const Part& part = job.p.tables.parts[index];
  int64_t begin = index;
  int64_t end = part.score_row >= 0 ? begin + 1 : begin;
  int64_t chunks = least(part.sealed, part.visible);
  if (!ledger_only(job.p)) {
    const int64_t tokens = job.p.shape.chunk_tokens;
    begin = part.first_row;
    end = begin + part.rows;
    // The furthest row's candidates.
    chunks = least(chunks, most(0, part.visible * tokens - job.p.recent) / tokens);
  }
  begin = most(begin, job.first_slot);
  end = least(end, int64_t{job.first_slot} + job.slots);
  PartWork work;
  work.first_slot = static_cast<int32_t>(begin - job.first_slot);
  work.rows = end > begin ? static_cast<int32_t>(end - begin) : 0;
  work.tiles = (work.rows + job.tile_rows - 1) / job.tile_rows;
  work.runs = static_cast<int32_t>((chunks + run - 1) / run);
  return work;
}

// Items of one kv head: ends[i] = those of parts [0, i]. Returns all; every thread has the same.
KVP_DEVICE int32_t count_items(const ScoreJob& job, int32_t run, int32_t* ends) {
  const int32_t parts = job.p.tables.header->parts;
  sync_block();
  for (int32_t i = thread_index(); i < parts; i += block_threads()) {
    const PartWork work = part_work(job, i, run);
    ends[i] = work.tiles * work.runs;
  }
  sync_block();
  if (warp_index() == 0) {
    int32_t before = 0;
    for (int32_t first = 0; first < parts; first += 32) {
      const int32_t at = first + lane_index();
      int32_t sum = at < parts ? ends[at] : 0;
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = shuffle(sum, lane_index() - step < 0 ? 0 : lane_index() - step);
        if (lane_index() >= step) sum += other;
      }
      if (at < parts) ends[at] = before + sum;
      before += shuffle(sum, 31);
    }
  }
  sync_block();
  return parts == 0 ? 0 : ends[parts - 1];
}

// Whose rows and which run an item is of; `ends` as count_items() leaves them.
struct ItemPlace {
  int32_t head = 0;
  int32_t part = 0;
  int32_t first_slot = 0;  // within the job
  int32_t rows = 0;
  int32_t run_begin = 0;
};

KVP_DEVICE ItemPlace place_of(const ScoreJob& job, int64_t index, int32_t run,
                              const int32_t* ends) {
  ItemPlace place;
  place.head = static_cast<int32_t>(index % job.p.shape.kv_heads);
  const int32_t local = static_cast<int32_t>(index / job.p.shape.kv_heads);
  int32_t low = 0;
  int32_t high = job.p.tables.header->parts - 1;
  while (low < high) {  // the first part whose end is above
    const int32_t middle = (low + high) / 2;
    if (ends[middle] > local) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const PartWork work = part_work(job, low, run);
  const int32_t within = local - (low == 0 ? 0 : ends[low - 1]);
  const int32_t first = within % work.tiles * job.tile_rows;
  place.part = low;
  place.first_slot = work.first_slot + first;
  place.rows = work.rows - first < job.tile_rows ? work.rows - first : job.tile_rows;
  place.run_begin = within / work.tiles * run;
  return place;
}

// Whether runs are to be half as long: half the blocks would have nothing to do.
KVP_DEVICE bool too_few(int64_t items, int64_t blocks, int32_t run) {
  return items * 2 <= blocks && run > kLeastRun;
}

// What a block works on; the same for all its threads.
struct Item {
  int32_t head = 0;
  int32_t rows = 0;
  int32_t begin = 0, end = 0;  // chunks some row of the tile needs; empty: nothing to do
};

// The largest magnitude of a row's queries of one kv group. Warp-wide.
KVP_DEVICE float largest_query(const SelectParams& p, int32_t row, int32_t head) {
  const int dim = p.shape.k_dim;
  const int group = group_of(p);
  float largest = 0.0f;
  for (int e = lane_index(); e < group * dim; e += 32) {
    const int64_t at =
        row * p.q.row_stride + (int64_t{head} * group + e / dim) * p.q.head_stride + e % dim;
    const float magnitude = fabsf(finite(element_to_float(p.q.data, p.q.dtype, at)));
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  return largest;
}

// Queries of a tile as int8, as quantize_query() has them: warp by warp a row.
KVP_DEVICE void quantize_rows(const ScoreJob& job, const Item& item, const TileRow* rows,
                              unsigned char* queries) {
  const SelectParams& p = job.p;
  const int dim = p.shape.k_dim;
  const int group = group_of(p);
  uint32_t* words = reinterpret_cast<uint32_t*>(queries);
  const int used = (item.rows * group + 15) / 16 * 16;
  const int lines = used < job.query_lines ? used : job.query_lines;
  for (int i = thread_index(); i < lines * job.query_pitch / 4; i += block_threads()) {
    words[i] = 0;
  }
  sync_block();
  for (int r = warp_index(); r < item.rows; r += job.warps) {
    const float largest = largest_query(p, rows[r].row, item.head);
    if (static_cast<double>(largest) < kNegligible) continue;
    const float inverse = div_rn(127.0f, largest);
    for (int e = lane_index(); e < group * dim; e += 32) {
      const int h = e / dim;
      const int d = e % dim;
      const int64_t at =
          rows[r].row * p.q.row_stride + (int64_t{item.head} * group + h) * p.q.head_stride + d;
      const float q = element_to_float(p.q.data, p.q.dtype, at);
      queries[(r * group + h) * job.query_pitch + d] =
          static_cast<unsigned char>(query_code(q, inverse));
    }
  }
  sync_block();
}

// Goes to item `index`: its rows, and into addresses[i] where the summary of chunk item.begin + i
// has this layer and head.
KVP_DEVICE Item start_item(const ScoreJob& job, int64_t index, int32_t run, const int32_t* ends) {
  const SelectParams& p = job.p;
  unsigned char* shared = shared_memory();
  TileRow* rows = reinterpret_cast<TileRow*>(shared + job.rows_at);
  uint64_t* addresses = reinterpret_cast<uint64_t*>(shared + job.addresses_at);
  Item item;
  const ItemPlace place = place_of(job, index, run, ends);
  const Part& part = p.tables.parts[place.part];
  const int32_t run_begin = place.run_begin;
  item.head = place.head;
  item.rows = place.rows;

  sync_block();  // the item before is done with shared memory
  for (int r = thread_index(); r < item.rows; r += block_threads()) {
    TileRow row;
    row.slot = place.first_slot + r;
    row.row = ledger_only(p) ? part.score_row : p.tables.order[job.first_slot + row.slot];
    const Range range = scored_range(p, part, row.row, p.tables.rows[row.row].position);
    row.begin = static_cast<int32_t>(range.begin);
    row.end = static_cast<int32_t>(range.end);
    rows[r] = row;
  }
  sync_block();
  item.begin = run_begin + run;
  item.end = run_begin;
  for (int r = 0; r < item.rows; ++r) {
    if (rows[r].begin >= rows[r].end) continue;
    item.begin = rows[r].begin < item.begin ? rows[r].begin : item.begin;
    item.end = rows[r].end > item.end ? rows[r].end : item.end;
  }
  item.begin = item.begin > run_begin ? item.begin : run_begin;
  item.end = item.end < run_begin + run ? item.end : run_begin + run;
  const int64_t offset = p.summary_page_bytes * (int64_t{p.layer} * p.shape.kv_heads + item.head);
  for (int i = thread_index(); i < item.end - item.begin; i += block_threads()) {
    addresses[i] = p.tables.summaries[part.first + item.begin + i] + static_cast<uint64_t>(offset);
  }
  sync_block();
  return item;
}

// Calls work(item) for each of the block's items. Runs get shorter while there are too few for all
// blocks.
template <class Work>
KVP_DEVICE void each_item(const ScoreJob& job, Work work) {
  int32_t* ends = reinterpret_cast<int32_t*>(shared_memory() + job.ends_at);
  int32_t run = kMostRun;
  int64_t items = int64_t{count_items(job, run, ends)} * job.p.shape.kv_heads;
  while (too_few(items, grid_blocks(), run)) {
    run /= 2;
    items = int64_t{count_items(job, run, ends)} * job.p.shape.kv_heads;
  }
  for (int64_t index = block_index(); index < items; index += grid_blocks()) {
    const Item item = start_item(job, index, run, ends);
    if (item.begin < item.end) work(item);
  }
}

KVP_DEVICE double* score_at(const ScoreJob& job, int32_t slot, int32_t head, int32_t chunk) {
  return job.scores + (int64_t{slot} * job.p.shape.kv_heads + head) * job.stride + chunk;
}

// Both products are exact: a 16-bit significand times a 32-bit integer. The sum is rounded once.
KVP_DEVICE double combine(float first_scale, int32_t first, double second_scale, int32_t second) {
  const double a = static_cast<double>(first_scale) * static_cast<double>(first);
  const double b = second_scale * static_cast<double>(second);
  return a + b;
}

}  // namespace kvpager::gpu::scoring
