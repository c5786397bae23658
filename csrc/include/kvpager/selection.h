// Which chunks a row attends to: a pure function of its own query, the sealed summaries before its
// recent window and the configuration (invariant 8). Residency is not an input and cannot become
// one.
//
//   positions   0        sinks                                   window start        p
//               |---------|...... candidates: k best by score .......|---- recent ----|
//   window start of row p = floor((p + 1 - recent) / C) * C, recent >= M, so that every candidate
//   is sealed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvpager/layout.h"

namespace kvpager {

struct Selection {
  enum class Kind : uint8_t { kDense = 0, kTopK = 1, kWindow = 2 };
  Kind kind = Kind::kDense;
  int32_t chunks = 0;    // k; kTopK only
  int64_t sinks = 64;    // tokens at the start that every row sees; kTopK and kWindow
  int64_t recent = 256;  // tokens before the row that it always sees; kTopK and kWindow
  std::vector<std::pair<int64_t, int64_t>> always;  // half-open token ranges every row sees; kTopK

  // Throws InvalidArgumentError naming the field. `rows` is M.
  void validate(int64_t chunk_tokens, int64_t rows) const;
};

// Summaries of sealed chunks and their scores: two bits per key dimension, within the chunk's own
// range, and the best token counts (docs/design/01-selection-and-residency.md). Thread-safe; the
// same bits on every machine: codes and dots are integers, and the few float steps are single IEEE
// operations in a fixed order.
namespace bits2 {

inline constexpr const char* kName = "bits2";  // in snapshots

// Bytes of the summary of one (chunk, layer, kv head); a multiple of 64.
int64_t summary_bytes(const Layout& layout);
// k_tile: a sealed page's keys, [k_dim][chunk_tokens] in layout.k_dtype. out: summary_bytes, fully
// written.
void summarize(const Layout& layout, const std::byte* k_tile, std::byte* out);

// A row's queries of one kv group, quantised once per row and layer with one scale for the group.
int64_t query_bytes(const Layout& layout, int group);
// q: [group][k_dim] float32, contiguous.
void prepare(const Layout& layout, int group, const float* q, std::byte* query);
// Real dot product = score * this, for people and for softmax; never for ordering.
double query_scale(const std::byte* query);

// scores[r][i] = the best match of any head of queries[r] with summary i, each of which is read once for
// all rows. Finite for every input, and of a row the same whatever rows it is scored with.
void score_rows(const Layout& layout, int group, int64_t rows, const std::byte* const* queries,
                const std::byte* const* summaries, int64_t count, double* const* scores);

}  // namespace bits2

// The candidates of a row, [begin, end) in chunks: after the sinks, before the recent window. Empty
// for kDense and kWindow. Chunks before `held` have no summary, and are left out.
struct CandidateRange {
  int64_t begin = 0;
  int64_t end = 0;
};
CandidateRange candidate_range(const Selection& selection, int64_t chunk_tokens, int64_t position,
                               int64_t held = 0);

// Appends the ascending chunk ids row `position` attends to: sinks, always, recent and the `chunks`
// best of the candidates by (score descending, id ascending). scores[i] belongs to candidate begin
// + i and is read for kTopK only. A chunk of `always` takes no place among the k. window > 0 (a
// sliding-window layer): chunks that lie wholly at or before position - window are left out, and do
// not count among the k. REQUIRES: the window leaves all chunks before `held` out.
void select_chunks(const Selection& selection, int64_t chunk_tokens, int64_t position,
                   int64_t window, const double* scores, std::vector<int32_t>* out,
                   int64_t held = 0);

}  // namespace kvpager
