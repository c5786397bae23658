// Tiles of up to 128 queries: prefill. A block's warps share K and V tiles in shared memory.
//
// With head_dim 64 a warp has two 16-row tiles, which halves what is read from shared memory per
// mma; with more, and with codes, its registers hold one. K and V are double buffered (one barrier per tile) and the
// group's state lies in shared memory. At head_dim 128: 8 warps, 64 KiB of tiles, 68 KiB of state; per tile of 64 keys 1024
// mma of 16x8x16 and 256 KiB read from shared memory, 2048 clocks at 128 bytes each.
#pragma once

#include <type_traits>

#include "cuda/attend_tensor_items.cuh"
#include "cuda/attend_tensor_store.cuh"

namespace kvpager::gpu::tensor {

template <int kDim, bool kCodes>
struct LargeShape {
  using P = Page<kDim, kCodes>;
  static constexpr int kM = kDim == 64 && !kCodes ? 2 : 1;
  static constexpr int kWarps = kLargeTile / (16 * kM);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kBlocksPerMultiprocessor = kM == 2 ? 2 : 1;
  static constexpr int kTileBytes = P::kTileBytes;  // of K, and of V
  static constexpr bool kSharedQueries = kM == 2 || (kCodes && kDim == 128);
  using Fragments =
      std::conditional_t<kSharedQueries, SharedFragments<kDim, kM>, RegisterFragments<kDim, kM>>;
  // In shared memory: addresses of a group's pages, what each warp sees of it, tiles, queries, the
  // group's state, what each thread's rows see of the group (its registers are full), and scales.
  static constexpr int kAddresses = 0;
  static constexpr int kRanges = kAddresses + kGroupChunks * 8;
  static constexpr int kBuffers = kRanges + 16 * 8;
  static constexpr int kQueries = kBuffers + kStages * 2 * kTileBytes;
  static constexpr int kState =
      kQueries + (kSharedQueries ? kWarps * SharedFragments<kDim, kM>::kWarpBytes : 0);
  static constexpr int kSights = kState + kThreads * kM * (kDim / 8 + 1) * 16;
  static constexpr int kScales = kSights + kThreads * kM * 2 * 16;
  static constexpr int kBlockBytes = kScales + (kCodes ? kStages * SharedScales::kBytes : 0);
};

template <DType kType, int kDim, bool kCodes>
struct LargeWalk {
  using L = LargeShape<kDim, kCodes>;
  using P = Page<kDim, kCodes>;
  static constexpr int kM = L::kM;
  static constexpr int kBlocks = kDim / 8;

  const Launch& launch;
  const Plan& plan;
  const Part& part;
  UnitSplits splits;
  Queries<kM> queries;
  typename L::Fragments q;
  unsigned char* memory;
  int32_t unit = 0;
  SplitState<kDim, kM> state;
  bool touched = false;  // some row of the warp saw a tile of the split

  KVP_DEVICE SharedStore group_store(int m) const {
    return SharedStore{reinterpret_cast<Float4*>(memory + L::kState) +
                           m * (kBlocks + 1) * L::kThreads + thread_index(),
                       L::kThreads, kBlocks};
  }
  KVP_DEVICE ScratchStore unit_store(int m) const {
    return tensor::unit_store(launch.attend, plan, queries, m, unit);
  }
  KVP_DEVICE ScratchStore total_store(int m) const {
    return tensor::total_store(launch.attend, queries, m);
  }

  KVP_DEVICE Sight<kGroupChunks>* sight_at(int m, int half) const {
    static_assert(sizeof(Sight<kGroupChunks>) == 16, "");
    return reinterpret_cast<Sight<kGroupChunks>*>(memory + L::kSights) +
           (2 * m + half) * L::kThreads + thread_index();
  }

  KVP_DEVICE unsigned char* key_tile(int stage) const {
    return memory + L::kBuffers + stage * 2 * L::kTileBytes;
  }
  KVP_DEVICE unsigned char* value_tile(int stage) const { return key_tile(stage) + L::kTileBytes; }
  KVP_DEVICE const unsigned char* page(int tile) const {
    return reinterpret_cast<const unsigned char*>(
        reinterpret_cast<const uint64_t*>(memory + L::kAddresses)[tile]);
  }

  // Rows [0, kCount) of kUnits units, `stride` bytes apart; zeros from row `valid` on.
  template <int kCount, int kUnits>
  KVP_DEVICE void bring(unsigned char* to, const unsigned char* from, int stride, int valid) const {
    using U = Units<kUnits>;
    using C = Copy<kUnits>;
    constexpr int kRows = C::kRows * L::kWarps;  // all threads together
    const int mine = warp_index() * C::kRows + C::row();
    from += mine * stride + C::unit() * 16;
    to += U::offset(mine, C::unit());
    KVP_UNROLL
    for (int row = 0; row < kCount; row += kRows) {
      if (kCount % kRows != 0 && row + mine >= kCount) break;
      KVP_UNROLL
      for (int unit = 0; unit < kUnits; unit += C::kLanes) {
        copy_async16(U::step(to, row, unit), from + row * stride + unit * 16, row + mine < valid);
      }
    }
  }
  KVP_DEVICE void bring_keys(int tile, int stage) const {
    bring<P::kKeyRows, kTokens / 8>(key_tile(stage), page(tile), kTokens * 2, P::kKeyRows);
  }
  // `valid`: tokens of the tile that are written. Codes are finite whatever they are.
  KVP_DEVICE void bring_values(int tile, int valid, int stage) const {
    bring<P::kValueRows, kDim / 8>(value_tile(stage), page(tile) + P::kValuesAt, kDim * 2,
                                   kCodes ? P::kValueRows : valid);
  }
  KVP_DEVICE unsigned char* scales(int stage) const {
    return memory + L::kScales + stage * SharedScales::kBytes;
  }
  KVP_DEVICE void bring_scales(int tile, int stage) const {
    constexpr int kUnits = kTokens * 2 / 16;  // of keys, and of values
    const int unit = thread_index();
    if (!kCodes || unit >= 2 * kUnits) return;
    const unsigned char* from = page(tile) + P::kTileBytes + unit % kUnits * 16;
    copy_async16(scales(stage) + unit * 16, from + (unit < kUnits ? 0 : P::kValuesAt), true);
  }
  // All of a tile. `written`: tokens of the group.
  KVP_DEVICE void bring_tile(int tile, int written, int stage) const {
    bring_keys(tile, stage);
    bring_values(tile, written - tile * kTokens, stage);
    bring_scales(tile, stage);
    copy_async_commit();
  }

  struct Step {
    TileSight sight[kM];
    bool masked, keep;
    uint32_t weights[kTokens / 16][kM][4];
  };

  // What the warp's rows see of a tile; false: none sees any of it.
  KVP_DEVICE bool look_at(int tile, Step& step) const {
    bool use = false, masked = false, keep = false;
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      const Sight<kGroupChunks> sight[2] = {*sight_at(m, 0), *sight_at(m, 1)};
      TileSight& seen = step.sight[m];
      seen = tile_sight<kGroupChunks>(sight, tile);
      KVP_UNROLL
      for (int half = 0; half < 2; ++half) {
        use = use || (seen.seen[half] && queries.row[m][half] >= 0);
        masked = masked || seen.begin[half] > 0 || seen.end[half] < kTokens;
        keep = keep || !seen.seen[half];
      }
    }
    step.masked = ballot(masked) != 0;
    step.keep = ballot(keep) != 0;
    return ballot(use) != 0;
  }

  KVP_DEVICE void use_keys(const unsigned char* keys, const SharedScales& scales, Step& step) {
    float s[kM][kTokens / 8][4];
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      KVP_UNROLL
      for (int n = 0; n < kTokens / 8; ++n) {
        KVP_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0.0f;
      }
    }
    keys += matrix_offset<kTokens / 8, kCodes>();
    KVP_UNROLL
    for (int k = 0; k < P::kKeyRows / 16; ++k) {
      if constexpr (kCodes) {
        uint32_t a[2][kM][4];
        KVP_UNROLL
        for (int m = 0; m < kM; ++m) {
          q.get(m, 2 * k, a[0][m]);
          q.get(m, 2 * k + 1, a[1][m]);
        }
        add_code_scores<kM>(s, a, keys, 16 * k);
      } else {
        uint32_t a[kM][4];
        KVP_UNROLL
        for (int m = 0; m < kM; ++m) q.get(m, k, a[m]);
        add_scores<kType, kM>(s, a, keys, 16 * k);
      }
    }
    state.template take<kType, kCodes>(launch, step.masked, step.sight, scales, s, step.weights);
    touched = true;
  }

  template <bool kKeep>
  KVP_DEVICE void use_values(const Step& step, const unsigned char* values) {
    bool seen[kM][2];
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      KVP_UNROLL
      for (int half = 0; half < 2; ++half) seen[m][half] = step.sight[m].seen[half];
    }
    values += matrix_offset<kDim / 8, kCodes>();
    KVP_UNROLL
    for (int k = 0; k < P::kValueRows / 16; ++k) {
      tensor::use_values<kType, kDim, kM, kCodes, kKeep>(state.acc, step.weights, k, values, 16 * k,
                                                         seen);
    }
  }

  KVP_DEVICE void use_values(const Step& step, const unsigned char* values) {
    if (step.keep) {
      use_values<true>(step, values);
    } else {
      use_values<false>(step, values);
    }
  }

  KVP_DEVICE void end_split() {
    if (plan.large != Level::kSplit && !touched) return;
    state.close(queries);
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      if (plan.large == Level::kSplit) {
        put<kBlocks>(unit_store(m), state.acc[m], state.m[m], state.l[m]);
      } else {
        fold_into<kBlocks>(group_store(m), state.acc[m], state.m[m], state.l[m]);
      }
    }
    state.reset();
    touched = false;
  }

  KVP_DEVICE void end_group() {
    if (plan.large == Level::kSplit) return;
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      take<kBlocks>(group_store(m), state.acc[m], state.m[m], state.l[m]);
      if (plan.large == Level::kGroup) {
        put<kBlocks>(unit_store(m), state.acc[m], state.m[m], state.l[m]);
      } else {
        fold_into<kBlocks>(total_store(m), state.acc[m], state.m[m], state.l[m]);
      }
    }
    state.reset();
  }

  // What the block's rows see of a group, and the addresses of its pages. All threads.
  KVP_DEVICE TileRange<kGroupChunks> prepare(int group, const TileRange<kGroupChunks>& mine) {
    const AttendParams& p = launch.attend;
    uint64_t* ranges = reinterpret_cast<uint64_t*>(memory + L::kRanges);
    sync_block();  // nobody is in the group before
    if (lane_index() == 0) ranges[warp_index()] = mine.chunks;
    for (int chunk = thread_index(); chunk < kGroupChunks; chunk += L::kThreads) {
      const int64_t at = int64_t{group} * kGroupChunks + chunk;
      uint64_t address = 0;
      if (at < part.visible) {
        address = slice_address(p, part, at) +
                  static_cast<uint64_t>(p.shape.page_bytes * queries.kv_head);
      }
      reinterpret_cast<uint64_t*>(memory + L::kAddresses)[chunk] = address;
    }
    sync_block();
    TileRange<kGroupChunks> range;
    for (int warp = 0; warp < L::kWarps; ++warp) range.chunks |= ranges[warp];
    return range;
  }

  // Tiles [first, limit) of a group.
  KVP_DEVICE void walk_group(int group, int first, int limit,
                             const TileRange<kGroupChunks>& range) {
    const int written = static_cast<int>(
        smaller(part.written - int64_t{group} * kGroupChunks * kTokens, kGroupChunks * kTokens));
    int tile = range.next(first, limit);
    int stage = 0;
    Step step;
    if (tile < limit) {
      bring_tile(tile, written, 0);
    }
    while (tile < limit) {
      const int following = range.next(tile + 1, limit);
      const bool use = look_at(tile, step);
      copy_async_wait<0>();
      sync_block();  // the tile is here, and the buffers of the one before are free
      if (following < limit) {
        bring_tile(following, written, stage ^ 1);
      }
      if (use) {
        use_keys(key_tile(stage), SharedScales{scales(stage)}, step);
        use_values(step, value_tile(stage));
      }
      stage ^= 1;
      if (following >= limit || following / kSplitChunks != tile / kSplitChunks) end_split();
      tile = following;
    }
  }

  KVP_DEVICE void walk() {
    const AttendParams& p = launch.attend;
    const Level level = plan.large;
    if (level == Level::kWalk && splits.first()) {
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) clear_total<kDim>(launch, queries, m, total_store(m));
    }
    state.reset();
    for (int group = splits.begin / kSplitsPerGroup; group * kSplitsPerGroup < splits.end;
         ++group) {
      Sight<kGroupChunks> sight[kM][2];
      const TileRange<kGroupChunks> mine = look(p, queries, group, sight);
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        *sight_at(m, 0) = sight[m][0];
        *sight_at(m, 1) = sight[m][1];
      }
      const TileRange<kGroupChunks> range = prepare(group, mine);
      const int from = splits.begin - group * kSplitsPerGroup;
      const int to = splits.end - group * kSplitsPerGroup;
      const int first_tile = (from > 0 ? from : 0) * kSplitChunks;
      const int limit = (to < kSplitsPerGroup ? to : kSplitsPerGroup) * kSplitChunks;
      if (range.next(first_tile, limit) >= limit) continue;
      if (level != Level::kSplit) {
        KVP_UNROLL
        for (int m = 0; m < kM; ++m) clear<kBlocks>(group_store(m));
      }
      walk_group(group, first_tile, limit, range);
      end_group();
    }
    if (level == Level::kWalk && splits.last(part)) {
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) write_total<kDim>(launch, queries, m, total_store(m));
    }
  }
};

template <DType kType, int kDim, bool kCodes>
KVP_KERNEL KVP_BOUNDS((LargeShape<kDim, kCodes>::kThreads),
                      (LargeShape<kDim, kCodes>::kBlocksPerMultiprocessor))
    large_tiles(const Launch launch) {
  using L = LargeShape<kDim, kCodes>;
  const AttendParams& p = launch.attend;
  const Plan plan = make_plan(launch);
  // Fits: every (tile, kv head, unit) has a state in scratch.
  const uint32_t items = large_items(p, plan);
  for (uint32_t i = static_cast<uint32_t>(block_index()); i < items;
       i += static_cast<uint32_t>(launch.large_workers)) {
    const WalkItem item = large_item(p, i);
    const Part& part = p.tables.parts[item.tile.part];
    const Span span = span_of(p.wave, item.tile.part, part);
    if (!has_chunks(plan, plan.large, span, item.unit)) continue;
    const UnitSplits splits = splits_of(plan, plan.large, span, item.unit);
    LargeWalk<kType, kDim, kCodes> work{launch,          plan,      part, splits, {}, {},
                                        shared_memory(), item.unit, {}};
    work.queries.place(p, part, item.kv_head, item.tile.begin + warp_index() * 16 * L::kM,
                       item.tile.end);
    if constexpr (L::kSharedQueries) {
      work.q.memory =
          shared_memory() + L::kQueries + warp_index() * SharedFragments<kDim, L::kM>::kWarpBytes;
    }
    load_queries<kType, kDim, L::kM, kCodes>(launch, work.queries, work.q);
    work.walk();
  }
}

}  // namespace kvpager::gpu::tensor
