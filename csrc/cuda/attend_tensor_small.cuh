// Tiles of up to 16 queries: decoding. A warp is on its own: it walks one unit of a (tile, kv head)
// with a ring of cp.async slots in shared memory that nobody else touches.
//
// One slot holds a slice of 4 KiB: some rows of the K tile, or of the V tile.
// Three are under way while one is used: 12 KiB per warp. An H100 needs about 15 bytes per clock and
// multiprocessor over about 1000 clocks of latency, so that 2 warps per multiprocessor ask for enough
// already and the 8 that run are ample; one row of 8 kv heads at 32K gives 1024 units, 7 or 8 for each.
// From head_dim 128 on queries lie in shared memory too, for registers. A block of 4 warps takes 64 to
// 80 KiB, of which two fit wherever a multiprocessor has 164 KiB.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/attend_tensor_items.cuh"
#include "cuda/attend_tensor_store.cuh"

namespace kvpager::gpu::tensor {

inline constexpr int kSmallWarps = 4;
inline constexpr int kSmallBlocks = 2;  // per multiprocessor
inline constexpr int kSlots = 4;

template <int kDim, bool kCodes>
struct SmallShape {
  using P = Page<kDim, kCodes>;
  static constexpr int kKeyRows = 32;                      // in a slot
  static constexpr int kValueRows = kDim == 64 ? 32 : 16;  // likewise
  static constexpr int kKeySlices = P::kKeyRows / kKeyRows;
  static constexpr int kValueSlices = P::kValueRows / kValueRows;
  static_assert(P::kKeyRows % kKeyRows == 0 && P::kValueRows % kValueRows == 0, "");
  static constexpr int kSlices = kKeySlices + kValueSlices;
  static constexpr int kKeyBytes = kKeyRows * kTokens * 2;
  static constexpr int kValueBytes = kValueRows * kDim * 2;
  static constexpr int kSlotBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  static constexpr bool kSharedQueries = kDim >= 128;
  using Fragments =
      std::conditional_t<kSharedQueries, SharedFragments<kDim, 1>, RegisterFragments<kDim, 1>>;
  static constexpr int kWarpBytes =
      kSlots * kSlotBytes + (kSharedQueries ? SharedFragments<kDim, 1>::kWarpBytes : 0);
  static constexpr int kBlockBytes = kSmallWarps * kWarpBytes;
};

// Brings slices of one split into the ring, ahead of their use.
template <int kDim, bool kCodes>
struct SmallFeed {
  using S = SmallShape<kDim, kCodes>;
  unsigned char* ring = nullptr;
  TileRange<kSplitChunks> range;
  uint64_t address = 0;  // of page `lane` of the split, in lanes 0..3
  int32_t written = 0;   // tokens from the split's start
  int32_t tile = 0;      // the one being brought
  const unsigned char* page = nullptr;
  int32_t slot = 0;  // that the next slice goes to

  // Slice `slice` of the next tile, if there is one; always a group for copy_async_wait.
  KVP_DEVICE void bring(int slice) {
    if (slice == 0) {
      tile = range.next(tile + 1, kSplitChunks);
      page = reinterpret_cast<const unsigned char*>(shuffle(address, tile % kSplitChunks));
    }
    if (tile < kSplitChunks) {
      unsigned char* to = ring + slot * S::kSlotBytes;
      if (slice < S::kKeySlices) {
        using U = Units<kTokens / 8>;
        using C = Copy<kTokens / 8>;
        const unsigned char* from =
            page + slice * S::kKeyRows * kTokens * 2 + C::row() * (kTokens * 2) + C::unit() * 16;
        unsigned char* at = to + U::offset(C::row(), C::unit());
        KVP_UNROLL
        for (int row = 0; row < S::kKeyRows; row += C::kRows) {
          copy_async16(U::step(at, row, 0), from + row * (kTokens * 2), true);
        }
      } else {
        using U = Units<kDim / 8>;
        using C = Copy<kDim / 8>;
        const int first = (slice - S::kKeySlices) * S::kValueRows;
        const unsigned char* from =
            page + S::P::kValuesAt + first * kDim * 2 + C::row() * (kDim * 2) + C::unit() * 16;
        unsigned char* at = to + U::offset(C::row(), C::unit());
        // Codes are finite whatever they are.
        const int valid = kCodes ? S::kValueRows : written - (tile * kTokens + first + C::row());
        KVP_UNROLL
        for (int row = 0; row < S::kValueRows; row += C::kRows) {
          KVP_UNROLL
          for (int unit = 0; unit < kDim / 8; unit += C::kLanes) {
            copy_async16(U::step(at, row, unit), from + row * (kDim * 2) + unit * 16, row < valid);
          }
        }
      }
    }
    copy_async_commit();
    slot = (slot + 1) % kSlots;
  }

  KVP_DEVICE LaneScales scales(int of_tile) const {
    if constexpr (!kCodes) return {};
    return LaneScales::of<kDim>(
        reinterpret_cast<const unsigned char*>(shuffle(address, of_tile % kSplitChunks)));
  }

  KVP_DEVICE void begin() {
    tile = range.next(0, kSplitChunks) - 1;  // bring(0) steps to it
    KVP_UNROLL
    for (int i = 0; i < kSlots - 1; ++i) bring(i % S::kSlices);
  }

  // The slot of slice `slice`, which has arrived; brings the one kSlots - 1 later into the slot
  // that all lanes have left.
  KVP_DEVICE const unsigned char* next(int slice) {
    copy_async_wait<kSlots - 2>();
    sync_warp();  // for all lanes' copies; collectives do not order memory
    const int ready = (slot + 1) % kSlots;
    bring((slice + kSlots - 1) % S::kSlices);
    return ring + ready * S::kSlotBytes;
  }
};

template <int... kIndex, class Function>
KVP_DEVICE void for_each_index(std::integer_sequence<int, kIndex...>, const Function& function) {
  (function(std::integral_constant<int, kIndex>()), ...);
}

template <DType kType, int kDim, bool kCodes>
KVP_DEVICE void walk_split(const Launch& launch, const Sight<kSplitChunks> (&sight)[2],
                           const typename SmallShape<kDim, kCodes>::Fragments& q,
                           SmallFeed<kDim, kCodes>& feed, SplitState<kDim, 1>& state) {
  using S = SmallShape<kDim, kCodes>;
  const TileRange<kSplitChunks>& range = feed.range;
  int tile = range.next(0, kSplitChunks);
  state.reset();
  feed.begin();
  while (tile < kSplitChunks) {
    const int following = range.next(tile + 1, kSplitChunks);
    const LaneScales scales = feed.scales(tile);
    const TileSight seen[1] = {tile_sight<kSplitChunks>(sight, tile)};
    const bool masked = ballot(seen[0].begin[0] > 0 || seen[0].begin[1] > 0 ||
                               seen[0].end[0] < kTokens || seen[0].end[1] < kTokens) != 0;
    const bool keep = ballot(!seen[0].seen[0] || !seen[0].seen[1]) != 0;
    float s[1][kTokens / 8][4];
    KVP_UNROLL
    for (int n = 0; n < kTokens / 8; ++n) {
      KVP_UNROLL
      for (int e = 0; e < 4; ++e) s[0][n][e] = 0.0f;
    }
    KVP_UNROLL
    for (int slice = 0; slice < S::kKeySlices; ++slice) {
      const unsigned char* keys = feed.next(slice) + matrix_offset<kTokens / 8, kCodes>();
      KVP_UNROLL
      for (int k = 0; k < S::kKeyRows / 16; ++k) {
        const int step = slice * (S::kKeyRows / 16) + k;
        if constexpr (kCodes) {
          uint32_t a[2][1][4];
          q.get(0, 2 * step, a[0][0]);
          q.get(0, 2 * step + 1, a[1][0]);
          add_code_scores<1>(s, a, keys, 16 * k);
        } else {
          uint32_t a[1][4];
          q.get(0, step, a[0]);
          add_scores<kType, 1>(s, a, keys, 16 * k);
        }
      }
    }
    uint32_t weights[kTokens / 16][1][4];
    state.template take<kType, kCodes>(launch, masked, seen, scales, s, weights);
    const bool halves[1][2] = {{seen[0].seen[0], seen[0].seen[1]}};
    // The compiler unrolls no loop of two such bodies, and an index that it does not know puts weights
    // into memory.
    const auto use_slice = [&](auto number) {
      constexpr int slice = decltype(number)::value;
      const unsigned char* values =
          feed.next(S::kKeySlices + slice) + matrix_offset<kDim / 8, kCodes>();
      KVP_UNROLL
      for (int k = 0; k < S::kValueRows / 16; ++k) {
        const int step = slice * (S::kValueRows / 16) + k;
        if (keep) {
          use_values<kType, kDim, 1, kCodes, true>(state.acc, weights, step, values, 16 * k,
                                                   halves);
        } else {
          use_values<kType, kDim, 1, kCodes, false>(state.acc, weights, step, values, 16 * k,
                                                    halves);
        }
      }
    };
    for_each_index(std::make_integer_sequence<int, S::kValueSlices>(), use_slice);
    tile = following;
  }
}

template <DType kType, int kDim, bool kCodes>
KVP_DEVICE void walk_small_unit(const Launch& launch, const Plan& plan, const Part& part,
                                const UnitSplits& splits, const Queries<1>& queries, int unit,
                                unsigned char* memory) {
  using S = SmallShape<kDim, kCodes>;
  constexpr int kBlocks = kDim / 8;
  const AttendParams& p = launch.attend;
  const Level level = plan.small;

  typename S::Fragments q;
  if constexpr (S::kSharedQueries) q.memory = memory + kSlots * S::kSlotBytes;
  bool have_queries = false, in_group = false;
  SmallFeed<kDim, kCodes> feed;
  feed.ring = memory;
  SplitState<kDim, 1> state;
  const bool walk = level == Level::kWalk;
  // Made anew wherever they are used, for registers.
  const auto store = [&] { return unit_store(p, plan, queries, 0, walk ? 0 : unit); };
  const auto total = [&] { return total_store(p, queries, 0); };
  if (walk && splits.first()) clear_total<kDim>(launch, queries, 0, total());

  const auto end_group = [&] {
    if (!walk || !in_group) return;
    take<kBlocks>(store(), state.acc[0], state.m[0], state.l[0]);
    fold_into<kBlocks>(total(), state.acc[0], state.m[0], state.l[0]);
    in_group = false;
  };
  for (int split = splits.begin; split < splits.end; ++split) {
    if (split % kSplitsPerGroup == 0) end_group();
    Sight<kSplitChunks> sight[1][2];
    feed.range = look(p, queries, split, sight);
    if (feed.range.chunks == 0) continue;
    const int64_t chunk = int64_t{split} * kSplitChunks + lane_index() % kSplitChunks;
    feed.address = 0;
    if (chunk < part.visible) {
      feed.address = slice_address(p, part, chunk) +
                     static_cast<uint64_t>(p.shape.page_bytes * queries.kv_head);
    }
    feed.written = static_cast<int32_t>(
        smaller(part.written - int64_t{split} * kSplitChunks * kTokens, kSplitChunks * kTokens));
    if (!have_queries) {
      load_queries<kType, kDim, 1, kCodes>(launch, queries, q);
      have_queries = true;
    }
    sync_warp();  // the ring is free; collectives do not order memory
    walk_split<kType, kDim, kCodes>(launch, sight[0], q, feed, state);
    state.close(queries);
    if (level == Level::kSplit) {
      put<kBlocks>(store(), state.acc[0], state.m[0], state.l[0]);
      continue;
    }
    if (!in_group) clear<kBlocks>(store());
    in_group = true;
    fold_into<kBlocks>(store(), state.acc[0], state.m[0], state.l[0]);
  }
  end_group();
  if (walk && splits.last(part)) write_total<kDim>(launch, queries, 0, total());
}

template <DType kType, int kDim, bool kCodes>
KVP_KERNEL KVP_BOUNDS(32 * kSmallWarps, kSmallBlocks) small_tiles(const Launch launch) {
  using S = SmallShape<kDim, kCodes>;
  const AttendParams& p = launch.attend;
  const Plan plan = make_plan(launch);
  unsigned char* memory = shared_memory() + warp_index() * S::kWarpBytes;
  // Fits: every (tile, kv head, unit) has a state in scratch.
  const uint32_t items = small_items(p, plan);
  for (uint32_t i = small_worker(block_index(), warp_index(), grid_blocks()); i < items;
       i += static_cast<uint32_t>(launch.small_workers)) {
    const WalkItem item = small_item(p, i);
    const Part& part = p.tables.parts[item.tile.part];
    const Span span = span_of(p.wave, item.tile.part, part);
    if (!has_chunks(plan, plan.small, span, item.unit)) continue;
    Queries<1> queries;
    queries.place(p, part, item.kv_head, item.tile.begin, item.tile.end);
    const UnitSplits splits = splits_of(plan, plan.small, span, item.unit);
    walk_small_unit<kType, kDim, kCodes>(launch, plan, part, splits, queries, item.unit, memory);
  }
}

}  // namespace kvpager::gpu::tensor
