// A forward as a backend sees it: whose rows it has, at which positions, and what it found.
#pragma once

#include <cstdint>
#include <vector>

#include "core/sequence.h"
#include "kvpager/layout.h"
#include "kvpager/pager.h"

namespace kvpager {

// Entries [first, first + count) of Forward::tokens.
struct TokenRange {
  int64_t first = 0;
  int64_t count = 0;
};

// One sequence's part in the running forward.
struct ForwardPart {
  Sequence* sequence = nullptr;
  std::vector<TokenRange> commits;   // what continues the sequence, in order of position
  int64_t commit_count = 0;          // all of it
  std::vector<int32_t> commit_rows;  // the rows of it one by one, for a backend that computes
  int32_t score_row = -1;            // the row whose scores the ledger keeps: the last one, if any
  int64_t visible = 0;               // chunks up to the furthest row or given position

  // Found by the backend:
  bool scored = false;        // some layer filled `mass`
  std::vector<uint8_t> read;  // [visible] read at any layer of this forward
  std::vector<double> mass;   // [visible] softmax shares summed over layers and kv heads
};

// A position whose keys and values are given.
struct GivenPosition {
  int32_t part = 0;
  int64_t position = 0;
};

struct Forward {
  uint64_t number = 0;  // of no other forward of the process
  std::vector<RowSpan> spans;
  std::vector<TokenId> tokens;  // [rows + given]: of the rows, then of the given positions
  int64_t given_count = 0;
  bool dense = false;  // every row attends to all before it
  std::vector<ForwardPart> parts;
  std::vector<uint8_t> layer_written;
  bool given_written = false;  // at every layer
  // For a backend that computes:
  std::vector<RowDescriptor> rows;
  std::vector<int32_t> part_of_row;  // [rows], -1: padding
  std::vector<GivenPosition> given;  // [given_count]

  int64_t row_count() const { return static_cast<int64_t>(tokens.size()) - given_count; }
};

// Marks the chunks a row at `position` sees through a window (0: none).
void mark_window(int64_t position, int64_t window, int64_t chunk_tokens,
                 std::vector<uint8_t>* chunks);

// NonFiniteError that names the layer and the position: of a row's query, of its key or value, and of
// given position `index`.
[[noreturn]] void refuse_query(const Forward& forward, int layer, int64_t row);
[[noreturn]] void refuse_row(const Forward& forward, const Layout& layout, int layer, int64_t row);
[[noreturn]] void refuse_given(const Forward& forward, const Layout& layout, int layer,
                               int64_t index);

}  // namespace kvpager
