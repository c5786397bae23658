#include <algorithm>
#include <utility>

#include "kvpager/error.h"
#include "pager/sequences.h"

namespace kvpager {

// The chunks of the text that exist; without a window, up to the first that does not.
std::vector<Sequences::Link> Sequences::find_chain(const Sequence& sequence,
                                                   const std::vector<TokenId>& tokens) const {
  const int64_t c = layout_.chunk_tokens;
  std::vector<Link> chain;
  chain.reserve(tokens.size() / static_cast<size_t>(c));
  ChunkName name;
  int64_t run = 0;
  int64_t homes = 0;
  for (int64_t end = c; end <= static_cast<int64_t>(tokens.size()); end += c) {
    const TokenId* ids = tokens.data() + (end - c);
    name = sequence.namer.next(name, ids, c, Provenance::kExact);
    auto found = ledger_.find(name, ids, c);
    if (found && ledger_[*found].damaged) found.reset();
    if (!found && options_.window == 0) break;
    if (!found) {
      run = static_cast<int64_t>(chain.size()) + 1;
    } else if (ledger_[*found].references == 0 && ledger_[*found].needs_home()) {
      // A cached chunk that is used again can no longer be reclaimed for what is reserved already. It
      // takes one of this sequence's own reservations.
      ++homes;
    }
    chain.push_back({found.value_or(RecordId()), name, run, homes});
  }
  return chain;
}

// Whether the sequence can go on behind the first `last` chunks; from *first on it uses them. With a
// window only the chunks that the next rows see have to be there.
bool Sequences::can_adopt(const Sequence& sequence, const std::vector<Link>& chain, int64_t last,
                          int64_t* first) const {
  const int64_t length = last * layout_.chunk_tokens;
  const Link& link = chain[static_cast<size_t>(last - 1)];
  if (link.record.value() < 0 || link.run > behind(length, 0)) return false;
  *first = std::max(link.run, behind(length, options_.rewind));
  const int64_t more = link.homes - (*first > 0 ? chain[static_cast<size_t>(*first - 1)].homes : 0);
  const int64_t own = std::min(sequence.reserved, last - *first);
  return more == 0 || more - own <= residency_.budget().left();
}

int64_t Sequences::adopt_prefix(SequenceId id, const std::vector<TokenId>& tokens) {
  Sequence& sequence = find(id);
  require_idle(sequence, "adopt a prefix for");
  if (sequence.length != 0) {
    throw InvalidArgumentError(str("adopt_prefix: sequence ", id.value(), " already holds ",
                                   sequence.length, " positions; only an empty one can adopt"));
  }
  const std::vector<Link> chain = find_chain(sequence, tokens);
  auto last = static_cast<int64_t>(chain.size());
  int64_t first = 0;
  while (last > 0 && !can_adopt(sequence, chain, last, &first)) --last;
  if (last == 0) return 0;

  std::vector<ChunkUse> uses;
  uses.reserve(static_cast<size_t>(last - first));
  for (int64_t chunk = first; chunk < last; ++chunk) {
    uses.push_back({chain[static_cast<size_t>(chunk)].record, 0, 0, 0, 0});
  }
  const int64_t reused = last * layout_.chunk_tokens;
  sequence.tokens.assign(tokens.begin(), tokens.begin() + reused);
  // Nothing below fails.
  sequence.sealed = std::move(uses);
  for (size_t i = 0; i < sequence.sealed.size(); ++i) {
    const RecordId record = sequence.sealed[i].record;
    residency_.add_reference(record);
    if (ledger_[record].summary_pending) sequence.summaries_loaded = false;
  }
  sequence.released = first;
  sequence.released_worth = {first, 0, 0};
  sequence.base = first == 0 ? ChunkName() : chain[static_cast<size_t>(first - 1)].name;
  set_reserved(sequence, sequence.reserved - std::min(sequence.reserved, last - first));
  sequence.length = reused;
  reserve_again(sequence);
  counters_.prefix_tokens_reused += reused;
  residency_.invalidate_eviction();
  return reused;
}

}  // namespace kvpager
