// Which chunks each row attends to at one layer, and the scores that the ledger keeps.
#include <algorithm>
#include <cstring>

#include "kernels/kernel_table.h"
#include "pager/host_backend.h"
#include "pager/scoped_timer.h"

namespace kvpager {
namespace {

// Scores kept at a time; more rows take turns.
constexpr int64_t kScores = int64_t{4} << 20;

// Softmax over the scored chunks: each (layer, kv head) hands out a share of 1. For residency and
// people only.
Shares shares_of(const double* scores, CandidateRange range, double scale) {
  const int64_t count = std::max<int64_t>(0, range.end - range.begin);
  Shares shares{range.begin, std::vector<float>(static_cast<size_t>(count))};
  if (count == 0) return shares;
  float* share = shares.of_chunk.data();
  const double top = *std::max_element(scores, scores + count);
  for (int64_t i = 0; i < count; ++i) share[i] = static_cast<float>((scores[i] - top) * scale);
  kernels().exp(share, share, count);
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += share[i];
  for (int64_t i = 0; i < count; ++i) share[i] /= sum;
  return shares;
}

void add_mass(ForwardPart* part, const Shares& shares) {
  part->scored = true;
  for (size_t i = 0; i < shares.of_chunk.size(); ++i) {
    part->mass[static_cast<size_t>(shares.first) + i] += static_cast<double>(shares.of_chunk[i]);
  }
}

}  // namespace

// Where the summaries of a part's sealed chunks begin: looked up once per forward, since every
// layer and kv head only adds an offset.
void HostBackend::find_summaries(size_t part) {
  const Sequence& sequence = *forward_->parts[part].sequence;
  const int64_t count = std::min(sequence.sealed_chunks(), forward_->parts[part].visible);
  std::vector<const std::byte*>& bases = parts_[part].summaries;
  if (static_cast<int64_t>(bases.size()) == count) return;
  bases.assign(static_cast<size_t>(std::min(count, sequence.released)), nullptr);
  bases.reserve(static_cast<size_t>(count));
  for (int64_t chunk = sequence.released; chunk < count; ++chunk) {
    bases.push_back(summaries_.slot(ledger_[sequence.use(chunk).record].summary.value()));
  }
}

// Invariant 8: what a row attends to comes from its own query, sealed summaries and the
// configuration.
void HostBackend::select_rows(int layer, const TensorView& q, const AttendOptions& attend_options) {
  const ScopedTimer timer(&counters_.seconds_scan);
  const Selection& selection = config_.options.selection;
  Forward& forward = *forward_;
  const int64_t rows = static_cast<int64_t>(forward.rows.size());
  const int64_t heads = layout_.kv_heads;
  chosen_.resize(static_cast<size_t>(rows * heads));
  for (std::vector<int32_t>& chunks : chosen_) chunks.clear();
  for (size_t p = 0; p < parts_.size(); ++p) find_summaries(p);
  std::vector<Shares> shares(parts_.size() * static_cast<size_t>(heads));
  const ScanLayout where{&layout_, config_.summary_page_bytes};
  for (int64_t next = 0; next < rows;) {
    scan_rows_.clear();
    int64_t scores = 0;
    for (; next < rows && (scan_rows_.empty() || scores < kScores); ++next) {
      const int32_t p = forward.part_of_row[static_cast<size_t>(next)];
      if (p < 0) continue;
      const int64_t position = forward.rows[static_cast<size_t>(next)].position;
      const CandidateRange range =
          candidate_range(selection, layout_.chunk_tokens, position,
                          forward.parts[static_cast<size_t>(p)].sequence->released);
      scan_rows_.push_back({next, &parts_[static_cast<size_t>(p)].summaries, range});
      scores += heads * std::max<int64_t>(0, range.end - range.begin);
    }
    scan_.run(where, layer, q, scan_rows_, threads_);
    const auto select = [&](int64_t item, int) {
      const size_t i = static_cast<size_t>(item / heads);
      const int h = static_cast<int>(item % heads);
      const ScanRow& row = scan_rows_[i];
      const size_t p = static_cast<size_t>(forward.part_of_row[static_cast<size_t>(row.row)]);
      const double* of_chunk = scan_.scores(i, h);
      if (forward.parts[p].score_row == row.row) {
        shares[p * static_cast<size_t>(heads) + static_cast<size_t>(h)] =
            shares_of(of_chunk, row.range, scan_.scale(i, h) * attend_options.scaling);
      }
      select_chunks(selection, layout_.chunk_tokens,
                    forward.rows[static_cast<size_t>(row.row)].position, attend_options.window,
                    of_chunk, &chosen_[static_cast<size_t>(row.row * heads + h)],
                    forward.parts[p].sequence->released);
    };
    threads_.run(static_cast<int64_t>(scan_rows_.size()) * heads, select,
                 threads_.worth_waking(4 * scores));
  }
  for (size_t i = 0; i < shares.size(); ++i) {
    add_mass(&forward.parts[i / static_cast<size_t>(heads)], shares[i]);
  }
}

// Dense attention needs no scores, but the QK policy does: those of one row per sequence, at one
// layer.
void HostBackend::score_for_ledger(size_t p, int layer, const TensorView& q,
                                   const AttendOptions& attend_options) {
  const ScopedTimer timer(&counters_.seconds_scan);
  ForwardPart& part = forward_->parts[p];
  if (part.score_row < 0) return;
  const RowDescriptor& row = forward_->rows[static_cast<size_t>(part.score_row)];
  const int64_t last =
      std::min(part.sequence->sealed_chunks(), row.position / layout_.chunk_tokens);
  const CandidateRange range{part.sequence->released, last};
  if (last <= range.begin) return;
  find_summaries(p);
  scan_rows_.assign(1, {part.score_row, &parts_[p].summaries, range});
  scan_.run({&layout_, config_.summary_page_bytes}, layer, q, scan_rows_, threads_);
  for (int h = 0; h < layout_.kv_heads; ++h) {
    add_mass(&part,
             shares_of(scan_.scores(0, h), range, scan_.scale(0, h) * attend_options.scaling));
  }
}

}  // namespace kvpager
