// Rows of keys and values into chunks and back: the K tile is [k_dim][tokens], so a row is one
// column of it.
#include <cstring>
#include <vector>

#include "kernels/float_environment.h"
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

// One head of one row in the stored dtype. `wide` holds dim floats, used when the dtypes differ.
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
  if (!is_supported(k.dtype) || !is_supported(v.dtype)) {
    throw InvalidArgumentError(str("keys are ", dtype_name(k.dtype), " and values ",
                                   dtype_name(v.dtype), "; expected float32, float16 or bfloat16"));
  }
}

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
  const KernelTable& table = kernels();
  const int64_t k_bytes = layout.k_dim * dtype_bytes(layout.k_dtype);
  const int64_t v_bytes = layout.v_dim * dtype_bytes(layout.v_dtype);
  thread_local std::vector<float> wide;
  thread_local std::vector<std::byte> gathered;
  wide.resize(static_cast<size_t>(layout.k_dim > layout.v_dim ? layout.k_dim : layout.v_dim));
  gathered.resize(static_cast<size_t>(layout.chunk_tokens * k_bytes));

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
      std::byte* v_tile = page + layout.k_tile_bytes() + first.offset * v_bytes;
      for (int64_t row = begin; row < end; ++row) {
        convert(table, element(k, row, head), k.dtype, layout.k_dtype, layout.k_dim, wide.data(),
                gathered.data() + (row - begin) * k_bytes);
        convert(table, element(v, row, head), v.dtype, layout.v_dtype, layout.v_dim, wide.data(),
                v_tile + (row - begin) * v_bytes);
      }
      if (layout.k_dtype == DType::kFloat32) {
        transpose<uint32_t>(gathered.data(), end - begin, layout.k_dim, layout.chunk_tokens,
                            first.offset, page);
      } else {
        transpose<uint16_t>(gathered.data(), end - begin, layout.k_dim, layout.chunk_tokens,
                            first.offset, page);
      }
    }
  }
}

void zero_rows_after(const Layout& layout, std::byte* chunk, int valid) {
  const int64_t left = layout.chunk_tokens - valid;
  const int64_t k_element = dtype_bytes(layout.k_dtype);
  const int64_t v_row = layout.v_dim * dtype_bytes(layout.v_dtype);
  for (int layer = 0; layer < layout.layers; ++layer) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      std::byte* page = chunk + layout.page_offset(layer, head);
      for (int64_t d = 0; d < layout.k_dim; ++d) {
        std::memset(page + (d * layout.chunk_tokens + valid) * k_element, 0,
                    static_cast<size_t>(left * k_element));
      }
      std::memset(page + layout.k_tile_bytes() + valid * v_row, 0,
                  static_cast<size_t>(left * v_row));
    }
  }
}

}  // namespace kvpager
