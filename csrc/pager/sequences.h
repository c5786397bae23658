// The sequences of a pager: which records each one uses, what is reserved for it and what is pinned.
//
//   sequences.cc  create, close, fork, trim
//   prefix.cc     share the chunks of a text that is known already
//   windows.cc    release what is behind every window, reserve homes for what is to come
//   pins.cc       pin, unpin
//
// What throws has changed nothing. Used under the pager's lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/sequence.h"
#include "pager/residency.h"

namespace kvpager {

class Sequences : PagerParts {
 public:
  Sequences(const PagerParts& parts, Residency& residency);

  // InvalidArgumentError, also for a frozen one.
  Sequence& find(SequenceId id);
  const Sequence& find(SequenceId id) const { return const_cast<Sequences*>(this)->find(id); }
  // The sequence that freezing made. REQUIRES: there is one.
  const Sequence& frozen(SequenceId id) const;
  // The same, frozen or not; null: there is none.
  const Sequence* lookup(SequenceId id) const;
  const std::map<int64_t, Sequence>& all() const { return sequences_; }
  // InvalidArgumentError naming `action` if it is in the running forward.
  void require_idle(const Sequence& sequence, const char* action) const;

  Sequence& create(const std::string& salt);
  // Gives it a number and a place, or throws bad_alloc. It may name records: the caller counts their
  // references when nothing can fail any more.
  Sequence& add(Sequence sequence);
  // forget: what no other sequence uses is not kept for prefix reuse, nor what was computed after it.
  void close(SequenceId id, bool forget = false);
  // The same for an owner that goes: one of the running forward goes when that has ended, and one that is
  // closed already is no error.
  void drop(SequenceId id);
  // REQUIRES: it is in no running forward.
  void erase(Sequence& sequence, bool forget = false) noexcept;
  // REQUIRES: freezing made it.
  void thaw(SequenceId id) noexcept;
  SequenceId fork(SequenceId id);
  void trim(SequenceId id, int64_t position);
  void drop_use_pins(ChunkUse& use);
  // Invariant 9: after this no sealed chunk of the sequence is without a summary.
  void load_summaries(Sequence& sequence);

  // --- prefix.cc
  int64_t adopt_prefix(SequenceId id, const std::vector<TokenId>& tokens);

  // --- windows.cc
  int64_t earliest_trim(const Sequence& sequence) const;
  // InvalidArgumentError unless position `first` is held; `what` needs it. REQUIRES: it is not negative.
  // What the running forward adds may come before it.
  void require_held(const Sequence& sequence, int64_t first, const std::string& what) const;
  void release_behind_window(Sequence& sequence);
  void reserve(SequenceId id, int64_t total_tokens);
  // Reserves again for what a sequence is yet to hold what it has released, where homes are left.
  void reserve_again(Sequence& sequence);
  // REQUIRES: HomeBudget::require() of what is more.
  void set_reserved(Sequence& sequence, int64_t homes);

  // --- pins.cc
  PinId pin(SequenceId id, int64_t start, int64_t stop);
  void unpin(PinId id);

  // [records] those whose chunk is a sink or in the recent window of a sequence.
  std::vector<uint8_t> sheltered() const;

  void add_to(PagerStats* stats) const;
  void check_invariants() const;

 private:
  // A chunk of a text that somebody computed before.
  struct Link {
    RecordId record;  // -1: none
    ChunkName name;
    int64_t run = 0;    // the first chunk from which on none is missing up to this one
    int64_t homes = 0;  // cached chunks up to this one, which need a home once they are used
  };

  std::optional<RecordId> copy_tail(Sequence& sequence, int64_t chunk);
  void release_from(Sequence& sequence, int64_t chunk, bool forget = false);
  std::vector<RecordId> cached_after(const Sequence& sequence) const;
  std::vector<Link> find_chain(const Sequence& sequence, const std::vector<TokenId>& tokens) const;
  bool can_adopt(const Sequence& sequence, const std::vector<Link>& chain, int64_t last,
                 int64_t* first) const;
  int64_t behind(int64_t length, int64_t rewind) const;
  int64_t own_homes(const Sequence& sequence) const;
  int64_t homes_to_reserve(int64_t more, int64_t own) const;
  void add_pins(Sequence& sequence, const PinRange& range, int32_t amount);
  void require_unpinned(int64_t chunks, int64_t start, int64_t stop) const;
  void check(const Sequence& sequence) const;
  void check_chunks(const Sequence& sequence) const;

  Residency& residency_;

  std::map<int64_t, Sequence> sequences_;
  std::map<int64_t, PinRange> pins_;
};

}  // namespace kvpager
