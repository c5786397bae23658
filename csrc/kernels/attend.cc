// Walks each row's chunks and hands tiles to the kernels. Rows of one sequence go through a tile
// together; what is shared is the reading of keys and values, never arithmetic.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr int kTileQueries = 256;    // at most, per pass over a tile (one row may have more)
constexpr int kMinTileQueries = 32;  // row tiles are not cut below this to feed more threads
constexpr int kItemsPerThread = 3;   // fewer items than this and splits are computed apart
constexpr int64_t kPartialBytes = int64_t{64} << 20;  // bound on states of splits computed apart
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Floats on a cache line, kept between calls.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  FloatBuffer(FloatBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ~FloatBuffer() { release(); }

  // Contents are lost when it grows.
  float* reserve(int64_t count) {
    if (count > size_) {
      release();
      data_ = static_cast<float*>(
          ::operator new(static_cast<size_t>(count) * sizeof(float), kAlignment));
      size_ = count;
    }
    return data_;
  }
  float* data() const { return data_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(float)); }

 private:
  static constexpr std::align_val_t kAlignment{kTileAlignment};
  void release() {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    size_ = 0;
  }
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Rows of one sequence, order[begin, end).
struct RowTile {
  int32_t table = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// One (row tile, kv head) and the splits in which any of its rows sees a key, ascending.
struct Walk {
  const RowTile* tile = nullptr;
  int head = 0;
  std::vector<int64_t> splits;
  int64_t partial = 0;  // index of its first partial state, when its splits are computed apart
};

struct ThreadScratch {
  FloatBuffer tile;
  FloatBuffer states;
  std::vector<TileQuery> queries;
  std::vector<int64_t> cursors;
};

void reset(float* state, int64_t v_dim) {
  std::memset(state, 0, static_cast<size_t>(state_stride(v_dim)) * sizeof(float));
  state[v_dim] = kMinusInfinity;
}

bool saw_a_key(const float* state, int64_t v_dim) { return state[v_dim] != kMinusInfinity; }

}  // namespace

struct AttendWorkspace::Impl {
  FloatBuffer totals;   // [rows][q_heads][state_stride]
  FloatBuffer queries;  // [rows][q_heads][k_dim], when q is not float32
  FloatBuffer partials;
  std::vector<int64_t> order;  // rows that are not padding, by table, then as given
  std::vector<RowTile> tiles;
  std::vector<Walk> walks;
  std::vector<ThreadScratch> threads;
};

AttendWorkspace::AttendWorkspace() : impl_(std::make_unique<Impl>()) {}
AttendWorkspace::~AttendWorkspace() = default;

int64_t AttendWorkspace::bytes() const {
  int64_t total = impl_->totals.bytes() + impl_->queries.bytes() + impl_->partials.bytes();
  for (const ThreadScratch& scratch : impl_->threads) {
    total += scratch.tile.bytes() + scratch.states.bytes();
  }
  return total;
}

namespace {

using Impl = AttendWorkspace::Impl;

// The parameters with the derived numbers every step needs.
struct Problem {
  Problem(const AttendParams& p, Impl& i)
      : params(p),
        layout(*p.layout),
        impl(i),
        group(p.q_heads / p.layout->kv_heads),
        stride(state_stride(p.layout->v_dim)) {}

  int64_t first_chunk(int64_t position) const {
    if (params.window <= 0 || position < params.window) return 0;
    return (position - params.window + 1) / layout.chunk_tokens;
  }
  int64_t last_chunk(int64_t position) const { return position / layout.chunk_tokens; }
  float* total(int64_t row, int64_t q_head) const {
    return impl.totals.data() + (row * params.q_heads + q_head) * stride;
  }
  const float* query(int64_t row, int64_t q_head) const {
    if (params.q.dtype == DType::kFloat32) {
      return static_cast<const float*>(params.q.data) + row * params.q.row_stride +
             q_head * params.q.head_stride;
    }
    return impl.queries.data() + (row * params.q_heads + q_head) * layout.k_dim;
  }
  // The selected chunks of (row, head).
  const int32_t* list_begin(int64_t row, int head) const {
    return params.selected + params.selected_offsets[row * layout.kv_heads + head];
  }
  const int32_t* list_end(int64_t row, int head) const {
    return params.selected + params.selected_offsets[row * layout.kv_heads + head + 1];
  }

  const AttendParams& params;
  const Layout& layout;
  Impl& impl;
  const int group;
  const int64_t stride;
};

void check_tensor(const char* name, const TensorView& tensor, int64_t rows, int64_t heads,
                  int64_t dim) {
  if (tensor.data == nullptr || tensor.rows != rows || tensor.heads != heads || tensor.dim != dim) {
    throw InvalidArgumentError(str(name, " is [", tensor.rows, ", ", tensor.heads, ", ", tensor.dim,
                                   "]; expected [", rows, ", ", heads, ", ", dim, "]"));
  }
  if (!is_supported(tensor.dtype)) {
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
  while (queries > kMinTileQueries && items() < int64_t{kItemsPerThread} * threads) queries /= 2;
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

// The splits of [split_begin, split_end) in which a row of the walk's tile sees a key.
void find_splits(const Problem& problem, int64_t split_begin, int64_t split_end, Walk* walk) {
  walk->splits.clear();
  std::vector<int64_t>& splits = walk->splits;
  for (int64_t i = walk->tile->begin; i < walk->tile->end; ++i) {
    const int64_t row = problem.impl.order[i];
    const int64_t position = problem.params.row[row].position;
    const int64_t low = std::max(problem.first_chunk(position), split_begin * kChunksPerSplit);
    const int64_t high = std::min(problem.last_chunk(position) + 1, split_end * kChunksPerSplit);
    if (low >= high) continue;
    if (problem.params.selected_offsets == nullptr) {
      for (int64_t s = low / kChunksPerSplit; s <= (high - 1) / kChunksPerSplit; ++s) {
        splits.push_back(s);
      }
    } else {
      const int32_t* end = problem.list_end(row, walk->head);
      const int32_t* c = std::lower_bound(problem.list_begin(row, walk->head), end, low);
      for (; c != end && *c < high; ++c) {
        const int64_t split = *c / kChunksPerSplit;
        if (splits.empty() || splits.back() != split) splits.push_back(split);
      }
    }
  }
  std::sort(splits.begin(), splits.end());
  splits.erase(std::unique(splits.begin(), splits.end()), splits.end());
}

// The keys of chunk `c` that `position` sees, half open within the chunk.
struct Visible {
  int32_t begin = 0;
  int32_t end = 0;
};

Visible visible_tokens(const Problem& problem, int64_t position, int64_t c) {
  const int64_t tokens = problem.layout.chunk_tokens;
  const int64_t start = c * tokens;
  const int64_t end = std::min(tokens, position + 1 - start);
  int64_t begin = 0;
  if (problem.params.window > 0) {
    begin = std::max<int64_t>(0, position - problem.params.window + 1 - start);
  }
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

int64_t walk_states(const Problem& problem, const Walk& walk) {
  return (walk.tile->end - walk.tile->begin) * problem.group;
}

// Adds one split to the states of a walk's rows, [tile rows][group][stride]. With selections
// scratch.cursors holds each row's place in its chunk list.
void walk_split(const Problem& problem, const Walk& walk, int64_t split, float* states,
                ThreadScratch& scratch) {
  const AttendParams& params = problem.params;
  const Layout& layout = problem.layout;
  const RowTile& tile = *walk.tile;
  const ChunkTableView& table = params.tables[tile.table];
  const bool dense = params.selected_offsets == nullptr;
  const int64_t group_stride = problem.group * problem.stride;

  TileParams kernel;
  kernel.k_dtype = layout.k_dtype;
  kernel.v_dtype = layout.v_dtype;
  kernel.tokens = layout.chunk_tokens;
  kernel.k_dim = layout.k_dim;
  kernel.v_dim = layout.v_dim;
  kernel.scaling = params.scaling;
  kernel.softcap = params.softcap;
  kernel.scratch =
      scratch.tile.reserve(tile_scratch_floats(walk_states(problem, walk), layout.chunk_tokens));

  for (int64_t c = split * kChunksPerSplit; c < (split + 1) * kChunksPerSplit; ++c) {
    scratch.queries.clear();
    for (int64_t i = tile.begin; i < tile.end; ++i) {
      const int64_t row = problem.impl.order[i];
      if (!dense) {
        int64_t& cursor = scratch.cursors[i - tile.begin];
        const int64_t end = params.selected_offsets[row * layout.kv_heads + walk.head + 1];
        while (cursor < end && params.selected[cursor] < c) ++cursor;
        if (cursor == end || params.selected[cursor] != c) continue;
      }
      const Visible visible = visible_tokens(problem, params.row[row].position, c);
      if (visible.begin >= visible.end) continue;
      for (int g = 0; g < problem.group; ++g) {
        float* state = states + (i - tile.begin) * group_stride + g * problem.stride;
        scratch.queries.push_back({problem.query(row, int64_t{walk.head} * problem.group + g),
                                   state, visible.begin, visible.end});
      }
    }
    if (scratch.queries.empty()) continue;
    const std::byte* slice = c < table.chunks ? table.slices[c] : nullptr;
    if (slice == nullptr) {
      throw InvariantError(
          str("chunk ", c, " of table ", tile.table, " is attended to but was not made readable"));
    }
    const std::byte* page = slice + layout.page_bytes() * walk.head;
    kernel.k = page;
    kernel.v = page + layout.k_tile_bytes();
    kernel.queries = scratch.queries.data();
    kernel.count = static_cast<int64_t>(scratch.queries.size());
    kernels().attend_tile(kernel);
  }
}

void place_cursors(const Problem& problem, const Walk& walk, int64_t split,
                   ThreadScratch& scratch) {
  if (problem.params.selected_offsets == nullptr) return;
  scratch.cursors.clear();
  for (int64_t i = walk.tile->begin; i < walk.tile->end; ++i) {
    const int64_t row = problem.impl.order[i];
    const int32_t* c = std::lower_bound(problem.list_begin(row, walk.head),
                                        problem.list_end(row, walk.head), split * kChunksPerSplit);
    scratch.cursors.push_back(c - problem.params.selected);
  }
}

void merge(const Problem& problem, const Walk& walk, const float* states) {
  for (int64_t i = 0; i < walk_states(problem, walk); ++i) {
    const float* state = states + i * problem.stride;
    if (!saw_a_key(state, problem.layout.v_dim)) continue;
    const int64_t row = problem.impl.order[walk.tile->begin + i / problem.group];
    const int64_t q_head = int64_t{walk.head} * problem.group + i % problem.group;
    kernels().merge_state(problem.total(row, q_head), state, problem.layout.v_dim);
  }
}

void reset_states(const Problem& problem, const Walk& walk, float* states) {
  for (int64_t i = 0; i < walk_states(problem, walk); ++i) {
    reset(states + i * problem.stride, problem.layout.v_dim);
  }
}

// Each walk is one item: its splits one after the other, merged as they are done.
void run_walks(const Problem& problem, ThreadPool& pool) {
  Impl& impl = problem.impl;
  pool.run(static_cast<int64_t>(impl.walks.size()), [&](int64_t item, int thread) {
    const FloatEnvironment environment;
    const Walk& walk = impl.walks[item];
    if (walk.splits.empty()) return;
    ThreadScratch& scratch = impl.threads[thread];
    float* states = scratch.states.reserve(walk_states(problem, walk) * problem.stride);
    place_cursors(problem, walk, walk.splits.front(), scratch);
    for (const int64_t split : walk.splits) {
      reset_states(problem, walk, states);
      walk_split(problem, walk, split, states, scratch);
      merge(problem, walk, states);
    }
  });
}

// Few walks and many threads: splits are computed apart, then merged in order.
void run_splits_apart(const Problem& problem, int64_t partials, ThreadPool& pool) {
  Impl& impl = problem.impl;
  struct Piece {
    const Walk* walk;
    size_t begin, end;
  };
  int64_t splits = 0;
  for (const Walk& walk : impl.walks) splits += static_cast<int64_t>(walk.splits.size());
  const int64_t wanted = int64_t{4} * pool.threads();
  const size_t length = static_cast<size_t>(std::max<int64_t>(1, splits / wanted));
  std::vector<Piece> pieces;
  for (const Walk& walk : impl.walks) {
    for (size_t begin = 0; begin < walk.splits.size(); begin += length) {
      pieces.push_back({&walk, begin, std::min(begin + length, walk.splits.size())});
    }
  }
  float* base = impl.partials.reserve(partials * problem.stride);
  const auto states_of = [&](const Walk& walk, size_t split) {
    return base + (walk.partial + static_cast<int64_t>(split) * walk_states(problem, walk)) *
                      problem.stride;
  };
  pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t item, int thread) {
    const FloatEnvironment environment;
    const Piece& piece = pieces[item];
    ThreadScratch& scratch = impl.threads[thread];
    place_cursors(problem, *piece.walk, piece.walk->splits[piece.begin], scratch);
    for (size_t i = piece.begin; i < piece.end; ++i) {
      float* states = states_of(*piece.walk, i);
      reset_states(problem, *piece.walk, states);
      walk_split(problem, *piece.walk, piece.walk->splits[i], states, scratch);
    }
  });
  pool.run(static_cast<int64_t>(impl.walks.size()), [&](int64_t item, int) {
    const FloatEnvironment environment;
    const Walk& walk = impl.walks[item];
    for (size_t i = 0; i < walk.splits.size(); ++i) merge(problem, walk, states_of(walk, i));
  });
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
  const bool widen = params.q.dtype != DType::kFloat32;
  if (widen) impl.queries.reserve(params.rows * params.q_heads * params.layout->k_dim);
  const int64_t v_dim = params.layout->v_dim;
  for (const int64_t row : impl.order) {
    for (int64_t head = 0; head < params.q_heads; ++head) {
      float* total = problem.total(row, head);
      reset(total, v_dim);
      if (params.sinks != nullptr) {
        total[v_dim] = params.sinks[head];
        total[v_dim + 1] = 1.0f;
      }
      if (widen) {
        const uint16_t* q = static_cast<const uint16_t*>(params.q.data) +
                            row * params.q.row_stride + head * params.q.head_stride;
        float* wide = impl.queries.data() + (row * params.q_heads + head) * params.layout->k_dim;
        kernels().to_float(q, params.q.dtype, params.layout->k_dim, wide);
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
  int64_t partials = 0;
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
      walk.partial = partials;
      partials += static_cast<int64_t>(walk.splits.size()) * walk_states(problem, walk);
    }
  }
  const int64_t wanted = int64_t{kItemsPerThread} * pool.threads();
  if (pool.threads() == 1 || static_cast<int64_t>(impl.walks.size()) >= wanted) {
    run_walks(problem, pool);
    return;
  }
  if (partials * problem.stride * static_cast<int64_t>(sizeof(float)) > kPartialBytes &&
      split_end - split_begin > 1) {
    const int64_t middle = split_begin + (split_end - split_begin) / 2;
    attend_wave(params, split_begin, middle, workspace, pool);
    attend_wave(params, middle, split_end, workspace, pool);
    return;
  }
  run_splits_apart(problem, partials, pool);
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
        kernels().from_float(result, params.out.dtype, v_dim, out);
      }
    }
  });
}

}  // namespace kvpager
