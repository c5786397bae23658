// Chunks that cross the link once per layer, ahead of their use, instead of page by page when they are
// read: those of parts whose pages several tiles of queries would read.
//
// A layer's wave is what one half of staging holds. While a wave is attended to, the next one, of this
// layer or of the one behind it, is copied into the other half:
//
//   up        | 0.0 | 0.1 | 0.2 | 1.0 | 1.1 |      layer.wave, into halves 0 1 0 1 0
//   compute         | 0.0 | 0.1 | 0.2 | 1.0 |
//
// A forward whose rows select chunks has one wave: what they select is far less than all they may see, so
// that what finds no room is better read in place.
#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "pager/device_backend.h"

namespace kvpager {

namespace {

struct PartRows {
  int64_t count = 0;
  int64_t first_position = std::numeric_limits<int64_t>::max();
};

std::vector<PartRows> rows_of_parts(const Forward& forward) {
  std::vector<PartRows> all(forward.parts.size());
  for (size_t i = 0; i < forward.rows.size(); ++i) {
    if (forward.part_of_row[i] < 0) continue;
    PartRows& rows = all[static_cast<size_t>(forward.part_of_row[i])];
    ++rows.count;
    rows.first_position = std::min(rows.first_position, forward.rows[i].position);
  }
  return all;
}

// The least window with which a row at `position` or after it sees a key of the chunk.
int64_t least_window(int64_t position, int64_t chunk, int64_t chunk_tokens) {
  return std::max<int64_t>(1, position - (chunk + 1) * chunk_tokens + 2);
}

}  // namespace

void DeviceBackend::plan_staging(const Forward& forward) {
  const int64_t room = staging_.slot_bytes / layout_.largest_slice_bytes();
  running_.waves = {StagedWave()};
  if (room == 0) return;
  cut_waves(forward, room);
  if (!running_.staged.empty()) sort_waves();
}

void DeviceBackend::cut_waves(const Forward& forward, int64_t room) {
  const std::vector<PartRows> rows = rows_of_parts(forward);
  const bool by_size = config_.options.missed_chunks == "auto";
  const int64_t tile = forward.dense ? gpu::kSmallTile : device::kSmallQueries;
  const int64_t group = shape_.q_heads / shape_.kv_heads;

  device::WaveCutter cutter;
  running_.waves.clear();
  std::vector<Staged>& staged = running_.staged;
  size_t first = 0;                           // of the wave, in `staged`
  std::unordered_map<int32_t, size_t> known;  // of the wave: where a record is in `staged`
  const auto held = [&] { return static_cast<int64_t>(staged.size() - first); };
  const auto cut = [&] {
    cutter.cut();
    running_.waves.push_back({{}, first, staged.size()});
    first = staged.size();
    known.clear();
  };
  const auto stage = [&](Entry& entry, int64_t window) {
    const auto [at, added] = known.emplace(entry.record.value(), staged.size());
    if (added && held() == room) {
      known.erase(at);
      return;
    }
    if (added) staged.push_back({ledger_[entry.record].host, window});
    Staged& slice = staged[at->second];
    slice.window = std::min(slice.window, window);
    entry.wave = static_cast<int32_t>(running_.waves.size());
    entry.staged = static_cast<int32_t>(at->second);
  };
  for (size_t p = 0; p < forward.parts.size(); ++p) {
    const ForwardPart& part = forward.parts[p];
    const bool stages = !by_size || rows[p].count * group > tile;
    const auto entry = [&](int64_t chunk) -> Entry& {
      return running_.entries[static_cast<size_t>(running_.first[p] + chunk)];
    };
    for (int64_t begin = 0; begin < part.visible; begin += gpu::kWaveChunks) {
      const int64_t end = std::min(begin + gpu::kWaveChunks, part.visible);
      std::vector<int64_t> missed;
      for (int64_t c = std::max(begin, part.sequence->released); stages && c < end; ++c) {
        if (entry(c).pinned) missed.push_back(c);
      }
      const auto more = std::count_if(missed.begin(), missed.end(), [&](int64_t c) {
        return known.count(entry(c).record.value()) == 0;
      });
      if (forward.dense && held() > 0 && held() + more > room) cut();
      cutter.add(static_cast<int32_t>(p), end);
      for (const int64_t c : missed) {
        stage(entry(c), least_window(rows[p].first_position, c, layout_.chunk_tokens));
      }
    }
  }
  cut();
  const std::vector<gpu::Wave> waves = cutter.take();
  for (size_t i = 0; i < waves.size(); ++i) running_.waves[i].wave = waves[i];
}

// Neighbouring slots of a wave one after another, so that one copy takes them.
void DeviceBackend::sort_waves() {
  std::vector<Staged>& staged = running_.staged;
  std::vector<int32_t> order(staged.size());
  std::vector<int32_t> place(staged.size());
  std::iota(order.begin(), order.end(), 0);
  for (const StagedWave& wave : running_.waves) {
    std::sort(order.begin() + static_cast<int64_t>(wave.first),
              order.begin() + static_cast<int64_t>(wave.end), [&](int32_t a, int32_t b) {
                return staged[static_cast<size_t>(a)].host.value() <
                       staged[static_cast<size_t>(b)].host.value();
              });
  }
  std::vector<Staged> sorted;
  for (const int32_t from : order) {
    place[static_cast<size_t>(from)] = static_cast<int32_t>(sorted.size());
    sorted.push_back(staged[static_cast<size_t>(from)]);
  }
  staged = std::move(sorted);
  for (Entry& entry : running_.entries) {
    if (entry.staged >= 0) entry.staged = place[static_cast<size_t>(entry.staged)];
  }
}

// Where slices are: in table s, those of a layer whose first wave is in half s.
void DeviceBackend::fill_staged(const device::TableArrays& arrays) const {
  if (running_.staged.empty()) return;
  for (size_t i = 0; i < running_.entries.size(); ++i) {
    const Entry& entry = running_.entries[i];
    for (size_t table = 0; table < 2; ++table) {
      uint64_t& address = arrays.staged[table][i];
      address = 0;
      if (entry.staged < 0) continue;
      const auto wave = static_cast<size_t>(entry.wave);
      const auto slot =
          static_cast<int64_t>(static_cast<size_t>(entry.staged) - running_.waves[wave].first);
      const auto half = static_cast<int64_t>((table + wave) % 2);
      address =
          reinterpret_cast<uint64_t>(staging_.at(half) + slot * layout_.largest_slice_bytes());
    }
  }
}

// Whether the first wave of the layer is in its half, with all that a layer of this window sees of it.
bool DeviceBackend::is_staged(int layer, int64_t window) const {
  if (running_.staged.empty()) return false;
  const int64_t number = wave_number(layer, 0);
  const Half& half = halves_[number % 2];
  return half.wave == number && (half.window == 0 || (window > 0 && window <= half.window));
}

int64_t DeviceBackend::wave_number(int layer, size_t wave) const {
  return static_cast<int64_t>(layer) * static_cast<int64_t>(running_.waves.size()) +
         static_cast<int64_t>(wave);
}

// Slices of a layer's wave into their half of staging, all in one call; behind a layer's last wave,
// those of the next layer's first one.
void DeviceBackend::stage(int layer, size_t wave) {
  if (wave == running_.waves.size()) ++layer, wave = 0;
  if (running_.staged.empty() || layer >= layout_.layers) return;
  const int64_t number = wave_number(layer, wave);
  Half& half = halves_[number % 2];
  if (half.wave == number) return;
  const int64_t window = windows_[static_cast<size_t>(layer)];
  Place& place = staging_.place(number % 2);
  timeline_.before_write(place, Lane::kUp);
  // A ticket to be taken when all of it is on its way.
  const Ticket later{Lane::kUp, timeline_.newest(Lane::kUp).number + 1};
  half = Half();
  device::Timeline::wrote(&place, later);
  std::vector<device::Pieces> runs;  // of neighbouring slots
  int64_t after = -1;                // the slot behind the last run
  const StagedWave& staged = running_.waves[wave];
  for (size_t i = staged.first; i < staged.end; ++i) {
    const Staged& slice = running_.staged[i];
    if (window > 0 && slice.window > window) continue;
    const int64_t slot = slice.host.value();
    timeline_.before_read(host_.place(slot), Lane::kUp);
    device::Timeline::reads(&host_.place(slot), later);
    if (runs.empty() || slot != after) {
      device::Pieces& run = runs.emplace_back();
      run.to_stride = layout_.largest_slice_bytes();
      run.from_stride = layout_.chunk_bytes();
      run.to = staging_.at(number % 2) + static_cast<int64_t>(i - staged.first) * run.to_stride;
      run.from = host_.at(slot) + layout_.slice_offset(layer);
      run.bytes = layout_.slice_bytes(layer);
    }
    ++runs.back().count;
    after = slot + 1;
    ++counters_.slices_staged;
    counters_.bytes_staged += runs.back().bytes;
  }
  if (!runs.empty()) move_up(timeline_.stream(Lane::kUp), runs);
  ticket(Lane::kUp);
  half = {number, window};
}

}  // namespace kvpager
