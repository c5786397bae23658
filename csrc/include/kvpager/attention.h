// Attention over chunks: each row alone, keys and values read where they live, in logical order.
//
// The bits of a row are a function of its query, the chunks it selects and the constants below.
// They do not depend on other rows, on how many there are, on addresses, on threads, on waves, on
// the instruction set, or on how the calling thread rounds and flushes:
//   score   s[t] = fmaf over d = 0..k_dim-1 of q[d] * k[d][t], from +0; then s * scaling; then,
//           with a soft cap, tanh(s / softcap) * softcap
//   chunk   m' = max(m, max_t s[t]); r = exp(m - m'); p[t] = exp(s[t] - m')
//           l = fmaf(l, r, sum of p): 16 partial sums over t mod 16, each ascending from +0, then
//           folded in halves (i with i + 8, then + 4, + 2, + 1)
//           acc[j] = acc[j] * r, then fmaf over the visible t, ascending, of p[t] * v[t][j]
//   split   kChunksPerSplit chunks at absolute chunk indices share one running (m, l, acc), from
//           (-inf, 0, 0)
//   merge   splits into the row's total in ascending order, a split with no visible key skipped:
//           M' = max(M, m), L = fmaf(L, exp(M - M'), l * exp(m - M')), acc likewise
//   out     acc[j] / l, rounded once to the output's dtype; zeros for a row that sees no key
//   exp     x <= 0: n = round(x log2 e), x - n ln 2 in two fmaf steps, a polynomial of degree 7,
//           times 2^n; exp(0) is 1, below -87 it is 0. Constants: kernels/vec_isa.h
//   tanh    sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
// Everything is float32; keys and values of 16 bits are widened exactly. Codes are multiplied as
// integers, by the steps that kvpager/codes.h has in the place of these.
// Invisible keys (after the row, outside its window, in an unselected chunk) are selected away,
// never multiplied by zero, so that unwritten bytes (finite or NaN) cannot reach a result. A query
// that is not finite, or a sum that overflows, spoils its own row and no other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpager/layout.h"
#include "kvpager/tensor.h"
#include "kvpager/thread_pool.h"

namespace kvpager {

inline constexpr int kChunksPerSplit = 8;
inline constexpr int kKernelVersion = 1;  // part of the fingerprint: raise it when any bit changes

// Where the chunks of one sequence are at one layer.
struct ChunkTableView {
  // [chunks] address of chunk c's slice (kv_heads pages) at this layer; null where no row of this
  // wave reads it.
  const std::byte* const* slices = nullptr;
  int64_t chunks = 0;
};

struct AttendRow {
  int64_t position = 0;  // keys at positions <= this are visible
  int32_t table = -1;    // index into AttendParams::tables; -1: padding, the output row is zeros
};

struct AttendParams {
  const Layout* layout = nullptr;  // of the layer: Layout::of_layer
  int32_t q_heads = 0;             // a multiple of layout->kv_heads
  int64_t rows = 0;
  const AttendRow* row = nullptr;          // [rows]
  const ChunkTableView* tables = nullptr;  // one per sequence in the forward
  TensorView q;                            // [rows, q_heads, k_dim]
  TensorView out;                          // [rows, q_heads, v_dim], written by attend_finish
  float scaling = 1.0f;
  float softcap = 0.0f;          // 0: none; else s = softcap * tanh(s / softcap)
  int64_t window = 0;            // 0: none; else keys at positions > position - window
  const float* sinks = nullptr;  // [q_heads] attention-sink logits, or null. Start of the merge: m
                                 // = sink, l = 1, acc = 0
  // The chunks of (row, kv head): selected[offsets[i] .. offsets[i+1]) ascending, i = row *
  // kv_heads + head. Both null: every chunk up to the row's position.
  const int32_t* selected = nullptr;
  const int64_t* selected_offsets = nullptr;  // [rows * kv_heads + 1]
};

// Scratch and the running totals of one attention call. Grows to what was asked for and is reused.
class AttendWorkspace {
 public:
  AttendWorkspace();
  ~AttendWorkspace();
  AttendWorkspace(const AttendWorkspace&) = delete;
  AttendWorkspace& operator=(const AttendWorkspace&) = delete;
  int64_t bytes() const;
  void release() noexcept;  // what calls have grown; the next one takes what it needs

  struct Impl;
  Impl* impl() { return impl_.get(); }

 private:
  std::unique_ptr<Impl> impl_;
};

// attend_begin (attend_wave)+ attend_finish. A wave covers the splits [split_begin, split_end) of
// every row; waves come in ascending order without overlap, and how the splits are cut into waves
// changes no bit.
void attend_begin(const AttendParams& params, AttendWorkspace& workspace, ThreadPool& pool);
void attend_wave(const AttendParams& params, int64_t split_begin, int64_t split_end,
                 AttendWorkspace& workspace, ThreadPool& pool);
void attend_finish(const AttendParams& params, AttendWorkspace& workspace, ThreadPool& pool);

// Where row `row` of k and v goes. Null page: the row is not written (padding, read-only).
struct WriteRow {
  std::byte* slice = nullptr;  // the chunk's slice at this layer
  int32_t offset = 0;          // token offset within the chunk, [0, chunk_tokens)
};

// Index of the first row with a non-null slice that holds a key or value that is not finite, or that
// rounds to infinity in the layout's dtype; -1: none. Shapes as for write_rows.
int64_t find_non_finite(const Layout& layout, const TensorView& k, const TensorView& v,
                        const WriteRow* rows, int64_t count);

// Index of the first row with part[row] >= 0 that holds a number that is not finite; -1: none.
int64_t find_non_finite(const TensorView& tensor, const int32_t* part);

// The layout of write_rows, find_non_finite and read_rows is one layer's.
//
// Writes rows into tails, converting to the layout's dtypes (round to nearest even; codes as
// kvpager/codes.h says). k is [count, kv_heads, k_dim], v is [count, kv_heads, v_dim].
void write_rows(const Layout& layout, const TensorView& k, const TensorView& v,
                const WriteRow* rows, int64_t count);

// The inverse: rows [begin, end) of a slice as k [end - begin, kv_heads, k_dim] and v [end - begin,
// kv_heads, v_dim], contiguous, in read_dtype() of the layout's dtypes.
void read_rows(const Layout& layout, const std::byte* slice, int64_t begin, int64_t end,
               std::byte* k, std::byte* v);

// Sets the rows [valid, chunk_tokens) of a chunk to zero, so that a partial chunk has one set of
// bytes.
void zero_rows_after(const Layout& layout, std::byte* chunk, int valid);

// The instruction-set tier in use: "base", "v3" or "v4"; KVPAGER_ISA overrides it, downwards only.
const char* isa_name();

}  // namespace kvpager
