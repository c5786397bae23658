// What the pieces of an attention call share: the walks of row tiles over splits and the memory they
// work in. Internal to attend.cc and attend_walk.cc.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/float_buffer.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"

namespace kvpager {

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
  int64_t partial = 0;     // index of its first partial state, when its splits are computed apart
  size_t first_piece = 0;  // Impl::pieces[first_piece, end_piece)
  size_t end_piece = 0;

  bool in_pieces() const { return end_piece - first_piece > 1; }
};

// Consecutive splits of a walk that one thread takes, walk.splits[begin, end).
struct Piece {
  int32_t walk = 0;
  size_t begin = 0;
  size_t end = 0;
};

// On lines of its own: what one thread counts in its vectors moves no other thread's memory.
struct alignas(128) ThreadScratch {
  FloatBuffer tile;
  FloatBuffer states;
  std::vector<TileQuery> queries;
  std::vector<int64_t> cursors;
};

// How far the splits of a walk in pieces are merged.
struct Merging {
  std::atomic<bool> taken{false};  // a thread is at it
  size_t next = 0;                 // the first piece that is not merged; belongs to who has `taken`
};

// Things that cannot be moved, made anew at each reset, in memory that is kept.
template <class T>
class Cells {
 public:
  void reset(size_t count) {
    if (count > size_) {
      cells_ = std::make_unique<T[]>(count);
      size_ = count;
      return;
    }
    for (size_t i = 0; i < count; ++i) {
      cells_[i].~T();
      new (&cells_[i]) T();
    }
  }
  T& operator[](size_t i) { return cells_[i]; }

 private:
  std::unique_ptr<T[]> cells_;
  size_t size_ = 0;
};

struct AttendWorkspace::Impl {
  FloatBuffer totals;             // [rows][q_heads][state_stride]
  FloatBuffer queries;            // [rows][q_heads][k_dim], unless they are read where they are
  std::vector<int16_t> integers;  // [rows][q_heads][k_dim], where keys are codes
  std::vector<float> units;       // [rows][q_heads]
  FloatBuffer partials;
  std::vector<int64_t> order;  // rows that are not padding, by table, then as given
  std::vector<RowTile> tiles;
  std::vector<Walk> walks;
  std::vector<Piece> pieces;
  Cells<std::atomic<bool>> done;  // [pieces]
  Cells<Merging> merging;         // [walks]
  std::vector<ThreadScratch> threads;
};

// The parameters with the derived numbers every step needs.
struct Problem {
  using Impl = AttendWorkspace::Impl;

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
  bool queries_as_given() const { return params.q.dtype == DType::kFloat32 && !layout.k_rotated; }
  const float* query(int64_t row, int64_t q_head) const {
    if (queries_as_given()) {
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

void reset(float* state, int64_t v_dim);
bool saw_a_key(const float* state, int64_t v_dim);

// Fills walk->splits: those of [split_begin, split_end) in which a row of its tile sees a key.
void find_splits(const Problem& problem, int64_t split_begin, int64_t split_end, Walk* walk);

// States of a walk: [tile rows][group], each of problem.stride floats.
int64_t walk_states(const Problem& problem, const Walk& walk);

// Computes the piece's splits one after the other and hands each one's states to `done(i)`, i its
// index in walk.splits; states_of(i) says where they are computed.
template <class StatesOf, class Done>
void walk_piece(const Problem& problem, const Piece& piece, ThreadScratch& scratch,
                StatesOf states_of, Done done);

// Adds the states of one split to the totals of the walk's rows.
void merge(const Problem& problem, const Walk& walk, const float* states);

// The steps of walk_piece.
void begin_piece(const Problem& problem, const Walk& walk, const Piece& piece,
                 ThreadScratch& scratch);
void reset_states(const Problem& problem, const Walk& walk, float* states);
// Adds one split to states, [tile rows][group][stride].
void walk_split(const Problem& problem, const Walk& walk, int64_t split, int64_t chunk_limit,
                float* states, ThreadScratch& scratch);

template <class StatesOf, class Done>
void walk_piece(const Problem& problem, const Piece& piece, ThreadScratch& scratch,
                StatesOf states_of, Done done) {
  const Walk& walk = problem.impl.walks[static_cast<size_t>(piece.walk)];
  begin_piece(problem, walk, piece, scratch);
  const int64_t chunk_limit = (walk.splits[piece.end - 1] + 1) * kChunksPerSplit;
  for (size_t i = piece.begin; i < piece.end; ++i) {
    float* states = states_of(i);
    reset_states(problem, walk, states);
    walk_split(problem, walk, walk.splits[i], chunk_limit, states, scratch);
    done(i, states);
  }
}

}  // namespace kvpager
