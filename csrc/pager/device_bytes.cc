// Chunks, seals and summaries on their way between files, pinned memory and a device.
#include <algorithm>
#include <cstring>
#include <exception>

#include "base/fault.h"
#include "kvpager/error.h"
#include "pager/device_backend.h"
#include "pager/scoped_timer.h"

namespace kvpager {

using device::Direction;

// Of all that the lane was given by now. If taking one fails at the moment, the first wait for it takes it.
DeviceBackend::Ticket DeviceBackend::ticket(Lane lane) noexcept {
  try {
    return timeline_.take(lane);
  } catch (const std::exception&) {
    return {lane, timeline_.newest(lane).number + 1};
  }
}

void DeviceBackend::move(Direction direction, void* stream, std::byte* to, const std::byte* from,
                         int64_t bytes) {
  switch (direction) {
    case Direction::kUp:
      device::copy_up(*device_, stream, to, from, bytes);
      counters_.bytes_copied_up += bytes;
      break;
    case Direction::kDown:
      device::copy_down(*device_, stream, to, from, bytes);
      counters_.bytes_copied_down += bytes;
      break;
    case Direction::kWithin:
      device_->check(api_.copy(device_->context(), to, from, bytes, direction, stream),
                     "copying within the device");
      break;
  }
}

void DeviceBackend::move_up(void* stream, const std::vector<device::Pieces>& runs) {
  device::copy_up(*device_, stream, runs);
  for (const device::Pieces& run : runs) counters_.bytes_copied_up += run.bytes * run.count;
}

void DeviceBackend::copy(Lane lane, Direction direction, Piece to, Piece from, int64_t bytes) {
  timeline_.before_read(*from.place, lane);
  timeline_.before_write(*to.place, lane);
  move(direction, timeline_.stream(lane), to.data, from.data, bytes);
  const Ticket done = ticket(lane);
  device::Timeline::wrote(to.place, done);
  device::Timeline::reads(from.place, done);
}

void DeviceBackend::launch(const char* what, const std::function<int()>& kernel) {
  if (const int error = fault::visit("device.launch")) {
    throw DeviceError(str(what, ": ", std::strerror(error)));
  }
  device_->check(kernel(), what);
}

void DeviceBackend::host_read(const Place& place) {
  if (timeline_.complete(place)) return;
  const ScopedTimer timer(&counters_.seconds_wait);
  ++counters_.host_waits;
  timeline_.host_before_read(place);
}

// The transfer buffer that was used longest ago.
DeviceBackend::Piece DeviceBackend::next_bounce() {
  bounce_next_ = (bounce_next_ + 1) % bounce_.slots();
  return piece(bounce_, bounce_next_);
}

void DeviceBackend::freed(BlockId block) noexcept {
  if (!config_.options.poison) return;
  try {
    Place& place = pool_.place(block.value());
    timeline_.before_write(place, Lane::kUp);
    device_->check(api_.fill(device_->context(), pool_.at(block.value()), 0xFF, pool_.slot_bytes,
                             timeline_.stream(Lane::kUp)),
                   "poisoning a block");
    device::Timeline::wrote(&place, ticket(Lane::kUp));
  } catch (const std::exception&) {  // poison is for tests; nothing relies on it
  }
}

void DeviceBackend::load(const ChunkRecord& from, BlockId to) {
  const Piece block = piece(pool_, to.value());
  if (from.resident() && (!from.on_host() || timeline_.complete(pool_.place(from.block.value())))) {
    copy(Lane::kUp, Direction::kWithin, block, piece(pool_, from.block.value()),
         layout_.chunk_bytes());
  } else if (from.on_host()) {
    copy(Lane::kUp, Direction::kUp, block, piece(host_, from.host.value()), layout_.chunk_bytes());
  } else {
    load([&](std::byte* out) { files_.read_chunk(from, out); }, to);
  }
}

void DeviceBackend::load(const std::function<void(std::byte*)>& read, BlockId to) {
  const Piece bounce = next_bounce();
  timeline_.host_before_write(*bounce.place);
  *bounce.place = Place();
  read(bounce.data);
  copy(Lane::kUp, Direction::kUp, piece(pool_, to.value()), bounce, layout_.chunk_bytes());
}

// What is in files is read into pinned memory, and verified: into its host slot, or on the way to its
// block into transfer buffers, as many at a time as there are.
void DeviceBackend::load(const std::vector<Arrival>& arrivals, int threads) {
  std::vector<Arrival> to_host;
  std::vector<Arrival> to_pool;
  for (const Arrival& arrival : arrivals) {
    if (arrival.host.value() >= 0) {
      Place& place = host_.place(arrival.host.value());
      timeline_.host_before_write(place);
      place = Place();
      to_host.push_back(arrival);
    } else if (const ChunkRecord& record = ledger_[arrival.record]; record.on_host()) {
      load(record, arrival.block);
    } else {
      to_pool.push_back(arrival);
    }
  }
  const auto read = [&](const Arrival& arrival, std::byte* out) {
    files_.read_chunk(ledger_[arrival.record], out);
  };
  threads_.run(
      static_cast<int64_t>(to_host.size()),
      [&](int64_t i, int) {
        const Arrival& arrival = to_host[static_cast<size_t>(i)];
        read(arrival, host_.at(arrival.host.value()));
      },
      threads);
  const size_t at_a_time = threads == 1 ? 1 : static_cast<size_t>(bounce_.slots());
  for (size_t done = 0; done < to_pool.size();) {
    const size_t count = std::min(at_a_time, to_pool.size() - done);
    std::vector<Piece> bounces;
    for (size_t i = 0; i < count; ++i) {
      const Piece bounce = bounces.emplace_back(next_bounce());
      timeline_.host_before_write(*bounce.place);
      *bounce.place = Place();
    }
    threads_.run(
        static_cast<int64_t>(count),
        [&](int64_t i, int) {
          read(to_pool[done + static_cast<size_t>(i)], bounces[static_cast<size_t>(i)].data);
        },
        threads);
    for (size_t i = 0; i < count; ++i) {
      copy(Lane::kUp, Direction::kUp, piece(pool_, to_pool[done + i].block.value()), bounces[i],
           layout_.chunk_bytes());
    }
    done += count;
  }
}

// Of an open chunk only rows before the running forward are asked for, and these are complete.
const std::byte* DeviceBackend::view(const ChunkRecord& record, int64_t offset, int64_t bytes) {
  if (record.on_host()) {
    host_read(host_.place(record.host.value()));
    return host_.at(record.host.value()) + offset;
  }
  if (!record.resident()) return nullptr;
  const Piece bounce = next_bounce();
  const Piece block = piece(pool_, record.block.value());
  copy(Lane::kDown, Direction::kDown, bounce, {block.data + offset, block.place}, bytes);
  host_read(*bounce.place);
  return bounce.data;
}

const std::byte* DeviceBackend::home(const ChunkRecord& record) {
  if (!record.home_on_host()) return nullptr;
  host_read(host_.place(record.host.value()));
  return host_.at(record.host.value());
}

uint64_t DeviceBackend::arriving(const ChunkRecord& record) {
  if (!record.home_on_host()) return 0;
  const Place& place = host_.place(record.host.value());
  try {
    return timeline_.complete(place) ? 0 : place.written.number;
  } catch (const std::exception&) {
    return place.written.number;
  }
}

void DeviceBackend::wait_for_home(const ChunkRecord& record) {
  if (record.on_host()) host_read(host_.place(record.host.value()));
}

void DeviceBackend::summarize(BlockId block, SlotId summary) {
  Place& from = pool_.place(block.value());
  Place& to = summaries_.place(summary.value());
  timeline_.before_read(from, Lane::kCompute);
  timeline_.before_write(to, Lane::kCompute);
  gpu::SummarizeParams params;
  params.summary_page_bytes = config_.summary_page_bytes;
  params.count = 1;
  params.chunks[0] = pool_.at(block.value());
  params.summaries[0] = summaries_.at(summary.value());
  for (const auto& [first, run] : runs_) {
    params.shape = run;
    params.first_layer = first;
    launch("summarising a chunk", [&] {
      return api_.summarize(device_->context(), &params, timeline_.stream(Lane::kCompute));
    });
  }
  const Ticket done = ticket(Lane::kCompute);
  device::Timeline::wrote(&to, done);
  device::Timeline::reads(&from, done);
  copy(Lane::kDown, Direction::kDown, piece(mirror_, summary.value()),
       piece(summaries_, summary.value()), summaries_.slot_bytes);
}

void DeviceBackend::write_home(BlockId block, const Home& to, SharedArray<uint64_t>* checksums) {
  const Piece from = piece(pool_, block.value());
  if (to.host.value() >= 0) {
    copy(Lane::kDown, Direction::kDown, piece(host_, to.host.value()), from, layout_.chunk_bytes());
  } else if (to.disk.value() >= 0) {
    const Piece bounce = next_bounce();
    copy(Lane::kDown, Direction::kDown, bounce, from, layout_.chunk_bytes());
    host_read(*bounce.place);
    // What comes back from disk is compared with them.
    if (checksums->empty()) *checksums = slice_checksums(layout_, bounce.data, threads_);
    files_.write_slot(to.disk, bounce.data);
  }
}

const std::byte* DeviceBackend::summary(SlotId slot) {
  host_read(mirror_.place(slot.value()));
  return mirror_.at(slot.value());
}

std::vector<std::byte*> DeviceBackend::summary_room(const std::vector<SlotId>& slots) {
  std::vector<std::byte*> room;
  room.reserve(slots.size());
  for (const SlotId slot : slots) {
    Place& place = mirror_.place(slot.value());
    timeline_.host_before_write(place);
    place = Place();
    room.push_back(mirror_.at(slot.value()));
  }
  return room;
}

void DeviceBackend::summaries_written(const std::vector<SlotId>& slots) {
  for (const SlotId slot : slots) {
    copy(Lane::kUp, Direction::kUp, piece(summaries_, slot.value()), piece(mirror_, slot.value()),
         summaries_.slot_bytes);
  }
}

}  // namespace kvpager
