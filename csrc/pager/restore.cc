// A sequence whose chunks are still in a snapshot. Nothing of the history of the pager that saved it is
// needed.
#include <algorithm>
#include <optional>
#include <utility>

#include "core/chunk_namer.h"
#include "kvpager/error.h"
#include "pager/lease.h"
#include "pager/restore_checks.h"
#include "pager/snapshots.h"

namespace kvpager {
namespace {

// The counts of chunks that are worth `worst` at best.
ProvenanceCounts at_best(const ProvenanceCounts& counts, Provenance worst) {
  ProvenanceCounts lowered{};
  for (size_t i = 0; i < counts.size(); ++i) {
    lowered[std::max(i, static_cast<size_t>(worst))] += counts[i];
  }
  return lowered;
}

Provenance worst_of(const ProvenanceCounts& counts, Provenance at_least) {
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) at_least = std::max(at_least, static_cast<Provenance>(i));
  }
  return at_least;
}

// References to records. They go back, the end of a chain first, unless they are kept.
class References {
 public:
  explicit References(Residency& residency) : residency_(residency) {}
  ~References() {
    for (size_t i = ids_.size(); i-- > 0;) residency_.release(ids_[i]);
  }
  References(const References&) = delete;
  References& operator=(const References&) = delete;

  void add(RecordId id) {
    ids_.push_back(id);
    residency_.add_reference(id);
  }
  void keep() noexcept { ids_.clear(); }

 private:
  Residency& residency_;
  std::vector<RecordId> ids_;
};

// One restore. plan() decides what becomes of each sealed chunk, require_room() whether it fits, and
// make() does it. Chunks and positions are the file's own unless they say otherwise.
class Restore : PagerParts {
 public:
  Restore(const PagerParts& parts, Residency& residency, Sequences& sequences,
          const std::shared_ptr<SnapshotReader>& reader, const std::string& salt,
          const ReleasedText& before, int64_t length, Provenance provenance)
      : PagerParts(parts),
        residency_(residency),
        sequences_(sequences),
        reader_(reader),
        meta_(reader->meta()),
        before_(before),
        c_(layout_.chunk_tokens),
        length_(length),
        sealed_(length / c_),
        partial_(length % c_ != 0),
        salt_(salt),
        namer_(options_.namespace_key, salt),
        released_(static_cast<int64_t>(before.tokens.size()) / c_),
        released_worth_(at_best(before.provenance, provenance)),
        base_(last_name(namer_, before.tokens, released_worth_, c_)),
        worst_(worst_of(released_worth_, provenance)) {}

  void plan(bool names_are_ours);
  void require_room() const;
  SequenceId make();

 private:
  // What becomes of a chunk: the ledger has it already, or it becomes a record that lives in the file.
  struct Planned {
    RecordId existing;  // -1: none
    Provenance provenance;
  };

  const SnapshotChunk& chunk(int64_t i) const { return meta_.chunks[static_cast<size_t>(i)]; }
  // Under the file's own namespace and worth a name is the one that verify_chain() has proved; from chunk
  // own_ on names are others.
  const ChunkName& name_of(int64_t i) const {
    if (i < 0) return base_;
    return i < own_ ? chunk(i).chain_hash : others_[static_cast<size_t>(i - own_)];
  }
  bool can_share(RecordId found, int64_t i) const;
  SharedArray<TokenId> all_tokens() const;
  void load_tail(BlockId block);
  RecordId share(const Planned& planned, int64_t i);
  RecordId create(const Planned& planned, int64_t i, SlotId summary);

  Residency& residency_;
  Sequences& sequences_;
  const std::shared_ptr<SnapshotReader>& reader_;
  const SnapshotMeta& meta_;
  const ReleasedText& before_;
  const int64_t c_;
  const int64_t length_;
  const int64_t sealed_;
  const bool partial_;  // of a chunk that is the file's tail, or sealed there
  const std::string& salt_;
  const ChunkNamer namer_;
  const int64_t released_;  // chunks before the file's first
  const ProvenanceCounts released_worth_;
  const ChunkName base_;

  int64_t own_ = 0;
  std::vector<ChunkName> others_;
  Provenance worst_;
  std::vector<Planned> plan_;
  int64_t created_ = 0;
  int64_t new_homes_ = 0;
};

// One name, other bytes: only its own bytes heal a damaged chunk.
bool Restore::can_share(RecordId found, int64_t i) const {
  return !ledger_[found].damaged || residency_.checksums(found) == chunk(i).slice_checksum;
}

void Restore::plan(bool names_are_ours) {
  own_ = names_are_ours ? sealed_ : 0;
  plan_.reserve(static_cast<size_t>(sealed_));
  for (int64_t i = 0; i < sealed_; ++i) {
    const TokenId* ids = meta_.tokens.data() + i * c_;
    worst_ = std::max(worst_, chunk(i).provenance);
    if (chunk(i).provenance != worst_) own_ = std::min(own_, i);
    if (i >= own_) others_.push_back(namer_.next(name_of(i - 1), ids, c_, worst_));
    Planned planned{RecordId(), worst_};
    if (worst_ == Provenance::kExact) {
      const auto found = ledger_.find(name_of(i), ids, c_);
      if (found && can_share(*found, i)) planned.existing = *found;
    }
    if (planned.existing.value() >= 0) {
      const ChunkRecord& record = ledger_[planned.existing];
      new_homes_ += record.references == 0 && record.needs_home() ? 1 : 0;
    } else {
      ++created_;
    }
    plan_.push_back(planned);
  }
}

void Restore::require_room() const {
  const HomeBudget& budget = residency_.budget();
  if (new_homes_ > 0) budget.require(new_homes_, "restore");
  const int64_t taken = budget.referenced + budget.reserved + budget.restored;
  const int64_t slots = budget.config.slots.summaries;
  if (taken + new_homes_ + created_ > slots) {
    const int64_t each = budget.config.summary_slot_bytes;
    throw CapacityError(str("restore: summaries of ", created_, " more chunks need ",
                            created_ * each, " bytes beside the ", taken,
                            " in use; raise summary_bytes, which is ", slots * each));
  }
}

SharedArray<TokenId> Restore::all_tokens() const {
  SharedArray<TokenId> tokens = meta_.tokens.first(static_cast<size_t>(length_));
  if (before_.tokens.empty()) return tokens;
  std::vector<TokenId> all = before_.tokens;
  all.insert(all.end(), tokens.begin(), tokens.end());
  return SharedArray(std::move(all));
}

void Restore::load_tail(BlockId block) {
  const auto read = [&](std::byte* out) {
    try {
      reader_->read_chunk(sealed_, out);
    } catch (const CorruptSnapshotError& error) {
      throw damage_of_chunk(error, sealed_, released_ + sealed_, c_);
    }
  };
  backend_.load(read, block);
}

RecordId Restore::share(const Planned& planned, int64_t i) {
  // The same bytes, sound for all we know.
  if (ledger_[planned.existing].damaged) residency_.heal_by_source(planned.existing, reader_, i);
  return planned.existing;
}

RecordId Restore::create(const Planned& planned, int64_t i, SlotId summary) {
  const RecordId id = residency_.create_restored(reader_, i, summary);
  ChunkRecord& record = ledger_[id];
  record.provenance = planned.provenance;
  record.index = released_ + i;
  record.name = name_of(i);
  record.previous = name_of(i - 1);
  record.score = meta_.hints.qk_score.empty() ? 0 : meta_.hints.qk_score[static_cast<size_t>(i)];
  if (planned.provenance == Provenance::kExact) ledger_.publish(id);
  return id;
}

SequenceId Restore::make() {
  Sequence made(namer_);
  made.salt = salt_;
  made.tokens = TokenLog(all_tokens());
  made.length = released_ * c_ + length_;
  made.released = released_;
  made.released_worth = released_worth_;
  made.base = base_;
  made.provenance = partial_ ? std::max(worst_, chunk(sealed_).provenance) : worst_;
  made.sealed.reserve(static_cast<size_t>(sealed_));
  made.frontier.reserve(partial_ ? 1 : 0);
  // References first, so that a block or a summary slot cannot come from what the plan shares.
  References references(residency_);
  for (const Planned& planned : plan_) {
    if (planned.existing.value() >= 0) references.add(planned.existing);
  }
  BlockLease tail(residency_, partial_ ? 1 : 0, "restore");
  if (partial_) load_tail(tail[0]);
  ledger_.expect(created_ + 1);
  SummaryLease summaries(residency_, created_, "restore");
  Sequence& sequence = sequences_.add(std::move(made));
  references.keep();
  // Nothing below fails.
  for (int64_t i = 0; i < sealed_; ++i) {
    const Planned& planned = plan_[static_cast<size_t>(i)];
    const RecordId id =
        planned.existing.value() >= 0 ? share(planned, i) : create(planned, i, summaries.release());
    if (ledger_[id].summary_pending) sequence.summaries_loaded = false;
    const double score =
        meta_.hints.qk_score.empty() ? 0 : meta_.hints.qk_score[static_cast<size_t>(i)];
    sequence.sealed.push_back({id, score, 0, 0, 0});
  }
  if (partial_) {
    const RecordId open = residency_.create_open(released_ + sealed_, tail.release());
    sequence.frontier.push_back({open, 0, 0, 0, 0});
  }
  residency_.invalidate_eviction();
  return sequence.id;
}

// How many of the file's positions are restored.
int64_t length_to_restore(const SnapshotReader& reader, const PagerOptions& options,
                          const ReleasedText& before, int64_t upto) {
  const auto released = static_cast<int64_t>(before.tokens.size());
  const auto saved = released + static_cast<int64_t>(reader.meta().tokens.size());
  const int64_t earliest = released == 0 ? 0 : released + options.window;
  if (upto > saved || (upto > 0 && upto < earliest)) {
    throw InvalidArgumentError(str("upto: ", upto, ", expected ", earliest == 0 ? "" : "0 or ",
                                   earliest, " to ", saved, ", the positions that ", reader.path(),
                                   " can serve"));
  }
  return (upto < 0 ? saved : upto) - released;
}

}  // namespace

SequenceId Snapshots::restore(const std::shared_ptr<SnapshotReader>& reader,
                              const std::string& salt, Provenance provenance,
                              const std::string& file_namespace, int64_t upto,
                              const ReleasedText& released_text) {
  const SnapshotMeta& meta = reader->meta();
  require_readable(*reader, config_);
  require_released(released_text, options_, static_cast<int64_t>(meta.tokens.size()),
                   reader->path());
  // Nothing of the text: nothing came before it either.
  const ReleasedText nothing;
  const ReleasedText& before = upto == 0 ? nothing : released_text;
  const int64_t length = length_to_restore(*reader, options_, before, upto);
  verify_chain(*reader, length / layout_.chunk_tokens, before, file_namespace, salt);
  Restore restore(*this, residency_, sequences_, reader, salt, before, length, provenance);
  restore.plan(file_namespace == options_.namespace_key);
  restore.require_room();
  return restore.make();
}

}  // namespace kvpager
