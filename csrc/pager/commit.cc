#include <algorithm>
#include <new>

#include "kvpager/error.h"
#include "pager/running_forward.h"
#include "pager/scoped_timer.h"
#include "pager/sealing.h"

namespace kvpager {

void RunningForward::commit_all(Provenance provenance) {
  if (!forward_) throw InvalidArgumentError("commit: no forward is running");
  std::vector<int64_t> count;
  count.reserve(forward_->parts.size());
  bool any = false;
  for (const ForwardPart& part : forward_->parts) {
    count.push_back(part.commit_count);
    any = any || part.commit_count > 0;
  }
  if (any) require_layers_written();
  commit_rows(count, provenance);
}

void RunningForward::commit(const std::vector<SequenceId>& ids,
                            const std::vector<int64_t>& accepted, Provenance provenance) {
  if (!forward_) throw InvalidArgumentError("commit: no forward is running");
  commit_rows(accepted_rows(ids, accepted), provenance);
}

// How many rows of each part are accepted, after checking that the forward can be committed.
std::vector<int64_t> RunningForward::accepted_rows(const std::vector<SequenceId>& ids,
                                                   const std::vector<int64_t>& accepted) const {
  if (ids.size() != accepted.size()) {
    throw InvalidArgumentError(
        str("accepted: ", accepted.size(), " counts for ", ids.size(), " sequences"));
  }
  std::vector<int64_t> count(forward_->parts.size(), 0);
  std::vector<uint8_t> named(forward_->parts.size(), 0);
  bool any = false;
  for (size_t i = 0; i < ids.size(); ++i) {
    const Sequence* known = sequences_.lookup(ids[i]);
    if (known == nullptr || known->part < 0) {
      throw InvalidArgumentError(
          str("commit: sequence ", ids[i].value(), " is not in this forward"));
    }
    const size_t p = static_cast<size_t>(known->part);
    const int64_t rows = forward_->parts[p].commit_count;
    if (accepted[i] < 0 || accepted[i] > rows) {
      throw InvalidArgumentError(str("accepted: ", accepted[i], " rows of sequence ",
                                     ids[i].value(), ", expected 0 to ", rows));
    }
    if (named[p]) {
      throw InvalidArgumentError(str("commit: sequence ", ids[i].value(), " is named twice"));
    }
    named[p] = 1;
    count[p] = accepted[i];
    any = any || accepted[i] > 0;
  }
  if (any) require_layers_written();
  return count;
}

void RunningForward::require_layers_written() const {
  if (forward_->given_count > 0 && !forward_->given_written) {
    throw InvalidArgumentError(str("commit: the keys and values of ", forward_->given_count,
                                   " given positions are missing; hand them in with give"));
  }
  if (forward_->row_count() == 0) return;
  for (int layer = 0; layer < layout_.layers; ++layer) {
    if (!forward_->layer_written[static_cast<size_t>(layer)]) {
      throw InvalidArgumentError(
          str("commit: layer ", layer, " was never written in this forward"));
    }
  }
}

// Without rows of the model there is nothing whose bits their number could change.
bool RunningForward::exact_row_count(int64_t rows) const {
  return options_.exact &&
         (rows == options_.rows || rows == 0 ||
          std::binary_search(options_.smaller_rows.begin(), options_.smaller_rows.end(), rows));
}

// Commits the first count[p] rows of each part.
void RunningForward::commit_rows(const std::vector<int64_t>& count, Provenance provenance) {
  if (!exact_row_count(forward_->row_count())) {
    provenance = std::max(provenance, Provenance::kDecode);
  }
  const ScopedTimer timer(&counters_.seconds_seal);
  Sealing sealing(*this, residency_, sequences_, *forward_);
  try {
    backend_.finish();
    held_.release();
    for (size_t p = 0; p < forward_->parts.size(); ++p) {
      sealing.prepare(forward_->parts[p], count[p], provenance);
    }
    sealing.reserve_records();
  } catch (...) {
    sealing.roll_back();
    abort();
    throw;
  }
  // Nothing below fails: what it needs memory for was had above.
  sealing.apply();
  for (size_t p = 0; p < forward_->parts.size(); ++p) {
    advance(forward_->parts[p], count[p], provenance);
  }
  backend_.end();
  end_parts(forward_.get());
  for (const ForwardPart& part : forward_->parts) {
    sequences_.release_behind_window(*part.sequence);
    sequences_.reserve_again(*part.sequence);
  }
  try {
    recall_ahead();
  } catch (const std::bad_alloc&) {  // only ahead of need
  }
  end();
}

// Rows become positions; what the forward read and scored goes into the ledger.
void RunningForward::advance(ForwardPart& part, int64_t count, Provenance provenance) {
  Sequence& sequence = *part.sequence;
  int64_t left = count;
  for (const TokenRange& rows : part.commits) {
    const int64_t more = std::min(rows.count, left);
    sequence.tokens.append(forward_->tokens.data() + rows.first, static_cast<size_t>(more));
    left -= more;
  }
  sequence.length += count;
  if (count > 0) sequence.provenance = std::max(sequence.provenance, provenance);
  counters_.rows_committed += count;
  give_back_unused(part);
  note_use(part);
}

// A moving average of each chunk's share of attention mass, for eviction and for people.
void RunningForward::note_use(const ForwardPart& part) {
  Sequence& sequence = *part.sequence;
  const int64_t layers = config_.scored_layers(forward_->dense);
  const double shares = static_cast<double>(layers * layout_.kv_heads);
  const auto known = static_cast<int64_t>(part.read.size());  // none where nothing is computed
  for (int64_t chunk = sequence.released; chunk < std::min(known, sequence.chunks()); ++chunk) {
    const size_t i = static_cast<size_t>(chunk);
    ChunkUse& use = sequence.use(chunk);
    if (part.scored) {
      use.qk_score = 0.75 * use.qk_score + 0.25 * part.mass[i] / shares;
      ledger_[use.record].score = use.qk_score;
    }
    if (part.read[i]) {
      use.last_use = residency_.clock();
      ++use.selected;
      ledger_[use.record].last_use = residency_.clock();
    }
  }
}

// What rows of this forward selected is what the next ones are likely to select.
void RunningForward::recall_ahead() {
  if (options_.recall_chunks == 0) return;
  const ScopedTimer timer(&counters_.seconds_recall);
  std::vector<RecordId> missed;
  for (const ForwardPart& part : forward_->parts) {
    if (std::find(part.read.begin(), part.read.end(), 1) == part.read.end()) continue;
    const int64_t end = std::min<int64_t>(part.visible, part.sequence->sealed_chunks());
    for (int64_t c = part.sequence->released; c < end; ++c) {
      const RecordId id = part.sequence->use(c).record;
      if (part.read[static_cast<size_t>(c)] && !ledger_[id].resident()) missed.push_back(id);
    }
  }
  residency_.recall(missed);
}

}  // namespace kvpager
