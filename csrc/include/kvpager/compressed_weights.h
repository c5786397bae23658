// Lossless copies of the weights of linear layers in 12 bits each, for products of few rows, which take
// as long as their weights take to be read.
//
// Of a bfloat16, or a float32 whose low half is zero as in a checkpoint that was widened, the low byte is
// kept as it is. The high one, its sign and seven bits of its exponent, is a place in a table of sixteen
// that each output has for itself: nearly all weights of an output are within sixteen powers of two. A
// group of 64 weights with another one is marked, and read from the weights themselves.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kvpager/large_memory.h"
#include "kvpager/types.h"

namespace kvpager {

class ThreadPool;
struct LinearParams;

inline constexpr int64_t kCompressedGroup = 64;  // weights; what is left of a depth has no copy
inline constexpr int64_t kCompressedTable = 16;  // high bytes
inline constexpr int64_t kCompressedBytes = 96;  // of a group: 64 places of 4 bits, 64 low bytes
// Of the marks of so many groups, a bit for each.
constexpr int64_t mark_words(int64_t groups) { return (groups + 63) / 64; }
// The byte of element i of 32 among those of a register: the order in which it is unpacked.
constexpr int compressed_place(DType dtype, int i) {
  const int vector = dtype == DType::kFloat32 ? 8 : 16;  // elements of the dtype in 32 bytes
  const int within = i % vector;
  return within / (vector / 2) * 16 + i / vector * (vector / 2) + within % (vector / 2);
}

// The copies of consecutive outputs.
struct CompressedRows {
  const uint8_t* groups = nullptr;   // [outputs][depth / 64][kCompressedBytes]; null: no copies
  const uint8_t* tables = nullptr;   // [outputs][kCompressedTable]
  const uint64_t* marked = nullptr;  // [outputs][mark_words(depth / 64)]
  int64_t of_row = 0;                // groups

  CompressedRows from(int64_t output) const {
    if (groups == nullptr) return *this;
    return {groups + output * of_row * kCompressedBytes, tables + output * kCompressedTable,
            marked + output * mark_words(of_row), of_row};
  }
};

class CompressedWeights {
 public:
  // Copies a matrix [outputs][depth] whose rows are w_stride elements apart. The caller keeps the
  // weights where and as they are as long as it multiplies with this. False, and nothing is kept: rows
  // overlap, so that none would be found again by where it lies; too few groups can have a copy; the depth
  // is below a group's; or the tier has no use for copies of the dtype.
  bool add(const void* w, DType dtype, int64_t outputs, int64_t depth, int64_t w_stride,
           ThreadPool& pool);

  // The copies of a product's weights, where these are some rows of an added matrix.
  CompressedRows find(const LinearParams& params) const;

  void clear() {  // not while something multiplies with them
    matrices_.clear();
    blocks_.clear();
  }

  int64_t bytes() const;         // of all copies
  int64_t weight_bytes() const;  // of the weights they are of

 private:
  struct Matrix {
    DType dtype;
    int64_t outputs, depth, stride;
    uint8_t* groups = nullptr;
    std::vector<uint8_t> tables;
    std::vector<uint64_t> marked;

    int64_t all_groups() const { return outputs * (depth / kCompressedGroup); }
    CompressedRows rows() const {
      return {groups, tables.data(), marked.data(), depth / kCompressedGroup};
    }
    int64_t copied_groups() const;
  };
  // Groups of several matrices, on huge pages, which are read a third faster where the system has them.
  struct Block {
    AlignedBytes memory;
    int64_t bytes = 0, used = 0;
  };
  uint8_t* reserve(int64_t bytes);

  std::vector<Block> blocks_;
  std::map<const char*, Matrix> matrices_;  // by where they begin
};

}  // namespace kvpager
