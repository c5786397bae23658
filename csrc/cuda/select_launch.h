// How the host cuts the work of scoring and selecting: shared memory of a block, and blocks. The test
// that replays launches calls these functions too.
#pragma once

#include <algorithm>

#include "cuda/score_items.cuh"
#include "cuda/score_sketch.cuh"

namespace kvpager::gpu::scoring {

inline constexpr int kStages = 3;
inline constexpr int64_t kSharedBudget = 72 << 10;  // three blocks of a kernel on sm_90 and later
inline constexpr int64_t kQueryBudget = 16 << 10;   // of it, unless one row needs more
inline constexpr int kBlocksPerMultiprocessor = 3;

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline int64_t sketch_stage_bytes(const ScoreJob& job) {
  const Shape& shape = job.p.shape;
  const int64_t padded = round_up(shape.k_dim, 32);
  const int64_t groups = padded * kBits / 32;
  return groups * (round_up(int64_t{4} * shape.chunk_tokens, 128) + 32) +
         round_up(3 * padded + 8, 64);
}

// Divides shared memory; returns how much of it a block needs.
inline int64_t lay_out(ScoreJob* job) {
  const Shape& shape = job->p.shape;
  const int group = shape.q_heads / shape.kv_heads;
  // Queries of a pair of neighbours at the same dimension lie in different banks.
  job->query_pitch = static_cast<int32_t>(round_up(shape.k_dim, 128) + 64);
  int64_t rows = kTileQueries / group;
  const int64_t fitting = kQueryBudget / (int64_t{group} * job->query_pitch);
  rows = rows < fitting ? rows : fitting;
  job->tile_rows = static_cast<int32_t>(rows < 1 ? 1 : rows);
  if (job->tile_rows > job->slots) job->tile_rows = job->slots;
  const int64_t queries = int64_t{job->tile_rows} * group;
  job->query_lines = static_cast<int32_t>(queries <= 8 ? 8 : round_up(queries, 16));
  job->warps = kScoreThreads / 32;
  job->stage_bytes = sketch_stage_bytes(*job);
  const int64_t rest = kSharedBudget - int64_t{job->query_lines} * job->query_pitch;
  job->stages = kStages;
  const auto fits = [&] { return job->warps * job->stages * job->stage_bytes <= rest; };
  if (!fits()) job->stages = 2;
  while (job->warps > 1 && !fits()) job->warps /= 2;
  int64_t at = job->warps * job->stages * job->stage_bytes;
  job->queries_at = static_cast<int32_t>(at);
  at += int64_t{job->query_lines} * job->query_pitch;
  job->values_at = static_cast<int32_t>(at);
  at += int64_t{job->warps} * job->query_lines * 8;
  job->addresses_at = static_cast<int32_t>(at);
  at += kMostRun * 8;
  job->rows_at = static_cast<int32_t>(at);
  at += int64_t{job->tile_rows} * static_cast<int64_t>(sizeof(TileRow));
  job->ends_at = static_cast<int32_t>(at);
  return at + int64_t{job->p.counts.parts} * 4;
}

inline int64_t score_blocks(const ScoreJob& job, int64_t processors) {
  const HostCounts& counts = job.p.counts;
  const int64_t tiles = (job.slots + job.tile_rows - 1) / job.tile_rows + counts.parts;
  const int64_t runs = (counts.max_visible + kLeastRun - 1) / kLeastRun;
  return std::min(tiles * runs * job.p.shape.kv_heads, processors * kBlocksPerMultiprocessor);
}

// A block for each (slot, kv head).
inline int64_t select_blocks(const Shape& shape, int64_t slots) { return slots * shape.kv_heads; }

}  // namespace kvpager::gpu::scoring
