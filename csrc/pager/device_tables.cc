// The start of a forward: every chunk one of its rows may see can be read by kernels, in the pool or
// in pinned memory, and the tables say where.
#include <algorithm>

#include "kvpager/error.h"
#include "pager/device_backend.h"

namespace kvpager {

using device::Direction;

void DeviceBackend::prepare(const Forward& forward, void* stream) {
  if (capturing(stream)) {
    throw InvalidArgumentError(
        "begin: stream is being captured; a forward begins before a capture");
  }
  int64_t entries = 0;
  int64_t most = 0;
  for (const ForwardPart& part : forward.parts) {
    entries += part.visible - part.sequence->released;
    most = std::max(most, part.visible);
  }
  grow(entries, most);
}

void DeviceBackend::begin(Forward* forward, void* stream) {
  timeline_.set_compute(stream);
  running_ = Running();
  running_.active = true;
  try {
    find_entries(*forward);
    Place& ring_place = ring_places_[ring_next_];
    timeline_.host_before_write(ring_place);
    std::byte* const pinned = arrays_.ring[ring_next_].data();
    ring_next_ = (ring_next_ + 1) % arrays_.ring.size();
    const device::TableArrays arrays = arrays_.layout.arrays(pinned);
    plan_staging(*forward);
    fill_tables(*forward, arrays);
    fill_staged(arrays);
    timeline_.compute_may_read(&ring_place);
    upload(arrays_.layout, pinned, !running_.staged.empty());
    halves_[0] = halves_[1] = Half();
    running_.computing = true;
    forward_ = forward;
  } catch (...) {
    running_ = Running();
    throw;
  }
}

// Where each chunk is read: in its block, or in pinned memory while the block's bytes are on their
// way. What follows on the caller's stream waits for what it reads and for those who still read what
// it is about to write.
void DeviceBackend::find_entries(const Forward& forward) {
  for (const ForwardPart& part : forward.parts) {
    const int64_t held = part.sequence->released;
    running_.first.push_back(static_cast<int64_t>(running_.entries.size()) - held);
    const int64_t sealed = part.sequence->sealed_chunks();
    for (int64_t c = held; c < part.visible; ++c) {
      Entry entry;
      entry.record = part.sequence->use(c).record;
      const ChunkRecord& record = ledger_[entry.record];
      entry.pinned = !record.resident() ||
                     (record.on_host() && !timeline_.complete(pool_.place(record.block.value())) &&
                      timeline_.complete(host_.place(record.host.value())));
      const Place& place =
          entry.pinned ? host_.place(record.host.value()) : pool_.place(record.block.value());
      timeline_.before_read(place, Lane::kCompute);
      entry.written = c >= sealed && part.commit_count > 0;
      if (entry.written) timeline_.before_write(place, Lane::kCompute);
      if (c < sealed) {
        timeline_.before_read(summaries_.place(record.summary.value()), Lane::kCompute);
      }
      running_.entries.push_back(entry);
    }
  }
}

void DeviceBackend::fill_tables(const Forward& forward, const device::TableArrays& arrays) {
  const int64_t c = layout_.chunk_tokens;
  gpu::Header header;
  for (size_t p = 0; p < forward.parts.size(); ++p) {
    const ForwardPart& part = forward.parts[p];
    gpu::Part& out = arrays.parts[p];
    out = gpu::Part();
    out.first = running_.first[p];
    out.held = static_cast<int32_t>(part.sequence->released);
    out.visible = part.visible;
    out.sealed = std::min(part.sequence->sealed_chunks(), part.visible);
    out.written = part.sequence->length + part.commit_count;
    out.score_row = part.score_row;
    header.max_visible = std::max(header.max_visible, part.visible);
    for (int64_t chunk = part.sequence->released; chunk < part.visible; ++chunk) {
      const size_t i = static_cast<size_t>(out.first + chunk);
      const Entry& entry = running_.entries[i];
      const ChunkRecord& record = ledger_[entry.record];
      arrays.chunks[i] = reinterpret_cast<uint64_t>(entry.pinned ? host_.at(record.host.value())
                                                                 : pool_.at(record.block.value()));
      arrays.summaries[i] = chunk < out.sealed
                                ? reinterpret_cast<uint64_t>(summaries_.at(record.summary.value()))
                                : 0;
    }
  }
  for (size_t i = 0; i < forward.rows.size(); ++i) {
    gpu::Row& out = arrays.rows[i];
    out = gpu::Row();
    out.part = forward.part_of_row[i];
    if (out.part < 0) continue;
    const RowDescriptor& row = forward.rows[i];
    out.position = row.position;
    if (row.kind != RowKind::kCommit) continue;
    running_.writes = true;
    const Sequence& sequence = *forward.parts[static_cast<size_t>(out.part)].sequence;
    out.write_offset = static_cast<int32_t>(row.position % c);
    out.write_chunk = reinterpret_cast<uint64_t>(
        pool_.at(ledger_[sequence.use(row.position / c).record].block.value()));
  }
  device::arrange(arrays.rows, static_cast<int32_t>(forward.rows.size()),
                  shape_.q_heads / shape_.kv_heads, arrays.parts,
                  static_cast<int32_t>(forward.parts.size()), &arrangement_);
  std::copy(arrangement_.order.begin(), arrangement_.order.end(), arrays.order);
  std::copy(arrangement_.tiles.begin(), arrangement_.tiles.end(), arrays.tiles);
  header.rows = static_cast<int32_t>(forward.rows.size());
  header.parts = static_cast<int32_t>(forward.parts.size());
  header.small_tiles = arrangement_.small_tiles;
  header.large_tiles = arrangement_.large_tiles;
  header.entries = static_cast<int64_t>(running_.entries.size());
  *arrays.header = header;
  running_.counts = {header.rows, header.parts, header.small_tiles, header.large_tiles,
                     header.max_visible};
}

// The tables, and nothing found yet. On the caller's stream, behind what still reads the last ones.
void DeviceBackend::upload(const device::TableLayout& layout, const std::byte* from, bool staged) {
  void* const stream = timeline_.stream(Lane::kCompute);
  std::byte* const to = arrays_.tables.data();
  const auto entries = static_cast<int64_t>(running_.entries.size());
  const auto send = [&](device::TableLayout::Range range) {
    if (range.end > range.begin) {
      move(Direction::kUp, stream, to + range.begin, from + range.begin, range.end - range.begin);
    }
  };
  send(layout.fixed());
  send(layout.chunks(entries));
  send(layout.summaries(entries));
  for (int half = 0; staged && half < 2; ++half) send(layout.staged(half, entries));
  const auto clear = [&](std::byte* what, int byte, int64_t bytes) {
    device_->check(api_.fill(device_->context(), what, byte, bytes, stream),
                   "clearing the results of a forward");
  };
  std::byte* const results = arrays_.results.data();
  clear(results, 0xFF, kStatusBytes);
  clear(results + entry_offset(false), 0, entries * 8);
  clear(results + entry_offset(true), 0, entries);
}

}  // namespace kvpager
