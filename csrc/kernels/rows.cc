// Rows of keys and values into chunks and back: the K tile is [k_dim][tokens], so a row is one
// column of it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/float_environment.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

const std::byte* element(const TensorView& tensor, int64_t row, int64_t head) {
  const int64_t index = row * tensor.row_stride + head * tensor.head_stride;
  return static_cast<const std::byte*>(tensor.data) + index * dtype_bytes(tensor.dtype);
}

bool row_fits(const KernelTable& table, const TensorView& tensor, DType stored, int64_t row) {
  const bool one_run = tensor.head_stride == tensor.dim;
  const int64_t runs = one_run ? 1 : tensor.heads;
  const int64_t length = one_run ? tensor.heads * tensor.dim : tensor.dim;
  for (int64_t run = 0; run < runs; ++run) {
    if (!table.all_fit(element(tensor, row, run), tensor.dtype, stored, length)) return false;
  }
  return true;
}

// One head of one row in the stored dtype, which is no code. `wide` holds dim floats, used when the
// dtypes differ.
void convert(const KernelTable& table, const std::byte* source, DType from, DType to, int64_t dim,
             float* wide, void* out) {
  if (from == to) {
    std::memcpy(out, source, static_cast<size_t>(dim * dtype_bytes(from)));
    return;
  }
  table.to_float(source, from, dim, wide);
  table.from_float(wide, to, dim, out);
}

// tile[d][column + i] = rows[i][d]: the innermost loop writes neighbouring columns.
template <class Word>
void transpose(const std::byte* rows, int64_t count, int64_t dim, int64_t tokens, int64_t column,
               std::byte* tile) {
  const Word* from = reinterpret_cast<const Word*>(rows);
  Word* to = reinterpret_cast<Word*>(tile) + column;
  for (int64_t d = 0; d < dim; ++d) {
    for (int64_t i = 0; i < count; ++i) to[d * tokens + i] = from[i * dim + d];
  }
}

void check_rows(const Layout& layout, const TensorView& k, const TensorView& v, int64_t count) {
  if (k.heads != layout.kv_heads || k.dim != layout.k_dim || v.heads != layout.kv_heads ||
      v.dim != layout.v_dim || k.rows < count || v.rows < count) {
    throw InvalidArgumentError(
        str("keys are [", k.rows, ", ", k.heads, ", ", k.dim, "] and values [", v.rows, ", ",
            v.heads, ", ", v.dim, "]; expected at least ", count, " rows of [", layout.kv_heads,
            ", ", layout.k_dim, "] and [", layout.kv_heads, ", ", layout.v_dim, "]"));
  }
  if (!is_float(k.dtype) || !is_float(v.dtype)) {
    throw InvalidArgumentError(str("keys are ", dtype_name(k.dtype), " and values ",
                                   dtype_name(v.dtype), "; expected float32, float16 or bfloat16"));
  }
}

// Rows of one tensor on their way into a tile, and the memory that takes.
class TileWriter {
 public:
  // Writes at most `most` rows at a time.
  TileWriter(const TensorView& rows, Side side, const Layout& layout, int64_t most)
      : rows_(rows),
        stored_(side == Side::kKeys ? layout.k_dtype : layout.v_dtype),
        rotated_(side == Side::kKeys ? layout.k_rotated : layout.v_rotated),
        side_(side),
        tokens_(layout.chunk_tokens),
        row_bytes_(row_code_bytes(stored_, rows.dim)),
        scales_(code_scales(stored_, rows.dim)),
        gathers_(side == Side::kKeys || stored_ == DType::kQ8) {
    if (gathers_) gathered_.resize(static_cast<size_t>(most * row_bytes_));
  }

  // Rows [begin, end) of one head become the tokens offset, offset + 1, ... of the tile.
  void write(int64_t begin, int64_t end, int64_t head, int64_t offset, std::byte* tile) {
    std::byte* to = gathers_ ? gathered_.data() : tile + offset * row_bytes_;
    for (int64_t row = begin; row < end; ++row, to += row_bytes_) {
      const std::byte* from = element(rows_, row, head);
      if (is_coded(stored_)) {
        encode(from, offset + row - begin, to, tile);
      } else {
        convert(kernels(), from, rows_.dtype, stored_, rows_.dim, wide_, to);
      }
    }
    if (!gathers_) return;
    const std::byte* from = gathered_.data();
    const int64_t count = end - begin;
    if (side_ == Side::kValues) {
      for (int64_t i = 0; i < count; ++i) interleave(from + i * row_bytes_, offset + i, tile);
    } else if (stored_ == DType::kQ4) {
      transpose<uint8_t>(from, count, row_bytes_, tokens_, offset, tile);
    } else if (stored_ == DType::kQ8) {
      transpose<uint16_t>(from, count, row_bytes_ / 2, tokens_, offset, tile);
    } else if (stored_ == DType::kFloat32) {
      transpose<uint32_t>(from, count, rows_.dim, tokens_, offset, tile);
    } else {
      transpose<uint16_t>(from, count, rows_.dim, tokens_, offset, tile);
    }
  }

 private:
  // Bytes of two tokens side by side.
  void interleave(const std::byte* from, int64_t token, std::byte* tile) const {
    std::byte* to = tile + token / 2 * 2 * row_bytes_ + token % 2;
    for (int64_t j = 0; j < row_bytes_; ++j) to[2 * j] = from[j];
  }

  void encode(const std::byte* from, int64_t token, std::byte* to, std::byte* tile) {
    const float* numbers = reinterpret_cast<const float*>(from);
    if (rows_.dtype != DType::kFloat32 || rotated_) {
      kernels().to_float(from, rows_.dtype, rows_.dim, wide_);
      numbers = wide_;
    }
    if (rotated_) kernels().rotate(wide_, rows_.dim);
    uint8_t* codes = reinterpret_cast<uint8_t*>(to);
    auto* scales = reinterpret_cast<uint16_t*>(tile + tokens_ * row_bytes_);
    if (stored_ == DType::kQ8) {
      kernels().encode(numbers, stored_, rows_.dim, codes, scales + token);
      return;
    }
    kernels().encode(numbers, stored_, rows_.dim, codes_, scales_of_row_);
    for (int64_t i = 0; i < scales_; ++i) {
      scales[i * tokens_ + token] = scales_of_row_[i];
    }
    // Which two codes share a byte: kvpager/codes.h.
    for (int64_t i = 0; i < row_bytes_; ++i) {
      const int64_t low = side_ == Side::kKeys ? 2 * i : i / 16 * kQ4Group + i % 16;
      const int64_t high = side_ == Side::kKeys ? 2 * i + 1 : low + 16;
      codes[i] = static_cast<uint8_t>(codes_[low] | codes_[high] << 4);
    }
  }

  const TensorView& rows_;
  DType stored_;
  bool rotated_;
  Side side_;
  int64_t tokens_;
  int64_t row_bytes_;  // of codes or numbers
  int64_t scales_;     // of one row
  bool gathers_;       // rows are collected, and then written together
  // Of one row: its numbers, its codes, a byte each, and their scales.
  float wide_[kMostDim];
  uint8_t codes_[kMostDim];
  uint16_t scales_of_row_[kMostDim / kQ4Group];
  std::vector<std::byte> gathered_;
};

}  // namespace

int64_t find_non_finite(const Layout& layout, const TensorView& k, const TensorView& v,
                        const WriteRow* rows, int64_t count) {
  check_rows(layout, k, v, count);
  const KernelTable& table = kernels();
  for (int64_t row = 0; row < count; ++row) {
    if (rows[row].slice == nullptr) continue;
    if (!row_fits(table, k, layout.k_dtype, row) || !row_fits(table, v, layout.v_dtype, row)) {
      return row;
    }
  }
  return -1;
}

int64_t find_non_finite(const TensorView& tensor, const int32_t* part) {
  const KernelTable& table = kernels();
  for (int64_t row = 0; row < tensor.rows; ++row) {
    if (part[row] >= 0 && !row_fits(table, tensor, tensor.dtype, row)) return row;
  }
  return -1;
}

void write_rows(const Layout& layout, const TensorView& k, const TensorView& v,
                const WriteRow* rows, int64_t count) {
  check_rows(layout, k, v, count);
  const FloatEnvironment environment;
  const int64_t most = std::min<int64_t>(count, layout.chunk_tokens);
  TileWriter keys(k, Side::kKeys, layout, most);
  TileWriter values(v, Side::kValues, layout, most);
  int64_t end = 0;
  for (int64_t begin = 0; begin < count; begin = end) {
    end = begin + 1;
    const WriteRow& first = rows[begin];
    if (first.slice == nullptr) continue;
    while (end < count && rows[end].slice == first.slice &&
           rows[end].offset == first.offset + (end - begin)) {
      ++end;
    }
    if (first.offset < 0 || first.offset + (end - begin) > layout.chunk_tokens) {
      throw InvariantError(str("a row is written at token ", first.offset + (end - begin) - 1,
                               " of a chunk of ", layout.chunk_tokens));
    }
    for (int head = 0; head < layout.kv_heads; ++head) {
      std::byte* page = first.slice + layout.page_bytes() * head;
      keys.write(begin, end, head, first.offset, page);
      values.write(begin, end, head, first.offset, page + layout.k_tile_bytes());
    }
  }
}

namespace {

// Of numbers that need not be aligned. room: [dim].
void rotate_in_place(int64_t dim, std::byte* numbers, float* room) {
  const auto bytes = static_cast<size_t>(dim) * sizeof(float);
  std::memcpy(room, numbers, bytes);
  kernels().rotate(room, dim);
  std::memcpy(numbers, room, bytes);
}

}  // namespace

void read_rows(const Layout& layout, const std::byte* slice, int64_t begin, int64_t end,
               std::byte* k, std::byte* v) {
  const FloatEnvironment environment;
  const int64_t tokens = layout.chunk_tokens;
  const int64_t k_element = dtype_bytes(read_dtype(layout.k_dtype));
  const int64_t v_row = layout.v_dim * dtype_bytes(read_dtype(layout.v_dtype));
  std::vector<float> read_keys;
  std::vector<float> read_values;
  std::vector<float> row(static_cast<size_t>(std::max(layout.k_dim, layout.v_dim)));
  const auto numbers = [&](const std::byte* tile, DType dtype, Side side, int32_t dim,
                           std::vector<float>* read) {
    if (!is_coded(dtype)) return tile;
    read->resize(static_cast<size_t>(tokens * dim));
    kernels().read_tile({tile, dtype, side, layout.chunk_tokens, dim}, read->data());
    return reinterpret_cast<const std::byte*>(read->data());
  };
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    const std::byte* page = slice + layout.page_bytes() * head;
    const std::byte* keys = numbers(page, layout.k_dtype, Side::kKeys, layout.k_dim, &read_keys);
    const std::byte* values = numbers(page + layout.k_tile_bytes(), layout.v_dtype, Side::kValues,
                                      layout.v_dim, &read_values);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t at = (token - begin) * layout.kv_heads + head;
      std::byte* key = k + at * layout.k_dim * k_element;
      for (int64_t d = 0; d < layout.k_dim; ++d) {
        std::memcpy(key + d * k_element, keys + (d * tokens + token) * k_element,
                    static_cast<size_t>(k_element));
      }
      std::memcpy(v + at * v_row, values + token * v_row, static_cast<size_t>(v_row));
      if (layout.k_rotated) rotate_in_place(layout.k_dim, key, row.data());
      if (layout.v_rotated) rotate_in_place(layout.v_dim, v + at * v_row, row.data());
    }
  }
}

namespace {

// Columns [valid, tokens) of `rows` rows of `tokens` elements.
void zero_columns(std::byte* to, int64_t rows, int64_t tokens, int64_t valid, int64_t element) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memset(to + (row * tokens + valid) * element, 0,
                static_cast<size_t>((tokens - valid) * element));
  }
}

void zero_values_after(DType dtype, int64_t dim, int64_t tokens, int64_t valid, std::byte* tile) {
  const int64_t row = row_code_bytes(dtype, dim);
  if (dtype == DType::kQ8 && valid % 2 == 1) {
    std::byte* pair = tile + (valid - 1) * row;
    for (int64_t j = 0; j < dim; ++j) pair[2 * j + 1] = std::byte{0};
    ++valid;
  }
  zero_columns(tile, 1, tokens, valid, row);
}

void zero_scales_after(DType dtype, int64_t dim, int64_t tokens, int64_t valid, std::byte* tile) {
  if (!is_coded(dtype)) return;
  zero_columns(tile + tokens * row_code_bytes(dtype, dim), code_scales(dtype, dim), tokens, valid,
               2);
}

void zero_layer_after(const Layout& layout, std::byte* slice, int valid) {
  const int64_t tokens = layout.chunk_tokens;
  const int64_t k_row = row_code_bytes(layout.k_dtype, layout.k_dim);
  const int64_t element = layout.k_dtype == DType::kQ4   ? 1
                          : layout.k_dtype == DType::kQ8 ? 2
                                                         : dtype_bytes(layout.k_dtype);
  for (int head = 0; head < layout.kv_heads; ++head) {
    std::byte* k_tile = slice + layout.page_bytes() * head;
    std::byte* v_tile = k_tile + layout.k_tile_bytes();
    zero_columns(k_tile, k_row / element, tokens, valid, element);
    zero_values_after(layout.v_dtype, layout.v_dim, tokens, valid, v_tile);
    zero_scales_after(layout.k_dtype, layout.k_dim, tokens, valid, k_tile);
    zero_scales_after(layout.v_dtype, layout.v_dim, tokens, valid, v_tile);
  }
}

}  // namespace

void zero_rows_after(const Layout& layout, std::byte* chunk, int valid) {
  for (int layer = 0; layer < layout.layers; ++layer) {
    zero_layer_after(layout.of_layer(layer), chunk + layout.slice_offset(layer), valid);
  }
}

}  // namespace kvpager
