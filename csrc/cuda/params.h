// What kernels are told. Plain data with no CUDA in it: the host side fills it in, the kernels of
// both plug-ins read it. "device" says that the pointer is to device memory.
//
// What changes from forward to forward is in Tables: arrays at addresses that stay the same, filled
// before the forward. The rest of the parameters depends on the model, the layer and the pager alone,
// so that a captured launch can be replayed for any later forward.
#pragma once

#include <cstdint>

#include "kvpager/types.h"

namespace kvpager::gpu {

// Queries (row, query head) of one part and kv head that share one pass over the keys. A query of a
// kv head is numbered q = (index of its row within the part) * group + (query head within the group).
inline constexpr int kSmallTile = 16;
inline constexpr int kLargeTile = 128;
inline constexpr int kTensorKernelVersion = 2;  // part of the fingerprint on devices that have it
// Of the order of products on tensor cores (linear_tensor.cuh); in the fingerprint where they are used.
inline constexpr int kTensorLinearVersion = 1;

struct Shape {
  int32_t layers = 0;
  int32_t kv_heads = 0;
  int32_t q_heads = 0;  // a multiple of kv_heads; group = q_heads / kv_heads
  int32_t chunk_tokens = 0;
  int32_t k_dim = 0, v_dim = 0;
  DType k_dtype = DType::kFloat32, v_dtype = DType::kFloat32;
  DType q_dtype = DType::kFloat32;
  bool k_rotated = false, v_rotated = false;  // rows, before they become codes
  int64_t k_tile_bytes = 0;                   // of a page: the K tile, then the V tile
  int64_t page_bytes = 0;
  int64_t slice_bytes = 0;  // kv_heads pages
  // Of the layer's slice in its chunk. Where several layers are meant, of the first of them, and the
  // others', which are as long, follow.
  int64_t slice_offset = 0;
};

struct Bounds {
  int32_t rows = 0;     // most rows of a forward
  int64_t chunks = 0;   // most chunks one row can see
  int64_t entries = 0;  // most chunks of all parts of a forward together
};

// Rows x heads x dim in device memory, dim contiguous, strides in elements.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t heads = 0, dim = 0;
  int64_t row_stride = 0, head_stride = 0;
};

struct Row {
  int64_t position = 0;      // keys at positions <= this are visible
  int32_t part = -1;         // -1: padding, its output is zeros
  int32_t write_offset = 0;  // token within the chunk it is written to
  uint64_t write_chunk = 0;  // address of that chunk; 0: the row is not written
};

// One sequence of the forward.
struct Part {
  // Its chunk 0 in Tables::chunks, staged, summaries, read and mass, where chunks before `held` are
  // not: this may be negative.
  int64_t first = 0;
  int64_t visible = 0;     // chunks up to its furthest row
  int64_t sealed = 0;      // of these the first have a summary
  int64_t written = 0;     // positions [0, written) hold keys once this layer's rows are written;
                           // whatever is after them may be any bytes
  int32_t score_row = -1;  // the row whose scores the ledger keeps; -1: none
  int32_t first_row = 0;   // its rows are Tables::order[first_row, first_row + rows)
  int32_t rows = 0;
  int32_t held = 0;           // the first chunk that is there; no row sees one before it
  int32_t large_queries = 0;  // its first, of each kv head, which are in large tiles
};

// Queries [begin, end) of one part, for each kv head.
struct Tile {
  int32_t part = 0;
  int32_t begin = 0;
  int32_t end = 0;  // end - begin <= kSmallTile or kLargeTile
};

struct Header {
  int32_t rows = 0;
  int32_t parts = 0;
  int32_t small_tiles = 0;  // Tables::tiles[0, small_tiles) have up to kSmallTile queries
  int32_t large_tiles = 0;  // ... and the next ones up to kLargeTile
  int64_t max_visible = 0;  // chunks, over all parts
  int64_t entries = 0;      // chunks of all parts together
};

// Of the forward at hand; every pointer is device memory and never changes while the pager lives.
struct Tables {
  const Header* header = nullptr;  // [1]
  const Row* rows = nullptr;       // [header.rows]
  const Part* parts = nullptr;     // [header.parts]
  const int32_t* order = nullptr;  // [rows that are not padding], by part, ascending positions
  const Tile* tiles = nullptr;     // [small_tiles + large_tiles]
  // [entries] address of the chunk, in the pool or in pinned memory.
  const uint64_t* chunks = nullptr;
  // [entries] address of this layer's slice of the chunk in staging, 0: not staged. Null: nothing is.
  const uint64_t* staged = nullptr;
  // [entries] address of the chunk's summary (all layers and kv heads); 0 for unsealed chunks.
  const uint64_t* summaries = nullptr;
};

// The same counts as the host knows them when it launches; while a graph is being captured, the most
// they can become. They size grids; kernels themselves go by the header.
struct HostCounts {
  int32_t rows = 0;
  int32_t parts = 0;
  int32_t small_tiles = 0;
  int32_t large_tiles = 0;
  int64_t max_visible = 0;
};

// Writes the K and V of rows into their chunks at `layer`, converting to the stored dtypes (nearest
// even). A key or value that is not finite, or becomes infinite in the stored dtype, lowers *status
// to layer << 32 | row (atomic minimum; kNoFailure before the first).
inline constexpr uint64_t kNoFailure = ~uint64_t{0};
struct WriteParams {
  Shape shape;
  Tables tables;
  HostCounts counts;
  int32_t layer = 0;
  bool writes = true;          // false: no row is written; queries are looked at all the same
  Tensor k, v;                 // [rows, kv_heads, k_dim], [rows, kv_heads, v_dim]
  uint64_t* status = nullptr;  // device
  // Looked at and not written: a query of a row with a part that is not finite lowers *query_status
  // in the same way. Without data there are none.
  Tensor q;                          // [rows, q_heads, k_dim]
  uint64_t* query_status = nullptr;  // device
};

// Summaries of whole chunks, every layer and kv head: what bits2::summarize makes, bit for bit.
inline constexpr int kMaxSummarized = 16;
struct SummarizeParams {
  Shape shape;                              // of `layers` layers that are kept alike
  int32_t first_layer = 0;                  // the first of them
  int64_t summary_page_bytes = 0;           // of one (layer, kv head)
  int32_t count = 0;                        // chunks, up to kMaxSummarized
  const void* chunks[kMaxSummarized] = {};  // device: the chunk in the pool
  void* summaries[kMaxSummarized] = {};     // device: all layers * kv_heads * summary_page_bytes
};

// Walsh-Hadamard transforms of every head of every row: kvpager/codes.h.
struct RotateParams {
  const Header* header = nullptr;
  HostCounts counts;
  Tensor from, to;  // of one shape; `to` may be `from`
};

// Which chunks each (row, kv head) attends to at one layer: what select_chunks() decides, bit for bit.
struct SelectParams {
  Shape shape;
  Tables tables;
  HostCounts counts;
  int64_t summary_page_bytes = 0;  // of one (layer, kv head)
  int32_t layer = 0;
  Tensor q;              // [rows, q_heads, k_dim]
  float scaling = 1.0f;  // for the shares of the ledger only
  int64_t window = 0;    // of the layer, 0: none
  int32_t kind = 1;  // of Selection::Kind: 1 top-k, 2 window; 0 dense: only the ledger is served
  int32_t k = 0;     // chunks chosen by score
  int64_t sinks = 0, recent = 0;    // tokens
  const int64_t* always = nullptr;  // device: [2 * always_count] half-open token ranges
  int32_t always_count = 0;
  // Out, device: bit c % 8 of byte c / 8 says that chunk c is attended to.
  uint8_t* selected = nullptr;  // [rows][kv_heads][selected_stride]
  int64_t selected_stride = 0;  // bytes, >= chunks / 8 rounded up, a multiple of 4
  // For residency and for people, never for results. mass[i] += the share of chunk i among the
  // scored ones of its part's score_row (softmax of score * query scale * scaling), in units of
  // 2^-40, one unit of 1 per kv head; read[i] = 1 where some row attends. Null: not wanted.
  uint64_t* mass = nullptr;  // [entries]
  uint8_t* read = nullptr;   // [entries]
  void* scratch = nullptr;   // device: select_scratch_bytes
  int64_t scratch_bytes = 0;
};

enum class Attention : int32_t {
  kReference = 0,  // the order of operations of kvpager/attention.h, in any dtype: the CPU's bits
  kTensor = 1,     // tensor cores, 16-bit K, V and q of one dtype
};

// The chunks that one call of `attend` takes. What does not fit into staging at once is attended to by
// several calls, in order, each with its own chunks staged. Chunks are in the order of parts, then of
// positions. The state of a part's queries is kept in scratch from call to call; its output is
// written by the one that has its last chunk.
inline constexpr int kWaveChunks = 64;
struct Wave {
  int32_t first_part = 0;   // its chunks from first_chunk on
  int32_t last_part = 0;    // its chunks up to end_chunk; parts between them are whole
  int64_t first_chunk = 0;  // a multiple of kWaveChunks
  int64_t end_chunk = 0;    // a multiple of kWaveChunks, or all that the part has
  int64_t most_chunks = 0;  // of one part; 0: every chunk of every part, in one call
};

struct AttendParams {
  Shape shape;
  Tables tables;
  HostCounts counts;
  Wave wave;
  Attention attention = Attention::kReference;
  int32_t layer = 0;
  Tensor q;    // [rows, q_heads, k_dim]
  Tensor out;  // [rows, q_heads, v_dim]; every element of every row is written
  float scaling = 1.0f;
  float softcap = 0.0f;               // 0: none
  int64_t window = 0;                 // 0: none; else keys at positions > position - window
  const float* sinks = nullptr;       // device: [q_heads], or null
  const uint8_t* selected = nullptr;  // as SelectParams writes it; null: every chunk
  int64_t selected_stride = 0;
  void* scratch = nullptr;  // device: attend_scratch_bytes
  int64_t scratch_bytes = 0;
};

}  // namespace kvpager::gpu
