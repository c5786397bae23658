// Selection: scores of all candidates into scratch, then the choice of each (row, kv head). Where
// the scores of all rows do not fit scratch, a range of rows after another.
#include <algorithm>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "cuda/score_sketch.cuh"
#include "cuda/select_launch.h"
#include "cuda/select_rows.cuh"
#include "device/api.h"

namespace kvpager::gpu {
namespace {

using namespace scoring;

constexpr int64_t kMostScratch = int64_t{64} << 20;

// Scores of one slot, in bytes.
int64_t stride_of(int64_t chunks) { return round_up(chunks < 1 ? 1 : chunks, 32); }
int64_t slot_bytes(const Shape& shape, int64_t chunks) {
  return stride_of(chunks) * shape.kv_heads * 8;
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

int launch_scores(ScoreJob job, void* stream) {
  Grid grid;
  grid.shared_bytes = lay_out(&job);
  grid.threads = job.warps * 32;
  grid.stream = stream;
  grid.blocks = score_blocks(job, multiprocessors());
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
  grid.blocks = select_blocks(job.p.shape, job.slots);
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
  grid.blocks = select_blocks(job.p.shape, job.slots);
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
