#include "pager/sealing.h"

#include <algorithm>
#include <utility>

#include "kvpager/require.h"

namespace kvpager {
namespace {

// Room for `size` elements, growing geometrically: reserve() alone would copy everything at every
// forward.
template <class T>
void grow(std::vector<T>* vector, int64_t size) {
  const size_t wanted = static_cast<size_t>(size);
  if (wanted > vector->capacity()) vector->reserve(std::max(wanted, vector->capacity() * 2));
}

}  // namespace

Sealing::Sealing(const PagerParts& parts, Residency& residency, Sequences& sequences,
                 const Forward& forward)
    : PagerParts(parts), residency_(residency), sequences_(sequences), forward_(forward) {}

void Sealing::roll_back() noexcept {
  for (size_t i = seals_.size(); i-- > 0;) {
    const Seal& seal = seals_[i];
    if (seal.has_home) residency_.free_home(seal.home);
    if (seal.existing) residency_.release(*seal.existing);
    if (seal.summary.value() >= 0) residency_.free_summary(seal.summary);
  }
  seals_.clear();
}

// The ids of chunks [first, last) of a part that commits: positions before its rows, then theirs.
SharedArray<TokenId> Sealing::tokens_of(const ForwardPart& part, int64_t first,
                                        int64_t last) const {
  const Sequence& sequence = *part.sequence;
  const int64_t c = layout_.chunk_tokens;
  const int64_t stop = last * c;
  std::vector<TokenId> ids(static_cast<size_t>(stop - first * c));
  sequence.tokens.copy(static_cast<size_t>(first * c), static_cast<size_t>(sequence.length),
                       ids.data());
  int64_t at = sequence.length;
  for (const TokenRange& rows : part.commits) {
    const int64_t count = std::min(rows.count, stop - at);
    std::copy_n(forward_.tokens.begin() + rows.first, count, ids.begin() + (at - first * c));
    at += count;
  }
  return SharedArray(std::move(ids));
}

void Sealing::prepare(const ForwardPart& part, int64_t count, Provenance provenance) {
  Sequence& sequence = *part.sequence;
  const int64_t c = layout_.chunk_tokens;
  sequence.tokens.grow(static_cast<size_t>(sequence.length + count));
  const int64_t first = sequence.sealed_chunks();
  const int64_t last = (sequence.length + count) / c;
  if (first == last) return;
  grow(&sequence.sealed, last - sequence.released);
  grow(&seals_, static_cast<int64_t>(seals_.size()) + last - first);
  const SharedArray<TokenId> ids = tokens_of(part, first, last);
  ChunkName name = last_name(sequence);
  for (int64_t chunk = first; chunk < last; ++chunk) {
    Seal& seal = seals_.emplace_back();
    seal.sequence = &sequence;
    seal.open = sequence.use(chunk).record;
    seal.tokens = ids.part(static_cast<size_t>((chunk - first) * c), static_cast<size_t>(c));
    seal.provenance = std::max(sequence.provenance, provenance);
    name = sequence.namer.next(name, seal.tokens.data(), c, seal.provenance);
    seal.name = name;
    prepare(&seal);
  }
}

// Of the last chunk that is sealed or released; empty without one.
ChunkName Sealing::last_name(const Sequence& sequence) const {
  const RecordId last = sequence.last_sealed();
  return last.value() < 0 ? sequence.base : ledger_[last].name;
}

void Sealing::prepare(Seal* seal) {
  const BlockId block = ledger_[seal->open].block;
  seal->checksums = backend_.checksums(block);
  if (seal->provenance == Provenance::kExact) find_identical(seal, block);
  if (seal->existing && !seal->heals) return;
  if (!seal->heals) {
    seal->summary = residency_.allocate_summary();
    backend_.summarize(block, seal->summary);
  } else if (ledger_[*seal->existing].summary_pending) {  // that slot is not read yet
    backend_.summarize(block, ledger_[*seal->existing].summary);
  }
  seal->home = residency_.allocate_home();
  seal->has_home = true;
  backend_.write_home(block, seal->home, &seal->checksums);
}

void Sealing::find_identical(Seal* seal, BlockId block) {
  const auto found = ledger_.find(seal->name, seal->tokens.data(), layout_.chunk_tokens);
  // One name, other bytes: some forward was not what it claimed. Neither record's K/V are replaced.
  if (!found || !(residency_.checksums(*found) == checksums(seal))) return;
  residency_.add_reference(*found);  // so that room for the next chunk cannot come from this one
  seal->existing = found;
  if (ledger_[*found].damaged && ledger_[*found].on_disk()) rewrite_spilled(seal, block);
  seal->heals = ledger_[*found].damaged;
}

// These are the bytes that a chunk on disk had, as its checksums say. They go to where it is, whatever
// becomes of this forward. REQUIRES: seal->existing is on disk.
void Sealing::rewrite_spilled(Seal* seal, BlockId block) {
  KVPAGER_REQUIRE(seal->existing && ledger_[*seal->existing].on_disk());
  const ChunkRecord& record = ledger_[*seal->existing];
  backend_.write_home(block, Home{SlotId(), record.disk}, &seal->checksums);
  record.damaged = false;
  ++counters_.chunks_healed;
  counters_.bytes_written_through += layout_.chunk_bytes();
}

const SharedArray<uint64_t>& Sealing::checksums(Seal* seal) {
  if (seal->checksums.empty()) {
    const ChunkRecord& open = ledger_[seal->open];
    seal->checksums =
        slice_checksums(layout_, backend_.view(open, 0, layout_.chunk_bytes()), threads_);
  }
  return seal->checksums;
}

void Sealing::reserve_records() {
  if (!seals_.empty()) ledger_.expect(static_cast<int64_t>(seals_.size()));
}

void Sealing::apply() {
  for (size_t i = 0; i < seals_.size();) {
    Sequence& sequence = *seals_[i].sequence;
    const size_t first = i;
    for (; i < seals_.size() && seals_[i].sequence == &sequence; ++i) {
      apply(seals_[i], sequence.frontier[i - first]);
    }
    sequence.frontier.erase(sequence.frontier.begin(),
                            sequence.frontier.begin() + static_cast<int64_t>(i - first));
  }
  seals_.clear();
}

void Sealing::apply(Seal& seal, ChunkUse use) {
  Sequence& sequence = *seal.sequence;
  if (sequence.reserved > 0) sequences_.set_reserved(sequence, sequence.reserved - 1);
  if (seal.existing) {
    share(seal, &use);
  } else {
    seal_open(seal);
  }
  use.last_use = residency_.clock();
  sequence.sealed.push_back(use);
}

// The same chunk was computed before, bit for bit, and its record is kept. If its bytes are not resident,
// this block becomes its resident copy, so that what is pinned stays where it is.
void Sealing::share(Seal& seal, ChunkUse* use) {
  const RecordId existing = *seal.existing;
  ChunkRecord& kept = ledger_[existing];
  ledger_.pin(use->record, -use->pins);
  if (!kept.resident()) std::swap(kept.block, ledger_[use->record].block);
  if (seal.heals) {
    residency_.heal_by_home(existing, seal.home, std::move(seal.tokens), std::move(seal.checksums));
  }
  residency_.drop(use->record);
  use->record = existing;
  ledger_.pin(existing, use->pins);
  if (kept.summary_pending) seal.sequence->summaries_loaded = false;
  ++counters_.chunks_shared;
}

void Sealing::seal_open(Seal& seal) {
  ChunkRecord& record = ledger_[seal.open];
  ledger_.seal(seal.open);
  residency_.set_home(seal.open, seal.home);
  record.provenance = seal.provenance;
  record.summary = seal.summary;
  record.name = seal.name;
  record.previous = last_name(*seal.sequence);
  record.tokens = std::move(seal.tokens);
  record.checksums = std::move(seal.checksums);
  record.last_use = residency_.clock();
  if (seal.provenance == Provenance::kExact) ledger_.publish(seal.open);
  ++counters_.chunks_sealed;
}

}  // namespace kvpager
