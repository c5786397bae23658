// Which worker of a kernel of tensor attention does what: the work of a forward as numbered items, of
// which each worker takes every n-th, n being the workers. Kernels go by these functions, and so does
// the test that replays launches on the host.
#pragma once

#include "cuda/attend_tensor.cuh"

namespace kvpager::gpu::tensor {

// One unit of a (tile, kv head).
struct WalkItem {
  Tile tile;
  int32_t kv_head = 0;
  int32_t unit = 0;
};

KVP_DEVICE uint32_t small_items(const AttendParams& p, const Plan& plan) {
  return static_cast<uint32_t>(p.tables.header->small_tiles) *
         static_cast<uint32_t>(p.shape.kv_heads) * static_cast<uint32_t>(plan.units(plan.small));
}
KVP_DEVICE WalkItem small_item(const AttendParams& p, uint32_t item) {
  const uint32_t heads = static_cast<uint32_t>(p.shape.kv_heads);
  const uint32_t walks = static_cast<uint32_t>(p.tables.header->small_tiles) * heads;
  const uint32_t walk = item % walks;
  return {p.tables.tiles[walk / heads], static_cast<int32_t>(walk % heads),
          static_cast<int32_t>(item / walks)};
}
// The worker that a warp of small_tiles is. Blocks come first, so that few items are on as many
// multiprocessors as there are.
KVP_DEVICE uint32_t small_worker(int64_t block, int warp, int64_t blocks) {
  return static_cast<uint32_t>(warp * blocks + block);
}

KVP_DEVICE uint32_t large_items(const AttendParams& p, const Plan& plan) {
  return static_cast<uint32_t>(p.tables.header->large_tiles) *
         static_cast<uint32_t>(p.shape.kv_heads) * static_cast<uint32_t>(plan.units(plan.large));
}
// Neighbouring items walk the same keys: tiles of one kv head and unit.
KVP_DEVICE WalkItem large_item(const AttendParams& p, uint32_t item) {
  const Header& header = *p.tables.header;
  const uint32_t tiles = static_cast<uint32_t>(header.large_tiles);
  const uint32_t walks = tiles * static_cast<uint32_t>(p.shape.kv_heads);
  const uint32_t walk = item % walks;
  return {p.tables.tiles[header.small_tiles + static_cast<int32_t>(walk % tiles)],
          static_cast<int32_t>(walk / tiles), static_cast<int32_t>(item / walks)};
}

// Spans are of different lengths: a unit may begin after the last chunk of its own.
KVP_DEVICE bool has_chunks(const Plan& plan, Level level, const Span& span, int32_t unit) {
  return span.begin + int64_t{unit} * unit_splits(plan, level) * kSplitChunks < span.end;
}

// Splits [begin, end) of a unit that has chunks.
struct UnitSplits {
  int begin, end;

  // Of a walk, whose unit is its span: whether that has the first and the last chunk of the part.
  KVP_DEVICE bool first() const { return begin == 0; }
  KVP_DEVICE bool last(const Part& part) const {
    return int64_t{end} * kSplitChunks >= part.visible;
  }
};
KVP_DEVICE UnitSplits splits_of(const Plan& plan, Level level, const Span& span, int32_t unit) {
  const int length = unit_splits(plan, level);
  const int begin = static_cast<int>(span.begin / kSplitChunks) + unit * length;
  const int end = static_cast<int>((span.end + kSplitChunks - 1) / kSplitChunks);
  return {begin, begin + length < end ? begin + length : end};
}

// One query whose states are to be folded, or one row that may be padding.
struct MergeItem {
  int64_t row = 0;
  int64_t index = -1;  // of the row within Tables::order; -1: a row to be looked at
  int32_t q_head = 0;
  Level level = Level::kWalk;  // kWalk: nothing is left to fold
  Span span;                   // of its part
};

// Queries in the order of their states, so that no item is empty where all are to be folded.
KVP_DEVICE int64_t merge_queries(const AttendParams& p, const Plan& plan) {
  const bool any = plan.small != Level::kWalk || plan.large != Level::kWalk;
  return any ? int64_t{ordered_rows(p.tables)} * p.shape.q_heads : 0;
}
KVP_DEVICE int64_t merge_items(const AttendParams& p, const Plan& plan) {
  return merge_queries(p, plan) + p.tables.header->rows;
}
KVP_DEVICE MergeItem merge_item(const AttendParams& p, const Plan& plan, int64_t item) {
  const int64_t queries = merge_queries(p, plan);
  MergeItem merge;
  if (item >= queries) {
    merge.row = item - queries;
    return merge;
  }
  const int32_t q_heads = p.shape.q_heads;
  const int32_t group = q_heads / p.shape.kv_heads;
  merge.index = item / q_heads;
  merge.q_head = static_cast<int32_t>(item % q_heads);
  merge.row = p.tables.order[merge.index];
  const int32_t number_of_part = p.tables.rows[merge.row].part;
  const Part& part = p.tables.parts[number_of_part];
  merge.span = span_of(p.wave, number_of_part, part);
  const int64_t number = (merge.index - part.first_row) * group + merge.q_head % group;
  merge.level = number < part.large_queries ? plan.large : plan.small;
  return merge;
}

}  // namespace kvpager::gpu::tensor
