// What a pager is made with, checked, and what follows from it. Constant for the pager's life.
#pragma once

#include <cstdint>

#include "kvpager/pager.h"
#include "kvpager/selection.h"

namespace kvpager {

// What the budgets come to, in chunks.
struct SlotCounts {
  int64_t pool = 0, host = 0, disk = 0, summaries = 0;
};

struct Config {
  // InvalidArgumentError naming the option that is out of range.
  explicit Config(const PagerOptions& given);
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;

  const PagerOptions options;
  const Layout& layout;              // of the options
  const int64_t summary_page_bytes;  // of one (chunk, layer, kv head)
  const int64_t summary_slot_bytes;  // of a chunk: all layers and kv heads
  const SlotCounts slots;

  // Most blocks that one sequence's unsealed chunks take while a forward runs.
  int64_t frontier_blocks() const;
  // Whether there is nothing below the pool but snapshots, so that a chunk's block is its home.
  bool blocks_are_homes() const { return slots.host + slots.disk == 0; }
  // Chunks that can have a home. Where blocks are homes, a forward's frontier must still fit.
  int64_t home_capacity() const;

  // Whether rows attend to all before them, as far as the selection says.
  bool dense() const { return options.selection.kind == Selection::Kind::kDense; }
  // Whether a forward, dense or not, holds a layer's queries against key summaries. TopK does so at
  // every layer to select. Dense attention reads every chunk whatever it scores: the middle layer is
  // enough for people and for eviction, and next to nothing in a model of many layers.
  bool scores(int layer, bool forward_is_dense) const;
  int64_t scored_layers(bool forward_is_dense) const;

  // Makes the summary of page `page` (layer * kv_heads + head) of a chunk, at its place in the chunk's
  // summary.
  void summarize_page(const std::byte* chunk, int64_t page, std::byte* summary) const;
};

}  // namespace kvpager
