// Attention at one layer: select chunks, find their bytes, walk them. What is selected depends on
// the row; where the bytes are does not change what comes out.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "kvpager/error.h"
#include "pager/impl.h"

namespace kvpager {
namespace {

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

// Rows and heads are written by whichever thread comes to them: two may not share an element.
void require_apart(const char* name, const TensorView& tensor) {
  const auto reach = [](int64_t count, int64_t stride) { return (count - 1) * std::abs(stride); };
  const int64_t row = std::abs(tensor.row_stride);
  const int64_t head = std::abs(tensor.head_stride);
  const bool heads_within_rows =
      (tensor.heads == 1 || head >= tensor.dim) &&
      (tensor.rows == 1 || row >= reach(tensor.heads, head) + tensor.dim);
  const bool rows_within_heads =
      (tensor.rows == 1 || row >= tensor.dim) &&
      (tensor.heads == 1 || head >= reach(tensor.rows, row) + tensor.dim);
  if (!heads_within_rows && !rows_within_heads) {
    throw InvalidArgumentError(str(name, ": strides ", tensor.row_stride, " and ",
                                   tensor.head_stride, " of rows and heads let them overlap, ",
                                   "expected a tensor with memory for each of its elements"));
  }
}

}  // namespace

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
  require_apart("out", out);
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

}  // namespace kvpager
