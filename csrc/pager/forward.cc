// A forward as a transaction (invariant 14): begin, attend per layer, commit or abort.
//
//   idle --begin--> running --commit--> idle       rows are positions; full chunks were sealed
//                     |  \--abort---> idle         nothing happened
//                     +--error in attend/write--> idle (aborted)
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/chain_hash.h"
#include "kvpager/error.h"
#include "kvpager/fault.h"
#include "pager/impl.h"

namespace kvpager {
namespace {

void require_shape(const char* name, const TensorView& tensor, int64_t rows, int64_t heads,
                   int64_t dim) {
  if (tensor.rows != rows || tensor.heads != heads || tensor.dim != dim) {
    throw InvalidArgumentError(str(name, ": shape [", tensor.rows, ", ", tensor.heads, ", ",
                                   tensor.dim, "], expected [", rows, ", ", heads, ", ", dim, "]"));
  }
  if (!is_supported(tensor.dtype)) {
    throw InvalidArgumentError(
        str(name, ": dtype ", dtype_name(tensor.dtype), " is not supported"));
  }
}

// Whether a row has a finite value that rounds to infinity in a narrower dtype.
bool overflows(const TensorView& tensor, int64_t row, DType stored) {
  if (tensor.dtype == stored || stored == DType::kFloat32) return false;
  // Halfway between the greatest finite value and the next power of two.
  const float limit = stored == DType::kFloat16 ? 65520.0f : 0x1.FFp127f;
  std::vector<float> values(static_cast<size_t>(tensor.heads * tensor.dim));
  read_query(tensor, row, 0, tensor.heads, values.data());
  return std::any_of(values.begin(), values.end(), [&](float x) { return std::fabs(x) >= limit; });
}

// Softmax over the scored chunks: each (layer, kv head) hands out a share of 1. For residency and
// people only.
Shares shares_of(const std::vector<double>& scores, int64_t first, double scale) {
  Shares shares{first, std::vector<float>(scores.size())};
  if (scores.empty()) return shares;
  const double top = *std::max_element(scores.begin(), scores.end());
  float sum = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    shares.of_chunk[i] = std::exp(static_cast<float>((scores[i] - top) * scale));
    sum += shares.of_chunk[i];
  }
  for (float& share : shares.of_chunk) share /= sum;
  return shares;
}

// Room for `size` elements, growing geometrically: reserve() alone would copy everything at every
// forward.
template <class T>
void grow(std::vector<T>* vector, int64_t size) {
  const size_t wanted = static_cast<size_t>(size);
  if (wanted > vector->capacity()) vector->reserve(std::max(wanted, vector->capacity() * 2));
}

}  // namespace

void Pager::Impl::begin(const std::vector<RowDescriptor>& rows) {
  if (forward)
    throw InvalidArgumentError("begin: a forward is already running; commit or abort it");
  if (rows.empty() || static_cast<int64_t>(rows.size()) > options.rows) {
    throw InvalidArgumentError(str("rows: ", rows.size(), " given, expected 1 to ", options.rows));
  }
  Forward next;
  next.rows = rows;
  next.part_of_row.assign(rows.size(), -1);
  next.layer_written.assign(static_cast<size_t>(layout.layers), 0);
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowDescriptor& row = rows[i];
    if (row.kind == RowKind::kPadding) continue;
    Sequence& sequence = find(row.sequence);
    auto part = std::find_if(next.parts.begin(), next.parts.end(),
                             [&](const ForwardPart& p) { return p.sequence == &sequence; });
    if (part == next.parts.end()) {
      part = next.parts.emplace(next.parts.end());
      part->sequence = &sequence;
    }
    const int64_t expected = sequence.length + static_cast<int64_t>(part->commit_rows.size());
    if (row.kind == RowKind::kCommit) {
      if (row.position != expected) {
        throw InvalidArgumentError(str("row ", i, ": position ", row.position, " of sequence ",
                                       sequence.id.value(), ", expected ", expected,
                                       ": commit rows continue the sequence in order"));
      }
      if (row.token < 0) {
        throw InvalidArgumentError(str("row ", i, ": token id ", row.token, " is negative"));
      }
      part->commit_rows.push_back(static_cast<int32_t>(i));
    } else if (row.position < 0 || row.position >= sequence.length) {
      throw InvalidArgumentError(str("row ", i, ": reads position ", row.position, " of sequence ",
                                     sequence.id.value(), ", which holds ", sequence.length));
    }
    part->score_row = static_cast<int32_t>(i);
    part->furthest = std::max(part->furthest, row.position);
    part->visible = part->furthest / layout.chunk_tokens + 1;
    next.part_of_row[i] = static_cast<int32_t>(part - next.parts.begin());
  }
  if (next.parts.empty()) throw InvalidArgumentError("rows: every row is padding");

  // Everything that can fail comes before the first change: homes for chunks that may seal, then
  // blocks.
  const int64_t c = layout.chunk_tokens;
  int64_t new_homes = 0;
  int64_t new_blocks = 0;
  const auto homes_wanted = [&](const ForwardPart& part) {
    const int64_t end = part.sequence->length + static_cast<int64_t>(part.commit_rows.size());
    return std::max<int64_t>(0, end / c - part.sequence->sealed_chunks() - part.sequence->reserved);
  };
  const auto blocks_wanted = [&](const ForwardPart& part) {
    const int64_t end = part.sequence->length + static_cast<int64_t>(part.commit_rows.size());
    return std::max<int64_t>(0, (end + c - 1) / c - part.sequence->chunks());
  };
  for (const ForwardPart& part : next.parts) {
    new_homes += homes_wanted(part);
    new_blocks += blocks_wanted(part);
  }
  if (new_homes > 0) require_homes(new_homes, "begin");
  require_blocks(new_blocks, "begin");
  for (ForwardPart& part : next.parts) {
    load_summaries(*part.sequence);
    const size_t visible = static_cast<size_t>(part.visible);
    part.slices.resize(visible);
    part.needed.resize(visible);
    part.read.assign(visible, 0);
    part.mass.assign(visible, 0);
    part.sequence->frontier.reserve(part.sequence->frontier.size() +
                                    static_cast<size_t>(blocks_wanted(part)));
  }
  for (ForwardPart& part : next.parts) {
    Sequence& sequence = *part.sequence;
    part.promised = homes_wanted(part);
    reserved_homes += part.promised;
    sequence.reserved += part.promised;
    for (int64_t n = blocks_wanted(part); n-- > 0;) {
      const BlockId block = *acquire_block();
      const RecordId id = ledger.create(ChunkState::kOpen);
      ledger[id].references = 1;
      ledger[id].index = sequence.chunks();
      ledger[id].block = block;
      sequence.frontier.push_back({id, 0, 0, 0, 0});
    }
  }
  ++clock;
  ++counters.forwards;
  forward.emplace(std::move(next));
}

void Pager::Impl::write(int layer, const TensorView& k, const TensorView& v) {
  if (!forward) throw InvalidArgumentError("attend: no forward is running; call begin first");
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  const int64_t rows = static_cast<int64_t>(forward->rows.size());
  require_shape("k", k, rows, layout.kv_heads, layout.k_dim);
  require_shape("v", v, rows, layout.kv_heads, layout.v_dim);
  const ScopedTimer timer(&counters.seconds_write);
  write_targets.assign(static_cast<size_t>(rows), {});
  for (const ForwardPart& part : forward->parts) {
    for (const int32_t row : part.commit_rows) {
      const int64_t position = forward->rows[static_cast<size_t>(row)].position;
      const ChunkUse& use = part.sequence->use(position / layout.chunk_tokens);
      write_targets[static_cast<size_t>(row)] = {
          pool.slot(ledger[use.record].block.value()) + layout.slice_offset(layer),
          static_cast<int32_t>(position % layout.chunk_tokens)};
    }
  }
  int64_t bad = find_non_finite(k, v, write_targets.data(), rows);
  for (int64_t row = 0; row < rows && bad < 0; ++row) {
    if (write_targets[static_cast<size_t>(row)].slice == nullptr) continue;
    if (overflows(k, row, layout.k_dtype) || overflows(v, row, layout.v_dtype)) bad = row;
  }
  if (bad >= 0) {
    const RowDescriptor row = forward->rows[static_cast<size_t>(bad)];
    abort();
    throw NonFiniteError(str("layer ", layer, ": the key or value at position ", row.position,
                             " of sequence ", row.sequence.value(),
                             " is not finite (keys are kept in ", dtype_name(layout.k_dtype),
                             ", values in ", dtype_name(layout.v_dtype),
                             "); the forward was aborted and the sequence is as it was"));
  }
  write_rows(layout, k, v, write_targets.data(), rows);
  forward->layer_written[static_cast<size_t>(layer)] = 1;
}

// Where the summaries of a part's sealed chunks begin: looked up once per forward, since every
// layer and kv head only adds an offset.
const std::vector<const std::byte*>& Pager::Impl::summary_bases(ForwardPart& part) const {
  const Sequence& sequence = *part.sequence;
  const int64_t count = std::min(sequence.sealed_chunks(), part.visible);
  if (static_cast<int64_t>(part.summaries.size()) != count) {
    part.summaries.clear();
    part.summaries.reserve(static_cast<size_t>(count));
    for (int64_t chunk = 0; chunk < count; ++chunk) {
      const ChunkRecord& record = ledger[sequence.use(chunk).record];
      part.summaries.push_back(summaries.slot(record.summary.value()));
    }
  }
  return part.summaries;
}

// Scores of the summaries [range.begin, range.end) for the queries of one kv group; returns what
// turns a score into a dot product.
double Pager::Impl::score_range(const std::vector<const std::byte*>& bases, CandidateRange range,
                                int layer, int kv_head, const TensorView& q, int64_t row,
                                std::vector<double>* scores) const {
  const int group = static_cast<int>(q.heads / layout.kv_heads);
  const int64_t count = std::max<int64_t>(0, range.end - range.begin);
  scores->resize(static_cast<size_t>(count));
  if (count == 0) return 0;
  thread_local std::vector<std::byte> query;
  thread_local std::vector<float> q_row;
  thread_local std::vector<const std::byte*> pointers;
  query.resize(static_cast<size_t>(scorer.query_bytes(layout, group)));
  q_row.resize(static_cast<size_t>(group * layout.k_dim));
  pointers.resize(static_cast<size_t>(count));
  const int64_t offset = summary_page_bytes * (int64_t{layer} * layout.kv_heads + kv_head);
  for (int64_t i = 0; i < count; ++i) {
    pointers[static_cast<size_t>(i)] = bases[static_cast<size_t>(range.begin + i)] + offset;
  }
  read_query(q, row, int64_t{kv_head} * group, group, q_row.data());
  scorer.prepare(layout, group, q_row.data(), query.data());
  scorer.score(layout, group, query.data(), pointers.data(), count, scores->data());
  return scorer.query_scale(query.data());
}

// Invariant 8: what a row attends to comes from its own query, sealed summaries and the
// configuration.
void Pager::Impl::select_rows(int layer, const TensorView& q, const AttendOptions& attend_options) {
  const ScopedTimer timer(&counters.seconds_scan);
  const Selection& selection = options.selection;
  const int64_t rows = static_cast<int64_t>(forward->rows.size());
  const int heads = layout.kv_heads;
  chosen.resize(static_cast<size_t>(rows * heads));
  for (ForwardPart& part : forward->parts) summary_bases(part);
  std::vector<Shares> shares(forward->parts.size() * static_cast<size_t>(heads));

  threads.run(rows * heads, [&](int64_t item, int) {
    const int64_t row = item / heads;
    const int h = static_cast<int>(item % heads);
    std::vector<int32_t>& out = chosen[static_cast<size_t>(item)];
    out.clear();
    const int32_t p = forward->part_of_row[static_cast<size_t>(row)];
    if (p < 0) return;
    const ForwardPart& part = forward->parts[static_cast<size_t>(p)];
    const int64_t position = forward->rows[static_cast<size_t>(row)].position;
    const CandidateRange range = candidate_range(selection, layout.chunk_tokens, position);
    thread_local std::vector<double> scores;
    const double scale = score_range(part.summaries, range, layer, h, q, row, &scores);
    if (part.score_row == row) {
      const size_t slot =
          static_cast<size_t>(p) * static_cast<size_t>(heads) + static_cast<size_t>(h);
      shares[slot] = shares_of(scores, range.begin, scale * attend_options.scaling);
    }
    select_chunks(selection, layout.chunk_tokens, position, attend_options.window, scores.data(),
                  &out);
  });
  for (size_t i = 0; i < shares.size(); ++i) {
    add_mass(forward->parts[i / static_cast<size_t>(heads)], shares[i]);
  }
}

// Dense attention needs no scores, but the QK policy does: those of one row per sequence.
void Pager::Impl::score_for_ledger(ForwardPart& part, int layer, const TensorView& q,
                                   const AttendOptions& attend_options) {
  const ScopedTimer timer(&counters.seconds_scan);
  const RowDescriptor& row = forward->rows[static_cast<size_t>(part.score_row)];
  const int64_t last = std::min(part.sequence->sealed_chunks(), row.position / layout.chunk_tokens);
  if (last == 0) return;
  summary_bases(part);
  std::vector<Shares> shares(static_cast<size_t>(layout.kv_heads));
  threads.run(layout.kv_heads, [&](int64_t h, int) {
    thread_local std::vector<double> scores;
    const double scale = score_range(part.summaries, {0, last}, layer, static_cast<int>(h), q,
                                     part.score_row, &scores);
    shares[static_cast<size_t>(h)] = shares_of(scores, 0, scale * attend_options.scaling);
  });
  for (const Shares& each : shares) add_mass(part, each);
}

void Pager::Impl::add_mass(ForwardPart& part, const Shares& shares) {
  part.scored = true;
  for (size_t i = 0; i < shares.of_chunk.size(); ++i) {
    part.mass[static_cast<size_t>(shares.first) + i] += static_cast<double>(shares.of_chunk[i]);
  }
}

void Pager::Impl::mark_needed(const AttendOptions& attend_options) {
  const int64_t c = layout.chunk_tokens;
  for (ForwardPart& part : forward->parts) std::fill(part.needed.begin(), part.needed.end(), 0);
  for (size_t row = 0; row < forward->rows.size(); ++row) {
    const int32_t p = forward->part_of_row[row];
    if (p < 0) continue;
    std::vector<uint8_t>& needed = forward->parts[static_cast<size_t>(p)].needed;
    const int64_t position = forward->rows[row].position;
    if (options.selection.kind == Selection::Kind::kDense) {
      const int64_t first = attend_options.window > 0
                                ? std::max<int64_t>(0, position - attend_options.window + 1) / c
                                : 0;
      std::fill(needed.begin() + first, needed.begin() + position / c + 1, 1);
    } else {
      for (int h = 0; h < layout.kv_heads; ++h) {
        for (const int32_t chunk :
             chosen[row * static_cast<size_t>(layout.kv_heads) + static_cast<size_t>(h)]) {
          needed[static_cast<size_t>(chunk)] = 1;
        }
      }
    }
  }
  for (ForwardPart& part : forward->parts) {
    for (size_t i = 0; i < part.needed.size(); ++i) part.read[i] |= part.needed[i];
  }
}

void Pager::Impl::attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
                         const TensorView& out, const AttendOptions& attend_options) {
  if (!forward) throw InvalidArgumentError("attend: no forward is running; call begin first");
  const int64_t rows = static_cast<int64_t>(forward->rows.size());
  if (q.heads <= 0 || q.heads % layout.kv_heads != 0) {
    throw InvalidArgumentError(
        str("q: ", q.heads, " heads, expected a multiple of kv_heads=", layout.kv_heads));
  }
  require_shape("q", q, rows, q.heads, layout.k_dim);
  require_shape("out", out, rows, q.heads, layout.v_dim);
  if (!(attend_options.scaling > 0) || !std::isfinite(attend_options.scaling)) {
    throw InvalidArgumentError(
        str("scaling: ", attend_options.scaling, ", expected a positive number"));
  }
  if (attend_options.window < 0 || attend_options.softcap < 0) {
    throw InvalidArgumentError(str("window: ", attend_options.window, ", softcap: ",
                                   attend_options.softcap, "; expected 0 (none) or positive"));
  }
  write(layer, k, v);
  try {
    if (options.selection.kind != Selection::Kind::kDense) {
      select_rows(layer, q, attend_options);
    } else if (options.policy == Policy::kQk) {
      for (ForwardPart& part : forward->parts) score_for_ledger(part, layer, q, attend_options);
    }
    mark_needed(attend_options);

    AttendParams params;
    params.layout = &layout;
    params.q_heads = static_cast<int32_t>(q.heads);
    params.rows = rows;
    params.q = q;
    params.out = out;
    params.scaling = attend_options.scaling;
    params.softcap = attend_options.softcap;
    params.window = attend_options.window;
    params.sinks = attend_options.sinks;
    if (options.selection.kind != Selection::Kind::kDense) {
      chosen_flat.clear();
      chosen_offsets.assign(1, 0);
      for (const std::vector<int32_t>& chunks : chosen) {
        chosen_flat.insert(chosen_flat.end(), chunks.begin(), chunks.end());
        chosen_offsets.push_back(static_cast<int64_t>(chosen_flat.size()));
      }
      params.selected = chosen_flat.data();
      params.selected_offsets = chosen_offsets.data();
    }
    run_attention(layer, params);
  } catch (...) {
    abort();
    throw;
  }
}

// Finds an address for every chunk the layer reads. Chunks that are only on disk or in a snapshot
// are brought into memory where there is room for them, and what finds no place is streamed slice
// by slice through staging. Either way the kernel sees the same bytes in the same order.
void Pager::Impl::run_attention(int layer, AttendParams& params) {
  const size_t rows = forward->rows.size();
  std::vector<AttendRow> row(rows);
  for (size_t i = 0; i < rows; ++i) row[i] = {forward->rows[i].position, forward->part_of_row[i]};
  params.row = row.data();
  std::vector<ChunkTableView> tables;
  for (const ForwardPart& part : forward->parts)
    tables.push_back({part.slices.data(), part.visible});
  params.tables = tables.data();

  std::vector<RecordId> reading;
  std::vector<RecordId> missing;
  const auto stop_reading = [&] {
    for (const RecordId id : reading) --ledger[id].readers;
    reading.clear();
  };
  for (const ForwardPart& part : forward->parts) {
    for (int64_t c = 0; c < part.visible; ++c) {
      if (!part.needed[static_cast<size_t>(c)]) continue;
      const RecordId id = part.sequence->use(c).record;
      ChunkRecord& record = ledger[id];
      if (record.readers++ == 0 && address(record) == nullptr) missing.push_back(id);
      reading.push_back(id);
    }
  }
  try {
    if (!missing.empty()) {
      const ScopedTimer timer(&counters.seconds_load);
      bring_in(missing);
    }
    bool streaming = false;
    for (ForwardPart& part : forward->parts) {
      for (int64_t c = 0; c < part.visible; ++c) {
        const size_t i = static_cast<size_t>(c);
        const std::byte* base =
            part.needed[i] ? address(ledger[part.sequence->use(c).record]) : nullptr;
        part.slices[i] = base == nullptr ? nullptr : base + layout.slice_offset(layer);
        streaming = streaming || (part.needed[i] && base == nullptr);
      }
    }
    if (streaming) {
      stream_attention(layer, params);
    } else {
      const ScopedTimer timer(&counters.seconds_attend);
      attend_begin(params, workspace, threads);
      attend_wave(params, 0, split_count(0, forward->parts.size()), workspace, threads);
      attend_finish(params, workspace, threads);
    }
  } catch (...) {
    stop_reading();
    throw;
  }
  stop_reading();
}

// Splits up to the furthest row of the parts [first, last).
int64_t Pager::Impl::split_count(size_t first, size_t last) const {
  int64_t chunks = 0;
  for (size_t p = first; p < last; ++p) chunks = std::max(chunks, forward->parts[p].visible);
  return (chunks + kChunksPerSplit - 1) / kChunksPerSplit;
}

// A few sequences at a time, so that one split of each always fits in staging. To a pass the rows
// of other sequences are padding, and what it writes for them goes nowhere.
void Pager::Impl::stream_attention(int layer, AttendParams& params) {
  const size_t parts = forward->parts.size();
  if (parts <= kStreamedSequences) return stream_parts(layer, 0, parts, params);
  const TensorView out = params.out;
  const AttendRow* all = params.row;
  const size_t element = static_cast<size_t>(dtype_bytes(out.dtype));
  std::vector<std::byte> scratch(static_cast<size_t>(out.rows * out.heads * out.dim) * element);
  params.out.data = scratch.data();
  params.out.row_stride = out.heads * out.dim;
  params.out.head_stride = out.dim;
  std::vector<AttendRow> rows(static_cast<size_t>(params.rows));
  params.row = rows.data();
  for (size_t first = 0; first < parts; first += kStreamedSequences) {
    const size_t last = std::min(first + kStreamedSequences, parts);
    const auto mine = [&](size_t row) {
      const int32_t part = all[row].table;
      return part >= static_cast<int32_t>(first) && part < static_cast<int32_t>(last);
    };
    for (size_t i = 0; i < rows.size(); ++i)
      rows[i] = {all[i].position, mine(i) ? all[i].table : -1};
    stream_parts(layer, first, last, params);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!mine(i) && !(first == 0 && all[i].table < 0)) continue;  // padding is written once
      for (int64_t h = 0; h < out.heads; ++h) {
        const int64_t to = static_cast<int64_t>(i) * out.row_stride + h * out.head_stride;
        const int64_t from = (static_cast<int64_t>(i) * out.heads + h) * out.dim;
        std::memcpy(static_cast<std::byte*>(out.data) + static_cast<size_t>(to) * element,
                    scratch.data() + static_cast<size_t>(from) * element,
                    static_cast<size_t>(out.dim) * element);
      }
    }
  }
}

// Waves of consecutive splits, each as long as its missing slices fit in staging.
void Pager::Impl::stream_parts(int layer, size_t first_part, size_t last_part,
                               AttendParams& params) {
  const int64_t splits = split_count(first_part, last_part);
  attend_begin(params, workspace, threads);
  std::vector<std::pair<ForwardPart*, size_t>> staged;
  for (int64_t first = 0; first < splits;) {
    int64_t last = first;
    {
      const ScopedTimer timer(&counters.seconds_load);
      for (; last < splits; ++last) {
        std::vector<std::pair<ForwardPart*, size_t>> wanted;
        for (size_t p = first_part; p < last_part; ++p) {
          ForwardPart& part = forward->parts[p];
          const int64_t end = std::min(part.visible, (last + 1) * kChunksPerSplit);
          for (int64_t c = last * kChunksPerSplit; c < end; ++c) {
            const size_t i = static_cast<size_t>(c);
            if (part.needed[i] && part.slices[i] == nullptr) wanted.push_back({&part, i});
          }
        }
        if (static_cast<int64_t>(staged.size() + wanted.size()) > staging.slots()) break;
        for (const auto& [part, i] : wanted) {
          std::byte* out = staging.slot(static_cast<int64_t>(staged.size()));
          read_slice(ledger[part->sequence->use(static_cast<int64_t>(i)).record], layer, out);
          part->slices[i] = out;
          staged.push_back({part, i});
          ++counters.slices_streamed;
        }
      }
    }
    {
      const ScopedTimer timer(&counters.seconds_attend);
      attend_wave(params, first, last, workspace, threads);
    }
    for (const auto& [part, i] : staged) part->slices[i] = nullptr;
    staged.clear();
    first = last;
  }
  attend_finish(params, workspace, threads);
}

void Pager::Impl::drop_surplus(ForwardPart& part) {
  Sequence& sequence = *part.sequence;
  const int64_t kept = sequence.length % layout.chunk_tokens == 0 ? 0 : 1;
  while (static_cast<int64_t>(sequence.frontier.size()) > kept) {
    drop_use_pins(sequence.frontier.back());
    drop_record(sequence.frontier.back().record);
    sequence.frontier.pop_back();
  }
  const int64_t unused = std::min(part.promised, sequence.reserved);
  sequence.reserved -= unused;
  reserved_homes -= unused;
  part.promised = 0;
}

void Pager::Impl::abort() {
  if (!forward) return;
  for (ForwardPart& part : forward->parts) drop_surplus(part);
  forward.reset();
  ++counters.aborted_forwards;
}

void Pager::Impl::commit_all(Provenance provenance) {
  if (!forward) throw InvalidArgumentError("commit: no forward is running");
  std::vector<SequenceId> ids;
  std::vector<int64_t> accepted;
  for (const ForwardPart& part : forward->parts) {
    ids.push_back(part.sequence->id);
    accepted.push_back(static_cast<int64_t>(part.commit_rows.size()));
  }
  commit(ids, accepted, provenance);
}

void Pager::Impl::commit(const std::vector<SequenceId>& ids, const std::vector<int64_t>& accepted,
                         Provenance provenance) {
  if (!forward) throw InvalidArgumentError("commit: no forward is running");
  if (ids.size() != accepted.size()) {
    throw InvalidArgumentError(
        str("accepted: ", accepted.size(), " counts for ", ids.size(), " sequences"));
  }
  std::vector<int64_t> count(forward->parts.size(), 0);
  std::vector<uint8_t> named(forward->parts.size(), 0);
  bool any = false;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto part = std::find_if(forward->parts.begin(), forward->parts.end(),
                                   [&](const ForwardPart& p) { return p.sequence->id == ids[i]; });
    if (part == forward->parts.end()) {
      throw InvalidArgumentError(
          str("commit: sequence ", ids[i].value(), " is not in this forward"));
    }
    const int64_t rows = static_cast<int64_t>(part->commit_rows.size());
    if (accepted[i] < 0 || accepted[i] > rows) {
      throw InvalidArgumentError(str("accepted: ", accepted[i], " rows of sequence ",
                                     ids[i].value(), ", expected 0 to ", rows));
    }
    const size_t p = static_cast<size_t>(part - forward->parts.begin());
    if (named[p])
      throw InvalidArgumentError(str("commit: sequence ", ids[i].value(), " is named twice"));
    named[p] = 1;
    count[p] = accepted[i];
    any = any || accepted[i] > 0;
  }
  if (any) {
    for (int layer = 0; layer < layout.layers; ++layer) {
      if (!forward->layer_written[static_cast<size_t>(layer)]) {
        throw InvalidArgumentError(
            str("commit: layer ", layer, " was never written in this forward"));
      }
    }
  }
  if (static_cast<int64_t>(forward->rows.size()) != options.rows) {
    provenance = std::max(provenance, Provenance::kDecode);
  }

  // Prepare: all that can fail, for every chunk that fills up.
  struct Seal {
    Sequence* sequence;
    RecordId open;
    std::vector<TokenId> tokens;
    Hash128 parent;
    Hash128 hash;
    Provenance provenance;
    std::optional<RecordId> existing;
    std::vector<uint64_t> checksums;
    SlotId summary;
    Home home;
    bool has_home = false;
  };
  const ScopedTimer timer(&counters.seconds_seal);
  const int64_t c = layout.chunk_tokens;
  std::vector<Seal> seals;
  try {
    for (size_t p = 0; p < forward->parts.size(); ++p) {
      const ForwardPart& part = forward->parts[p];
      Sequence& sequence = *part.sequence;
      const auto token_at = [&](int64_t position) {
        if (position < sequence.length) return sequence.tokens[static_cast<size_t>(position)];
        const int32_t row = part.commit_rows[static_cast<size_t>(position - sequence.length)];
        return forward->rows[static_cast<size_t>(row)].token;
      };
      grow(&sequence.tokens, sequence.length + count[p]);
      const int64_t first = sequence.sealed_chunks();
      const int64_t last = (sequence.length + count[p]) / c;
      Hash128 parent = first == 0 ? sequence.root : ledger[sequence.sealed.back().record].hash;
      for (int64_t chunk = first; chunk < last; ++chunk) {
        Seal seal;
        seal.sequence = &sequence;
        seal.open = sequence.use(chunk).record;
        for (int64_t i = chunk * c; i < (chunk + 1) * c; ++i) seal.tokens.push_back(token_at(i));
        seal.provenance = std::max(sequence.provenance, provenance);
        seal.parent = parent;
        seal.hash = chain_next(parent, seal.tokens.data(), c, seal.provenance);
        parent = seal.hash;
        const std::byte* bytes = pool.slot(ledger[seal.open].block.value());
        seal.checksums.resize(static_cast<size_t>(layout.layers));
        threads.run(layout.layers, [&](int64_t layer, int) {
          seal.checksums[static_cast<size_t>(layer)] = slice_checksum(
              bytes + layout.slice_offset(static_cast<int>(layer)), layout.slice_bytes());
        });
        if (seal.provenance == Provenance::kExact) {
          seal.existing = ledger.find(seal.hash, seal.parent, seal.tokens.data(), c);
          // One name, other bytes: some forward was not what it claimed. Nobody's K/V is swapped
          // for another's.
          if (seal.existing && ledger[*seal.existing].checksums != seal.checksums)
            seal.existing.reset();
        }
        seals.push_back(std::move(seal));
        if (seals.back().existing) {
          // Held from here on, so that making room for the next chunk cannot forget it.
          add_reference(*seals.back().existing);
          continue;
        }
        Seal& now = seals.back();
        now.summary = take_summary_slot();
        std::byte* summary = summaries.slot(now.summary.value());
        threads.run(int64_t{layout.layers} * layout.kv_heads, [&](int64_t page, int) {
          const int layer = static_cast<int>(page / layout.kv_heads);
          const int head = static_cast<int>(page % layout.kv_heads);
          scorer.summarize(layout, bytes + layout.page_offset(layer, head),
                           summary + page * summary_page_bytes);
        });
        now.home = take_home();
        now.has_home = true;
        if (now.home.host.value() >= 0) {
          if (const int error = fault::visit("host.write")) {
            throw StorageError(str("host arena: write failed: ", std::strerror(error)));
          }
          std::memcpy(host.slot(now.home.host.value()), bytes,
                      static_cast<size_t>(layout.chunk_bytes()));
        } else if (now.home.disk.value() >= 0) {
          disk.write(now.home.disk.value(), bytes);
        }
      }
      grow(&sequence.sealed, last);
    }
  } catch (...) {
    for (const Seal& seal : seals) {
      if (seal.existing) release(*seal.existing);
      if (seal.has_home) give_back(seal.home);
      if (seal.summary.value() >= 0) summary_slots.give_back(seal.summary);
    }
    abort();
    throw;
  }

  // Apply: nothing below fails.
  for (Seal& seal : seals) {
    Sequence& sequence = *seal.sequence;
    ChunkUse use = sequence.frontier.front();
    sequence.frontier.erase(sequence.frontier.begin());
    if (sequence.reserved > 0) {
      --sequence.reserved;
      --reserved_homes;
    }
    if (seal.existing) {
      // Somebody computed the same chunk, bit for bit. Keep their record; if its bytes are not
      // resident, this block becomes its resident copy, so that what is pinned stays where it is.
      ChunkRecord& kept = ledger[*seal.existing];
      ledger[use.record].pins -= use.pins;
      if (!kept.resident()) std::swap(kept.block, ledger[use.record].block);
      drop_record(use.record);
      use.record = *seal.existing;
      kept.pins += use.pins;
      if (kept.summary_pending) sequence.summaries_loaded = false;
      ++counters.chunks_shared;
    } else {
      ChunkRecord& record = ledger[seal.open];
      record.state = ChunkState::kSealed;
      record.provenance = seal.provenance;
      record.host = seal.home.host;
      record.disk = seal.home.disk;
      record.summary = seal.summary;
      record.hash = seal.hash;
      record.parent = seal.parent;
      record.tokens = std::move(seal.tokens);
      record.checksums = std::move(seal.checksums);
      record.last_use = clock;
      ++referenced_homes;
      if (seal.provenance == Provenance::kExact) ledger.publish(seal.open);
      if (record.has_lower_copy()) counters.bytes_written_through += layout.chunk_bytes();
      ++counters.chunks_sealed;
    }
    use.last_use = clock;
    sequence.sealed.push_back(use);
  }
  for (size_t p = 0; p < forward->parts.size(); ++p) {
    ForwardPart& part = forward->parts[p];
    Sequence& sequence = *part.sequence;
    for (int64_t i = 0; i < count[p]; ++i) {
      sequence.tokens.push_back(
          forward->rows[static_cast<size_t>(part.commit_rows[static_cast<size_t>(i)])].token);
    }
    sequence.length += count[p];
    if (count[p] > 0) sequence.provenance = std::max(sequence.provenance, provenance);
    counters.rows_committed += count[p];
    drop_surplus(part);
    // A moving average of each chunk's share of attention mass, for residency and for people.
    const double shares = static_cast<double>(layout.layers) * layout.kv_heads;
    for (int64_t chunk = 0; chunk < std::min(part.visible, sequence.chunks()); ++chunk) {
      const size_t i = static_cast<size_t>(chunk);
      ChunkUse& use = sequence.use(chunk);
      if (part.scored) {
        use.qk_score = 0.75 * use.qk_score + 0.25 * part.mass[i] / shares;
        ledger[use.record].score = use.qk_score;
      }
      if (part.read[i]) {
        use.last_use = clock;
        ++use.selected;
        ledger[use.record].last_use = clock;
      }
    }
  }
  recall_ahead();
  forward.reset();
}

}  // namespace kvpager
