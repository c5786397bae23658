#include <algorithm>
#include <utility>

#include "core/unique_number.h"
#include "kvpager/error.h"
#include "pager/load_lease.h"
#include "pager/running_forward.h"
#include "pager/scoped_timer.h"

namespace kvpager {

uint64_t RunningForward::begin(std::vector<RowSpan> spans, std::vector<TokenId> tokens,
                               ForwardOptions with) {
  if (forward_) {
    throw InvalidArgumentError("begin: a forward is already running; commit or abort it");
  }
  auto next = std::make_unique<Forward>();
  next->spans = std::move(spans);
  next->tokens = std::move(tokens);
  next->given_count = static_cast<int64_t>(with.given.size());
  next->dense = with.dense || config_.dense();
  next->tokens.insert(next->tokens.end(), with.given.begin(), with.given.end());
  const int64_t rows = next->row_count();
  if (rows > options_.rows || (rows < 1 && next->given_count == 0)) {
    throw InvalidArgumentError(str("rows: ", rows, " given, expected 1 to ", options_.rows));
  }
  if (next->given_count > 0 && !next->dense) {
    throw InvalidArgumentError(
        "dense: false, but a forward with given positions has to be dense, because rows cannot "
        "select among chunks that are not sealed yet");
  }
  next->layer_written.assign(static_cast<size_t>(layout_.layers), 0);
  try {
    add_spans(next.get());
    backend_.prepare(*next, with.stream);
    allocate_frontier(next.get());
    if (backend_.computes()) describe_rows(next.get());
    if (backend_.reads_all()) hold_all_visible(*next);
    backend_.begin(next.get(), with.stream);
  } catch (...) {
    held_.release();
    end_parts(next.get());
    throw;
  }
  residency_.invalidate_eviction();  // what was loaded has not been noted
  residency_.tick();
  ++counters_.forwards;
  next->number = static_cast<uint64_t>(unique_number());
  forward_ = std::move(next);
  number_ = forward_->number;
  return forward_->number;
}

// Tokens of the rows come first, those of given positions after them: `row` and `given` are the next
// of either.
void RunningForward::add_spans(Forward* next) {
  const int64_t rows = next->row_count();
  int64_t row = 0;
  int64_t given = rows;
  for (const RowSpan& span : next->spans) {
    const bool is_given = span.kind == RowKind::kGiven;
    int64_t& at = is_given ? given : row;
    const int64_t left = (is_given ? rows + next->given_count : rows) - at;
    if (span.count < 1 || span.count > left) {
      throw InvalidArgumentError(str("spans: ", span.count, is_given ? " given" : "", " rows from ",
                                     is_given ? "given " : "", "row ", is_given ? at - rows : at,
                                     " on, expected 1 to ", left, ", the tokens left for them"));
    }
    add_span(span, at, next);
    at += span.count;
  }
  if (row < rows) {
    throw InvalidArgumentError(str("spans: of ", row, " rows, expected as many as tokens, ", rows));
  }
  if (given < rows + next->given_count) {
    throw InvalidArgumentError(str("spans: of ", given - rows,
                                   " given rows, expected as many as given tokens, ",
                                   next->given_count));
  }
  if (next->parts.empty()) throw InvalidArgumentError("rows: every row is padding");
  const auto parts = static_cast<int64_t>(next->parts.size());
  if (parts > options_.rows) {
    throw InvalidArgumentError(
        str("spans: of ", parts, " sequences, expected at most ", options_.rows));
  }
}

// Adds a span to its sequence's part.
void RunningForward::add_span(const RowSpan& span, int64_t first_token, Forward* next) {
  if (span.kind == RowKind::kPadding) return;
  const bool is_given = span.kind == RowKind::kGiven;
  // As messages call entry `first_token + i` of the tokens.
  const auto row_name = [&](int64_t i) {
    return str(is_given ? "given row " : "row ",
               first_token + i - (is_given ? next->row_count() : 0));
  };
  Sequence& sequence = sequences_.find(span.sequence);
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
    const int64_t window = options_.window;
    sequences_.require_held(sequence,
                            window == 0 ? 0 : std::max<int64_t>(0, span.position - window + 1),
                            str(row_name(0), " at position ", span.position));
    part.score_row = static_cast<int32_t>(first_token + span.count - 1);
  }
  const int64_t last = span.position + span.count - 1;
  part.visible = std::max(part.visible, last / layout_.chunk_tokens + 1);
}

// What a backend that computes wants to know: each row and given position for itself, and room for
// what is read.
void RunningForward::describe_rows(Forward* next) const {
  const auto rows = static_cast<size_t>(next->row_count());
  next->rows.reserve(rows);
  next->part_of_row.reserve(rows);
  next->given.reserve(static_cast<size_t>(next->given_count));
  for (const RowSpan& span : next->spans) {
    const bool padding = span.kind == RowKind::kPadding;
    const int32_t part = padding ? -1 : sequences_.find(span.sequence).part;
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

// Beyond what is reserved for the sequence.
int64_t RunningForward::homes_wanted(const ForwardPart& part) const {
  const int64_t end = part.sequence->length + part.commit_count;
  return std::max<int64_t>(
      0, end / layout_.chunk_tokens - part.sequence->sealed_chunks() - part.sequence->reserved);
}

int64_t RunningForward::blocks_wanted(const ForwardPart& part) const {
  const int64_t end = part.sequence->length + part.commit_count;
  const int64_t c = layout_.chunk_tokens;
  return std::max<int64_t>(0, (end + c - 1) / c - part.sequence->chunks());
}

// Homes for chunks that may seal, then blocks for the rows and for open chunks that are paged out: all that
// the parts need. end_parts() gives back what is not used.
void RunningForward::allocate_frontier(Forward* next) {
  int64_t new_homes = 0;
  int64_t new_blocks = 0;
  for (const ForwardPart& part : next->parts) {
    new_homes += homes_wanted(part);
    new_blocks += blocks_wanted(part);
  }
  const HomesAside homes(residency_.budget(), new_homes, "begin");
  std::vector<RecordId> missing;
  for (const ForwardPart& part : next->parts) {
    for (const ChunkUse& use : part.sequence->frontier) {
      held_.add(use.record);
      if (ledger_[use.record].paged_out) missing.push_back(use.record);
    }
  }
  for (ForwardPart& part : next->parts) {
    sequences_.load_summaries(*part.sequence);
    part.sequence->frontier.reserve(part.sequence->frontier.size() +
                                    static_cast<size_t>(blocks_wanted(part)));
  }
  // Where blocks are the only room, allocating one may forget a cached chunk: blocks for the rows and for
  // what has to be loaded for them are allocated at once, or not at all.
  Readers readers(ledger_);
  if (backend_.reads_all() && config_.blocks_are_homes()) {
    hold_visible(*next, &readers, &missing);
  }
  const HostRoom host = config_.blocks_are_homes() ? HostRoom::kReclaimed : HostRoom::kNone;
  LoadLease room(residency_, missing, host, NoRoom::kRefuse, "begin", new_blocks);
  if (!missing.empty()) {
    const ScopedTimer timer(&counters_.seconds_load);
    room.load(Reading::kTogether);
  }
  ledger_.expect(new_blocks);
  held_.expect(new_blocks);
  // Nothing below fails.
  for (ForwardPart& part : next->parts) {
    Sequence& sequence = *part.sequence;
    sequence.reserved_by_forward = homes_wanted(part);
    sequences_.set_reserved(sequence, sequence.reserved + sequence.reserved_by_forward);
    for (int64_t n = blocks_wanted(part); n-- > 0;) {
      const BlockId block = room.blocks().release();
      const RecordId open = residency_.create_open(sequence.chunks(), block);
      sequence.frontier.push_back({open, 0, 0, 0, 0});
      held_.add(open);
    }
  }
}

// What the rows of a forward may see stays where it is. What of it is below memory goes to `missing`.
void RunningForward::hold_visible(const Forward& forward, Readers* readers,
                                  std::vector<RecordId>* missing) {
  for (const ForwardPart& part : forward.parts) {
    const int64_t end = std::min(part.visible, part.sequence->chunks());
    for (int64_t c = part.sequence->released; c < end; ++c) {
      const RecordId id = part.sequence->use(c).record;
      if (readers->add(id) && !ledger_[id].in_memory()) missing->push_back(id);
    }
  }
}

// All that the rows may see is in memory from now on, and stays there.
void RunningForward::hold_all_visible(const Forward& forward) {
  std::vector<RecordId> missing;
  hold_visible(forward, &held_, &missing);
  if (missing.empty()) return;
  const ScopedTimer timer(&counters_.seconds_load);
  LoadLease(residency_, missing, HostRoom::kReclaimed, NoRoom::kRefuse, "begin")
      .load(Reading::kTogether);
}

}  // namespace kvpager
