// A forward as a transaction (invariant 14): begin, write, attend, abort. The rest is in commit.cc.
//
//   idle --begin--> running --commit--> idle       rows are positions; full chunks were sealed
//                     |  \--abort---> idle         nothing happened
//                     +--error in attend/write--> idle (aborted)
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "kvpager/error.h"
#include "pager/impl.h"

namespace kvpager {

void require_shape(const char* name, const TensorView& tensor, int64_t rows, int64_t heads,
                   int64_t dim) {
  if (tensor.rows != rows || tensor.heads != heads || tensor.dim != dim) {
    throw InvalidArgumentError(str(name, ": shape [", tensor.rows, ", ", tensor.heads, ", ",
                                   tensor.dim, "], expected [", rows, ", ", heads, ", ", dim, "]"));
  }
  if (!is_supported(tensor.dtype)) {
    throw InvalidArgumentError(
        str(name, ": dtype ", dtype_name(tensor.dtype), " is not supported"));
  }
}

void require_apart(const char* name, const TensorView& tensor) {
  const auto reach = [](int64_t count, int64_t stride) { return (count - 1) * std::abs(stride); };
  const int64_t row = std::abs(tensor.row_stride);
  const int64_t head = std::abs(tensor.head_stride);
  const bool heads_within_rows =
      (tensor.heads == 1 || head >= tensor.dim) &&
      (tensor.rows == 1 || row >= reach(tensor.heads, head) + tensor.dim);
  const bool rows_within_heads =
      (tensor.rows == 1 || row >= tensor.dim) &&
      (tensor.heads == 1 || head >= reach(tensor.rows, row) + tensor.dim);
  if (!heads_within_rows && !rows_within_heads) {
    throw InvalidArgumentError(str(name, ": strides ", tensor.row_stride, " and ",
                                   tensor.head_stride, " of rows and heads let them overlap, ",
                                   "expected a tensor with memory for each of its elements"));
  }
}

void mark_window(int64_t position, int64_t window, int64_t chunk_tokens,
                 std::vector<uint8_t>* chunks) {
  const int64_t first = window > 0 ? std::max<int64_t>(0, position - window + 1) / chunk_tokens : 0;
  std::fill(chunks->begin() + first, chunks->begin() + position / chunk_tokens + 1, 1);
}

void Pager::Impl::begin(const std::vector<RowDescriptor>& rows, void* stream) {
  if (forward)
    throw InvalidArgumentError("begin: a forward is already running; commit or abort it");
  if (rows.empty() || static_cast<int64_t>(rows.size()) > options.rows) {
    throw InvalidArgumentError(str("rows: ", rows.size(), " given, expected 1 to ", options.rows));
  }
  Forward next;
  next.rows = rows;
  next.part_of_row.assign(rows.size(), -1);
  next.layer_written.assign(static_cast<size_t>(layout.layers), 0);
  auto part = next.parts.end();  // rows of one sequence mostly follow each other
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowDescriptor& row = rows[i];
    if (row.kind == RowKind::kPadding) continue;
    if (part == next.parts.end() || !(part->sequence->id == row.sequence)) {
      Sequence& wanted = find(row.sequence);
      part = std::find_if(next.parts.begin(), next.parts.end(),
                          [&](const ForwardPart& p) { return p.sequence == &wanted; });
      if (part == next.parts.end()) {
        part = next.parts.emplace(next.parts.end());
        part->sequence = &wanted;
      }
    }
    const Sequence& sequence = *part->sequence;
    const int64_t expected = sequence.length + static_cast<int64_t>(part->commit_rows.size());
    if (row.kind == RowKind::kCommit) {
      if (row.position != expected) {
        throw InvalidArgumentError(str("row ", i, ": position ", row.position, " of sequence ",
                                       sequence.id.value(), ", expected ", expected,
                                       ": commit rows continue the sequence in order"));
      }
      if (row.token < 0) {
        throw InvalidArgumentError(str("row ", i, ": token id ", row.token, " is negative"));
      }
      part->commit_rows.push_back(static_cast<int32_t>(i));
    } else if (row.position < 0 || row.position >= sequence.length) {
      throw InvalidArgumentError(str("row ", i, ": reads position ", row.position, " of sequence ",
                                     sequence.id.value(), ", which holds ", sequence.length));
    }
    part->score_row = static_cast<int32_t>(i);
    part->visible = std::max(part->visible, row.position / layout.chunk_tokens + 1);
    next.part_of_row[i] = static_cast<int32_t>(part - next.parts.begin());
  }
  if (next.parts.empty()) throw InvalidArgumentError("rows: every row is padding");

  take_frontier(&next);
  try {
    backend->begin(&next, stream);
  } catch (...) {
    for (ForwardPart& part : next.parts) drop_surplus(part);
    throw;
  }
  ++clock;
  ++counters.forwards;
  forward.emplace(std::move(next));
}

// Homes for chunks that may seal, then blocks for the rows: all that the parts need, or nothing.
void Pager::Impl::take_frontier(Forward* next) {
  const int64_t c = layout.chunk_tokens;
  int64_t new_homes = 0;
  int64_t new_blocks = 0;
  const auto homes_wanted = [&](const ForwardPart& part) {
    const int64_t end = part.sequence->length + static_cast<int64_t>(part.commit_rows.size());
    return std::max<int64_t>(0, end / c - part.sequence->sealed_chunks() - part.sequence->reserved);
  };
  const auto blocks_wanted = [&](const ForwardPart& part) {
    const int64_t end = part.sequence->length + static_cast<int64_t>(part.commit_rows.size());
    return std::max<int64_t>(0, (end + c - 1) / c - part.sequence->chunks());
  };
  for (const ForwardPart& part : next->parts) {
    new_homes += homes_wanted(part);
    new_blocks += blocks_wanted(part);
  }
  if (new_homes > 0) require_homes(new_homes, "begin");
  require_blocks(new_blocks, "begin");
  for (ForwardPart& part : next->parts) {
    load_summaries(*part.sequence);
    const size_t visible = static_cast<size_t>(part.visible);
    part.read.assign(visible, 0);
    part.mass.assign(visible, 0);
    part.sequence->frontier.reserve(part.sequence->frontier.size() +
                                    static_cast<size_t>(blocks_wanted(part)));
  }
  try {
    for (ForwardPart& part : next->parts) {
      Sequence& sequence = *part.sequence;
      part.promised = homes_wanted(part);
      reserved_homes += part.promised;
      sequence.reserved += part.promised;
      for (int64_t n = blocks_wanted(part); n-- > 0;) {
        const BlockId block = *acquire_block();
        const RecordId id = ledger.create(ChunkState::kOpen);
        ledger[id].references = 1;
        ledger[id].index = sequence.chunks();
        ledger[id].block = block;
        sequence.frontier.push_back({id, 0, 0, 0, 0});
      }
    }
  } catch (...) {
    for (ForwardPart& part : next->parts) drop_surplus(part);
    throw;
  }
}

void Pager::Impl::require_layer(int layer, const TensorView& k, const TensorView& v) const {
  if (!forward) throw InvalidArgumentError("attend: no forward is running; call begin first");
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  const int64_t rows = static_cast<int64_t>(forward->rows.size());
  require_shape("k", k, rows, layout.kv_heads, layout.k_dim);
  require_shape("v", v, rows, layout.kv_heads, layout.v_dim);
}

void Pager::Impl::write(int layer, const TensorView& k, const TensorView& v, void* stream) {
  require_layer(layer, k, v);
  try {
    backend->write(layer, k, v, stream);
  } catch (...) {
    abort();
    throw;
  }
}

void Pager::Impl::attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
                         const TensorView& out, const AttendOptions& attend_options) {
  if (!forward) throw InvalidArgumentError("attend: no forward is running; call begin first");
  const int64_t rows = static_cast<int64_t>(forward->rows.size());
  if (q.heads <= 0 || q.heads % layout.kv_heads != 0) {
    throw InvalidArgumentError(
        str("q: ", q.heads, " heads, expected a multiple of kv_heads=", layout.kv_heads));
  }
  if (options.q_heads > 0 && q.heads != options.q_heads) {
    throw InvalidArgumentError(str("q: ", q.heads, " heads, expected ", options.q_heads));
  }
  require_shape("q", q, rows, q.heads, layout.k_dim);
  require_shape("out", out, rows, q.heads, layout.v_dim);
  require_apart("out", out);
  if (!(attend_options.scaling > 0) || !std::isfinite(attend_options.scaling)) {
    throw InvalidArgumentError(
        str("scaling: ", attend_options.scaling, ", expected a positive number"));
  }
  if (attend_options.window < 0 || attend_options.softcap < 0) {
    throw InvalidArgumentError(str("window: ", attend_options.window, ", softcap: ",
                                   attend_options.softcap, "; expected 0 (none) or positive"));
  }
  require_layer(layer, k, v);
  try {
    backend->write(layer, k, v, attend_options.stream);
    backend->attend(layer, q, out, attend_options);
  } catch (...) {
    abort();
    throw;
  }
}

void Pager::Impl::refuse_non_finite(int layer, int64_t row) const {
  const RowDescriptor& bad = forward->rows[static_cast<size_t>(row)];
  throw NonFiniteError(str("layer ", layer, ": the key or value at position ", bad.position,
                           " of sequence ", bad.sequence.value(),
                           " is not finite (keys are kept in ", dtype_name(layout.k_dtype),
                           ", values in ", dtype_name(layout.v_dtype),
                           "); the forward was aborted and the sequence is as it was"));
}

void Pager::Impl::mark_replayed(uint64_t generation, void* stream) {
  if (!forward)
    throw InvalidArgumentError("mark_replayed: no forward is running; call begin first");
  if (generation != backend->generation()) {
    throw InvalidArgumentError(
        str("mark_replayed: the graph was captured at generation ", generation,
            " of the pager's memory, which is now at ", backend->generation(),
            "; what it has computed is void: abort this forward and capture the graph again"));
  }
  backend->replayed(stream);
  std::fill(forward->layer_written.begin(), forward->layer_written.end(), 1);
}

void Pager::Impl::drop_surplus(ForwardPart& part) {
  Sequence& sequence = *part.sequence;
  const int64_t kept = sequence.length % layout.chunk_tokens == 0 ? 0 : 1;
  while (static_cast<int64_t>(sequence.frontier.size()) > kept) {
    drop_use_pins(sequence.frontier.back());
    drop_record(sequence.frontier.back().record);
    sequence.frontier.pop_back();
  }
  const int64_t unused = std::min(part.promised, sequence.reserved);
  sequence.reserved -= unused;
  reserved_homes -= unused;
  part.promised = 0;
}

void Pager::Impl::abort() {
  if (!forward) return;
  backend->end();
  for (ForwardPart& part : forward->parts) drop_surplus(part);
  forward.reset();
  ++counters.aborted_forwards;
}

}  // namespace kvpager
