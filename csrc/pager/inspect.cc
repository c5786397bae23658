// Reading a pager's state: chunks, stats, raw K/V, a selection that is not run.
#include <algorithm>
#include <cstring>

#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "pager/impl.h"
#include "pager/scan.h"

namespace kvpager {

std::vector<ChunkInfo> Pager::Impl::inspect(SequenceId id) const {
  const Layout& layout = config.layout;
  const Sequence& sequence = sequences.find(id);
  std::vector<ChunkInfo> infos;
  infos.reserve(static_cast<size_t>(sequence.chunks()));
  for (int64_t c = 0; c < sequence.released; ++c) {
    ChunkInfo info;
    info.chunk = c;
    info.start = c * layout.chunk_tokens;
    info.stop = info.start + layout.chunk_tokens;
    info.sealed = true;
    info.released = true;
    info.k_dtype = layout.k_dtype;
    info.v_dtype = layout.v_dtype;
    info.provenance = sequence.released_provenance(c);
    infos.push_back(info);
  }
  for (int64_t c = sequence.released; c < sequence.chunks(); ++c) {
    const ChunkUse& use = sequence.use(c);
    const ChunkRecord& record = ledger[use.record];
    ChunkInfo info;
    info.chunk = c;
    info.start = c * layout.chunk_tokens;
    info.stop = std::max(info.start, std::min(info.start + layout.chunk_tokens, sequence.length));
    info.sealed = record.state == ChunkState::kSealed;
    info.tiers = static_cast<uint8_t>(
        (record.resident() ? kTierResident : 0) | (record.on_host() ? kTierHost : 0) |
        (record.on_disk() ? kTierDisk : 0) | (record.source != nullptr ? kTierSnapshot : 0));
    info.damaged = record.damaged;
    info.block = record.block;
    info.k_dtype = layout.k_dtype;
    info.v_dtype = layout.v_dtype;
    info.provenance = info.sealed ? record.provenance : sequence.provenance;
    info.chain_hash = record.name;
    info.references = record.references;
    info.pins = use.pins;
    info.qk_score = use.qk_score;
    info.last_use = use.last_use;
    info.selected = use.selected;
    info.recalled = record.recalled;
    infos.push_back(info);
  }
  return infos;
}

PagerStats Pager::Impl::stats() const {
  PagerStats stats = counters;
  backend->add_to(&stats);
  residency.add_to(&stats);
  sequences.add_to(&stats);
  stats.workspace_bytes = workers->workspace_bytes();
  return stats;
}

void Pager::Impl::check_invariants() const {
  residency.check_invariants();
  sequences.check_invariants();
  forward.check_invariants();
  backend->check_invariants();
}

void Pager::Impl::read_kv(SequenceId id, int layer, int64_t start, int64_t stop, std::byte* k,
                          std::byte* v) {
  const Layout& layout = config.layout;
  const Sequence& sequence = sequences.find(id);
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  if (start < 0 || stop < start || stop > sequence.length) {
    throw InvalidArgumentError(str("range [", start, ", ", stop,
                                   "): expected 0 <= start <= stop <= ", sequence.length,
                                   ", the positions this sequence holds"));
  }
  if (start == stop) return;
  sequences.require_held(sequence, start, str("range [", start, ", ", stop, ")"));
  const int64_t c = layout.chunk_tokens;
  const Layout of_layer = layout.of_layer(layer);
  std::vector<std::byte> buffer(static_cast<size_t>(layout.slice_bytes(layer)));
  for (int64_t chunk = start / c; chunk * c < stop; ++chunk) {
    const ChunkRecord& record = ledger[sequence.use(chunk).record];
    const std::byte* slice =
        backend->view(record, layout.slice_offset(layer), layout.slice_bytes(layer));
    if (slice == nullptr) {
      files.read_slice(record, layer, buffer.data());
      slice = buffer.data();
    }
    const int64_t first = std::max(start, chunk * c);
    const int64_t end = std::min(stop, (chunk + 1) * c);
    const int64_t row = (first - start) * layout.kv_heads;
    read_rows(of_layer, slice, first - chunk * c, end - chunk * c,
              k + row * layout.k_dim * dtype_bytes(read_dtype(of_layer.k_dtype)),
              v + row * layout.v_dim * dtype_bytes(read_dtype(of_layer.v_dtype)));
  }
}

std::vector<std::vector<int32_t>> Pager::Impl::select(SequenceId id, int layer, const TensorView& q,
                                                      int64_t position, int64_t window) {
  const Layout& layout = config.layout;
  Sequence& sequence = sequences.find(id);
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  if (position < 0 || position > sequence.length) {
    throw InvalidArgumentError(
        str("position: ", position, " is not in [0, ", sequence.length, "]"));
  }
  if (q.rows != 1 || q.heads <= 0 || q.heads % layout.kv_heads != 0 || q.dim != layout.k_dim) {
    throw InvalidArgumentError(str("q: shape [", q.rows, ", ", q.heads, ", ", q.dim,
                                   "], expected [1, a multiple of ", layout.kv_heads, ", ",
                                   layout.k_dim, "]"));
  }
  if (constexpr int32_t kPart = 0; find_non_finite(q, &kPart) >= 0) {
    throw NonFiniteError(str("layer ", layer, ": the query at position ", position, " of sequence ",
                             id.value(), " is not finite, so that it selects nothing"));
  }
  sequences.require_held(sequence, window > 0 ? std::max<int64_t>(0, position - window + 1) : 0,
                         str("a selection at position ", position, " (window=", window, ")"));
  sequences.load_summaries(sequence);
  std::vector<const std::byte*> bases(static_cast<size_t>(sequence.released), nullptr);
  for (const ChunkUse& use : sequence.sealed) {
    bases.push_back(backend->summary(ledger[use.record].summary));
  }
  const CandidateRange range =
      candidate_range(config.options.selection, layout.chunk_tokens, position, sequence.released);
  std::vector<std::vector<int32_t>> result(static_cast<size_t>(layout.kv_heads));
  Scan scan;
  scan.run({&layout, config.summary_page_bytes}, layer, q, {{0, &bases, range}}, threads);
  for (int h = 0; h < layout.kv_heads; ++h) {
    select_chunks(config.options.selection, layout.chunk_tokens, position, window,
                  scan.scores(0, h), &result[static_cast<size_t>(h)], sequence.released);
  }
  return result;
}

}  // namespace kvpager
