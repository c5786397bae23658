#include "pager/forward.h"

#include <algorithm>

#include "kvpager/error.h"

namespace kvpager {
namespace {

[[noreturn]] void refuse_key_or_value(const Layout& of_pager, int layer, SequenceId sequence,
                                      int64_t position) {
  const Layout layout = of_pager.of_layer(layer);
  throw NonFiniteError(str("layer ", layer, ": the key or value at position ", position,
                           " of sequence ", sequence.value(), " is not finite (keys are kept in ",
                           dtype_name(layout.k_dtype), ", values in ", dtype_name(layout.v_dtype),
                           "); the forward was aborted and the sequence is as it was"));
}

}  // namespace

void mark_window(int64_t position, int64_t window, int64_t chunk_tokens,
                 std::vector<uint8_t>* chunks) {
  const int64_t first = window > 0 ? std::max<int64_t>(0, position - window + 1) / chunk_tokens : 0;
  std::fill(chunks->begin() + first, chunks->begin() + position / chunk_tokens + 1, 1);
}

void refuse_query(const Forward& forward, int layer, int64_t row) {
  const RowDescriptor& bad = forward.rows[static_cast<size_t>(row)];
  throw NonFiniteError(
      str("layer ", layer, ": the query at position ", bad.position, " of sequence ",
          bad.sequence.value(),
          " is not finite; the forward was aborted and the sequence is as it was"));
}

void refuse_row(const Forward& forward, const Layout& layout, int layer, int64_t row) {
  const RowDescriptor& bad = forward.rows[static_cast<size_t>(row)];
  refuse_key_or_value(layout, layer, bad.sequence, bad.position);
}

void refuse_given(const Forward& forward, const Layout& layout, int layer, int64_t index) {
  const GivenPosition& bad = forward.given[static_cast<size_t>(index)];
  refuse_key_or_value(layout, layer, forward.parts[static_cast<size_t>(bad.part)].sequence->id,
                      bad.position);
}

}  // namespace kvpager
