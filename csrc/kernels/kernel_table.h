// The functions that exist once per instruction-set tier, and the choice between them. Internal to
// the kernels and their tests. Every tier gives the same bits; the tests hold them against each
// other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpager/types.h"

#ifdef __FAST_MATH__
#error "kvpager promises bits: compile the kernels without -ffast-math (-fno-fast-math last)"
#endif

namespace kvpager {

// Lanes of the logical vector all tiers compute with, whatever their registers are.
inline constexpr int kLanes = 16;

// Of KVPAGER_ISA: the base tier is level 1.
constexpr const char* level_name(int level) {
  return level == 4 ? "v4" : level == 3 ? "v3" : "base";
}

// One query head of one row and its running softmax over a split.
//   state = acc[v_dim], m, l (floats). Fresh: m = -inf, l = 0, acc = 0.
struct TileQuery {
  const float* q = nullptr;  // [k_dim]
  float* state = nullptr;    // [state_stride(v_dim)]
  int32_t begin = 0;         // visible keys of the tile, [begin, end), not empty
  int32_t end = 0;
  const int16_t* integers = nullptr;  // q as round_query gives it, where keys are codes
  float unit = 0.0f;
};

inline constexpr int64_t state_stride(int64_t v_dim) { return v_dim + kLanes; }

// Which tile of a page: they are laid out the other way around (kvpager/layout.h).
enum class Side { kKeys, kValues };

// One tile of a page, as it is stored.
struct Tile {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  Side side = Side::kKeys;
  int32_t tokens = 0;
  int32_t dim = 0;
};

struct TileParams {
  const void* k = nullptr;  // [k_dim][tokens]
  const void* v = nullptr;  // [tokens][v_dim]
  // Keys and values of the tile that is read after this one, fetched meanwhile; null: not known.
  const void* next_k = nullptr;
  const void* next_v = nullptr;
  DType k_dtype = DType::kFloat32;
  DType v_dtype = DType::kFloat32;
  int32_t tokens = 0;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  float scaling = 1.0f;
  float softcap = 0.0f;
  const TileQuery* queries = nullptr;
  int64_t count = 0;
  float* scratch = nullptr;  // [tile_scratch_floats]
};

// More queries than this and a tile that is not float32 is widened to it in scratch, once for all
// blocks.
inline constexpr int kWidenQueries = 12;

inline constexpr int64_t tile_scratch_floats(const TileParams& params) {
  const int64_t dim = params.k_dim > params.v_dim ? params.k_dim : params.v_dim;
  return params.count + kLanes + (params.count + dim) * params.tokens;
}

// Summaries of per-dimension codes: see bits2.cc for the bytes.
struct SketchParams {
  int32_t tokens = 0;      // of a chunk
  int32_t padded_dim = 0;  // k_dim rounded up to kSketchDims
  int32_t rows = 1;
  int32_t group = 0;  // heads of a row; its score is the best one's
  // [rows]; each a header and int16 [group][padded_dim], -127..127.
  const std::byte* const* queries = nullptr;
};
inline constexpr int kSketchDims = 32;
inline constexpr int64_t kQueryHeaderBytes = 64;  // the scale, up to a cache line

// Instructions that a processor of level v4 may have in addition.
enum class Extensions { kNone, kVnni, kVnniBf16 };

struct KernelTable {
  const char* name = nullptr;
  int level = 1;
  Extensions extensions = Extensions::kNone;
  void (*attend_tile)(const TileParams& params) = nullptr;
  // total += part, both states; skipped by the caller when part saw no key.
  void (*merge_state)(float* total, const float* part, int32_t v_dim) = nullptr;
  // out[i] = state's acc[i] / l.
  void (*finish_state)(const float* state, int32_t v_dim, float* out) = nullptr;
  void (*exp)(const float* x, float* y, int64_t count) = nullptr;
  void (*to_float)(const void* source, DType dtype, int64_t count, float* out) = nullptr;
  void (*from_float)(const float* source, DType dtype, int64_t count, void* out) = nullptr;
  // The Walsh-Hadamard transform of a row, in place: kvpager/codes.h. dim: a multiple of 16.
  void (*rotate)(float* x, int64_t dim) = nullptr;
  // The numbers of a tile as float32, exactly: [dim][tokens] of keys, [tokens][dim] of values; of
  // rows that were rotated, as they are then.
  void (*read_tile)(const Tile& tile, float* out) = nullptr;
  // q, a multiple of 16 numbers, as integers times the unit that is returned: kvpager/codes.h.
  float (*round_query)(const float* q, int64_t count, int16_t* out) = nullptr;
  // The codes of one row of a head, one to a byte, and its scales: kvpager/codes.h. REQUIRES: a
  // coded dtype, and numbers that all_fit it.
  void (*encode)(const float* source, DType dtype, int64_t dim, uint8_t* codes,
                 uint16_t* scales) = nullptr;
  // Whether every element is finite, and still is when rounded to `stored`; of codes, whether it is
  // below 2^117, so that no stored number overflows, rotated or not.
  bool (*all_fit)(const void* source, DType dtype, DType stored, int64_t count) = nullptr;
  // scores[row][i] is summary i's.
  void (*score_sketches)(const SketchParams& params, const std::byte* const* summaries,
                         int64_t count, double* const* scores) = nullptr;
};

// The tier in use. The first call chooses it; throws InvalidArgumentError for a bad KVPAGER_ISA.
const KernelTable& kernels();

// The level (1, 3 or 4) for a value of KVPAGER_ISA (null: not set) on a machine of level `machine`.
int choose_level(const char* requested, int machine);

// Every table this machine can run, lowest first; v4 once more for each of its extensions.
std::vector<const KernelTable*> runnable_kernels();

// Makes kernels() return `table` while it lives. For tests: not thread-safe against running
// kernels.
class KernelOverride {
 public:
  explicit KernelOverride(const KernelTable& table);
  ~KernelOverride();
  KernelOverride(const KernelOverride&) = delete;
  KernelOverride& operator=(const KernelOverride&) = delete;
};

// One table per compilation of the *_isa.cc files.
namespace isa_base {
const KernelTable& table(Extensions extensions);
}
namespace isa_v3 {
const KernelTable& table(Extensions extensions);
}
namespace isa_v4 {
const KernelTable& table(Extensions extensions);
}

}  // namespace kvpager
