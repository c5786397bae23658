// What lies behind every window: sequences let go of it, and are promised room for what they can hold at
// a time instead of for all their positions.
//
//   positions  0           released         length - window - rewind       length
//              |- - - - - - -|----------------|--------------|---------------|
//               let go         sealed, may go   for trims      what the next row sees
#include <algorithm>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/impl.h"

namespace kvpager {

// Chunks that no row from `rewind` positions before `length` on sees, nor one just before it: logits of
// the last position that is kept can be computed again.
int64_t Pager::Impl::behind(int64_t length, int64_t rewind) const {
  if (options.window == 0 || length - options.window <= rewind) return 0;
  return (length - options.window - rewind) / layout.chunk_tokens;
}

int64_t Pager::Impl::earliest_trim(const Sequence& sequence) const {
  return sequence.released == 0 ? 0 : sequence.released * layout.chunk_tokens + options.window;
}

// REQUIRES: `first` is not negative; what the running forward adds may come before it. Throws unless it
// is held.
void Pager::Impl::require_held(const Sequence& sequence, int64_t first,
                               const std::string& what) const {
  KVPAGER_REQUIRE(first >= 0);
  const int64_t released = sequence.released * layout.chunk_tokens;
  if (first >= released) return;
  throw InvalidArgumentError(str(what, " needs position ", first, " of sequence ",
                                 sequence.id.value(), ", whose positions [0, ", released,
                                 ") were let go behind the window of ", options.window,
                                 " tokens (rewind=", options.rewind, "); expected positions of [",
                                 released, ", ", sequence.length, ")"));
}

// A pinned chunk stays, and so does all that follows it.
void Pager::Impl::let_go(Sequence& sequence) {
  const int64_t most = behind(sequence.length, options.rewind) - sequence.released;
  int64_t count = 0;
  while (count < std::min(most, static_cast<int64_t>(sequence.sealed.size())) &&
         sequence.sealed[static_cast<size_t>(count)].pins == 0) {
    const RecordId id = sequence.sealed[static_cast<size_t>(count)].record;
    ++sequence.released_worth[static_cast<size_t>(ledger[id].provenance)];
    sequence.base = ledger[id].name;
    release(id);
    ++count;
  }
  if (count == 0) return;
  sequence.sealed.erase(sequence.sealed.begin(), sequence.sealed.begin() + count);
  sequence.released += count;
  counters.chunks_released += count;
  forget_orders();
}

void Pager::Impl::reserve(Sequence& sequence, int64_t total_tokens) {
  if (total_tokens < sequence.length) {
    throw InvalidArgumentError(str("total_tokens: ", total_tokens, " is below the ",
                                   sequence.length, " positions the sequence already holds"));
  }
  int64_t wanted = homes_to_promise(total_tokens / layout.chunk_tokens - sequence.sealed_chunks(),
                                    own_homes(sequence));
  // What a running forward may seal stays promised, and is then the caller's to keep.
  if (sequence.part >= 0) wanted = std::max(wanted, sequence.reserved);
  if (wanted > sequence.reserved) require_homes(wanted - sequence.reserved, "reserve");
  sequence.reserved_by_forward = 0;
  reserved_homes += wanted - sequence.reserved;
  sequence.reserved = wanted;
  sequence.target = total_tokens;
}

// Homes that come free when the sequence lets go of what it holds: nobody else uses these chunks.
int64_t Pager::Impl::own_homes(const Sequence& sequence) const {
  if (options.window == 0) return 0;
  int64_t own = 0;
  for (const ChunkUse& use : sequence.sealed) {
    const ChunkRecord& record = ledger[use.record];
    own += record.references == 1 && record.needs_home() ? 1 : 0;
  }
  return own;
}

// For `more` chunks to come of a sequence that holds `own` homes alone. A windowed one lets go of them
// after each commit: it never has more than the window, the rewind and the rows of a forward fill, once
// it has let go of what it may have adopted beyond that.
int64_t Pager::Impl::homes_to_promise(int64_t more, int64_t own) const {
  if (options.window == 0) return more;
  const int64_t c = layout.chunk_tokens;
  const int64_t at_a_time = (options.window + options.rewind + options.rows) / c + 1;
  const int64_t of_a_forward = (options.rows + c - 1) / c;
  return std::min(more, std::max(at_a_time - own, of_a_forward));
}

// What a sequence has let go of is promised again to what it is yet to hold. Homes that others keep busy
// are replaced as far as there are any.
void Pager::Impl::promise_again(Sequence& sequence) {
  if (options.window == 0 || sequence.part >= 0) return;
  const int64_t more = sequence.target / layout.chunk_tokens - sequence.sealed_chunks();
  const int64_t wanted = homes_to_promise(std::max<int64_t>(0, more), own_homes(sequence));
  const int64_t taken = referenced_homes + reserved_homes;
  const int64_t room =
      std::min(config.home_capacity() - taken, summary_slots.slots() - taken - restored_records);
  const int64_t promised = std::min(wanted, sequence.reserved + std::max<int64_t>(0, room));
  reserved_homes += promised - sequence.reserved;
  sequence.reserved = promised;
}

}  // namespace kvpager
