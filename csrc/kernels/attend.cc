// Divides an attention call among threads. Rows of one sequence go through a tile of keys together;
// what is shared is the reading of keys and values, never arithmetic.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/capacity.h"
#include "base/float_environment.h"
#include "kernels/attend_walk.h"
#include "kvpager/error.h"

namespace kvpager {

AttendWorkspace::AttendWorkspace() : impl_(std::make_unique<Impl>()) {}
AttendWorkspace::~AttendWorkspace() = default;

int64_t AttendWorkspace::bytes() const {
  int64_t total = impl_->totals.bytes() + impl_->queries.bytes() + impl_->partials.bytes();
  for (const ThreadScratch& scratch : impl_->threads) {
    total += scratch.tile.bytes() + scratch.states.bytes();
  }
  return total + capacity_bytes(impl_->integers) + capacity_bytes(impl_->units) +
         capacity_bytes(impl_->order) + capacity_bytes(impl_->tiles) +
         capacity_bytes(impl_->walks) + capacity_bytes(impl_->pieces);
}

void AttendWorkspace::release() noexcept { *impl_ = Impl(); }

namespace {

using Impl = AttendWorkspace::Impl;

constexpr int kTileQueries = 256;    // at most, per pass over a tile (one row may have more)
constexpr int kMinTileQueries = 32;  // row tiles are not cut below this to feed more threads
constexpr int kTilesPerThread = 4;   // row tiles are cut until there are so many
constexpr int64_t kPartialBytes = int64_t{64} << 20;  // bound on states of splits computed apart

void check_tensor(const char* name, const TensorView& tensor, int64_t rows, int64_t heads,
                  int64_t dim) {
  if (tensor.data == nullptr || tensor.rows != rows || tensor.heads != heads || tensor.dim != dim) {
    throw InvalidArgumentError(str(name, " is [", tensor.rows, ", ", tensor.heads, ", ", tensor.dim,
                                   "]; expected [", rows, ", ", heads, ", ", dim, "]"));
  }
  if (!is_float(tensor.dtype)) {
    throw InvalidArgumentError(
        str(name, " is ", dtype_name(tensor.dtype), "; expected float32, float16 or bfloat16"));
  }
}

void check(const AttendParams& params) {
  const Layout& layout = *params.layout;
  if (params.q_heads < 1 || params.q_heads % layout.kv_heads != 0) {
    throw InvalidArgumentError(str("q_heads is ", params.q_heads, "; expected a multiple of ",
                                   layout.kv_heads, " kv_heads"));
  }
  check_tensor("q", params.q, params.rows, params.q_heads, layout.k_dim);
  check_tensor("out", params.out, params.rows, params.q_heads, layout.v_dim);
  if ((params.selected == nullptr) != (params.selected_offsets == nullptr) &&
      params.selected_offsets == nullptr) {
    throw InvalidArgumentError("selected is given without selected_offsets");
  }
}

// Tiles as large as fit the caches, but small enough that every thread gets some.
void cut_tiles(const Problem& problem, int threads) {
  Impl& impl = problem.impl;
  const AttendParams& params = problem.params;
  impl.order.clear();
  for (int64_t row = 0; row < params.rows; ++row) {
    if (params.row[row].table >= 0) impl.order.push_back(row);
  }
  std::stable_sort(impl.order.begin(), impl.order.end(),
                   [&](int64_t a, int64_t b) { return params.row[a].table < params.row[b].table; });
  const int64_t rows = static_cast<int64_t>(impl.order.size());
  int64_t queries = kTileQueries;
  const auto items = [&] {
    return (rows * problem.group + queries - 1) / queries * problem.layout.kv_heads;
  };
  while (queries > kMinTileQueries && items() < int64_t{kTilesPerThread} * threads) queries /= 2;
  const int64_t tile_rows = std::max<int64_t>(1, queries / problem.group);

  impl.tiles.clear();
  for (int64_t begin = 0; begin < rows;) {
    const int32_t table = params.row[impl.order[begin]].table;
    int64_t end = begin + 1;
    while (end < rows && end - begin < tile_rows && params.row[impl.order[end]].table == table) {
      ++end;
    }
    impl.tiles.push_back({table, begin, end});
    begin = end;
  }
}

// About how long a wave takes one thread, in nanoseconds: its bytes at 16 GB/s or its operations at
// 64 GFLOP/s. Decides how many threads are worth waking, and nothing else.
int64_t estimated_nanoseconds(const Problem& problem) {
  const Layout& layout = problem.layout;
  int64_t bytes = 0;
  int64_t operations = 0;
  for (const Walk& walk : problem.impl.walks) {
    int64_t chunks = static_cast<int64_t>(walk.splits.size()) * kChunksPerSplit;
    if (problem.params.selected_offsets != nullptr && walk.tile->end - walk.tile->begin == 1) {
      const int64_t row = problem.impl.order[static_cast<size_t>(walk.tile->begin)];
      chunks = std::min<int64_t>(
          chunks, problem.list_end(row, walk.head) - problem.list_begin(row, walk.head));
    }
    bytes += chunks * layout.page_bytes();
    operations += chunks * layout.chunk_tokens * walk_states(problem, walk) * 2 *
                  (layout.k_dim + layout.v_dim);
  }
  return std::max(bytes / 16, operations / 64);
}

// Cuts the walks into pieces for `threads` threads; returns how many partial states they need. A
// walk in one piece needs none: it merges as it goes. A piece is half of what is left divided by the
// threads: long while there is much to do, so that few walks are cut, and a single split at last, so
// that threads end together whenever they began.
int64_t cut_walks(const Problem& problem, int threads) {
  Impl& impl = problem.impl;
  size_t left = 0;
  for (const Walk& walk : impl.walks) left += walk.splits.size();
  impl.pieces.clear();
  int64_t partials = 0;
  for (size_t w = 0; w < impl.walks.size(); ++w) {
    Walk& walk = impl.walks[w];
    const size_t splits = walk.splits.size();
    walk.first_piece = impl.pieces.size();
    walk.partial = partials;
    for (size_t begin = 0; begin < splits;) {
      const size_t wanted = threads == 1 ? splits : left / (2 * static_cast<size_t>(threads));
      const size_t end = std::min(splits, begin + std::max<size_t>(1, wanted));
      impl.pieces.push_back({static_cast<int32_t>(w), begin, end});
      left -= end - begin;
      begin = end;
    }
    walk.end_piece = impl.pieces.size();
    if (walk.in_pieces()) partials += static_cast<int64_t>(splits) * walk_states(problem, walk);
  }
  return partials;
}

// Merges what is done of a walk in pieces, in order, up to the first piece that is not. One thread
// at a time; one that finds another at it leaves its piece to that one, which looks again after it
// let go.
template <class StatesOf>
void merge_in_order(const Problem& problem, const Walk& walk, StatesOf states_of) {
  Impl& impl = problem.impl;
  Merging& merging = impl.merging[static_cast<size_t>(&walk - impl.walks.data())];
  for (;;) {
    if (merging.taken.exchange(true)) return;
    size_t next = merging.next;
    for (; next < walk.end_piece && impl.done[next].load(); ++next) {
      for (size_t i = impl.pieces[next].begin; i < impl.pieces[next].end; ++i) {
        merge(problem, walk, states_of(i));
      }
    }
    merging.next = next;
    merging.taken.store(false);
    if (next == walk.end_piece || !impl.done[next].load()) return;
  }
}

// A walk that is one piece merges its splits as they are done. The splits of one in several pieces
// are kept apart until all before them are merged.
void run_pieces(const Problem& problem, int64_t partials, int threads, ThreadPool& pool) {
  Impl& impl = problem.impl;
  float* base = impl.partials.reserve(partials * problem.stride);
  impl.done.reset(impl.pieces.size());
  impl.merging.reset(impl.walks.size());
  for (size_t w = 0; w < impl.walks.size(); ++w) impl.merging[w].next = impl.walks[w].first_piece;
  const auto run = [&](int64_t item, int thread) {
    const FloatEnvironment environment;
    const Piece& piece = impl.pieces[static_cast<size_t>(item)];
    const Walk& walk = impl.walks[static_cast<size_t>(piece.walk)];
    ThreadScratch& scratch = impl.threads[static_cast<size_t>(thread)];
    const int64_t states = walk_states(problem, walk);
    if (!walk.in_pieces()) {
      float* own = scratch.states.reserve(states * problem.stride);
      walk_piece(
          problem, piece, scratch, [&](size_t) { return own; },
          [&](size_t, const float* done) { merge(problem, walk, done); });
      return;
    }
    const auto states_of = [&](size_t i) {
      return base + (walk.partial + static_cast<int64_t>(i) * states) * problem.stride;
    };
    walk_piece(problem, piece, scratch, states_of, [](size_t, const float*) {});
    impl.done[static_cast<size_t>(item)].store(true);
    merge_in_order(problem, walk, states_of);
  };
  pool.run(static_cast<int64_t>(impl.pieces.size()), run, threads);
}

}  // namespace

void attend_begin(const AttendParams& params, AttendWorkspace& workspace, ThreadPool& pool) {
  check(params);
  const FloatEnvironment environment;
  Impl& impl = *workspace.impl();
  const Problem problem(params, impl);
  cut_tiles(problem, pool.threads());
  impl.threads.resize(static_cast<size_t>(pool.threads()));
  impl.totals.reserve(params.rows * params.q_heads * problem.stride);
  const bool copied = !problem.queries_as_given();
  if (copied) impl.queries.reserve(params.rows * params.q_heads * params.layout->k_dim);
  const bool coded = is_coded(params.layout->k_dtype);
  if (coded) {
    impl.units.resize(static_cast<size_t>(params.rows * params.q_heads));
    impl.integers.resize(impl.units.size() * static_cast<size_t>(params.layout->k_dim));
  }
  const int64_t v_dim = params.layout->v_dim;
  for (const int64_t row : impl.order) {
    for (int64_t head = 0; head < params.q_heads; ++head) {
      float* total = problem.total(row, head);
      reset(total, v_dim);
      if (params.sinks != nullptr) {
        total[v_dim] = params.sinks[head];
        total[v_dim + 1] = 1.0f;
      }
      if (copied) {
        const std::byte* q =
            static_cast<const std::byte*>(params.q.data) +
            (row * params.q.row_stride + head * params.q.head_stride) * dtype_bytes(params.q.dtype);
        float* copy = impl.queries.data() + (row * params.q_heads + head) * params.layout->k_dim;
        kernels().to_float(q, params.q.dtype, params.layout->k_dim, copy);
        if (params.layout->k_rotated) kernels().rotate(copy, params.layout->k_dim);
      }
      if (coded) {
        const auto at = static_cast<size_t>(row * params.q_heads + head);
        impl.units[at] =
            kernels().round_query(problem.query(row, head), params.layout->k_dim,
                                  &impl.integers[at * static_cast<size_t>(params.layout->k_dim)]);
      }
    }
  }
}

void attend_wave(const AttendParams& params, int64_t split_begin, int64_t split_end,
                 AttendWorkspace& workspace, ThreadPool& pool) {
  Impl& impl = *workspace.impl();
  if (impl.threads.size() < static_cast<size_t>(pool.threads())) {
    throw InvariantError(str("attend_wave: ", pool.threads(), " threads after attend_begin with ",
                             impl.threads.size()));
  }
  const Problem problem(params, impl);
  int64_t last = -1;
  for (const int64_t row : impl.order) last = std::max(last, params.row[row].position);
  const int64_t chunks = last < 0 ? 0 : problem.last_chunk(last) + 1;
  split_end = std::min(split_end, (chunks + kChunksPerSplit - 1) / kChunksPerSplit);
  if (split_begin >= split_end) return;
  impl.walks.resize(impl.tiles.size() * static_cast<size_t>(params.layout->kv_heads));
  size_t next = 0;
  for (const RowTile& tile : impl.tiles) {
    for (int head = 0; head < params.layout->kv_heads; ++head) {
      Walk& walk = impl.walks[next++];
      walk.tile = &tile;
      walk.head = head;
      // Dense rows of all heads see the same splits.
      if (params.selected_offsets == nullptr && head > 0) {
        walk.splits = impl.walks[next - 2].splits;
      } else {
        find_splits(problem, split_begin, split_end, &walk);
      }
    }
  }
  const int threads = pool.worth_waking(estimated_nanoseconds(problem));
  const int64_t partials = cut_walks(problem, threads);
  if (partials * problem.stride * static_cast<int64_t>(sizeof(float)) > kPartialBytes &&
      split_end - split_begin > 1) {
    const int64_t middle = split_begin + (split_end - split_begin) / 2;
    attend_wave(params, split_begin, middle, workspace, pool);
    attend_wave(params, middle, split_end, workspace, pool);
    return;
  }
  run_pieces(problem, partials, threads, pool);
}

void attend_finish(const AttendParams& params, AttendWorkspace& workspace, ThreadPool& pool) {
  const Problem problem(params, *workspace.impl());
  const int64_t v_dim = params.layout->v_dim;
  const int64_t element = dtype_bytes(params.out.dtype);
  const int64_t rows_per_item = std::max<int64_t>(1, 4096 / params.q_heads);
  const int64_t items = (params.rows + rows_per_item - 1) / rows_per_item;
  pool.run(items, [&](int64_t item, int) {
    const FloatEnvironment environment;
    float result[512];
    const int64_t end = std::min(params.rows, (item + 1) * rows_per_item);
    for (int64_t row = item * rows_per_item; row < end; ++row) {
      for (int64_t head = 0; head < params.q_heads; ++head) {
        std::byte* out = static_cast<std::byte*>(params.out.data) +
                         (row * params.out.row_stride + head * params.out.head_stride) * element;
        const bool padding = params.row[row].table < 0;
        const float* total = padding ? nullptr : problem.total(row, head);
        if (padding || !saw_a_key(total, v_dim)) {
          std::memset(out, 0, static_cast<size_t>(v_dim * element));
          continue;
        }
        kernels().finish_state(total, static_cast<int32_t>(v_dim), result);
        if (params.layout->v_rotated) kernels().rotate(result, v_dim);
        kernels().from_float(result, params.out.dtype, v_dim, out);
      }
    }
  });
}

}  // namespace kvpager
