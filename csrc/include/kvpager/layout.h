// The shape of a chunk's bytes: a value type that turns (layer, kv head) into an offset.
//
//   chunk = [layers][kv_heads] pages, contiguous, so that moving a chunk is one copy
//   page  = K tile [k_dim][chunk_tokens], then V tile [chunk_tokens][v_dim], each padded to
//           64 bytes; tiles of codes have scales too (kvpager/codes.h)
//
// Where keys or values are codes, some layers may be kept in a float dtype: their pages are larger.
//
// K is stored with tokens innermost: the lanes of a vector register are keys, a dot product runs
// over k_dim in one fixed order, and nothing is ever summed across lanes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "kvpager/codes.h"
#include "kvpager/types.h"

namespace kvpager {

inline constexpr int64_t kTileAlignment = 64;

// Which layers of a model.
class LayerSet {
 public:
  // REQUIRES: 0 <= layer < kMostLayers.
  void add(int layer) { words_[word(layer)] |= bit(layer); }
  bool has(int layer) const {
    return layer >= 0 && layer < kMostLayers && (words_[word(layer)] & bit(layer)) != 0;
  }
  bool empty() const { return count_below(kMostLayers) == 0; }
  int count_below(int layer) const {
    int count = 0;
    for (int i = 0; i * 64 < layer && i * 64 < kMostLayers; ++i) {
      const int rest = layer - i * 64;
      const uint64_t mask = rest >= 64 ? ~uint64_t{0} : (uint64_t{1} << rest) - 1;
      count += __builtin_popcountll(words_[static_cast<size_t>(i)] & mask);
    }
    return count;
  }
  friend bool operator==(const LayerSet& a, const LayerSet& b) { return a.words_ == b.words_; }

 private:
  static size_t word(int layer) { return static_cast<size_t>(layer) / 64; }
  static uint64_t bit(int layer) { return uint64_t{1} << (layer % 64); }
  std::array<uint64_t, kMostLayers / 64> words_{};
};

// A broken rule: "layout.layers", "0", "1 to 1024".
struct BrokenRule {
  std::string field;
  std::string value;
  std::string expected;
};

struct Layout {
  int32_t layers = 0;
  int32_t kv_heads = 0;
  int32_t chunk_tokens = 64;  // C
  int32_t k_dim = 0;          // head_dim of keys
  int32_t v_dim = 0;          // head_dim of values
  DType k_dtype = DType::kFloat32;
  DType v_dtype = DType::kFloat32;
  // Whether rows are rotated before they become codes (kvpager/codes.h).
  bool k_rotated = false;
  bool v_rotated = false;
  // Layers whose keys and values are not codes but float_dtype.
  LayerSet float_layers;
  DType float_dtype = DType::kFloat32;

  // The first field that is out of range. Sizes are those of a layout without one: each is positive then,
  // and a chunk has at most 2^40 bytes.
  std::optional<BrokenRule> broken_rule() const;
  // Throws the broken rule as an InvalidArgumentError.
  void validate() const;

  // The layout of a model that has this layer alone. Its tile_bytes and page_bytes are the layer's.
  Layout of_layer(int layer) const {
    Layout one = *this;
    one.layers = 1;
    one.float_layers = LayerSet();
    one.float_dtype = DType::kFloat32;
    if (!float_layers.has(layer)) return one;
    one.k_dtype = one.v_dtype = float_dtype;
    one.k_rotated = one.v_rotated = false;
    return one;
  }

  // REQUIRES: float_layers is empty.
  int64_t k_tile_bytes() const { return align(chunk_tokens * row_bytes(k_dtype, k_dim)); }
  int64_t v_tile_bytes() const { return align(chunk_tokens * row_bytes(v_dtype, v_dim)); }
  int64_t page_bytes() const { return k_tile_bytes() + v_tile_bytes(); }

  // One layer's pages of a chunk: a "slice", the unit that is checksummed and streamed from disk.
  int64_t slice_bytes(int layer) const {
    return float_layers.has(layer) ? float_slice_bytes() : page_bytes() * kv_heads;
  }
  // Of one in float_dtype or of the others: where keys or values alone are codes, either may be larger.
  int64_t largest_slice_bytes() const {
    const int64_t floats = float_layers.empty() ? 0 : float_slice_bytes();
    return std::max(floats, page_bytes() * kv_heads);
  }
  int64_t chunk_bytes() const { return slice_offset(layers); }
  int64_t slice_offset(int layer) const {
    const int64_t floats = float_layers.count_below(layer);
    const int64_t coded = page_bytes() * kv_heads * (layer - floats);
    return floats == 0 ? coded : coded + floats * float_slice_bytes();
  }
  int64_t page_offset(int layer, int kv_head) const {
    return slice_offset(layer) + slice_bytes(layer) / kv_heads * kv_head;
  }
  // Bytes of keys and values per token without padding, as a full cache would hold them.
  int64_t token_bytes() const {
    const int64_t floats = float_layers.count_below(layers);
    const int64_t coded = row_bytes(k_dtype, k_dim) + row_bytes(v_dtype, v_dim);
    const int64_t wide = (int64_t{k_dim} + v_dim) * dtype_bytes(float_dtype);
    return kv_heads * ((layers - floats) * coded + floats * wide);
  }

  friend bool operator==(const Layout& a, const Layout& b) {
    return a.layers == b.layers && a.kv_heads == b.kv_heads && a.chunk_tokens == b.chunk_tokens &&
           a.k_dim == b.k_dim && a.v_dim == b.v_dim && a.k_dtype == b.k_dtype &&
           a.v_dtype == b.v_dtype && a.k_rotated == b.k_rotated && a.v_rotated == b.v_rotated &&
           a.float_layers == b.float_layers && a.float_dtype == b.float_dtype;
  }

 private:
  int64_t float_slice_bytes() const {
    const int64_t row = chunk_tokens * dtype_bytes(float_dtype);
    return kv_heads * (align(row * k_dim) + align(row * v_dim));
  }
  static int64_t align(int64_t bytes) {
    return (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  }
};

}  // namespace kvpager
