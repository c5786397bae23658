// Folds the states of splits or groups of each query, in scratch, into its total and, after its last
// chunk, its output; padding rows become zeros. A block per query: its warps fold a group each, then
// all threads the groups.
#pragma once

#include "cuda/attend_tensor_items.cuh"
#include "cuda/attend_tensor_store.cuh"

namespace kvpager::gpu::tensor {

inline constexpr int kMergeWarps = 8;
inline constexpr int kMergeThreads = 32 * kMergeWarps;
inline constexpr int kMergeBlocks = 4;  // per multiprocessor
static_assert(kMergeThreads >= 256, "a thread for each element of the widest head");

// The state of one group, the query's `group`th in scratch: lane i holds elements i, i + 32, ...
template <int kDim>
KVP_DEVICE void merge_group(const AttendParams& p, Level level, uint64_t chunks, const float* query,
                            int group, float (&acc)[kDim / 32], float* m, float* l) {
  const int64_t floats = state_floats(p.shape);
  *m = kMinusInfinity;
  *l = 0.0f;
  KVP_UNROLL
  for (int i = 0; i < kDim / 32; ++i) acc[i] = 0.0f;
  if (chunks == 0) return;
  if (level == Level::kGroup) {
    const float* state = query + group * floats;
    KVP_UNROLL
    for (int i = 0; i < kDim / 32; ++i) acc[i] = state[i * 32 + lane_index()];
    *m = state[kDim];
    *l = state[kDim + 1];
    return;
  }
  constexpr int kAhead = 8;  // loads under way together
  for (int first = 0; first < kSplitsPerGroup; first += kAhead) {
    float from[kAhead][kDim / 32], from_m[kAhead], from_l[kAhead];
    KVP_UNROLL
    for (int s = 0; s < kAhead; ++s) {
      const bool seen = (chunks >> (kSplitChunks * (first + s)) & kSplitMask) != 0;
      const float* state = query + (group * kSplitsPerGroup + first + s) * floats;
      from_m[s] = seen ? state[kDim] : kMinusInfinity;
      from_l[s] = seen ? state[kDim + 1] : 0.0f;
      KVP_UNROLL
      for (int i = 0; i < kDim / 32; ++i) {
        from[s][i] = seen ? state[i * 32 + lane_index()] : 0.0f;
      }
    }
    KVP_UNROLL
    for (int s = 0; s < kAhead; ++s) {
      if (!holds(from_m[s], from_l[s])) continue;
      const Weights weights = fold_weights(*m, from_m[s]);
      KVP_UNROLL
      for (int i = 0; i < kDim / 32; ++i) acc[i] = fold(weights, acc[i], from[s][i]);
      *l = fold(weights, *l, from_l[s]);
      *m = weights.m;
    }
  }
}

template <int kDim>
KVP_DEVICE void merge_query(const Launch& launch, const Plan& plan, const MergeItem& item,
                            float* memory) {
  const AttendParams& p = launch.attend;
  const int64_t row = item.row;
  const int q_head = item.q_head;
  const int kv_head = q_head / (p.shape.q_heads / p.shape.kv_heads);
  const float* query = state_at(p, plan, item.index, q_head, 0);
  const int begin = static_cast<int>(item.span.begin / kGroupChunks);
  const int span_end = static_cast<int>((item.span.end + kGroupChunks - 1) / kGroupChunks);
  const int row_end =
      static_cast<int>((p.tables.rows[row].position / p.shape.chunk_tokens) / kGroupChunks) + 1;
  const int groups = (row_end < span_end ? row_end : span_end) - begin;
  float* sums = memory + kMergeWarps * kDim;  // m and l of each warp's group
  float total_m, total_l, total = 0.0f;       // of element thread_index()
  if (item.span.first) {
    start_total(p, q_head, &total_m, &total_l);
  } else {
    const float* const kept = total_at(p, item.index, q_head);
    if (thread_index() < kDim) total = kept[thread_index()];
    total_m = kept[kDim];
    total_l = kept[kDim + 1];
  }
  for (int first = 0; first < groups; first += kMergeWarps) {
    const int group = first + warp_index();
    float acc[kDim / 32], m = kMinusInfinity, l = 0.0f;
    const uint64_t chunks =
        group < groups ? sight_of<kGroupChunks>(p, row, kv_head, begin + group).chunks : 0;
    merge_group<kDim>(p, item.level, chunks, query, group, acc, &m, &l);
    sync_block();  // the groups before have been read
    KVP_UNROLL
    for (int i = 0; i < kDim / 32; ++i) {
      memory[warp_index() * kDim + i * 32 + lane_index()] = acc[i];
    }
    if (lane_index() == 0) {
      sums[2 * warp_index()] = m;
      sums[2 * warp_index() + 1] = l;
    }
    sync_block();
    for (int warp = 0; warp < kMergeWarps; ++warp) {
      if (!holds(sums[2 * warp], sums[2 * warp + 1])) continue;
      const Weights weights = fold_weights(total_m, sums[2 * warp]);
      if (thread_index() < kDim) total = fold(weights, total, memory[warp * kDim + thread_index()]);
      total_l = fold(weights, total_l, sums[2 * warp + 1]);
      total_m = weights.m;
    }
  }
  if (item.span.last) {
    if (thread_index() < kDim) {
      write_out(p, row, q_head, thread_index(),
                holds(total_m, total_l) ? finish(total, total_l) : 0.0f);
    }
    return;
  }
  sync_block();  // all have read what was kept
  float* const kept = total_at(p, item.index, q_head);
  if (thread_index() < kDim) kept[thread_index()] = total;
  if (thread_index() < kSumFloats) {
    kept[kDim + thread_index()] = thread_index() % 2 == 0 ? total_m : total_l;
  }
}

template <int kDim>
KVP_DEVICE void write_zeros(const AttendParams& p, int64_t row) {
  for (int at = thread_index(); at < p.shape.q_heads * kDim; at += kMergeThreads) {
    write_out(p, row, at / kDim, at % kDim, 0.0f);
  }
}

template <int kDim>
KVP_KERNEL KVP_BOUNDS(kMergeThreads, 2) merge_states(const Launch launch) {
  const AttendParams& p = launch.attend;
  const Plan plan = make_plan(launch);
  float* memory = reinterpret_cast<float*>(shared_memory());
  const int64_t items = merge_items(p, plan);
  for (int64_t i = block_index(); i < items; i += grid_blocks()) {
    const MergeItem item = merge_item(p, plan, i);
    if (item.index < 0) {
      if (p.tables.rows[item.row].part < 0) write_zeros<kDim>(p, item.row);
    } else if (item.level != Level::kWalk && !item.span.empty()) {
      merge_query<kDim>(launch, plan, item, memory);
    }
  }
}

inline constexpr int64_t merge_shared_bytes(int dim) {
  return (int64_t{kMergeWarps} * dim + 2 * kMergeWarps) * 4;
}

}  // namespace kvpager::gpu::tensor
