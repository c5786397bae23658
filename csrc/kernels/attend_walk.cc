// One walk: a tile of rows through the splits it sees, chunk after chunk.
#include "kernels/attend_walk.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

void reset(float* state, int64_t v_dim) {
  std::memset(state, 0, static_cast<size_t>(state_stride(v_dim)) * sizeof(float));
  state[v_dim] = kMinusInfinity;
}

bool saw_a_key(const float* state, int64_t v_dim) { return state[v_dim] != kMinusInfinity; }

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

int64_t walk_states(const Problem& problem, const Walk& walk) {
  return (walk.tile->end - walk.tile->begin) * problem.group;
}

namespace {

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

// The slice a walk reads after chunk c, where it is known to lie below `limit`; a guess that costs a
// fetch where it is wrong. scratch.cursors stand at c or after it.
const std::byte* slice_after(const Problem& problem, const Walk& walk, int64_t c, int64_t limit,
                             const ThreadScratch& scratch) {
  const AttendParams& params = problem.params;
  const ChunkTableView& table = params.tables[walk.tile->table];
  int64_t next = c + 1;
  if (params.selected_offsets != nullptr) {
    next = limit;
    for (int64_t i = walk.tile->begin; i < walk.tile->end; ++i) {
      int64_t cursor = scratch.cursors[static_cast<size_t>(i - walk.tile->begin)];
      const int64_t row = problem.impl.order[static_cast<size_t>(i)];
      const int64_t end = params.selected_offsets[row * problem.layout.kv_heads + walk.head + 1];
      if (cursor < end && params.selected[cursor] == c) ++cursor;
      if (cursor < end) next = std::min<int64_t>(next, params.selected[cursor]);
    }
  }
  return next < std::min(limit, table.chunks) ? table.slices[next] : nullptr;
}

}  // namespace

// What is read after the split's last chunk is looked for below chunk_limit.
void walk_split(const Problem& problem, const Walk& walk, int64_t split, int64_t chunk_limit,
                float* states, ThreadScratch& scratch) {
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
  kernel.count = walk_states(problem, walk);
  kernel.scratch = scratch.tile.reserve(tile_scratch_floats(kernel));

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
        const int64_t head = int64_t{walk.head} * problem.group + g;
        TileQuery query = {problem.query(row, head), state, visible.begin, visible.end};
        if (is_coded(layout.k_dtype)) {
          const size_t at = static_cast<size_t>(row * params.q_heads + head);
          query.integers = &problem.impl.integers[at * static_cast<size_t>(layout.k_dim)];
          query.unit = problem.impl.units[at];
        }
        scratch.queries.push_back(query);
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
    const std::byte* next = slice_after(problem, walk, c, chunk_limit, scratch);
    kernel.next_k = next == nullptr ? nullptr : next + layout.page_bytes() * walk.head;
    kernel.next_v =
        next == nullptr ? nullptr : next + layout.page_bytes() * walk.head + layout.k_tile_bytes();
    kernel.queries = scratch.queries.data();
    kernel.count = static_cast<int64_t>(scratch.queries.size());
    kernels().attend_tile(kernel);
  }
}

void reset_states(const Problem& problem, const Walk& walk, float* states) {
  for (int64_t i = 0; i < walk_states(problem, walk); ++i) {
    reset(states + i * problem.stride, problem.layout.v_dim);
  }
}

// Places each row's cursor in its chunk list at the piece's first split.
void begin_piece(const Problem& problem, const Walk& walk, const Piece& piece,
                 ThreadScratch& scratch) {
  if (problem.params.selected_offsets == nullptr) return;
  const int64_t first = walk.splits[piece.begin] * kChunksPerSplit;
  scratch.cursors.clear();
  for (int64_t i = walk.tile->begin; i < walk.tile->end; ++i) {
    const int64_t row = problem.impl.order[static_cast<size_t>(i)];
    const int32_t* c = std::lower_bound(problem.list_begin(row, walk.head),
                                        problem.list_end(row, walk.head), first);
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

}  // namespace kvpager
