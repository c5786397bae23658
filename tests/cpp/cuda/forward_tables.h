// The rows of a forward in the tables of cuda/params.h, for tests of the kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/tables.h"
#include "kvpager/layout.h"

namespace kvpager::testing {

inline gpu::Shape kernel_shape_of(const Layout& layout, int group, DType q_dtype) {
  gpu::Shape s;
  s.layers = layout.layers;
  s.kv_heads = layout.kv_heads;
  s.q_heads = layout.kv_heads * group;
  s.chunk_tokens = layout.chunk_tokens;
  s.k_dim = layout.k_dim;
  s.v_dim = layout.v_dim;
  s.k_dtype = layout.k_dtype;
  s.v_dtype = layout.v_dtype;
  s.q_dtype = q_dtype;
  s.k_tile_bytes = layout.k_tile_bytes();
  s.page_bytes = layout.page_bytes();
  s.k_rotated = layout.k_rotated;
  s.v_rotated = layout.v_rotated;
  s.slice_bytes = layout.slice_bytes(0);
  return s;
}

struct ForwardTables {
  gpu::Header header;
  std::vector<gpu::Row> rows;
  std::vector<gpu::Part> parts;  // in the order in which their sequences come up in the rows
  std::vector<int> sequences;    // of each part
  std::vector<int64_t> starts;   // of each part's rows, the least position
  device::Arrangement arrangement;

  // Of rows with a `sequence` (-1: padding) and a `position`. Parts have no sealed chunks yet.
  template <class From>
  ForwardTables(const std::vector<From>& from, int64_t chunk_tokens) {
    for (const From& row : from) {
      gpu::Row r;
      if (row.sequence >= 0) {
        r.part = part_of(row.sequence, row.position);
        r.position = row.position;
        gpu::Part& p = parts[static_cast<size_t>(r.part)];
        p.visible = std::max(p.visible, row.position / chunk_tokens + 1);
        p.written = std::max(p.written, row.position + 1);
        int64_t& start = starts[static_cast<size_t>(r.part)];
        start = std::min(start, row.position);
      }
      rows.push_back(r);
    }
    header.rows = static_cast<int32_t>(rows.size());
    header.parts = static_cast<int32_t>(parts.size());
    for (gpu::Part& p : parts) {
      p.first = header.entries;
      header.entries += p.visible;
      header.max_visible = std::max(header.max_visible, p.visible);
    }
  }
  ForwardTables() = default;

  // Once the parts say what is sealed.
  void arrange(int group, int32_t small_queries = device::kSmallQueries) {
    device::arrange(rows.data(), header.rows, group, parts.data(), header.parts, &arrangement,
                    small_queries);
    header.small_tiles = arrangement.small_tiles;
    header.large_tiles = arrangement.large_tiles;
  }

  // All but what is kept by entry goes into the image of a table.
  void copy_to(const device::TableArrays& arrays) const {
    *arrays.header = header;
    std::copy(rows.begin(), rows.end(), arrays.rows);
    std::copy(parts.begin(), parts.end(), arrays.parts);
    std::copy(arrangement.order.begin(), arrangement.order.end(), arrays.order);
    std::copy(arrangement.tiles.begin(), arrangement.tiles.end(), arrays.tiles);
  }

 private:
  int32_t part_of(int sequence, int64_t position) {
    const auto at = std::find(sequences.begin(), sequences.end(), sequence);
    const auto part = static_cast<int32_t>(at - sequences.begin());
    if (at == sequences.end()) {
      sequences.push_back(sequence);
      starts.push_back(position);
      parts.emplace_back();
    }
    return part;
  }
};

// Room for the image of a table, in which what a forward does not use is poison.
class TableImage {
 public:
  explicit TableImage(const device::TableLayout& layout)
      : words_(static_cast<size_t>(layout.bytes() + 7) / 8, ~uint64_t{0}),
        arrays_(layout.arrays(reinterpret_cast<std::byte*>(words_.data()))) {}
  const device::TableArrays& arrays() const { return arrays_; }
  const void* data() const { return words_.data(); }

 private:
  std::vector<uint64_t> words_;
  device::TableArrays arrays_;
};

}  // namespace kvpager::testing
