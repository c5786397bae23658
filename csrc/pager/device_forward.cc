// A forward on a device: launches on the caller's stream, and what they found.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>

#include "kvpager/error.h"
#include "pager/device_backend.h"
#include "pager/scoped_timer.h"

namespace kvpager {

using device::Direction;

namespace {

gpu::Tensor tensor(const TensorView& view) {
  return {view.data,
          view.dtype,
          static_cast<int32_t>(view.heads),
          static_cast<int32_t>(view.dim),
          view.row_stride,
          view.head_stride};
}

}  // namespace

bool DeviceBackend::to_stream(void* stream) {
  if (capturing(stream)) return true;
  timeline_.set_compute(stream);
  return false;
}

gpu::HostCounts DeviceBackend::counts(bool into_graph) const {
  return into_graph ? device::most_counts(arrays_.bounds, shape_.q_heads / shape_.kv_heads)
                    : running_.counts;
}

// The chunks that given positions are written to are among those the forward writes: begin() has
// ordered the caller's stream behind all that still uses them.
gpu::Tables DeviceBackend::upload_given() {
  const Forward& forward = *forward_;
  grow_given(forward.given_count);
  timeline_.host_before_write(given_.place);
  gpu::Header header;
  header.rows = static_cast<int32_t>(forward.given_count);
  std::byte* const from = given_.host.data();
  std::memcpy(from, &header, sizeof header);
  auto* row = reinterpret_cast<gpu::Row*>(from + kGivenRowsAt);
  for (const GivenPosition& given : forward.given) {
    const Sequence& sequence = *forward.parts[static_cast<size_t>(given.part)].sequence;
    const ChunkUse& use = sequence.use(given.position / layout_.chunk_tokens);
    gpu::Row& out = *row++;
    out = gpu::Row();
    out.position = given.position;
    out.write_offset = static_cast<int32_t>(given.position % layout_.chunk_tokens);
    out.write_chunk = reinterpret_cast<uint64_t>(pool_.at(ledger_[use.record].block.value()));
  }
  timeline_.compute_may_read(&given_.place);
  std::byte* const to = given_.device.data();
  move(Direction::kUp, timeline_.stream(Lane::kCompute), to, from,
       kGivenRowsAt + forward.given_count * static_cast<int64_t>(sizeof(gpu::Row)));
  gpu::Tables tables;
  tables.header = reinterpret_cast<const gpu::Header*>(to);
  tables.rows = reinterpret_cast<const gpu::Row*>(to + kGivenRowsAt);
  return tables;
}

void DeviceBackend::give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
                         void* stream) {
  timeline_.set_compute(stream);
  gpu::WriteParams params;
  params.tables = upload_given();
  params.counts.rows = static_cast<int32_t>(forward_->given_count);
  params.status = reinterpret_cast<uint64_t*>(arrays_.results.data()) + kGivenStatus;
  for (size_t layer = 0; layer < k.size(); ++layer) {
    params.layer = static_cast<int32_t>(layer);
    params.shape = shape_at(static_cast<int>(layer), DType::kFloat32);
    params.k = tensor(k[layer]);
    params.v = tensor(v[layer]);
    launch("writing given keys and values",
           [&] { return api_.write_rows(device_->context(), &params, stream); });
  }
}

bool DeviceBackend::write(int layer, const TensorView* q, const TensorView& k, const TensorView& v,
                          void* stream) {
  const bool into_graph = to_stream(stream);
  if (!into_graph) stage(layer, 0);  // the first layer's: a graph that is replayed reads in place
  gpu::WriteParams params;
  params.writes = into_graph || running_.writes;
  if (!params.writes && q == nullptr) return true;
  params.shape = shape_at(layer, DType::kFloat32);
  params.tables = arrays_.layout.tables(arrays_.tables.data());
  params.counts = counts(into_graph);
  params.layer = layer;
  params.k = tensor(k);
  params.v = tensor(v);
  params.status = reinterpret_cast<uint64_t*>(arrays_.results.data()) + kRowStatus;
  if (q != nullptr) {
    params.q = tensor(*q);
    params.query_status = reinterpret_cast<uint64_t*>(arrays_.results.data()) + kQueryStatus;
  }
  launch("writing keys and values",
         [&] { return api_.write_rows(device_->context(), &params, stream); });
  return !into_graph;
}

namespace {

// Rows of the same heads in memory of their own, as float32.
gpu::Tensor in_rows(const gpu::Tensor& like, const device::Memory& memory) {
  gpu::Tensor rows = like;
  rows.data = memory.data();
  rows.dtype = DType::kFloat32;
  rows.head_stride = like.dim;
  rows.row_stride = int64_t{like.heads} * like.dim;
  return rows;
}

}  // namespace

// Sinks are weights: few contents, uploaded when one is first seen.
const float* DeviceBackend::sinks_on_device(const AttendOptions& attend_options, void* stream,
                                            bool into_graph) {
  if (attend_options.sinks == nullptr || attend_options.sinks_on_device) {
    return attend_options.sinks;
  }
  std::vector<float> content(attend_options.sinks, attend_options.sinks + shape_.q_heads);
  const auto known = sinks_known_.find(content);
  if (known != sinks_known_.end()) {
    return reinterpret_cast<const float*>(sinks_.at(known->second));
  }
  if (into_graph) {
    throw InvalidArgumentError(
        "sinks: first seen while a graph is captured, which cannot copy them to the device; run a "
        "forward outside of the capture first, or give device memory");
  }
  if (static_cast<int64_t>(sinks_known_.size()) == sinks_.slots()) {
    throw InvalidArgumentError(str("sinks: more than ", sinks_.slots(),
                                   " different ones were given; expected the model's, per layer"));
  }
  const auto slot = static_cast<int64_t>(sinks_known_.size());
  std::byte* const from = sinks_host_.data() + slot * sinks_.slot_bytes;
  const auto bytes = static_cast<int64_t>(content.size() * sizeof(float));
  std::memcpy(from, content.data(), static_cast<size_t>(bytes));
  move(Direction::kUp, stream, sinks_.at(slot), from, bytes);
  sinks_known_.emplace(std::move(content), slot);
  return reinterpret_cast<const float*>(sinks_.at(slot));
}

// Scores a layer's summaries and, unless its rows attend to all before them, selects chunks by the scores.
void DeviceBackend::launch_select(int layer, const gpu::Tensor& q,
                                  const AttendOptions& attend_options, const gpu::Tables& tables,
                                  bool into_graph) {
  const Selection& selection = config_.options.selection;
  const bool dense = forward_->dense;
  gpu::SelectParams params;
  params.shape = shape_at(layer, q.dtype);
  params.tables = tables;
  params.counts = counts(into_graph);
  params.summary_page_bytes = config_.summary_page_bytes;
  params.layer = layer;
  params.q = q;
  params.scaling = attend_options.scaling;
  params.window = attend_options.window;
  params.kind = static_cast<int32_t>(dense ? Selection::Kind::kDense : selection.kind);
  params.k = selection.chunks;
  params.sinks = selection.sinks;
  params.recent = selection.recent;
  params.always = reinterpret_cast<const int64_t*>(always_.data());
  params.always_count = static_cast<int32_t>(selection.always.size());
  params.mass = reinterpret_cast<uint64_t*>(arrays_.results.data() + entry_offset(false));
  if (!dense) {
    params.selected = reinterpret_cast<uint8_t*>(arrays_.selected.data());
    params.selected_stride = arrays_.selected_stride;
    params.read = reinterpret_cast<uint8_t*>(arrays_.results.data() + entry_offset(true));
  }
  params.scratch = arrays_.scratch.data();
  params.scratch_bytes = arrays_.scratch.bytes();
  launch("selecting chunks",
         [&] { return api_.select(device_->context(), &params, attend_options.stream); });
  running_.scored = true;
}

void DeviceBackend::attend(int layer, const TensorView& q, const TensorView& out,
                           const AttendOptions& attend_options) {
  const ScopedTimer timer(&counters_.seconds_attend);
  void* const stream = attend_options.stream;
  const bool into_graph = to_stream(stream);
  const bool dense = forward_->dense;
  const bool staged = !into_graph && is_staged(layer, attend_options.window);
  if (!into_graph) windows_[static_cast<size_t>(layer)] = attend_options.window;
  const int64_t first_half = wave_number(layer, 0) % 2;
  const gpu::Tables tables =
      arrays_.layout.tables(arrays_.tables.data(), staged ? static_cast<int32_t>(first_half) : -1);
  const float* const sinks = sinks_on_device(attend_options, stream, into_graph);
  const gpu::Shape at = shape_at(layer, q.dtype);
  const gpu::Tensor queries =
      at.k_rotated ? rotated(tensor(q), arrays_.queries, into_graph, stream) : tensor(q);
  if (config_.scores(layer, dense)) {
    launch_select(layer, queries, attend_options, tables, into_graph);
  }
  if (dense) mark_dense(attend_options.window);

  gpu::AttendParams params;
  params.shape = shape_at(layer, queries.dtype);
  params.tables = tables;
  params.counts = counts(into_graph);
  params.attention = attention(q.dtype);
  params.layer = layer;
  params.q = queries;
  params.out = at.v_rotated ? in_rows(tensor(out), arrays_.outputs) : tensor(out);
  params.scaling = attend_options.scaling;
  params.softcap = attend_options.softcap;
  params.window = attend_options.window;
  params.sinks = sinks;
  if (!dense) {
    params.selected = reinterpret_cast<const uint8_t*>(arrays_.selected.data());
    params.selected_stride = arrays_.selected_stride;
  }
  params.scratch = arrays_.scratch.data();
  params.scratch_bytes = arrays_.scratch.bytes();
  if (staged) {
    attend_in_waves(layer, &params, stream);
  } else {
    launch_attend(params, stream);
  }
  if (at.v_rotated) rotate(params.out, tensor(out), into_graph, stream);
  if (!into_graph && !staged) stage(layer + 1, 0);
}

void DeviceBackend::launch_attend(const gpu::AttendParams& params, void* stream) {
  launch("attention", [&] { return api_.attend(device_->context(), &params, stream); });
}

void DeviceBackend::attend_in_waves(int layer, gpu::AttendParams* params, void* stream) {
  for (size_t wave = 0; wave < running_.waves.size(); ++wave) {
    Place& half = staging_.place(wave_number(layer, wave) % 2);
    timeline_.before_read(half, Lane::kCompute);
    params->wave = running_.waves[wave].wave;
    launch_attend(*params, stream);
    device::Timeline::reads(&half, ticket(Lane::kCompute));
    stage(layer, wave + 1);
  }
}

gpu::Tensor DeviceBackend::rotated(const gpu::Tensor& from, const device::Memory& to,
                                   bool into_graph, void* stream) {
  const gpu::Tensor rows = in_rows(from, to);
  rotate(from, rows, into_graph, stream);
  return rows;
}

void DeviceBackend::rotate(const gpu::Tensor& from, const gpu::Tensor& to, bool into_graph,
                           void* stream) {
  gpu::RotateParams params;
  params.header = arrays_.layout.tables(arrays_.tables.data()).header;
  params.counts = counts(into_graph);
  params.from = from;
  params.to = to;
  launch("rotating rows", [&] { return api_.rotate(device_->context(), &params, stream); });
}

// What rows of a dense layer read is known without asking the device.
void DeviceBackend::mark_dense(int64_t window) {
  std::vector<int64_t>& seen = running_.windows;
  if (std::find(seen.begin(), seen.end(), window) != seen.end()) return;
  seen.push_back(window);
  Forward& forward = *forward_;
  for (size_t i = 0; i < forward.rows.size(); ++i) {
    const int32_t part = forward.part_of_row[i];
    if (part < 0) continue;
    mark_window(forward.rows[i].position, window, layout_.chunk_tokens,
                &forward.parts[static_cast<size_t>(part)].read);
  }
}

void DeviceBackend::replayed(void* stream) {
  timeline_.set_compute(stream);
  running_.scored = config_.scored_layers(forward_->dense) > 0;
  if (forward_->dense) mark_dense(0);
}

// From now on others may ask for what the forward has read and written.
void DeviceBackend::set_tickets(Ticket done) noexcept {
  if (!running_.computing) return;
  running_.computing = false;
  for (const Entry& entry : running_.entries) {
    const ChunkRecord& record = ledger_[entry.record];
    if (entry.written) {
      device::Timeline::wrote(&pool_.place(record.block.value()), done);
    } else {
      device::Timeline::reads(
          entry.pinned ? &host_.place(record.host.value()) : &pool_.place(record.block.value()),
          done);
    }
  }
}

void DeviceBackend::finish() {
  void* const stream = timeline_.stream(Lane::kCompute);
  if (capturing(stream)) {
    throw InvalidArgumentError("commit: the forward's stream is being captured; commit after it");
  }
  const auto entries = static_cast<int64_t>(running_.entries.size());
  const auto fetch = [&](int64_t offset, int64_t bytes) {
    move(Direction::kDown, stream, arrays_.results_host.data() + offset,
         arrays_.results.data() + offset, bytes);
  };
  fetch(0, kStatusBytes);
  if (running_.scored) {
    fetch(entry_offset(false), entries * 8);
    fetch(entry_offset(true), entries);
  }
  const Ticket done = timeline_.take(Lane::kCompute);
  {
    const ScopedTimer timer(&counters_.seconds_wait);
    ++counters_.host_waits;
    timeline_.wait(done, "host reads results after compute");
  }
  set_tickets(done);
  take_results();
  running_.entries.clear();
}

void DeviceBackend::take_results() {
  uint64_t status[kStatusBytes / sizeof(uint64_t)];
  std::memcpy(status, arrays_.results_host.data(), sizeof status);
  const auto layer = [](uint64_t failure) {
    return failure == gpu::kNoFailure ? std::numeric_limits<int>::max()
                                      : static_cast<int>(failure >> 32);
  };
  const auto row = [](uint64_t failure) { return static_cast<int64_t>(failure & 0xFFFFFFFFu); };
  if (const uint64_t bad = status[kGivenStatus]; bad != gpu::kNoFailure) {
    refuse_given(*forward_, layout_, layer(bad), row(bad));
  }
  // What was not finite first made all after it so. The queries of a layer are looked at first.
  const uint64_t bad_query = status[kQueryStatus];
  const uint64_t bad_row = status[kRowStatus];
  if (bad_query != gpu::kNoFailure && layer(bad_query) <= layer(bad_row)) {
    refuse_query(*forward_, layer(bad_query), row(bad_query));
  }
  if (bad_row != gpu::kNoFailure) refuse_row(*forward_, layout_, layer(bad_row), row(bad_row));
  if (!running_.scored) return;
  const bool dense = forward_->dense;
  const auto* mass =
      reinterpret_cast<const uint64_t*>(arrays_.results_host.data() + entry_offset(false));
  const auto* read =
      reinterpret_cast<const uint8_t*>(arrays_.results_host.data() + entry_offset(true));
  for (size_t p = 0; p < forward_->parts.size(); ++p) {
    ForwardPart& part = forward_->parts[p];
    part.scored = !dense || part.sequence->sealed_chunks() > part.sequence->released;
    for (int64_t c = part.sequence->released; c < part.visible; ++c) {
      const auto i = static_cast<size_t>(c);
      const auto entry = static_cast<size_t>(running_.first[p] + c);
      part.mass[i] += std::ldexp(static_cast<double>(mass[entry]), -40);
      if (!dense && read[entry] != 0) part.read[i] = 1;
    }
  }
}

void DeviceBackend::end() noexcept {
  if (running_.computing) {
    Ticket done{Lane::kCompute, timeline_.newest(Lane::kCompute).number + 1};
    try {  // an event of a capture would stand for nothing: the next one outside of it is taken
      if (!capturing(timeline_.stream(Lane::kCompute))) done = ticket(Lane::kCompute);
    } catch (const std::exception&) {
    }
    set_tickets(done);
  }
  running_ = Running();
  forward_ = nullptr;
}

}  // namespace kvpager
