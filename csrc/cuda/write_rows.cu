// New keys and values into their chunks, one launch per layer, which looks at the queries too: a block
// takes kTileRows rows of one head. Keys are turned in shared memory, so that the tokens of a chunk, which lie side by side in
// the K tile, are written side by side.
#include <cstring>

#include "cuda/codes.cuh"
#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "cuda/summarize_steps.cuh"
#include "cuda/write_launch.h"

namespace kvpager::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = kWriteTileRows;
constexpr int kUnit = 8;    // elements that are loaded, converted and stored together
constexpr int kSlab = 128;  // elements of a key that are in shared memory at a time
// A row of the slab in 32-bit words: odd, so that a column lies in 32 different banks.
template <class Element>
constexpr int kSlabWords = kSlab * static_cast<int>(sizeof(Element)) / 4 + 1;

struct alignas(16) Vector {
  uint32_t words[4];
};

template <DType dtype>
struct Stored {
  using Element = uint16_t;
};
template <>
struct Stored<DType::kFloat32> {
  using Element = uint32_t;
};
template <DType dtype>
using Element = typename Stored<dtype>::Element;

// Where the rows of the block go. A page of 0: the row is not written.
struct Places {
  uint64_t page[kTileRows];
  int32_t offset[kTileRows];
};

// The conversions of base/half.h to the bit, also of a NaN.
template <DType from>
KVP_DEVICE float widen(Element<from> bits) {
  if constexpr (from == DType::kFloat32) {
    return bits_to_float(bits);
  } else if constexpr (from == DType::kBFloat16) {
    return bfloat16_bits_to_float(bits);
  } else {
    const uint32_t wide = bits;
    return (wide & 0x7FFFu) > 0x7C00u
               ? bits_to_float((wide & 0x8000u) << 16 | 0x7FC00000u | (wide & 0x3FFu) << 13)
               : float16_bits_to_float(bits);
  }
}

template <DType to>
KVP_DEVICE Element<to> narrow(float x) {
  const uint32_t bits = float_to_bits(x);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  if constexpr (to == DType::kFloat32) {
    return bits;
  } else if constexpr (to == DType::kBFloat16) {
    return is_nan ? static_cast<uint16_t>(bits >> 16 | 0x40u) : float_to_bfloat16_bits(x);
  } else {
    return is_nan ? static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7E00u | (bits >> 13 & 0x3FFu))
                  : float_to_float16_bits(x);
  }
}

template <DType dtype>
KVP_DEVICE bool is_finite(Element<dtype> bits) {
  constexpr uint32_t kExponent = dtype == DType::kFloat32   ? 0x7F800000u
                                 : dtype == DType::kFloat16 ? 0x7C00u
                                                            : 0x7F80u;
  return (bits & kExponent) != kExponent;
}

// Rows of one tensor and head. `wide` says that every row starts at a multiple of 16 bytes.
struct Source {
  const unsigned char* data;
  int64_t row_bytes;
  bool wide;
};

KVP_DEVICE Source source_of(const Tensor& tensor, int head, int64_t first) {
  const int64_t size = tensor.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = tensor.row_stride * size;
  const int64_t head_bytes = tensor.head_stride * size;
  const unsigned char* data = static_cast<const unsigned char*>(tensor.data);
  const uint64_t bits = reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(row_bytes) |
                        static_cast<uint64_t>(head_bytes);
  return {data + first * row_bytes + head * head_bytes, row_bytes, bits % 16 == 0};
}

// kUnit elements as they are stored, in 32-bit words. False if one of them is not finite then.
template <DType from, DType to>
KVP_DEVICE bool convert(const unsigned char* source, bool wide,
                        uint32_t (&out)[kUnit * sizeof(Element<to>) / 4]) {
  Element<from> in[kUnit];
  if (wide) {
    constexpr int kEach = 16 / sizeof(Element<from>);
    KVP_UNROLL
    for (int i = 0; i < kUnit; i += kEach) {
      const Vector vector = *reinterpret_cast<const Vector*>(source + i * sizeof(Element<from>));
      std::memcpy(in + i, &vector, sizeof vector);
    }
  } else {
    KVP_UNROLL
    for (int i = 0; i < kUnit; ++i) in[i] = reinterpret_cast<const Element<from>*>(source)[i];
  }
  Element<to> stored[kUnit];
  bool finite = true;
  KVP_UNROLL
  for (int i = 0; i < kUnit; ++i) {
    if constexpr (from == to) {
      stored[i] = in[i];
    } else {
      stored[i] = narrow<to>(widen<from>(in[i]));
    }
    finite = finite && is_finite<to>(stored[i]);
  }
  std::memcpy(out, stored, sizeof stored);
  return finite;
}

// Both return the first row of the tile in which this thread met a number that is not finite.
template <DType from, DType to>
KVP_DEVICE int write_values(const Source& source, const Places& places, int count, int dim,
                            int64_t tile_offset) {
  constexpr int kSize = sizeof(Element<to>);
  const int units = dim / kUnit;
  int failed = kTileRows;
  for (int i = thread_index(); i < count * units; i += kThreads) {
    const int row = i / units;
    const int column = (i - row * units) * kUnit;
    if (places.page[row] == 0) continue;
    uint32_t words[kUnit * kSize / 4];
    const unsigned char* at =
        source.data + row * source.row_bytes + column * static_cast<int>(sizeof(Element<from>));
    if (!convert<from, to>(at, source.wide, words) && row < failed) failed = row;
    unsigned char* to_row = reinterpret_cast<unsigned char*>(places.page[row]) + tile_offset +
                            (int64_t{places.offset[row]} * dim + column) * kSize;
    KVP_UNROLL
    for (int j = 0; j < kUnit * kSize / 16; ++j) {
      Vector vector;
      std::memcpy(&vector, words + 4 * j, sizeof vector);
      reinterpret_cast<Vector*>(to_row)[j] = vector;
    }
  }
  return failed;
}

template <DType from, DType to>
KVP_DEVICE int write_keys(const Source& source, const Places& places, int count, int dim,
                          int tokens, uint32_t* slab) {
  constexpr int kSize = sizeof(Element<to>);
  constexpr int kWords = kSlabWords<Element<to>>;
  const Element<to>* turned = reinterpret_cast<const Element<to>*>(slab);
  int shift = 0;  // neighbouring threads write neighbouring rows: of 2^shift, at least `count`
  while ((1 << shift) < count) ++shift;
  int failed = kTileRows;
  for (int begin = 0; begin < dim; begin += kSlab) {
    const int width = dim - begin < kSlab ? dim - begin : kSlab;
    const int units = width / kUnit;
    for (int i = thread_index(); i < count * units; i += kThreads) {
      const int row = i / units;
      const int column = (i - row * units) * kUnit;
      if (places.page[row] == 0) continue;
      uint32_t words[kUnit * kSize / 4];
      const unsigned char* at = source.data + row * source.row_bytes +
                                (begin + column) * static_cast<int>(sizeof(Element<from>));
      if (!convert<from, to>(at, source.wide, words) && row < failed) failed = row;
      KVP_UNROLL
      for (int j = 0; j < kUnit * kSize / 4; ++j) {
        slab[row * kWords + column * kSize / 4 + j] = words[j];
      }
    }
    sync_block();
    for (int i = thread_index(); i < width << shift; i += kThreads) {
      const int row = i & ((1 << shift) - 1);
      const int column = i >> shift;
      if (row >= count || places.page[row] == 0) continue;
      Element<to>* tile = reinterpret_cast<Element<to>*>(places.page[row]);
      tile[int64_t{begin + column} * tokens + places.offset[row]] =
          turned[row * (kWords * 4 / kSize) + column];
    }
    sync_block();
  }
  return failed;
}

// A row of codes as a warp has it: kernels/codes_isa.cc says what becomes of which number, and
// kvpager/codes.h where it lies.
struct RowOfCodes {
  unsigned char* tile;
  int dim;
  int tokens;
  int token;
  bool keys;

  KVP_DEVICE void write_q8(const float* x) const {
    uint32_t bits = 0;
    KVP_UNROLL
    for (int i = 0; i < codes::kRowVectors; ++i) {
      const uint32_t magnitude = codes::magnitude_bits(x[i]);
      bits = magnitude > bits ? magnitude : bits;
    }
    const float largest = bits_to_float(codes::largest_of_warp(bits));
    const bool zeros = largest < codes::kNegligible;
    const uint16_t scale = zeros ? 0 : float_to_bfloat16_bits(div_rn(largest, 127.0f));
    const float inverse = zeros ? 0.0f : div_rn(1.0f, bfloat16_bits_to_float(scale));
    KVP_UNROLL
    for (int i = 0; i < codes::kRowVectors; ++i) {
      const int d = i * codes::kWarp + lane_index();
      if (d >= dim) continue;
      const int32_t level = zeros ? 0 : codes::rounded(x[i], inverse);
      tile[keys ? (int64_t{d / 2} * tokens + token) * 2 + d % 2
                : (int64_t{token / 2} * dim + d) * 2 + token % 2] =
          static_cast<unsigned char>(level);
    }
    if (lane_index() == 0) {
      reinterpret_cast<uint16_t*>(tile + int64_t{tokens} * dim)[token] = scale;
    }
  }

  // A group is what the lanes have of one vector. One after another is moved to where x[0] is: a copy of
  // all this for each of them was most of what the compiler had to do here.
  KVP_DEVICE void write_q4(float* x) const {
    uint16_t* scales = reinterpret_cast<uint16_t*>(tile + int64_t{tokens} * (dim / 2));
    KVP_NO_UNROLL
    for (int i = 0; i * codes::kWarp < dim; ++i) {
      uint16_t scale = 0;
      const uint32_t code = q4_code(x[0], &scale);
      KVP_UNROLL
      for (int j = 0; j + 1 < codes::kRowVectors; ++j) x[j] = x[j + 1];
      const uint32_t beside = shuffle_xor(code, keys ? 1 : 16);
      const int lane = lane_index();
      if (keys && lane % 2 == 0) {
        tile[int64_t{i * 16 + lane / 2} * tokens + token] =
            static_cast<unsigned char>(code | beside << 4);
      }
      if (!keys && lane < 16) {
        tile[int64_t{token} * (dim / 2) + i * 16 + lane] =
            static_cast<unsigned char>(code | beside << 4);
      }
      if (lane == 0) scales[int64_t{i} * tokens + token] = scale;
    }
  }

  // Of the lane's number in its group, and the group's scale.
  KVP_DEVICE static uint32_t q4_code(float x, uint16_t* scale) {
    const uint32_t bits = codes::largest_of_warp(codes::magnitude_bits(x));
    const float largest = bits_to_float(bits);
    if (largest < codes::kNegligible) return 8;  // level 0
    // The first number of largest magnitude, with its sign.
    uint32_t first = codes::magnitude_bits(x) == bits ? static_cast<uint32_t>(lane_index()) : 32u;
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint32_t other = shuffle_xor(first, mask);
      first = other < first ? other : first;
    }
    const float top = shuffle(x, static_cast<int>(first));
    float least = 0.0f;
    uint32_t best = 0;
    KVP_NO_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float last = static_cast<float>(codes::level_of(i < 2 ? 0u : 15u));
      const float end = last * (i % 2 == 0 ? 1.0f : 1.05f);
      const uint16_t candidate = float_to_bfloat16_bits(div_rn(top, end));
      const float step = bfloat16_bits_to_float(candidate);
      const float y = x * div_rn(1.0f, step);
      uint32_t code = 0;
      for (uint32_t c = 0; c < 15; ++c) {
        const float half_way = 0.5f * (static_cast<float>(codes::level_of(c)) +
                                       static_cast<float>(codes::level_of(c + 1)));
        code += y < half_way ? 0u : 1u;
      }
      const float off = x - static_cast<float>(codes::level_of(code)) * step;
      float error = off * off;
      for (int mask = 16; mask > 0; mask /= 2) error = error + shuffle_xor(error, mask);
      if (i > 0 && !(error < least)) continue;
      least = error;
      *scale = candidate;
      best = code;
    }
    return best;
  }
};

KVP_DEVICE int write_codes(const Source& source, DType from, DType to, bool rotated, bool keys,
                           const Places& places, int count, int dim, int tokens,
                           int64_t tile_offset) {
  constexpr uint32_t kTooLarge = 0x7A000000u;  // 2^117
  int failed = kTileRows;
  for (int row = warp_index(); row < count; row += kThreads / 32) {
    if (places.page[row] == 0) continue;
    const unsigned char* data = source.data + row * source.row_bytes;
    float x[codes::kRowVectors];
    uint32_t bits = 0;
    KVP_UNROLL
    for (int i = 0; i < codes::kRowVectors; ++i) {
      const int d = i * codes::kWarp + lane_index();
      x[i] = d < dim ? scoring::element_to_float(data, from, d) : 0.0f;
      const uint32_t magnitude = codes::magnitude_bits(x[i]);
      bits = magnitude > bits ? magnitude : bits;
    }
    if (codes::largest_of_warp(bits) >= kTooLarge) {
      failed = row < failed ? row : failed;
      continue;
    }
    if (rotated) codes::rotate_row(x, dim);
    unsigned char* tile = reinterpret_cast<unsigned char*>(places.page[row]) + tile_offset;
    const RowOfCodes out = {tile, dim, tokens, places.offset[row], keys};
    if (to == DType::kQ8) {
      out.write_q8(x);
    } else {
      out.write_q4(x);
    }
  }
  return failed;
}

// Calls Write<from, to>::run(arguments...) for two dtypes of DType's first three.
template <template <DType, DType> class Write, DType from, class... Arguments>
KVP_DEVICE int dispatch_to(DType to, Arguments&&... arguments) {
  if (to == DType::kFloat32) return Write<from, DType::kFloat32>::run(arguments...);
  if (to == DType::kFloat16) return Write<from, DType::kFloat16>::run(arguments...);
  return Write<from, DType::kBFloat16>::run(arguments...);
}
template <template <DType, DType> class Write, class... Arguments>
KVP_DEVICE int dispatch(DType from, DType to, Arguments&&... arguments) {
  if (from == DType::kFloat32) return dispatch_to<Write, DType::kFloat32>(to, arguments...);
  if (from == DType::kFloat16) return dispatch_to<Write, DType::kFloat16>(to, arguments...);
  return dispatch_to<Write, DType::kBFloat16>(to, arguments...);
}
template <DType from, DType to>
struct Values {
  template <class... Arguments>
  KVP_DEVICE static int run(Arguments&&... arguments) {
    return write_values<from, to>(arguments...);
  }
};
template <DType from, DType to>
struct Keys {
  template <class... Arguments>
  KVP_DEVICE static int run(Arguments&&... arguments) {
    return write_keys<from, to>(arguments...);
  }
};

// The first row of the tile, of those that are no padding, with a query in this head of which this
// thread met an element that is not finite.
template <DType dtype>
KVP_DEVICE int bad_query(const Source& source, const Row* rows, int count, int dim) {
  const int units = dim / kUnit;
  int failed = kTileRows;
  for (int i = thread_index(); i < count * units; i += kThreads) {
    const int row = i / units;
    if (rows[row].part < 0 || row >= failed) continue;
    const int column = (i - row * units) * kUnit;
    uint32_t words[kUnit * sizeof(Element<dtype>) / 4];
    const unsigned char* at =
        source.data + row * source.row_bytes + column * static_cast<int>(sizeof(Element<dtype>));
    if (!convert<dtype, dtype>(at, source.wide, words)) failed = row;
  }
  return failed;
}

KVP_DEVICE void look_at_queries(const WriteParams& p, int64_t block) {
  const int head = static_cast<int>(block % p.q.heads);
  const int64_t first = block / p.q.heads * kTileRows;
  const int64_t left = p.tables.header->rows - first;
  if (left <= 0) return;
  const int count = left < kTileRows ? static_cast<int>(left) : kTileRows;
  const Source source = source_of(p.q, head, first);
  const Row* rows = p.tables.rows + first;
  int failed = 0;
  if (p.q.dtype == DType::kFloat32) {
    failed = bad_query<DType::kFloat32>(source, rows, count, p.q.dim);
  } else if (p.q.dtype == DType::kFloat16) {
    failed = bad_query<DType::kFloat16>(source, rows, count, p.q.dim);
  } else {
    failed = bad_query<DType::kBFloat16>(source, rows, count, p.q.dim);
  }
  if (failed < kTileRows) {
    atomic_min(p.query_status,
               static_cast<uint64_t>(p.layer) << 32 | static_cast<uint64_t>(first + failed));
  }
}

KVP_KERNEL KVP_BOUNDS(kThreads, 2) write_rows_kernel(const WriteParams p) {
  const Shape& shape = p.shape;
  const int64_t writing = writing_blocks(p);
  if (block_index() >= writing) return look_at_queries(p, block_index() - writing);
  const int head = static_cast<int>(block_index() % shape.kv_heads);
  const int64_t first = block_index() / shape.kv_heads * kTileRows;
  const int64_t left = p.tables.header->rows - first;
  if (left <= 0) return;
  const int count = left < kTileRows ? static_cast<int>(left) : kTileRows;

  Places& places = *reinterpret_cast<Places*>(shared_memory());
  uint32_t* slab = reinterpret_cast<uint32_t*>(shared_memory() + sizeof(Places));
  if (thread_index() < count) {
    const Row& row = p.tables.rows[first + thread_index()];
    places.page[thread_index()] =
        row.write_chunk == 0
            ? 0
            : row.write_chunk + static_cast<uint64_t>(shape.slice_offset + shape.page_bytes * head);
    places.offset[thread_index()] = row.write_offset;
  }
  sync_block();
  const Source v = source_of(p.v, head, first);
  const Source k = source_of(p.k, head, first);
  const int tokens = shape.chunk_tokens;
  int failed = kTileRows;
  const auto note = [&](int row) { failed = row < failed ? row : failed; };
  if (!codes::coded(shape.v_dtype)) {
    note(dispatch<Values>(p.v.dtype, shape.v_dtype, v, places, count, static_cast<int>(shape.v_dim),
                          shape.k_tile_bytes));
  }
  if (!codes::coded(shape.k_dtype)) {
    note(dispatch<Keys>(p.k.dtype, shape.k_dtype, k, places, count, static_cast<int>(shape.k_dim),
                        tokens, slab));
  }
  // One call for both: it is most of what the compiler has to do here.
  KVP_NO_UNROLL
  for (int side = 0; side < 2; ++side) {
    const bool keys = side == 1;
    const DType to = keys ? shape.k_dtype : shape.v_dtype;
    if (!codes::coded(to)) continue;
    const Source source = {keys ? k.data : v.data, keys ? k.row_bytes : v.row_bytes, false};
    note(write_codes(source, keys ? p.k.dtype : p.v.dtype, to,
                     keys ? shape.k_rotated : shape.v_rotated, keys, places, count,
                     keys ? shape.k_dim : shape.v_dim, tokens, keys ? 0 : shape.k_tile_bytes));
  }
  if (failed < kTileRows) {
    atomic_min(p.status,
               static_cast<uint64_t>(p.layer) << 32 | static_cast<uint64_t>(first + failed));
  }
}

}  // namespace

int write_rows(const WriteParams& params, void* stream) {
  const bool wide_keys = params.shape.k_dtype == DType::kFloat32;
  const int words = wide_keys ? kSlabWords<uint32_t> : kSlabWords<uint16_t>;
  Grid grid;
  grid.blocks = writing_blocks(params) + looking_blocks(params);
  grid.threads = kThreads;
  grid.shared_bytes = static_cast<int64_t>(sizeof(Places)) + kTileRows * words * 4;
  grid.stream = stream;
  return launch(write_rows_kernel, grid, params);
}

}  // namespace kvpager::gpu
