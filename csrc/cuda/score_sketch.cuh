// Scores of sketches: each warp streams summaries through its own ring in shared memory and
// multiplies the codes of 16 tokens with the weights of 8 queries at a time on the integer tensor
// cores.
//
// A 32-bit word of codes holds, field by field, four neighbouring dimensions of one token: what one
// thread brings to mma_uint8 of a token's row. Thread t of a row's four takes every fourth group of
// dimensions and two of its fields per product; which dimensions meet in one product does not
// matter as long as the weights follow. Tokens go to rows in any order, since the best one counts.
#pragma once

#include "cuda/score_items.cuh"

namespace kvpager::gpu::scoring {

inline constexpr int kBits = 2;            // of a code
inline constexpr int kFields = 8 / kBits;  // of a byte

// (q * step + 128) >> 8 of four dimensions, as signed bytes.
KVP_DEVICE uint32_t weigh(uint32_t q, uint32_t step) {
  int32_t x[4];
  KVP_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint32_t byte = static_cast<uint32_t>(k);
    const int32_t code = static_cast<int32_t>(permute_bytes(q, 0, 0x8880u + byte * 0x1111u));
    const int32_t width = static_cast<int32_t>(permute_bytes(step, 0, 0x4440u + byte));
    x[k] = code * width + 128;
  }
  const uint32_t low =
      permute_bytes(static_cast<uint32_t>(x[0]), static_cast<uint32_t>(x[1]), 0x0051);
  const uint32_t high =
      permute_bytes(static_cast<uint32_t>(x[2]), static_cast<uint32_t>(x[3]), 0x0051);
  return permute_bytes(low, high, 0x5410);
}

// Where the parts of a summary lie in its stage.
template <int kTokens>
struct SketchStage {
  static constexpr int kGroupUnits = kTokens / 4;  // of 16 bytes
  // Four neighbouring groups at one token lie in different banks.
  static constexpr int kGroupPitch = (kTokens * 4 + 127) / 128 * 128 + 32;
  int groups = 0;
  int padded = 0;  // dimensions

  KVP_DEVICE explicit SketchStage(int k_dim)
      : groups((k_dim + 31) / 32 * 32 / (4 * kFields)), padded((k_dim + 31) / 32 * 32) {}
  KVP_DEVICE int lows() const { return groups * kGroupPitch; }
  KVP_DEVICE int steps() const { return lows() + 2 * padded; }
  KVP_DEVICE int scales() const { return lows() + 3 * padded; }
  KVP_DEVICE int tail_units() const { return (3 * padded + 8 + 63) / 64 * 4; }

  KVP_DEVICE void load(const unsigned char* summary, unsigned char* stage) const {
    const int code_units = groups * kGroupUnits;
    for (int u = lane_index(); u < code_units + tail_units(); u += 32) {
      const int at = u < code_units ? u / kGroupUnits * kGroupPitch + u % kGroupUnits * 16
                                    : lows() + (u - code_units) * 16;
      copy_async16(stage + at, summary + int64_t{u} * 16, true);
    }
  }
};

// Scores of 8 kBatches queries into values[].
template <int kTokens, int kBatches>
KVP_DEVICE void score_batches(const SketchStage<kTokens>& sketch, const unsigned char* stage,
                              const unsigned char* queries, int query_pitch, double* values) {
  constexpr int kTiles = kTokens / 16;
  constexpr int kPair = kTiles < 2 ? 1 : 2;  // tiles a load brings codes for
  constexpr uint32_t kMask = 0x03030303u;
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  int32_t sums[kBatches][kTiles][4] = {};
  // Row 0: q . (low bytes of low), row 1: q . (high bytes + 128), row 2: sum of q.
  int32_t base[kBatches][4] = {};
  const uint32_t pick = g == 1 ? 0x7531u : 0x6420u;
  const uint32_t flip = g == 1 ? 0x80808080u : 0u;

  for (int first = 0; first < sketch.groups; first += 4) {
    const bool own = first + t < sketch.groups;
    const int group = own ? first + t : sketch.groups - 1;
    const unsigned char* query = queries + g * query_pitch + group * 4 * kFields;
    const unsigned char* step = stage + sketch.steps() + group * 4 * kFields;
    const unsigned char* low = stage + sketch.lows() + group * 8 * kFields;
    uint32_t weights[kBatches][kFields];
    KVP_UNROLL
    for (int s = 0; s < kFields; s += 4) {
      const Words width = load_words(step + 4 * s);
      uint32_t halves[2][4] = {};  // of `low`, as rows of a product
      KVP_UNROLL
      for (int i = 0; i < 2; ++i) {
        const Words lows = load_words(low + 8 * s + 16 * i);
        halves[i][0] = permute_bytes(lows.w[0], lows.w[1], pick) ^ flip;
        halves[i][2] = permute_bytes(lows.w[2], lows.w[3], pick) ^ flip;
        if (g == 2) halves[i][0] = halves[i][2] = 0x01010101u;
      }
      KVP_UNROLL
      for (int b = 0; b < kBatches; ++b) {
        Words q = load_words(query + 8 * b * query_pitch + 4 * s);
        KVP_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (!own) q.w[i] = 0;
          weights[b][s + i] = weigh(q.w[i], width.w[i]);
        }
        mma_uint8(base[b], halves[0], q.w[0], q.w[1]);
        mma_uint8(base[b], halves[1], q.w[2], q.w[3]);
      }
    }
    const unsigned char* codes = stage + group * sketch.kGroupPitch;
    KVP_UNROLL
    for (int tile = 0; tile < kTiles; tile += kPair) {
      uint32_t raw[2 * kPair];
      if constexpr (kPair == 2) {
        const Words four = load_words(codes + tile * 64 + g * 16);
        KVP_UNROLL
        for (int i = 0; i < 4; ++i) raw[i] = four.w[i];
      } else {
        raw[0] = *reinterpret_cast<const uint32_t*>(codes + g * 8);
        raw[1] = *reinterpret_cast<const uint32_t*>(codes + g * 8 + 4);
      }
      KVP_UNROLL
      for (int i = 0; i < kPair; ++i) {
        KVP_UNROLL
        for (int s = 0; s < kFields; s += 2) {
          const uint32_t a[4] = {(raw[2 * i] >> (s * kBits)) & kMask,
                                 (raw[2 * i + 1] >> (s * kBits)) & kMask,
                                 (raw[2 * i] >> ((s + 1) * kBits)) & kMask,
                                 (raw[2 * i + 1] >> ((s + 1) * kBits)) & kMask};
          KVP_UNROLL
          for (int b = 0; b < kBatches; ++b) {
            mma_uint8(sums[b][tile + i], a, weights[b][s], weights[b][s + 1]);
          }
        }
      }
    }
  }

  const float low_scale = *reinterpret_cast<const float*>(stage + sketch.scales());
  const double step_scale =
      256.0 * static_cast<double>(*reinterpret_cast<const float*>(stage + sketch.scales() + 4));
  KVP_UNROLL
  for (int b = 0; b < kBatches; ++b) {
    KVP_UNROLL
    for (int i = 0; i < 2; ++i) {
      int32_t best = sums[b][0][i];
      KVP_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        best = sums[b][tile][i] > best ? sums[b][tile][i] : best;
        best = sums[b][tile][i + 2] > best ? sums[b][tile][i + 2] : best;
      }
      for (int mask = 4; mask < 32; mask *= 2) {
        const int32_t other = shuffle_xor(best, mask);
        best = other > best ? other : best;
      }
      // Modulo 2^32, where the sum fits.
      const uint32_t low = static_cast<uint32_t>(shuffle(base[b][i], t)) +
                           256u * static_cast<uint32_t>(shuffle(base[b][i], 4 + t)) -
                           32768u * static_cast<uint32_t>(shuffle(base[b][i], 8 + t));
      if (g == 0) {
        values[8 * b + 2 * t + i] = combine(low_scale, static_cast<int32_t>(low), step_scale, best);
      }
    }
  }
}

// Sixteen queries at a time cost less each than eight do, and more registers.
template <int kTokens>
struct SketchBatches {
  static constexpr int kMost = kTokens <= 64 ? 2 : 1;
};

template <int kTokens, int kBatches>
KVP_KERNEL KVP_BOUNDS(kScoreThreads, kTokens <= 64 && kBatches == 1 ? 3 : 2)
    score_sketches(const ScoreJob job) {
  const SelectParams& p = job.p;
  unsigned char* shared = shared_memory();
  unsigned char* queries = shared + job.queries_at;
  const TileRow* rows = reinterpret_cast<const TileRow*>(shared + job.rows_at);
  const uint64_t* addresses = reinterpret_cast<const uint64_t*>(shared + job.addresses_at);
  const int group = group_of(p);
  const SketchStage<kTokens> sketch(p.shape.k_dim);
  unsigned char* ring = shared + warp_index() * job.stages * job.stage_bytes;
  double* values =
      reinterpret_cast<double*>(shared + job.values_at) + warp_index() * job.query_lines;

  each_item(job, [&](const Item& item) {
    const int count = (item.end - item.begin - warp_index() + job.warps - 1) / job.warps;
    const auto chunk_of = [&](int i) { return item.begin + warp_index() + i * job.warps; };
    const auto fetch = [&](int i) {
      if (i < count) {
        sketch.load(reinterpret_cast<const unsigned char*>(addresses[chunk_of(i) - item.begin]),
                    ring + i % job.stages * job.stage_bytes);
      }
      copy_async_commit();
    };
    for (int i = 0; i + 1 < job.stages; ++i) fetch(i);
    quantize_rows(job, item, rows, queries);
    for (int i = 0; i < count; ++i) {
      fetch(i + job.stages - 1);
      if (job.stages == 3) {
        copy_async_wait<2>();
      } else {
        copy_async_wait<1>();
      }
      sync_warp();
      const unsigned char* stage = ring + i % job.stages * job.stage_bytes;
      for (int first = 0; first < item.rows * group; first += 8 * kBatches) {
        score_batches<kTokens, kBatches>(sketch, stage, queries + first * job.query_pitch,
                                         job.query_pitch, values + first);
      }
      sync_warp();
      for (int r = lane_index(); r < item.rows; r += 32) {
        double best = values[r * group];
        for (int h = 1; h < group; ++h) best = larger(best, values[r * group + h]);
        const int chunk = chunk_of(i);
        if (chunk >= rows[r].begin && chunk < rows[r].end) {
          *score_at(job, rows[r].slot, item.head, chunk) = best;
        }
      }
    }
    copy_async_wait<0>();
  });
}

}  // namespace kvpager::gpu::scoring
