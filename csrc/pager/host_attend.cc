// Attention at one layer: find the bytes of the chunks its rows selected, walk them. Where the bytes
// are does not change what comes out.
#include <algorithm>
#include <cstring>

#include "kvpager/error.h"
#include "pager/host_backend.h"
#include "pager/scoped_timer.h"

namespace kvpager {

void HostBackend::begin(Forward* forward, void*) {
  parts_.assign(forward->parts.size(), {});
  for (size_t p = 0; p < parts_.size(); ++p) {
    const size_t visible = static_cast<size_t>(forward->parts[p].visible);
    parts_[p].chunks.resize(visible);
    parts_[p].slices.resize(visible);
    parts_[p].needed.resize(visible);
  }
  forward_ = forward;
}

// Where a position that is not committed yet is written, at layer 0.
WriteRow HostBackend::target(const ForwardPart& part, int64_t position) {
  const ChunkUse& use = part.sequence->use(position / layout_.chunk_tokens);
  return {pool_.slot(ledger_[use.record].block.value()),
          static_cast<int32_t>(position % layout_.chunk_tokens)};
}

void HostBackend::give(const std::vector<TensorView>& k, const std::vector<TensorView>& v, void*) {
  const ScopedTimer timer(&counters_.seconds_write);
  const Forward& forward = *forward_;
  give_targets_.clear();
  for (const GivenPosition& given : forward.given) {
    give_targets_.push_back(target(forward.parts[static_cast<size_t>(given.part)], given.position));
  }
  std::vector<int64_t> bad(k.size(), -1);
  threads_.run(layout_.layers, [&](int64_t layer, int) {
    const auto i = static_cast<size_t>(layer);
    std::vector<WriteRow> targets = give_targets_;
    for (WriteRow& row : targets) row.slice += layout_.slice_offset(static_cast<int>(layer));
    const Layout of_layer = layout_.of_layer(static_cast<int>(layer));
    bad[i] = find_non_finite(of_layer, k[i], v[i], targets.data(), forward.given_count);
    if (bad[i] < 0) write_rows(of_layer, k[i], v[i], targets.data(), forward.given_count);
  });
  for (int layer = 0; layer < layout_.layers; ++layer) {
    if (bad[static_cast<size_t>(layer)] >= 0) {
      refuse_given(forward, layout_, layer, bad[static_cast<size_t>(layer)]);
    }
  }
}

bool HostBackend::write(int layer, const TensorView* q, const TensorView& k, const TensorView& v,
                        void*) {
  const ScopedTimer timer(&counters_.seconds_write);
  write_targets_.assign(forward_->rows.size(), {});
  for (const ForwardPart& part : forward_->parts) {
    for (const int32_t row : part.commit_rows) {
      WriteRow& to = write_targets_[static_cast<size_t>(row)];
      to = target(part, forward_->rows[static_cast<size_t>(row)].position);
      to.slice += layout_.slice_offset(layer);
    }
  }
  const int64_t rows = k.rows;
  if (q != nullptr) {
    const int64_t bad = find_non_finite(*q, forward_->part_of_row.data());
    if (bad >= 0) refuse_query(*forward_, layer, bad);
  }
  const Layout of_layer = layout_.of_layer(layer);
  const int64_t bad = find_non_finite(of_layer, k, v, write_targets_.data(), rows);
  if (bad >= 0) refuse_row(*forward_, layout_, layer, bad);
  write_rows(of_layer, k, v, write_targets_.data(), rows);
  return true;
}

void HostBackend::replayed(void*) {
  throw InvalidArgumentError("mark_replayed: device is cpu, which has no graphs to replay");
}

void HostBackend::mark_needed(const AttendOptions& attend_options) {
  Forward& forward = *forward_;
  for (Part& part : parts_) std::fill(part.needed.begin(), part.needed.end(), 0);
  for (size_t row = 0; row < forward.rows.size(); ++row) {
    const int32_t p = forward.part_of_row[row];
    if (p < 0) continue;
    std::vector<uint8_t>& needed = parts_[static_cast<size_t>(p)].needed;
    const int64_t position = forward.rows[row].position;
    if (forward_->dense) {
      mark_window(position, attend_options.window, layout_.chunk_tokens, &needed);
    } else {
      for (int h = 0; h < layout_.kv_heads; ++h) {
        for (const int32_t chunk :
             chosen_[row * static_cast<size_t>(layout_.kv_heads) + static_cast<size_t>(h)]) {
          needed[static_cast<size_t>(chunk)] = 1;
        }
      }
    }
  }
  for (size_t p = 0; p < parts_.size(); ++p) {
    std::vector<uint8_t>& read = forward.parts[p].read;
    for (size_t i = 0; i < read.size(); ++i) read[i] |= parts_[p].needed[i];
  }
}

bool HostBackend::select(int layer, const TensorView& q, const AttendOptions& attend_options) {
  const bool dense = forward_->dense;
  awake_.emplace(threads_, threads_.worth_waking(bytes_to_read(layer) / 16));
  if (!dense) {
    select_rows(layer, q, attend_options);
  } else if (config_.scores(layer, dense)) {
    for (size_t p = 0; p < parts_.size(); ++p) score_for_ledger(p, layer, q, attend_options);
  }
  mark_needed(attend_options);
  in_memory_ = find_slices(layer);
  return in_memory_;
}

void HostBackend::attend(int layer, const TensorView& q, const TensorView& out,
                         const AttendOptions& attend_options) {
  const Layout of_layer = layout_.of_layer(layer);
  AttendParams params;
  params.layout = &of_layer;
  params.q_heads = static_cast<int32_t>(q.heads);
  params.rows = q.rows;
  params.q = q;
  params.out = out;
  params.scaling = attend_options.scaling;
  params.softcap = attend_options.softcap;
  params.window = attend_options.window;
  params.sinks = attend_options.sinks;
  if (!forward_->dense) {
    chosen_flat_.clear();
    chosen_offsets_.assign(1, 0);
    for (const std::vector<int32_t>& chunks : chosen_) {
      chosen_flat_.insert(chosen_flat_.end(), chunks.begin(), chunks.end());
      chosen_offsets_.push_back(static_cast<int64_t>(chosen_flat_.size()));
    }
    params.selected = chosen_flat_.data();
    params.selected_offsets = chosen_offsets_.data();
  }
  run_attention(layer, params);
  awake_.reset();
}

// About what one row of each sequence makes a layer read.
int64_t HostBackend::bytes_to_read(int layer) const {
  const Selection& selection = config_.options.selection;
  int64_t chunks = 0;
  for (const ForwardPart& part : forward_->parts) {
    const int64_t held = part.visible - part.sequence->released;
    chunks += forward_->dense
                  ? held
                  : std::min(held, selection.chunks +
                                       (selection.sinks + selection.recent) / layout_.chunk_tokens);
  }
  return chunks * layout_.slice_bytes(layer);
}

// Where the chunks that the layer reads lie; false if some are not in memory. Looked up once per
// forward: records are many and far apart, and the keys and values of a layer leave none of them in
// a cache. An address is good until a block or a host slot is given back.
bool HostBackend::find_slices(int layer) {
  if (addresses_stale_) {
    for (Part& part : parts_) std::fill(part.chunks.begin(), part.chunks.end(), nullptr);
    addresses_stale_ = false;
  }
  const int64_t offset = layout_.slice_offset(layer);
  bool complete = true;
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Sequence& sequence = *forward_->parts[p].sequence;
    Part& part = parts_[p];
    for (auto c = static_cast<size_t>(sequence.released); c < part.slices.size(); ++c) {
      part.slices[c] = nullptr;
      if (!part.needed[c]) continue;
      const std::byte*& chunk = part.chunks[c];
      if (chunk == nullptr) {
        chunk = address(ledger_[sequence.use(static_cast<int64_t>(c)).record]);
      }
      if (chunk == nullptr) {
        complete = false;
      } else {
        part.slices[c] = chunk + offset;
      }
    }
  }
  return complete;
}

// What is not in memory is streamed slice by slice through staging. Either way the kernel sees the same
// bytes in the same order.
void HostBackend::run_attention(int layer, AttendParams& params) {
  const size_t rows = forward_->rows.size();
  std::vector<AttendRow> row(rows);
  for (size_t i = 0; i < rows; ++i) row[i] = {forward_->rows[i].position, forward_->part_of_row[i]};
  params.row = row.data();
  std::vector<ChunkTableView> tables;
  for (size_t p = 0; p < parts_.size(); ++p)
    tables.push_back({parts_[p].slices.data(), forward_->parts[p].visible});
  params.tables = tables.data();

  if (!in_memory_ && !find_slices(layer)) return stream_attention(layer, params);
  const ScopedTimer timer(&counters_.seconds_attend);
  attend_begin(params, workspace_, threads_);
  attend_wave(params, 0, split_count(0, forward_->parts.size()), workspace_, threads_);
  attend_finish(params, workspace_, threads_);
}

// Splits up to the furthest row of the parts [first, last).
int64_t HostBackend::split_count(size_t first, size_t last) const {
  int64_t chunks = 0;
  for (size_t p = first; p < last; ++p) chunks = std::max(chunks, forward_->parts[p].visible);
  return (chunks + kChunksPerSplit - 1) / kChunksPerSplit;
}

// A few sequences at a time, so that one split of each always fits in staging. To a pass the rows
// of other sequences are padding, and what it writes for them goes nowhere.
void HostBackend::stream_attention(int layer, AttendParams& params) {
  const size_t parts = forward_->parts.size();
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
void HostBackend::stream_parts(int layer, size_t first_part, size_t last_part,
                               AttendParams& params) {
  const int64_t splits = split_count(first_part, last_part);
  attend_begin(params, workspace_, threads_);
  std::vector<std::pair<size_t, size_t>> staged;  // part, chunk
  for (int64_t first = 0; first < splits;) {
    int64_t last = first;
    {
      const ScopedTimer timer(&counters_.seconds_load);
      for (; last < splits; ++last) {
        std::vector<std::pair<size_t, size_t>> wanted;
        for (size_t p = first_part; p < last_part; ++p) {
          const int64_t visible = forward_->parts[p].visible;
          const int64_t end = std::min(visible, (last + 1) * kChunksPerSplit);
          for (int64_t c = last * kChunksPerSplit; c < end; ++c) {
            const size_t i = static_cast<size_t>(c);
            if (parts_[p].needed[i] && parts_[p].slices[i] == nullptr) wanted.push_back({p, i});
          }
        }
        if (static_cast<int64_t>(staged.size() + wanted.size()) > staging_.slots()) break;
        for (const auto& [p, i] : wanted) {
          const Sequence& sequence = *forward_->parts[p].sequence;
          std::byte* out = staging_.slot(static_cast<int64_t>(staged.size()));
          files_.read_slice(ledger_[sequence.use(static_cast<int64_t>(i)).record], layer, out);
          parts_[p].slices[i] = out;
          staged.push_back({p, i});
          ++counters_.slices_streamed;
        }
      }
    }
    {
      const ScopedTimer timer(&counters_.seconds_attend);
      attend_wave(params, first, last, workspace_, threads_);
    }
    for (const auto& [p, i] : staged) parts_[p].slices[i] = nullptr;
    staged.clear();
    first = last;
  }
  attend_finish(params, workspace_, threads_);
}

}  // namespace kvpager
