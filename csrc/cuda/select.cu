// Selection: scores of all candidates into scratch, then the choice of each (row, kv head). Where
// the scores of all rows do not fit scratch, a range of rows after another.
#include <algorithm>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "cuda/score_exact.cuh"
#include "cuda/score_means.cuh"
#include "cuda/score_sketch.cuh"
#include "cuda/select_rows.cuh"
#include "device/api.h"

namespace kvpager::gpu {
namespace {

using namespace scoring;

constexpr int64_t kMostScratch = int64_t{64} << 20;
constexpr int kStages = 3;
constexpr int64_t kSharedBudget = 72 << 10;  // three blocks of a kernel on sm_90 and later
constexpr int64_t kQueryBudget = 16 << 10;   // of it, unless one row needs more
constexpr int kBlocksPerMultiprocessor = 3;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Scores of one slot, in bytes.
int64_t stride_of(int64_t chunks) { return round_up(chunks < 1 ? 1 : chunks, 32); }
int64_t slot_bytes(const Shape& shape, int64_t chunks) {
  return stride_of(chunks) * shape.kv_heads * 8;
}

int64_t sketch_stage_bytes(const ScoreJob& job) {
  const Shape& shape = job.p.shape;
  const int64_t padded = round_up(shape.k_dim, 32);
  const int64_t groups = padded * kBits / 32;
  return groups * (round_up(int64_t{4} * shape.chunk_tokens, 128) + 32) +
         round_up(3 * padded + 8, 64);
}

// Divides shared memory; returns how much of it a block needs.
int64_t lay_out(ScoreJob* job) {
  const Shape& shape = job->p.shape;
  const int group = shape.q_heads / shape.kv_heads;
  const bool sketch = job->p.scorer.family == ScorerParams::Family::kSketch;
  const bool means = job->p.scorer.family == ScorerParams::Family::kMean;
  if (sketch) {
    // Queries of a pair of neighbours at the same dimension lie in different banks.
    job->query_pitch = static_cast<int32_t>(round_up(shape.k_dim, 128) + 64);
  } else if (means) {
    int units = 1;  // as many as the kernel has
    while (units * 64 < shape.k_dim) units *= 2;
    job->query_pitch = units * 64;
  } else {
    job->query_pitch = shape.k_dim * 4;
  }
  int64_t rows = kTileQueries / group;
  const int64_t fitting = kQueryBudget / (int64_t{group} * job->query_pitch);
  rows = rows < fitting ? rows : fitting;
  job->tile_rows = static_cast<int32_t>(rows < 1 ? 1 : rows);
  if (job->tile_rows > job->slots) job->tile_rows = job->slots;
  const int64_t queries = int64_t{job->tile_rows} * group;
  job->query_lines = static_cast<int32_t>(queries <= 8 ? 8 : round_up(queries, 16));
  job->warps = kScoreThreads / 32;
  int64_t at = 0;
  if (sketch) {
    job->stage_bytes = sketch_stage_bytes(*job);
    const int64_t rest = kSharedBudget - int64_t{job->query_lines} * job->query_pitch;
    job->stages = kStages;
    const auto fits = [&] { return job->warps * job->stages * job->stage_bytes <= rest; };
    if (!fits()) job->stages = 2;
    while (job->warps > 1 && !fits()) job->warps /= 2;
    at = job->warps * job->stages * job->stage_bytes;
  }
  job->queries_at = static_cast<int32_t>(at);
  at += int64_t{job->query_lines} * job->query_pitch;
  job->values_at = static_cast<int32_t>(at);
  if (sketch) at += int64_t{job->warps} * job->query_lines * 8;
  job->addresses_at = static_cast<int32_t>(at);
  at += kMostRun * 8;
  job->rows_at = static_cast<int32_t>(at);
  at += int64_t{job->tile_rows} * static_cast<int64_t>(sizeof(TileRow));
  job->bias_at = static_cast<int32_t>(at);
  if (means) at += int64_t{job->query_lines} * 4;
  job->ends_at = static_cast<int32_t>(at);
  return at + int64_t{job->p.counts.parts} * 4;
}

template <int kTokens>
int launch_sketches_of(const Grid& grid, const ScoreJob& job) {
  constexpr int kMost = SketchBatches<kTokens>::kMost;
  return job.query_lines % 16 == 0 ? launch(score_sketches<kTokens, kMost>, grid, job)
                                   : launch(score_sketches<kTokens, 1>, grid, job);
}

int launch_sketches(const Grid& grid, const ScoreJob& job) {
  switch (job.p.shape.chunk_tokens) {
    case 16:
      return launch_sketches_of<16>(grid, job);
    case 32:
      return launch_sketches_of<32>(grid, job);
    case 64:
      return launch_sketches_of<64>(grid, job);
    case 128:
      return launch_sketches_of<128>(grid, job);
    default:
      return launch_sketches_of<256>(grid, job);
  }
}

int launch_means(const Grid& grid, const ScoreJob& job) {
  switch (job.query_pitch / 64) {
    case 1:
      return launch(score_means<1>, grid, job);
    case 2:
      return launch(score_means<2>, grid, job);
    case 4:
      return launch(score_means<4>, grid, job);
    default:
      return launch(score_means<8>, grid, job);
  }
}

int launch_scores(ScoreJob job, void* stream) {
  Grid grid;
  grid.shared_bytes = lay_out(&job);
  grid.threads = job.warps * 32;
  grid.stream = stream;
  const HostCounts& counts = job.p.counts;
  const int64_t tiles = (job.slots + job.tile_rows - 1) / job.tile_rows + counts.parts;
  const int64_t runs = (counts.max_visible + kLeastRun - 1) / kLeastRun;
  const int64_t items = tiles * runs * job.p.shape.kv_heads;
  const int64_t resident = int64_t{multiprocessors()} * kBlocksPerMultiprocessor;
  grid.blocks = items < resident ? items : resident;
  const ScorerParams& scorer = job.p.scorer;
  if (scorer.family == ScorerParams::Family::kExact) return launch(score_exact, grid, job);
  if (scorer.family == ScorerParams::Family::kMean) return launch_means(grid, job);
  return launch_sketches(grid, job);
}

int launch_selection(const ScoreJob& scores, void* stream) {
  SelectJob job;
  job.p = scores.p;
  job.scores = scores.scores;
  job.stride = scores.stride;
  job.first_slot = scores.first_slot;
  job.slots = scores.slots;
  const bool scored = job.p.kind == 1;
  job.cached =
      scored ? static_cast<int32_t>(job.stride < kCachedKeys ? job.stride : kCachedKeys) : 0;
  job.words = scored ? static_cast<int32_t>(job.stride / 32 + 1) : 0;
  Grid grid;
  grid.blocks = int64_t{job.slots} * job.p.shape.kv_heads;
  grid.threads = kSelectThreads;
  grid.shared_bytes = select_shared_bytes(job.cached, job.words);
  grid.stream = stream;
  return launch(select_rows, grid, job);
}

int launch_shares(const ScoreJob& scores, void* stream) {
  SelectJob job;
  job.p = scores.p;
  job.scores = scores.scores;
  job.stride = scores.stride;
  job.first_slot = scores.first_slot;
  job.slots = scores.slots;
  Grid grid;
  grid.blocks = int64_t{job.slots} * job.p.shape.kv_heads;
  grid.threads = kSelectThreads;
  grid.shared_bytes = select_shared_bytes(0, 0);
  grid.stream = stream;
  return launch(share_mass, grid, job);
}

}  // namespace

int64_t select_scratch_bytes(const Shape& shape, const Bounds& bounds) {
  const int64_t one = slot_bytes(shape, bounds.chunks);
  int64_t slots = kMostScratch / one;
  slots = slots < 1 ? 1 : slots;
  return one * std::max<int64_t>(std::min<int64_t>(slots, bounds.rows), 1);
}

int select(const SelectParams& params, void* stream) {
  ScoreJob job;
  job.p = params;
  const bool dense = params.kind == 0;
  const bool scored = params.kind == 1 || (dense && params.mass != nullptr);
  const int32_t count = dense ? params.counts.parts : params.counts.rows;
  if (scored) {
    job.scores = static_cast<double*>(params.scratch);
    job.stride = stride_of(params.counts.max_visible);
    const int64_t fitting =
        params.scratch_bytes / slot_bytes(params.shape, params.counts.max_visible);
    const int32_t step = static_cast<int32_t>(fitting < count ? fitting : count);
    if (step < 1 && count > 0) return device::kOutOfMemory;
    for (int32_t first = 0; first < count; first += step) {
      job.first_slot = first;
      job.slots = count - first < step ? count - first : step;
      int code = launch_scores(job, stream);
      if (code == 0) code = dense ? launch_shares(job, stream) : launch_selection(job, stream);
      if (code != 0) return code;
    }
  }
  if (params.kind == 1 || (params.selected == nullptr && params.read == nullptr)) return 0;
  job.scores = nullptr;
  job.first_slot = 0;
  job.slots = params.counts.rows;
  return launch_selection(job, stream);
}

}  // namespace kvpager::gpu
