// Scores of mean keys: four lanes a chunk, eight chunks a warp at a time, straight from global memory
// into registers.
#pragma once

#include "cuda/score_items.cuh"

namespace kvpager::gpu::scoring {

// 16 kUnits bytes a lane of each mean: D is at most 64 kUnits.
template <int kUnits>
KVP_KERNEL KVP_BOUNDS(kScoreThreads, kUnits <= 2 ? 3 : 2) score_means(const ScoreJob job) {
  const SelectParams& p = job.p;
  unsigned char* shared = shared_memory();
  unsigned char* queries = shared + job.queries_at;
  const TileRow* rows = reinterpret_cast<const TileRow*>(shared + job.rows_at);
  const uint64_t* addresses = reinterpret_cast<const uint64_t*>(shared + job.addresses_at);
  int32_t* bias = reinterpret_cast<int32_t*>(shared + job.bias_at);
  const int group = group_of(p);
  const int padded = (p.shape.k_dim + 63) / 64 * 64;
  constexpr int kAbreast = 8;  // chunks
  const int j = lane_index() % 4;
  const int place = lane_index() / 4;

  each_item(job, [&](const Item& item) {
    quantize_rows(job, item, rows, queries);
    for (int q = warp_index(); q < item.rows * group; q += job.warps) {
      int32_t sum = 0;
      for (int at = 4 * lane_index(); at < padded; at += 128) {
        sum = dot4(0x01010101u,
                   *reinterpret_cast<const int32_t*>(queries + q * job.query_pitch + at), sum);
      }
      for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      if (lane_index() == 0) bias[q] = 128 * sum;
    }
    sync_block();
    for (int first = item.begin + warp_index() * kAbreast; first < item.end;
         first += job.warps * kAbreast) {
      const int chunk = first + place;
      const bool here = chunk < item.end;
      const unsigned char* summary =
          reinterpret_cast<const unsigned char*>(addresses[(here ? chunk : first) - item.begin]);
      const float scale = *reinterpret_cast<const float*>(summary + padded);
      Words mean[kUnits];
      KVP_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        mean[u] = load_words(summary + (64 * u < padded ? 64 * u : 0) + 16 * j);
      }
      for (int r = 0; r < item.rows; ++r) {
        double best = 0.0;
        for (int h = 0; h < group; ++h) {
          const unsigned char* query = queries + (r * group + h) * job.query_pitch + 16 * j;
          int32_t sum = 0;
          KVP_UNROLL
          for (int u = 0; u < kUnits; ++u) {
            // The query's codes past its last dimension are zeros.
            const Words codes = load_words(query + 64 * u);
            KVP_UNROLL
            for (int i = 0; i < 4; ++i) {
              sum = dot4(mean[u].w[i], static_cast<int32_t>(codes.w[i]), sum);
            }
          }
          sum += shuffle_xor(sum, 1);
          sum += shuffle_xor(sum, 2);
          const double value = combine(scale, sum - bias[r * group + h], 0.0, 0);
          if (h == 0 || value > best) best = value;
        }
        if (here && j == 0 && chunk >= rows[r].begin && chunk < rows[r].end) {
          *score_at(job, rows[r].slot, item.head, chunk) = best;
        }
      }
    }
  });
}

}  // namespace kvpager::gpu::scoring
