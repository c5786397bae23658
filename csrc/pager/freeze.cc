// A save's view of a sequence. To the ledger it is one more sequence; to a writer it is content that never
// changes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/impl.h"
#include "pager/locked.h"
#include "pager/snapshots.h"

namespace kvpager {
namespace {

class FrozenSequence final : public SnapshotContent {
 public:
  FrozenSequence(std::shared_ptr<Pager::Impl> pager, SequenceId id, SnapshotMeta meta,
                 std::vector<std::byte> tail)
      : pager_(std::move(pager)),
        id_(id),
        meta_(std::move(meta)),
        tail_(std::move(tail)),
        borrowed_(meta_.chunks.size()) {}

  ~FrozenSequence() override {
    if (pager_->process.forked()) return;  // it is the parent's
    const MutexLock lock(pager_->mutex);
    for (int64_t chunk = 0; chunk < meta_.sealed_chunks(); ++chunk) {
      while (borrowed_[static_cast<size_t>(chunk)] > 0) return_one(chunk);
    }
    pager_->sequences.thaw(id_);
  }
  FrozenSequence(const FrozenSequence&) = delete;
  FrozenSequence& operator=(const FrozenSequence&) = delete;

  const SnapshotMeta& meta() const override { return meta_; }

  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override {
    pager_->process.require("frozen sequence");
    require_chunk(chunk, static_cast<int64_t>(meta_.chunks.size()));
    if (chunk == meta_.sealed_chunks()) return tail_.data();
    ChunkRecord below;  // a copy: the ledger may move while we read without the lock
    {
      const MutexLock lock(pager_->mutex);
      const RecordId id = record(chunk);
      if (const std::byte* bytes = pager_->residency.lend(id, scratch)) {
        if (bytes != scratch) ++borrowed_[static_cast<size_t>(chunk)];
        return bytes;
      }
      below = pager_->ledger[id];
    }
    try {
      pager_->files.read_chunk(below, scratch);
    } catch (...) {
      const MutexLock lock(pager_->mutex);
      const ChunkRecord& now = pager_->ledger[record(chunk)];
      if (now.source == below.source) now.damaged = below.damaged;
      throw;
    }
    return scratch;
  }

  void give_back_chunk(int64_t chunk) const override {
    if (pager_->process.forked()) return;
    const MutexLock lock(pager_->mutex);
    require_chunk(chunk, static_cast<int64_t>(meta_.chunks.size()));
    if (borrowed_[static_cast<size_t>(chunk)] > 0) return_one(chunk);
  }

  void read_summary(int64_t chunk, std::byte* out) const override {
    pager_->process.require("frozen sequence");
    require_chunk(chunk, meta_.sealed_chunks());
    const MutexLock lock(pager_->mutex);
    std::memcpy(out, pager_->backend->summary(pager_->ledger[record(chunk)].summary),
                static_cast<size_t>(pager_->config.summary_slot_bytes));
  }

 private:
  static void require_chunk(int64_t chunk, int64_t count) {
    if (chunk < 0 || chunk >= count) {
      throw InvalidArgumentError(
          str("frozen sequence: chunk is ", chunk, ", expected [0, ", count, ")"));
    }
  }

  RecordId record(int64_t chunk) const KVPAGER_HOLDS(pager_->mutex) {
    const Sequence& frozen = pager_->sequences.frozen(id_);
    return frozen.use(frozen.released + chunk).record;
  }

  void return_one(int64_t chunk) const KVPAGER_HOLDS(pager_->mutex) {
    --borrowed_[static_cast<size_t>(chunk)];
    --pager_->ledger[record(chunk)].borrows;
  }

  const std::shared_ptr<Pager::Impl> pager_;
  const SequenceId id_;
  const SnapshotMeta meta_;
  const std::vector<std::byte> tail_;
  // How often each chunk is lent. All its memory is there before anything is lent: no loan is forgotten.
  mutable std::vector<int32_t> borrowed_ KVPAGER_GUARDED_BY(pager_->mutex);
};

}  // namespace

Snapshots::Snapshots(const PagerParts& parts, Residency& residency, Sequences& sequences)
    : PagerParts(parts), residency_(residency), sequences_(sequences) {}

int64_t Snapshots::freezable_length(const Sequence& source, int64_t upto) const {
  if (source.length == 0) {
    throw InvalidArgumentError("freeze: the sequence is empty, there is nothing to save");
  }
  const int64_t length = upto < 0 ? source.length : upto;
  if (length < 1 || length > source.length) {
    throw InvalidArgumentError(str("upto: ", upto, ", expected 1 to ", source.length,
                                   ", the positions this sequence holds"));
  }
  const int64_t earliest = sequences_.earliest_trim(source);
  if (length < earliest) {
    throw InvalidArgumentError(str("upto: ", upto, " of sequence ", source.id.value(),
                                   ", whose positions [0, ", source.released * layout_.chunk_tokens,
                                   ") were let go behind the window of ", options_.window,
                                   " tokens; expected ", earliest, " to ", source.length));
  }
  return length;
}

// The rows of an open chunk, or the first ones of a sealed chunk.
SnapshotChunk Snapshots::copy_tail(const Sequence& source, int64_t chunk, int32_t valid,
                                   std::vector<std::byte>* tail) {
  const ChunkRecord& record = ledger_[source.use(chunk).record];
  const bool open = record.state == ChunkState::kOpen;
  tail->resize(static_cast<size_t>(layout_.chunk_bytes()));
  if (const std::byte* bytes = backend_.view(record, 0, layout_.chunk_bytes())) {
    std::memcpy(tail->data(), bytes, tail->size());
  } else {
    files_.read_chunk(record, tail->data());
  }
  zero_rows_after(layout_, tail->data(), valid);
  return {valid,
          open ? source.provenance : record.provenance,
          {},
          slice_checksums(layout_, tail->data(), threads_),
          0};
}

void Snapshots::describe(const Sequence& source, const SharedArray<TokenId>& tokens,
                         SnapshotMeta* meta, std::vector<std::byte>* tail) {
  const auto length = static_cast<int64_t>(tokens.size());
  const int64_t sealed = length / layout_.chunk_tokens;
  const auto valid = static_cast<int32_t>(length % layout_.chunk_tokens);
  meta->layout = layout_;
  meta->scorer = bits2::kName;
  meta->summary_page_bytes = config_.summary_page_bytes;
  const auto released = static_cast<size_t>(source.released * layout_.chunk_tokens);
  meta->tokens = tokens.part(released, static_cast<size_t>(length) - released);
  if (released > 0) {
    meta->before = {tokens.first(released).to_vector(), source.released_worth, options_.window};
  }
  meta->chunks.reserve(static_cast<size_t>(sealed - source.released) + 1);
  for (int64_t c = source.released; c < sealed + (valid > 0 ? 1 : 0); ++c) {
    const ChunkUse& use = source.use(c);
    if (c < sealed) {
      const ChunkRecord& record = ledger_[use.record];
      meta->chunks.push_back({layout_.chunk_tokens, record.provenance, record.name,
                              residency_.checksums(use.record).to_vector(), 0});
    } else {
      meta->chunks.push_back(copy_tail(source, c, valid, tail));
    }
    meta->hints.qk_score.push_back(use.qk_score);
    // Age: the clock is not saved.
    const uint64_t now = residency_.clock();
    meta->hints.last_use.push_back(now - std::min(now, use.last_use));
  }
}

SequenceId Snapshots::freeze(SequenceId id, int64_t upto, SnapshotMeta* meta,
                             std::vector<std::byte>* tail) {
  Sequence& source = sequences_.find(id);
  sequences_.require_idle(source, "freeze");
  const int64_t length = freezable_length(source, upto);
  sequences_.load_summaries(source);
  const SharedArray<TokenId> tokens(source.tokens.first(static_cast<size_t>(length)));
  describe(source, tokens, meta, tail);

  const int64_t sealed = length / layout_.chunk_tokens;
  Sequence frozen(source.namer);
  frozen.salt = source.salt;
  frozen.frozen = true;
  frozen.provenance = source.provenance;
  frozen.length = sealed * layout_.chunk_tokens;
  frozen.released = source.released;
  frozen.released_worth = source.released_worth;
  frozen.base = source.base;
  frozen.tokens = TokenLog(tokens.first(static_cast<size_t>(frozen.length)));
  for (int64_t c = source.released; c < sealed; ++c) {
    frozen.sealed.push_back({source.use(c).record, 0, 0, 0, 0});
  }
  const Sequence& kept = sequences_.add(std::move(frozen));
  // Nothing below fails.
  for (const ChunkUse& use : kept.sealed) residency_.add_reference(use.record);
  sequences_.reserve_again(source);  // what the save uses does not come free for a while
  return kept.id;
}

std::shared_ptr<SnapshotContent> Pager::freeze(SequenceId sequence, int64_t upto) {
  SnapshotMeta meta;
  std::vector<std::byte> tail;
  const SequenceId id = locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->snapshots.freeze(sequence, upto, &meta, &tail);
  });
  try {
    return std::make_shared<FrozenSequence>(impl_, id, std::move(meta), std::move(tail));
  } catch (...) {
    locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->sequences.thaw(id); });
    throw;
  }
}

}  // namespace kvpager
