// Scores of boxes: four lanes a box, eight boxes a warp at a time, straight from global memory into
// registers.
#pragma once

#include "cuda/score_items.cuh"

namespace kvpager::gpu::scoring {

KVP_DEVICE uint32_t magnitudes(uint32_t codes) {
  // Of each byte: (x ^ sign) - sign, no byte is -128.
  const uint32_t sign = permute_bytes(codes, 0, 0xBA98);
  return (codes ^ sign) + (sign & 0x01010101u);
}

// 16 kUnits bytes a lane of each half of a box: D is at most 64 kUnits.
template <int kUnits, bool kSpread>
KVP_KERNEL KVP_BOUNDS(kScoreThreads, kUnits <= 2 ? 3 : 2) score_boxes(const ScoreJob job) {
  const SelectParams& p = job.p;
  unsigned char* shared = shared_memory();
  unsigned char* queries = shared + job.queries_at;
  const TileRow* rows = reinterpret_cast<const TileRow*>(shared + job.rows_at);
  const uint64_t* addresses = reinterpret_cast<const uint64_t*>(shared + job.addresses_at);
  int32_t* bias = reinterpret_cast<int32_t*>(shared + job.bias_at);
  const int group = group_of(p);
  const int padded = (p.shape.k_dim + 63) / 64 * 64;
  const int boxes = p.scorer.boxes;  // a power of two up to 16
  const int box_bytes = padded * (kSpread ? 2 : 1);
  const int abreast = boxes < 8 ? boxes : 8;  // boxes of a chunk at a time
  const int per_step = 8 / abreast;           // chunks
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
    for (int first = item.begin + warp_index() * per_step; first < item.end;
         first += job.warps * per_step) {
      const int chunk = first + place / abreast;
      const bool here = chunk < item.end;
      const unsigned char* summary =
          reinterpret_cast<const unsigned char*>(addresses[(here ? chunk : first) - item.begin]);
      const float* scales = reinterpret_cast<const float*>(summary + int64_t{boxes} * box_bytes);
      const float centre_scale = scales[0];
      const double spread_scale = static_cast<double>(scales[1]);
      for (int box = place % abreast; box < boxes; box += abreast) {
        Words centre[kUnits];
        Words spread[kUnits];
        KVP_UNROLL
        for (int u = 0; u < kUnits; ++u) {
          const bool in = 64 * u < padded;
          const unsigned char* at = summary + box * box_bytes + (in ? 64 * u : 0) + 16 * j;
          centre[u] = load_words(at);
          if (kSpread) spread[u] = load_words(at + padded);
        }
        for (int r = 0; r < item.rows; ++r) {
          double best = 0.0;
          for (int h = 0; h < group; ++h) {
            const unsigned char* query = queries + (r * group + h) * job.query_pitch + 16 * j;
            int32_t along = 0;
            int32_t across = 0;
            KVP_UNROLL
            for (int u = 0; u < kUnits; ++u) {
              // The query's codes past its last dimension are zeros.
              const Words codes = load_words(query + 64 * u);
              KVP_UNROLL
              for (int i = 0; i < 4; ++i) {
                along = dot4(centre[u].w[i], static_cast<int32_t>(codes.w[i]), along);
                if (kSpread) {
                  across =
                      dot4(spread[u].w[i], static_cast<int32_t>(magnitudes(codes.w[i])), across);
                }
              }
            }
            along += shuffle_xor(along, 1);
            along += shuffle_xor(along, 2);
            if (kSpread) {
              across += shuffle_xor(across, 1);
              across += shuffle_xor(across, 2);
            }
            const double value =
                combine(centre_scale, along - bias[r * group + h], spread_scale, across);
            if (h == 0 || value > best) best = value;
          }
          for (int mask = 4; mask < 4 * abreast; mask *= 2) {
            best = larger(best, shuffle_xor(best, mask));
          }
          const bool mine = here && j == 0 && place % abreast == 0;
          if (mine && chunk >= rows[r].begin && chunk < rows[r].end) {
            double* score = score_at(job, rows[r].slot, item.head, chunk);
            *score = box < abreast ? best : larger(best, *score);
          }
        }
      }
    }
  });
}

}  // namespace kvpager::gpu::scoring
