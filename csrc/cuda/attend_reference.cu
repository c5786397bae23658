// Attention with the CPU's bits, in one of two ways that give the same ones:
//   walk    many rows: a warp walks all splits of its queries and keeps the total in registers
//   rounds  few rows: every split of a round has a warp of its own and leaves its state in scratch; then
//           a warp per query head folds the round's states into the total, splits ascending
// Splits are counted from the first one that a row can see in the call's wave, so that a window costs
// what it spans. Totals are kept in scratch between rounds and from wave to wave.
#include <algorithm>

#include "cuda/attend_reference.cuh"
#include "cuda/kernels.h"

namespace kvpager::gpu {
namespace reference {
namespace {

constexpr int kWarps = 4;  // per block
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerMultiprocessor = 8;
// With this many walks and more, rounds would keep a GPU no busier.
constexpr int64_t kWalksPerMultiprocessor = 16;
constexpr int64_t kMostScratch = int64_t{32} << 20;

struct Params {
  AttendParams attend;
  int32_t packs = 0;  // of a kv head's query heads
  // Of a round: splits [begin, begin + splits), counted from a row's first. No splits: no rounds.
  int64_t begin = 0;
  int64_t splits = 0;
  bool first = true;
  bool last = true;
  float* acc = nullptr;            // [rows][q_heads][splits][v_dim]
  float* softmax = nullptr;        // [rows][q_heads][splits][2]: m, l
  float* total_acc = nullptr;      // [rows][q_heads][v_dim]
  float* total_softmax = nullptr;  // [rows][q_heads][2]
};

// A pack of query heads of a row, numbered by kv head.
template <int kQueries>
KVP_DEVICE Queries queries_of(const Params& params, int64_t row, int32_t pack) {
  const AttendParams& p = params.attend;
  const int32_t group = p.shape.q_heads / p.shape.kv_heads;
  const int32_t within = pack % params.packs * kQueries;
  Queries queries;
  queries.kv_head = pack / params.packs;
  queries.head = queries.kv_head * group + within;
  queries.count = group - within < kQueries ? group - within : kQueries;
  queries.selected = nullptr;
  if (p.selected != nullptr) {
    queries.selected = p.selected + (row * p.shape.kv_heads + queries.kv_head) * p.selected_stride;
  }
  return queries;
}

template <int kQueries>
KVP_DEVICE void load_queries(const AttendParams& p, int64_t row, const Row& r,
                             Pack<kQueries>* memory, Queries* queries) {
  queries->position = r.position;
  queries->first = p.tables.parts[r.part].first;
  if (p.q.dtype == DType::kFloat32) {
    widen_queries<Float32>(p, row, *queries, memory);
  } else if (p.q.dtype == DType::kFloat16) {
    widen_queries<Float16>(p, row, *queries, memory);
  } else {
    widen_queries<BFloat16>(p, row, *queries, memory);
  }
  if (codes::coded(p.shape.k_dtype)) round_queries(p.shape, memory);
}

// The total of a query: the sink or nothing before its part's first chunk, then what is kept in scratch.
// `item`: row * q_heads + head. Lanes have the elements that they have of a state.
template <int kQueries, int kVectors>
KVP_DEVICE void take_total(const Params& params, bool first, int64_t item, int32_t head, int q,
                           State<kQueries, kVectors>* total) {
  const AttendParams& p = params.attend;
  if (first) {
    if (p.sinks == nullptr) return;
    total->m[q] = p.sinks[head];
    total->l[q] = 1.0f;
    return;
  }
  total->m[q] = params.total_softmax[2 * item];
  total->l[q] = params.total_softmax[2 * item + 1];
  KVP_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int32_t j = i * kWarp + lane_index();
    if (j < p.shape.v_dim) total->acc[q][i] = params.total_acc[item * p.shape.v_dim + j];
  }
}

// Into the output after the part's last chunk, else into scratch. Every lane has read m and l there.
template <int kQueries, int kVectors>
KVP_DEVICE void put_total(const Params& params, bool last, int64_t row, int32_t head, int q,
                          const State<kQueries, kVectors>& total) {
  const AttendParams& p = params.attend;
  const int64_t item = row * p.shape.q_heads + head;
  if (!last && lane_index() == 0) {
    params.total_softmax[2 * item] = total.m[q];
    params.total_softmax[2 * item + 1] = total.l[q];
  }
  KVP_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int32_t j = i * kWarp + lane_index();
    if (j >= p.shape.v_dim) continue;
    if (last) {
      write_output(p, row, head, j, total.acc[q][i], total.m[q], total.l[q]);
    } else {
      params.total_acc[item * p.shape.v_dim + j] = total.acc[q][i];
    }
  }
}

// Padding has a span of its own, whose output is zeros.
KVP_DEVICE Span span_of(const AttendParams& p, const Row& row) {
  if (row.part < 0) return {0, 1, true, true};
  return gpu::span_of(p.wave, row.part, p.tables.parts[row.part]);
}

// Both ways in one kernel, since walking is most of what the compiler has to do. A walk is of all splits
// that a row can see, or of one split of a round.
template <int kQueries, int kVectors>
KVP_KERNEL KVP_BOUNDS(kThreads, 3) walk(const Params params) {
  const AttendParams& p = params.attend;
  const bool rounds = params.splits > 0;
  const int64_t packs = int64_t{p.shape.kv_heads} * params.packs;
  const int64_t slots = rounds ? params.splits : 1;
  const int64_t items = p.tables.header->rows * slots * packs;
  Pack<kQueries>* memory = warp_memory<kQueries>(p.shape);
  for (int64_t item = block_index() * kWarps + warp_index(); item < items;
       item += grid_blocks() * kWarps) {
    const int64_t row = item / packs / slots;
    const int64_t slot = item / packs % slots;
    const Row r = p.tables.rows[row];
    const Span span = span_of(p, r);
    if (span.empty()) continue;
    Splits splits = {0, 0};
    if (r.part >= 0) splits = splits_of(p, r.position, span);
    if (rounds) {
      splits.begin += params.begin + slot;
      if (splits.begin >= splits.end) continue;
      splits.end = splits.begin + 1;
    }
    Queries queries = queries_of<kQueries>(params, row, static_cast<int32_t>(item % packs));
    const int64_t first_item = row * p.shape.q_heads + queries.head;
    State<kQueries, kVectors> total;
    total.reset();
    if (splits.begin < splits.end) load_queries(p, row, r, memory, &queries);
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      if (rounds || r.part < 0 || q >= queries.count) continue;
      take_total(params, span.first, first_item + q, queries.head + q, q, &total);
    }
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      State<kQueries, kVectors> state;
      if (!walk_split(p, queries, split, memory, &state)) continue;
      if (rounds) {
        total = state;
        break;
      }
      KVP_UNROLL
      for (int q = 0; q < kQueries; ++q) {
        if (state.m[q] == minus_infinity()) continue;
        const Merge merge = merge_of(total.m[q], state.m[q]);
        KVP_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          total.acc[q][i] = merged(merge, total.acc[q][i], state.acc[q][i]);
        }
        total.l[q] = merged(merge, total.l[q], state.l[q]);
        total.m[q] = merge.m;
      }
    }
    sync_warp();  // every lane has read the kept totals
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      if (q >= queries.count) continue;
      if (!rounds) {
        put_total(params, span.last, row, queries.head + q, q, total);
        continue;
      }
      const int64_t at = (first_item + q) * slots + slot;
      if (lane_index() == 0) {
        params.softmax[2 * at] = total.m[q];
        params.softmax[2 * at + 1] = total.l[q];
      }
      if (total.m[q] == minus_infinity()) continue;  // its acc is not read
      KVP_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const int32_t j = i * kWarp + lane_index();
        if (j < p.shape.v_dim) params.acc[at * p.shape.v_dim + j] = total.acc[q][i];
      }
    }
  }
}

template <int kVectors>
KVP_KERNEL KVP_BOUNDS(kThreads, 4) merge_splits(const Params params) {
  constexpr int kAhead = 16 / kVectors;  // splits whose states are loaded together
  const AttendParams& p = params.attend;
  const int32_t v_dim = p.shape.v_dim;
  const int64_t items = int64_t{p.tables.header->rows} * p.shape.q_heads;
  for (int64_t item = block_index() * kWarps + warp_index(); item < items;
       item += grid_blocks() * kWarps) {
    const int64_t row = item / p.shape.q_heads;
    const int32_t head = static_cast<int32_t>(item % p.shape.q_heads);
    const Row r = p.tables.rows[row];
    const Span span = span_of(p, r);
    if (span.empty()) continue;
    State<1, kVectors> total;
    total.reset();
    int64_t count = 0;
    if (r.part >= 0) {
      take_total(params, params.first && span.first, item, head, 0, &total);
      const Splits splits = splits_of(p, r.position, span);
      count = splits.end - splits.begin - params.begin;
      if (count > params.splits) count = params.splits;
    }
    for (int64_t slot = 0; slot < count; slot += kAhead) {
      float acc[kAhead][kVectors], m[kAhead], l[kAhead];
      KVP_UNROLL
      for (int s = 0; s < kAhead; ++s) {
        const int64_t at = item * params.splits + slot + s;
        const bool within = slot + s < count;
        m[s] = within ? params.softmax[2 * at] : minus_infinity();
        l[s] = within ? params.softmax[2 * at + 1] : 0.0f;
      }
      KVP_UNROLL
      for (int s = 0; s < kAhead; ++s) {
        const int64_t at = item * params.splits + slot + s;
        KVP_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          const int32_t j = i * kWarp + lane_index();
          const bool present = m[s] != minus_infinity() && j < v_dim;
          acc[s][i] = present ? params.acc[at * v_dim + j] : 0.0f;
        }
      }
      KVP_UNROLL
      for (int s = 0; s < kAhead; ++s) {
        if (m[s] == minus_infinity()) continue;
        const Merge merge = merge_of(total.m[0], m[s]);
        KVP_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          total.acc[0][i] = merged(merge, total.acc[0][i], acc[s][i]);
        }
        total.l[0] = merged(merge, total.l[0], l[s]);
        total.m[0] = merge.m;
      }
    }
    sync_warp();  // every lane has read the kept total
    put_total(params, params.last && span.last, row, head, 0, total);
  }
}

// Query heads per warp and vectors of 32 values per query.
struct Kernels {
  int queries;
  int vectors;
  void (*walk)(Params);
  void (*merge)(Params);
};
template <int kQueries, int kVectors>
Kernels kernels_of() {
  return {kQueries, kVectors, walk<kQueries, kVectors>, merge_splits<kVectors>};
}
Kernels kernels_for(const Shape& shape) {
  const int32_t group = shape.q_heads / shape.kv_heads;
  if (shape.v_dim <= 128) {
    if (group == 1) return kernels_of<1, 4>();
    return group == 2 ? kernels_of<2, 4>() : kernels_of<4, 4>();
  }
  if (shape.v_dim <= 256) return group == 1 ? kernels_of<1, 8>() : kernels_of<2, 8>();
  return kernels_of<1, 16>();
}

int64_t state_floats(const Shape& shape) { return shape.v_dim + 2; }

// The most splits a row can see.
int64_t most_splits(const Shape& shape, int64_t chunks, int64_t window) {
  const int64_t splits = (chunks + kChunksPerSplit - 1) / kChunksPerSplit;
  if (window <= 0) return splits;
  const int64_t span = int64_t{shape.chunk_tokens} * kChunksPerSplit;
  const int64_t spanned = (window - 1 + span - 1) / span + 1;
  return spanned < splits ? spanned : splits;
}

Grid grid_for(int64_t warps, int64_t shared_bytes, void* stream) {
  const int64_t blocks = (warps + kWarps - 1) / kWarps;
  const int64_t most = int64_t{multiprocessors()} * kBlocksPerMultiprocessor;
  return {blocks < most ? blocks : most, kThreads, shared_bytes, stream};
}

}  // namespace
}  // namespace reference

int64_t reference_scratch_bytes(const Shape& shape, const Bounds& bounds) {
  const int64_t splits = reference::most_splits(shape, bounds.chunks, 0);
  const int64_t totals = int64_t{bounds.rows} * shape.q_heads * reference::state_floats(shape) *
                         static_cast<int64_t>(sizeof(float));
  return totals + std::min(totals * splits, reference::kMostScratch);
}

int attend_reference(const AttendParams& attend, void* stream) {
  using namespace reference;
  const Shape& shape = attend.shape;
  const Kernels kernels = kernels_for(shape);
  const int64_t rows = attend.counts.rows;
  const int32_t group = shape.q_heads / shape.kv_heads;
  Params params;
  params.attend = attend;
  params.packs = (group + kernels.queries - 1) / kernels.queries;
  const int64_t walks = rows * shape.kv_heads * params.packs;
  const int64_t shared = int64_t{kWarps} * kernels.queries *
                         (shape.k_dim + shape.chunk_tokens + kWorthPacks) *
                         static_cast<int64_t>(sizeof(float));
  if (walks == 0) return 0;

  // Totals of all rows, then as many splits per round as there is room for.
  const int64_t chunks = most_chunks(attend.wave, attend.counts.max_visible);
  const int64_t splits = most_splits(shape, chunks, attend.window);
  const int64_t states = rows * shape.q_heads;
  const int64_t capacity =
      attend.scratch_bytes / static_cast<int64_t>(sizeof(float)) / (states * state_floats(shape)) -
      1;
  params.total_acc = static_cast<float*>(attend.scratch);
  params.total_softmax = params.total_acc + states * shape.v_dim;
  params.splits = std::min(splits, capacity);
  if (params.splits < 1 || walks >= multiprocessors() * kWalksPerMultiprocessor) {
    params.splits = 0;
    return launch(kernels.walk, grid_for(walks, shared, stream), params);
  }
  params.acc = params.total_softmax + 2 * states;
  params.softmax = params.acc + states * params.splits * shape.v_dim;
  for (params.begin = 0; params.begin < splits; params.begin += params.splits) {
    params.first = params.begin == 0;
    params.last = params.begin + params.splits >= splits;
    int code = launch(kernels.walk, grid_for(walks * params.splits, shared, stream), params);
    if (code != 0) return code;
    code = launch(kernels.merge, grid_for(states, 0, stream), params);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace kvpager::gpu
