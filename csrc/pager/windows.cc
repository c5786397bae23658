// Sequences of windowed models: they release what lies behind every window, and have homes reserved for
// what they can hold at a time instead of for all their positions.
//
//   positions  0           released         length - window - rewind       length
//              |- - - - - - -|----------------|--------------|---------------|
//               released       sealed, may go   for trims      what the next row sees
#include <algorithm>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/sequences.h"

namespace kvpager {

// Chunks that no row from `rewind` positions before `length` on sees, nor one just before it: logits of
// the last position that is kept can be computed again.
int64_t Sequences::behind(int64_t length, int64_t rewind) const {
  if (options_.window == 0 || length - options_.window <= rewind) return 0;
  return (length - options_.window - rewind) / layout_.chunk_tokens;
}

int64_t Sequences::earliest_trim(const Sequence& sequence) const {
  return sequence.released == 0 ? 0 : sequence.released * layout_.chunk_tokens + options_.window;
}

void Sequences::require_held(const Sequence& sequence, int64_t first,
                             const std::string& what) const {
  KVPAGER_REQUIRE(first >= 0);
  const int64_t released = sequence.released * layout_.chunk_tokens;
  if (first >= released) return;
  throw InvalidArgumentError(str(what, " needs position ", first, " of sequence ",
                                 sequence.id.value(), ", whose positions [0, ", released,
                                 ") were let go behind the window of ", options_.window,
                                 " tokens (rewind=", options_.rewind, "); expected positions of [",
                                 released, ", ", sequence.length, ")"));
}

// A pinned chunk stays, and so does all that follows it.
void Sequences::release_behind_window(Sequence& sequence) {
  const int64_t most = behind(sequence.length, options_.rewind) - sequence.released;
  int64_t count = 0;
  while (count < std::min(most, static_cast<int64_t>(sequence.sealed.size())) &&
         sequence.sealed[static_cast<size_t>(count)].pins == 0) {
    const RecordId id = sequence.sealed[static_cast<size_t>(count)].record;
    ++sequence.released_worth[static_cast<size_t>(ledger_[id].provenance)];
    sequence.base = ledger_[id].name;
    residency_.release(id);
    ++count;
  }
  if (count == 0) return;
  sequence.sealed.erase(sequence.sealed.begin(), sequence.sealed.begin() + count);
  sequence.released += count;
  counters_.chunks_released += count;
  residency_.invalidate_eviction();
}

void Sequences::set_reserved(Sequence& sequence, int64_t homes) {
  residency_.budget().reserved += homes - sequence.reserved;
  sequence.reserved = homes;
}

void Sequences::reserve(SequenceId id, int64_t total_tokens) {
  Sequence& sequence = find(id);
  if (total_tokens < sequence.length) {
    throw InvalidArgumentError(str("total_tokens: ", total_tokens, " is below the ",
                                   sequence.length, " positions the sequence already holds"));
  }
  int64_t wanted = homes_to_reserve(total_tokens / layout_.chunk_tokens - sequence.sealed_chunks(),
                                    own_homes(sequence));
  // What a running forward may seal stays reserved, and is then the caller's to keep.
  if (sequence.part >= 0) wanted = std::max(wanted, sequence.reserved);
  if (wanted > sequence.reserved) {
    residency_.budget().require(wanted - sequence.reserved, "reserve");
  }
  sequence.reserved_by_forward = 0;
  set_reserved(sequence, wanted);
  sequence.target = total_tokens;
}

// Homes that come free when the sequence releases its chunks: no other one uses these.
int64_t Sequences::own_homes(const Sequence& sequence) const {
  if (options_.window == 0) return 0;
  int64_t own = 0;
  for (const ChunkUse& use : sequence.sealed) {
    const ChunkRecord& record = ledger_[use.record];
    own += record.references == 1 && record.needs_home() ? 1 : 0;
  }
  return own;
}

// For `more` chunks to come of a sequence that holds `own` homes alone. A windowed one releases chunks
// after each commit: it never has more than the window, the rewind and the rows of a forward fill, once it
// has released what it may have adopted beyond that.
int64_t Sequences::homes_to_reserve(int64_t more, int64_t own) const {
  if (options_.window == 0) return more;
  const int64_t c = layout_.chunk_tokens;
  const int64_t at_a_time = (options_.window + options_.rewind + options_.rows) / c + 1;
  const int64_t of_a_forward = (options_.rows + c - 1) / c;
  return std::min(more, std::max(at_a_time - own, of_a_forward));
}

// Homes that other sequences keep busy are replaced as far as there are any.
void Sequences::reserve_again(Sequence& sequence) {
  if (options_.window == 0 || sequence.part >= 0) return;
  const int64_t more = sequence.target / layout_.chunk_tokens - sequence.sealed_chunks();
  const int64_t wanted = homes_to_reserve(std::max<int64_t>(0, more), own_homes(sequence));
  const int64_t left = std::max<int64_t>(0, residency_.budget().left());
  set_reserved(sequence, std::min(wanted, sequence.reserved + left));
}

}  // namespace kvpager
