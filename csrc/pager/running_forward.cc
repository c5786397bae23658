// A forward as a transaction (invariant 14): begin, give, write, attend, abort. The rest is in
// commit.cc.
//
//   idle --begin--> running --commit--> idle       rows are positions; full chunks were sealed
//                     |  \--abort---> idle         nothing happened
//                     +--error in give/attend/write--> idle (aborted)
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/unique_number.h"
#include "kvpager/error.h"
#include "pager/impl.h"
#include "pager/room.h"

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

// Tokens of the rows come first, those of given positions after them: `row` and `given` are the next
// of either.
void Pager::Impl::begin(std::vector<RowSpan> spans, std::vector<TokenId> tokens,
                        ForwardOptions with) {
  if (forward)
    throw InvalidArgumentError("begin: a forward is already running; commit or abort it");
  auto owner = std::make_unique<Forward>();
  Forward& next = *owner;
  next.spans = std::move(spans);
  next.tokens = std::move(tokens);
  next.given_count = static_cast<int64_t>(with.given.size());
  next.dense = with.dense || config.dense();
  next.tokens.insert(next.tokens.end(), with.given.begin(), with.given.end());
  const int64_t rows = next.row_count();
  if (rows > options.rows || (rows < 1 && next.given_count == 0)) {
    throw InvalidArgumentError(str("rows: ", rows, " given, expected 1 to ", options.rows));
  }
  if (next.given_count > 0 && !next.dense) {
    throw InvalidArgumentError(
        "dense: false, but a forward with given positions has to be dense, because rows cannot "
        "select among chunks that are not sealed yet");
  }
  next.layer_written.assign(static_cast<size_t>(layout.layers), 0);
  try {
    int64_t row = 0;
    int64_t given = rows;
    for (const RowSpan& span : next.spans) {
      const bool is_given = span.kind == RowKind::kGiven;
      int64_t& at = is_given ? given : row;
      const int64_t left = (is_given ? rows + next.given_count : rows) - at;
      if (span.count < 1 || span.count > left) {
        throw InvalidArgumentError(str("spans: ", span.count, is_given ? " given" : "",
                                       " rows from ", is_given ? "given " : "", "row ",
                                       is_given ? at - rows : at, " on, expected 1 to ", left,
                                       ", the tokens left for them"));
      }
      enroll(span, at, &next);
      at += span.count;
    }
    if (row < rows) {
      throw InvalidArgumentError(
          str("spans: of ", row, " rows, expected as many as tokens, ", rows));
    }
    if (given < rows + next.given_count) {
      throw InvalidArgumentError(str("spans: of ", given - rows,
                                     " given rows, expected as many as given tokens, ",
                                     next.given_count));
    }
    if (next.parts.empty()) throw InvalidArgumentError("rows: every row is padding");
    const auto parts = static_cast<int64_t>(next.parts.size());
    if (parts > options.rows) {
      throw InvalidArgumentError(
          str("spans: of ", parts, " sequences, expected at most ", options.rows));
    }
    backend->prepare(next, with.stream);
    take_frontier(&next);
    if (backend->computes()) describe_rows(&next);
    if (backend->reads_all()) hold_what_it_reads(next);
    backend->begin(&next, with.stream);
  } catch (...) {
    held.release();
    disband(&next);
    throw;
  }
  forget_orders();  // what was loaded has not been noted
  ++clock;
  ++counters.forwards;
  next.number = static_cast<uint64_t>(unique_number());
  forward = std::move(owner);
  running = forward->number;
}

// Adds a span to its sequence's part.
void Pager::Impl::enroll(const RowSpan& span, int64_t first_token, Forward* next) {
  if (span.kind == RowKind::kPadding) return;
  const bool is_given = span.kind == RowKind::kGiven;
  // As messages call entry `first_token + i` of the tokens.
  const auto row_name = [&](int64_t i) {
    return str(is_given ? "given row " : "row ",
               first_token + i - (is_given ? next->row_count() : 0));
  };
  Sequence& sequence = find(span.sequence);
  if (sequence.part < 0) {
    next->parts.emplace_back().sequence = &sequence;
    sequence.part = static_cast<int32_t>(next->parts.size()) - 1;
  }
  ForwardPart& part = next->parts[static_cast<size_t>(sequence.part)];
  if (span.kind != RowKind::kRead) {
    const int64_t expected = sequence.length + part.commit_count;
    if (span.position != expected) {
      throw InvalidArgumentError(str(row_name(0), ": position ", span.position, " of sequence ",
                                     sequence.id.value(), ", expected ", expected,
                                     ": commit rows continue the sequence in order"));
    }
    const auto first = next->tokens.begin() + first_token;
    const auto bad = std::find_if(first, first + span.count, [](TokenId id) { return id < 0; });
    if (bad != first + span.count) {
      throw InvalidArgumentError(str(row_name(bad - first), ": token id ", *bad, " is negative"));
    }
    part.commits.push_back({first_token, span.count});
    part.commit_count += span.count;
  } else if (span.position < 0 || span.position > sequence.length - span.count) {
    const bool none = span.position < 0 || span.position >= sequence.length;
    const int64_t bad = none ? 0 : sequence.length - span.position;
    throw InvalidArgumentError(str(row_name(bad), ": reads position ", span.position + bad,
                                   " of sequence ", sequence.id.value(), ", which holds ",
                                   sequence.length));
  }
  if (!is_given) {  // which sees nothing
    require_held(sequence,
                 options.window == 0 ? 0 : std::max<int64_t>(0, span.position - options.window + 1),
                 str(row_name(0), " at position ", span.position));
    part.score_row = static_cast<int32_t>(first_token + span.count - 1);
  }
  const int64_t last = span.position + span.count - 1;
  part.visible = std::max(part.visible, last / layout.chunk_tokens + 1);
}

// What a backend that computes wants to know: each row and given position for itself, and room for
// what is read.
void Pager::Impl::describe_rows(Forward* next) const {
  const auto rows = static_cast<size_t>(next->row_count());
  next->rows.reserve(rows);
  next->part_of_row.reserve(rows);
  next->given.reserve(static_cast<size_t>(next->given_count));
  for (const RowSpan& span : next->spans) {
    const bool padding = span.kind == RowKind::kPadding;
    const int32_t part = padding ? -1 : find(span.sequence).part;
    if (span.kind == RowKind::kGiven) {
      for (int64_t i = 0; i < span.count; ++i) next->given.push_back({part, span.position + i});
      continue;
    }
    for (int64_t i = 0; i < span.count; ++i) {
      const auto row = static_cast<int32_t>(next->rows.size());
      next->rows.push_back({span.sequence, span.position + (padding ? 0 : i),
                            next->tokens[static_cast<size_t>(row)], span.kind});
      next->part_of_row.push_back(part);
      if (span.kind == RowKind::kCommit) {
        next->parts[static_cast<size_t>(part)].commit_rows.push_back(row);
      }
    }
  }
  for (ForwardPart& part : next->parts) {
    part.read.assign(static_cast<size_t>(part.visible), 0);
    part.mass.assign(static_cast<size_t>(part.visible), 0);
  }
}

// Homes for chunks that may seal, then blocks for the rows: all that the parts need, or what disband()
// gives back.
void Pager::Impl::take_frontier(Forward* next) {
  const int64_t c = layout.chunk_tokens;
  int64_t new_homes = 0;
  int64_t new_blocks = 0;
  const auto homes_wanted = [&](const ForwardPart& part) {
    const int64_t end = part.sequence->length + part.commit_count;
    return std::max<int64_t>(0, end / c - part.sequence->sealed_chunks() - part.sequence->reserved);
  };
  const auto blocks_wanted = [&](const ForwardPart& part) {
    const int64_t end = part.sequence->length + part.commit_count;
    return std::max<int64_t>(0, (end + c - 1) / c - part.sequence->chunks());
  };
  for (const ForwardPart& part : next->parts) {
    new_homes += homes_wanted(part);
    new_blocks += blocks_wanted(part);
  }
  if (new_homes > 0) require_homes(new_homes, "begin");
  for (ForwardPart& part : next->parts) {
    load_summaries(*part.sequence);
    part.sequence->frontier.reserve(part.sequence->frontier.size() +
                                    static_cast<size_t>(blocks_wanted(part)));
  }
  // Where blocks are the only room, taking one may forget a cached chunk: what the rows take and what has
  // to be brought up for them is had at once, or neither.
  Readers readers(ledger);
  std::vector<RecordId> missing;
  if (backend->reads_all() && config.blocks_are_homes()) {
    hold_visible(*this, *next, &readers, &missing);
  }
  RoomLease room(*this, missing, HostRoom::kReclaimed, Lacking::kRefuse, "begin", new_blocks);
  if (!missing.empty()) {
    const ScopedTimer timer(&counters.seconds_load);
    room.bring_up(Reading::kTogether);
  }
  for (ForwardPart& part : next->parts) {
    Sequence& sequence = *part.sequence;
    sequence.reserved_by_forward = homes_wanted(part);
    reserved_homes += sequence.reserved_by_forward;
    sequence.reserved += sequence.reserved_by_forward;
    for (int64_t n = blocks_wanted(part); n-- > 0;) {
      const RecordId id = ledger.create(ChunkState::kOpen);
      ChunkRecord& record = ledger[id];
      record.references = 1;
      record.index = sequence.chunks();
      record.block = room.blocks().release();
      sequence.frontier.push_back({id, 0, 0, 0, 0});
    }
  }
}

// Whatever the forward's rows may see is in memory from now on, and stays where it is.
void Pager::Impl::hold_what_it_reads(const Forward& next) {
  std::vector<RecordId> missing;
  hold_visible(*this, next, &held, &missing);
  if (missing.empty()) return;
  const ScopedTimer timer(&counters.seconds_load);
  RoomLease(*this, missing, HostRoom::kReclaimed, Lacking::kRefuse, "begin")
      .bring_up(Reading::kTogether);
}

// The parts end, as far as they had begun; what they took and did not use goes back.
void Pager::Impl::disband(Forward* ended) {
  for (ForwardPart& part : ended->parts) {
    drop_surplus(part);
    part.sequence->part = -1;
  }
  forget_orders();  // nothing is being read any more
}

void Pager::Impl::give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
                       void* stream) {
  if (!forward) throw InvalidArgumentError("give: no forward is running; call begin first");
  if (forward->given_count == 0) {
    throw InvalidArgumentError("give: this forward has no given positions; name them in its spans");
  }
  if (forward->given_written) {
    throw InvalidArgumentError("give: this forward has been given its keys and values already");
  }
  const auto layers = static_cast<size_t>(layout.layers);
  if (k.size() != layers || v.size() != layers) {
    throw InvalidArgumentError(str("give: keys of ", k.size(), " layers and values of ", v.size(),
                                   ", expected ", layers, " of each"));
  }
  for (size_t layer = 0; layer < layers; ++layer) {
    require_shape(str("k[", layer, "]").c_str(), k[layer], forward->given_count, layout.kv_heads,
                  layout.k_dim);
    require_shape(str("v[", layer, "]").c_str(), v[layer], forward->given_count, layout.kv_heads,
                  layout.v_dim);
  }
  if (backend->capturing(stream)) {
    throw InvalidArgumentError("give: stream is being captured; give before a capture");
  }
  try {
    backend->give(k, v, stream);
  } catch (...) {
    abort();
    throw;
  }
  forward->given_written = true;
}

// Whether rows of the forward that runs attend to more than the configured selection.
bool Pager::Impl::dense_by_itself() const { return forward->dense && !config.dense(); }

void Pager::Impl::require_rows() const {
  if (!forward) throw InvalidArgumentError("attend: no forward is running; call begin first");
  if (forward->row_count() == 0) {
    throw InvalidArgumentError(
        "attend: this forward has given positions and no rows; call give, then commit");
  }
}

void Pager::Impl::require_layer(int layer, const TensorView& k, const TensorView& v) const {
  require_rows();
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  const int64_t rows = forward->row_count();
  require_shape("k", k, rows, layout.kv_heads, layout.k_dim);
  require_shape("v", v, rows, layout.kv_heads, layout.v_dim);
}

void Pager::Impl::write(int layer, const TensorView& k, const TensorView& v, void* stream) {
  require_layer(layer, k, v);
  try {
    if (backend->write(layer, nullptr, k, v, stream)) {
      forward->layer_written[static_cast<size_t>(layer)] = 1;
    }
  } catch (...) {
    abort();
    throw;
  }
}

void Pager::Impl::attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
                         const TensorView& out, const AttendOptions& attend_options) {
  require_rows();
  if (forward->given_count > 0 && !forward->given_written) {
    throw InvalidArgumentError(str("attend: the keys and values of ", forward->given_count,
                                   " given positions, which rows may see, are missing; hand them "
                                   "in with give first"));
  }
  const int64_t rows = forward->row_count();
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
  if (options.window > 0 &&
      (attend_options.window == 0 || attend_options.window > options.window)) {
    throw InvalidArgumentError(str("window: ", attend_options.window, " of layer ", layer,
                                   ", expected 1 to ", options.window,
                                   ": this pager lets go of what is behind its own window"));
  }
  require_layer(layer, k, v);
  if (dense_by_itself() && backend->capturing(attend_options.stream)) {
    throw InvalidArgumentError(
        "attend: this forward is dense, and a graph runs the configured selection; attend outside "
        "of a capture");
  }
  try {
    if (backend->write(layer, &q, k, v, attend_options.stream)) {
      forward->layer_written[static_cast<size_t>(layer)] = 1;
    }
    if (!backend->select(layer, q, attend_options)) load_missing();
    backend->attend(layer, q, out, attend_options);
  } catch (...) {
    abort();
    throw;
  }
  forget_orders();  // what the layer read and brought in may leave again
}

// What the layer reads and is not in memory is loaded: chunks of snapshots into free host slots; else, if
// the pool can hold all that are left beside what is being read, into blocks. What the layer reads stays
// where it is meanwhile.
void Pager::Impl::load_missing() {
  const ScopedTimer timer(&counters.seconds_load);
  Readers readers(ledger);
  std::vector<RecordId> missing;
  for (size_t p = 0; p < forward->parts.size(); ++p) {
    const ForwardPart& part = forward->parts[p];
    const std::vector<uint8_t>& reads = backend->reads(p);
    for (int64_t c = part.sequence->released; c < part.visible; ++c) {
      if (!reads[static_cast<size_t>(c)]) continue;
      const RecordId id = part.sequence->use(c).record;
      const ChunkRecord& record = ledger[id];
      if (readers.add(id) && !record.resident() && !record.on_host()) missing.push_back(id);
    }
  }
  RoomLease(*this, missing, HostRoom::kIdle, Lacking::kLeave, "attend")
      .bring_up(Reading::kTogether);
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
  if (dense_by_itself() && backend->computes()) {
    throw InvalidArgumentError(
        "mark_replayed: this forward is dense, and a graph runs the configured selection; attend "
        "outside of a graph");
  }
  backend->replayed(stream);
  if (!backend->computes()) forward->given_written = true;
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
  const int64_t unused = std::min(sequence.reserved_by_forward, sequence.reserved);
  sequence.reserved -= unused;
  reserved_homes -= unused;
  sequence.reserved_by_forward = 0;
}

void Pager::Impl::abort() {
  if (!forward) return;
  backend->end();
  held.release();
  disband(&*forward);
  destroy_dropped(*forward);
  forward.reset();
  running = 0;
  ++counters.aborted_forwards;
}

}  // namespace kvpager
