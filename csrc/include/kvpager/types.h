// Small value types every room shares: index types that cannot be mixed up, dtypes, provenance.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvpager {

// An integer that only compares with its own kind, so that a block is never passed for a chunk.
template <class Tag, class Rep>
class Index {
 public:
  using rep = Rep;
  constexpr Index() = default;
  constexpr explicit Index(Rep value) : value_(value) {}
  constexpr Rep value() const { return value_; }
  friend constexpr bool operator==(Index a, Index b) { return a.value_ == b.value_; }
  friend constexpr bool operator!=(Index a, Index b) { return a.value_ != b.value_; }
  friend constexpr bool operator<(Index a, Index b) { return a.value_ < b.value_; }

 private:
  Rep value_ = -1;
};

using BlockId = Index<struct BlockTag, int32_t>;        // a chunk-sized slot of the slab
using SlotId = Index<struct SlotTag, int32_t>;          // a chunk-sized slot of a lower tier
using RecordId = Index<struct RecordTag, int32_t>;      // a ledger record
using SequenceId = Index<struct SequenceTag, int64_t>;  // never reused within a pager
using PinId = Index<struct PinTag, int64_t>;            // never reused within a pager

using TokenId = int32_t;

// The most a layout has (kvpager/layout.h).
inline constexpr int kMostLayers = 1024;
inline constexpr int kMostDim = 512;  // of keys or values of a head
inline constexpr int kMostChunkTokens = 256;

// Element types: of tensors, the floats; of keys and values in chunks, codes too (kvpager/codes.h).
enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3 = 3,  // has a number; nothing computes with it yet
  kQ8 = 4,
  kQ4 = 5,
};

constexpr bool is_float(DType dtype) { return static_cast<uint8_t>(dtype) <= 2; }
constexpr bool is_coded(DType dtype) { return dtype == DType::kQ8 || dtype == DType::kQ4; }
// Of one element. REQUIRES: is_float(dtype).
constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
// The dtype in which stored elements are read back: of codes the numbers that they stand for.
constexpr DType read_dtype(DType stored) { return is_coded(stored) ? DType::kFloat32 : stored; }
constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kQ8:
      return "q8";
    case DType::kQ4:
      return "q4";
  }
  return "unknown";
}

// What a chunk's bits are worth. Transitive: what follows an approximate chunk is approximate.
enum class Provenance : uint8_t {
  kExact = 0,        // every row came from a forward of M rows, or of a count proven its equal
  kDecode = 1,       // rows from forwards of another shape; never served as an exact hit
  kApproximate = 2,  // stitched, or restored under a numerics mismatch the caller allowed
};
const char* provenance_name(Provenance provenance);

// What a sealed chunk is found by: a digest of all token ids up to its end, and of what they were
// computed under. All zero: none. See core/chunk_namer.h.
struct ChunkName {
  std::array<uint64_t, 4> words{};  // little-endian

  bool empty() const { return (words[0] | words[1] | words[2] | words[3]) == 0; }
  friend bool operator==(const ChunkName& a, const ChunkName& b) { return a.words == b.words; }
  friend bool operator!=(const ChunkName& a, const ChunkName& b) { return !(a == b); }
};

// XXH3-128: of contents, never of what somebody may choose.
struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Hash128& a, const Hash128& b) {
    return a.low == b.low && a.high == b.high;
  }
};

}  // namespace kvpager
