// What kernels read off the tables of a forward.
#pragma once

#include "cuda/params.h"
#include "cuda/portable.h"

namespace kvpager::gpu {

// Rows that are no padding: the length of Tables::order.
KVP_DEVICE int32_t ordered_rows(const Tables& tables) {
  const int32_t parts = tables.header->parts;
  return parts == 0 ? 0 : tables.parts[parts - 1].first_row + tables.parts[parts - 1].rows;
}

// Chunks [begin, end) of a part: what a wave has of it.
struct Span {
  int64_t begin = 0, end = 0;
  bool first = false, last = false;  // it has the part's first chunk, its last one

  KVP_DEVICE bool empty() const { return begin >= end; }
};
KVP_DEVICE Span span_of(const Wave& wave, int32_t number, const Part& part) {
  if (wave.most_chunks == 0) return {0, part.visible, true, true};
  if (number < wave.first_part || number > wave.last_part) return {};
  const int64_t begin = number == wave.first_part ? wave.first_chunk : 0;
  const bool last = number < wave.last_part || wave.end_chunk >= part.visible;
  return {begin, last ? part.visible : wave.end_chunk, begin == 0, last};
}

// The chunks of the longest span.
KVP_HOST_DEVICE int64_t most_chunks(const Wave& wave, int64_t max_visible) {
  return wave.most_chunks == 0 ? max_visible : wave.most_chunks;
}

}  // namespace kvpager::gpu
