// The forward that runs, if any, as a transaction (invariant 14).
//
//   idle --begin--> running --commit--> idle       rows are positions; full chunks were sealed
//                     |  \--abort---> idle         nothing happened
//                     +--error in give/attend/write/commit--> idle (aborted)
//
//   begin.cc            sequences, homes, blocks and chunks for a forward's rows
//   running_forward.cc  give, write, attend, abort
//   commit.cc           rows become positions
//
// Used under the pager's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pager/forward.h"
#include "pager/readers.h"
#include "pager/residency.h"
#include "pager/sequences.h"

namespace kvpager {

class RunningForward : PagerParts {
 public:
  // `number`: of the running forward, for threads that do not hold the lock; 0: none.
  RunningForward(const PagerParts& parts, Residency& residency, Sequences& sequences,
                 std::atomic<uint64_t>& number);

  // Null: none runs.
  const Forward* get() const { return forward_.get(); }

  // InvalidArgumentError unless the forward with this number runs; 0: nothing is asked.
  void require_running(uint64_t number) const;

  // Returns its number.
  uint64_t begin(std::vector<RowSpan> spans, std::vector<TokenId> tokens, ForwardOptions with);
  void give(const std::vector<TensorView>& k, const std::vector<TensorView>& v, void* stream);
  void write(int layer, const TensorView& k, const TensorView& v, void* stream);
  void attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
              const TensorView& out, const AttendOptions& attend_options);
  std::vector<std::vector<int32_t>> selected() const;
  void mark_replayed(uint64_t generation, void* stream);
  void commit(const std::vector<SequenceId>& ids, const std::vector<int64_t>& accepted,
              Provenance provenance);
  void commit_all(Provenance provenance);
  // Nothing happens if none runs.
  void abort();

  void check_invariants() const;

 private:
  // begin.cc
  void add_spans(Forward* next);
  void add_span(const RowSpan& span, int64_t first_token, Forward* next);
  void describe_rows(Forward* next) const;
  int64_t homes_wanted(const ForwardPart& part) const;
  int64_t blocks_wanted(const ForwardPart& part) const;
  void allocate_frontier(Forward* next);
  void hold_visible(const Forward& forward, Readers* readers, std::vector<RecordId>* missing);
  void hold_all_visible(const Forward& forward);

  // running_forward.cc
  bool denser_than_selection() const;
  void require_rows() const;
  void require_layer(int layer, const TensorView& k, const TensorView& v) const;
  void require_attention(int layer, const TensorView& q, const TensorView& out,
                         const AttendOptions& attend_options) const;
  void write_rows_of(int layer, const TensorView* q, const TensorView& k, const TensorView& v,
                     void* stream);
  void load_missing();
  void end_parts(Forward* ended);
  void give_back_unused(ForwardPart& part);
  void end();

  // commit.cc
  bool exact_row_count(int64_t rows) const;
  std::vector<int64_t> accepted_rows(const std::vector<SequenceId>& ids,
                                     const std::vector<int64_t>& accepted) const;
  void require_layers_written() const;
  void commit_rows(const std::vector<int64_t>& count, Provenance provenance);
  void advance(ForwardPart& part, int64_t count, Provenance provenance);
  void note_use(const ForwardPart& part);
  void recall_ahead();

  Residency& residency_;
  Sequences& sequences_;

  std::unique_ptr<Forward> forward_;
  std::atomic<uint64_t>& number_;
  // Its parts' open chunks, until it commits, and what it may read, where a backend wants all of that in
  // memory.
  Readers held_;
};

}  // namespace kvpager
