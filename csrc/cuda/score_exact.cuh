// Scores of all keys in float32: a warp a chunk, a lane a token, ascending dimensions in binary64.
#pragma once

#include "cuda/score_items.cuh"

namespace kvpager::gpu::scoring {

inline constexpr int kExactHeads = 4;  // in one pass over a chunk

KVP_KERNEL KVP_BOUNDS(kScoreThreads, 2) score_exact(const ScoreJob job) {
  const SelectParams& p = job.p;
  unsigned char* shared = shared_memory();
  float* queries = reinterpret_cast<float*>(shared + job.queries_at);
  const TileRow* rows = reinterpret_cast<const TileRow*>(shared + job.rows_at);
  const uint64_t* addresses = reinterpret_cast<const uint64_t*>(shared + job.addresses_at);
  const int group = group_of(p);
  const int dim = p.shape.k_dim;
  const int tokens = p.shape.chunk_tokens;

  each_item(job, [&](const Item& item) {
    for (int i = thread_index(); i < item.rows * group * dim; i += block_threads()) {
      const int q = i / dim;
      queries[i] = element_to_float(p.q.data, p.q.dtype,
                                    rows[q / group].row * p.q.row_stride +
                                        (int64_t{item.head} * group + q % group) * p.q.head_stride +
                                        i % dim);
    }
    sync_block();
    for (int chunk = item.begin + warp_index(); chunk < item.end; chunk += job.warps) {
      const float* keys = reinterpret_cast<const float*>(addresses[chunk - item.begin]);
      for (int r = 0; r < item.rows; ++r) {
        double best = 0.0;
        for (int first = 0; first < group; first += kExactHeads) {
          const int heads = group - first < kExactHeads ? group - first : kExactHeads;
          for (int strip = 0; strip < tokens; strip += 32) {
            // Lanes beyond the last token repeat it, heads beyond the last one that.
            const int t = strip + lane_index() < tokens ? strip + lane_index() : tokens - 1;
            double sums[kExactHeads] = {};
            for (int d = 0; d < dim; ++d) {
              const double key = static_cast<double>(keys[int64_t{d} * tokens + t]);
              KVP_UNROLL
              for (int i = 0; i < kExactHeads; ++i) {
                const int h = first + (i < heads ? i : heads - 1);
                const double product =
                    static_cast<double>(queries[(r * group + h) * dim + d]) * key;
                sums[i] += product;
              }
            }
            // The first one stays if it is NaN, later NaNs are passed over.
            const double start = shuffle(sums[0], 0);
            if (first + strip == 0) best = start;
            KVP_UNROLL
            for (int i = 0; i < kExactHeads; ++i) best = larger(best, sums[i]);
          }
        }
        for (int mask = 16; mask > 0; mask /= 2) best = larger(best, shuffle_xor(best, mask));
        if (lane_index() == 0 && chunk >= rows[r].begin && chunk < rows[r].end) {
          *score_at(job, rows[r].slot, item.head, chunk) = best;
        }
      }
    }
  });
}

}  // namespace kvpager::gpu::scoring
