// Chunks, seals and summaries in ordinary memory.
#include <cstring>

#include "base/capacity.h"
#include "base/fault.h"
#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/host_backend.h"

namespace kvpager {

HostBackend::HostBackend(const BackendParts& parts)
    : BackendParts(parts),
      pool_("pool_tokens", config_.slots.pool, layout_.chunk_bytes()),
      host_("host_bytes", config_.slots.host, layout_.chunk_bytes()),
      summaries_("summary_bytes", config_.slots.summaries, config_.summary_slot_bytes),
      staging_("staging", kChunksPerSplit * int64_t{kStreamedSequences},
               layout_.largest_slice_bytes()) {
  for (int64_t i = 0; i < pool_.slots(); ++i) freed(BlockId(static_cast<int32_t>(i)));
}

void HostBackend::freed(BlockId block) noexcept {
  addresses_stale_ = true;
  if (!config_.options.poison) return;
  std::memset(pool_.slot(block.value()), 0xFF, static_cast<size_t>(pool_.slot_bytes()));
}

const std::byte* HostBackend::address(const ChunkRecord& record) const {
  if (record.resident()) return pool_.slot(record.block.value());
  if (record.on_host()) return host_.slot(record.host.value());
  return nullptr;
}

void HostBackend::copy_chunk(const ChunkRecord& from, std::byte* to) const {
  if (const std::byte* bytes = address(from)) {
    std::memcpy(to, bytes, static_cast<size_t>(layout_.chunk_bytes()));
  } else {
    files_.read_chunk(from, to);
  }
}

void HostBackend::load(const ChunkRecord& from, BlockId to) {
  copy_chunk(from, pool_.slot(to.value()));
}

void HostBackend::load(const std::function<void(std::byte*)>& read, BlockId to) {
  read(pool_.slot(to.value()));
}

void HostBackend::load(const std::vector<Arrival>& arrivals, int threads) {
  threads_.run(
      static_cast<int64_t>(arrivals.size()),
      [&](int64_t i, int) {
        const Arrival& arrival = arrivals[static_cast<size_t>(i)];
        copy_chunk(ledger_[arrival.record], arrival.block.value() >= 0
                                                ? pool_.slot(arrival.block.value())
                                                : host_.slot(arrival.host.value()));
      },
      threads);
}

const std::byte* HostBackend::view(const ChunkRecord& record, int64_t offset, int64_t) {
  const std::byte* bytes = address(record);
  return bytes == nullptr ? nullptr : bytes + offset;
}

const std::byte* HostBackend::home(const ChunkRecord& record) {
  if (record.home_on_host()) return host_.slot(record.host.value());
  return record.has_lower_copy() ? nullptr : pool_.slot(record.block.value());
}

SharedArray<uint64_t> HostBackend::checksums(BlockId block) {
  return slice_checksums(layout_, pool_.slot(block.value()), threads_);
}

void HostBackend::summarize(BlockId block, SlotId summary) {
  const std::byte* chunk = pool_.slot(block.value());
  std::byte* out = summaries_.slot(summary.value());
  threads_.run(int64_t{layout_.layers} * layout_.kv_heads,
               [&](int64_t page, int) { config_.summarize_page(chunk, page, out); });
}

void HostBackend::write_home(BlockId block, const Home& to, SharedArray<uint64_t>* checksums) {
  const std::byte* bytes = pool_.slot(block.value());
  if (to.host.value() >= 0) {
    if (const int error = fault::visit("host.write")) {
      throw StorageError(str("host arena: write failed: ", std::strerror(error)));
    }
    std::memcpy(host_.slot(to.host.value()), bytes, static_cast<size_t>(layout_.chunk_bytes()));
  } else if (to.disk.value() >= 0) {
    KVPAGER_REQUIRE(!checksums->empty());
    files_.write_slot(to.disk, bytes);
  }
}

std::vector<std::byte*> HostBackend::summary_room(const std::vector<SlotId>& slots) {
  std::vector<std::byte*> room;
  room.reserve(slots.size());
  for (const SlotId slot : slots) room.push_back(summaries_.slot(slot.value()));
  return room;
}

void HostBackend::add_to(PagerStats* stats) const {
  stats->pool_bytes = pool_.mapped_bytes();
  stats->staging_bytes = staging_.mapped_bytes();
  stats->host_bytes = host_.mapped_bytes();
  stats->summary_bytes = summaries_.mapped_bytes();
  stats->scratch_bytes = scratch_bytes();
}

int64_t HostBackend::scratch_bytes() const {
  int64_t bytes = workspace_.bytes() + scan_.bytes() + capacity_bytes(chosen_) +
                  capacity_bytes(chosen_flat_) + capacity_bytes(chosen_offsets_) +
                  capacity_bytes(scan_rows_) + capacity_bytes(write_targets_) +
                  capacity_bytes(give_targets_) + capacity_bytes(parts_);
  for (const std::vector<int32_t>& chunks : chosen_) bytes += capacity_bytes(chunks);
  for (const Part& part : parts_) {
    bytes += capacity_bytes(part.chunks) + capacity_bytes(part.slices) +
             capacity_bytes(part.summaries) + capacity_bytes(part.needed);
  }
  return bytes;
}

// Assigning {} would keep the memory.
template <class T>
static void forget(std::vector<T>& many) {
  std::vector<T>().swap(many);
}

// A prompt's forwards of many rows need more than the decode steps after them, and so do those of many
// long sequences. Nothing of such a forward is kept.
void HostBackend::end() noexcept {
  forward_ = nullptr;
  awake_.reset();
  if (scratch_bytes() <= kKeptScratch) return;
  workspace_.release();
  scan_.release();
  forget(parts_);
  forget(scan_rows_);
  forget(chosen_);
  forget(chosen_flat_);
  forget(chosen_offsets_);
  forget(write_targets_);
  forget(give_targets_);
}

void HostBackend::check_invariants() {
  if (pool_.slots() != config_.options.pool_blocks) {
    throw InvariantError("invariant 2: the pool is not the size it was given");
  }
}

}  // namespace kvpager
