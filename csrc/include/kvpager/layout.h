// The shape of a chunk's bytes: a value type that turns (layer, kv head) into an offset.
//
//   chunk = [layers][kv_heads] pages, contiguous, so that moving a chunk is one copy
//   page  = K tile [k_dim][chunk_tokens], then V tile [chunk_tokens][v_dim], each padded to
//           64 bytes; tiles of codes have scales too (kvpager/codes.h)
//
// K is stored with tokens innermost: the lanes of a vector register are keys, a dot product runs
// over k_dim in one fixed order, and nothing is ever summed across lanes.
#pragma once

#include <cstdint>

#include "kvpager/codes.h"
#include "kvpager/types.h"

namespace kvpager {

inline constexpr int64_t kTileAlignment = 64;

struct Layout {
  int32_t layers = 0;
  int32_t kv_heads = 0;
  int32_t chunk_tokens = 64;  // C
  int32_t k_dim = 0;          // head_dim of keys
  int32_t v_dim = 0;          // head_dim of values
  DType k_dtype = DType::kFloat32;
  DType v_dtype = DType::kFloat32;

  // Throws InvalidArgumentError naming the first field that is out of range.
  void validate() const;

  int64_t k_tile_bytes() const { return align(chunk_tokens * row_bytes(k_dtype, k_dim)); }
  int64_t v_tile_bytes() const { return align(chunk_tokens * row_bytes(v_dtype, v_dim)); }
  int64_t page_bytes() const { return k_tile_bytes() + v_tile_bytes(); }
  // One layer's pages of a chunk: a "slice", the unit that is checksummed and streamed from disk.
  int64_t slice_bytes() const { return page_bytes() * kv_heads; }
  int64_t chunk_bytes() const { return slice_bytes() * layers; }
  int64_t slice_offset(int layer) const { return slice_bytes() * layer; }
  int64_t page_offset(int layer, int kv_head) const {
    return slice_bytes() * layer + page_bytes() * kv_head;
  }
  // Bytes of keys and values per token without padding, as a full cache would hold them.
  int64_t token_bytes() const {
    return int64_t{layers} * kv_heads * (row_bytes(k_dtype, k_dim) + row_bytes(v_dtype, v_dim));
  }

  friend bool operator==(const Layout& a, const Layout& b) {
    return a.layers == b.layers && a.kv_heads == b.kv_heads && a.chunk_tokens == b.chunk_tokens &&
           a.k_dim == b.k_dim && a.v_dim == b.v_dim && a.k_dtype == b.k_dtype &&
           a.v_dtype == b.v_dtype;
  }

 private:
  static int64_t align(int64_t bytes) {
    return (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  }
};

}  // namespace kvpager
