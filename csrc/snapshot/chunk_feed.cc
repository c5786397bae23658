#include "snapshot/chunk_feed.h"

#include <algorithm>
#include <new>
#include <system_error>

#include "kvpager/error.h"

namespace kvpager::snapshot {

namespace {

constexpr size_t kScratchAlignment = 4096;

size_t groups_of(size_t chunks, size_t each) { return (chunks + each - 1) / each; }

}  // namespace

ChunkFeed::ChunkFeed(const SnapshotContent& content, const std::vector<int64_t>& which,
                     std::vector<SnapshotChunk>* records, const std::string& path)
    : content_(content),
      which_(which),
      records_(records),
      path_(path),
      layout_(content.meta().layout) {
  const int64_t fitting = kGroupBytes / layout_.chunk_bytes();
  chunks_per_group_ = static_cast<size_t>(std::clamp<int64_t>(fitting, 1, kMostChunks));
  count_ = groups_of(which_.size(), chunks_per_group_);
  const auto bytes = chunks_per_group_ * static_cast<size_t>(layout_.chunk_bytes());
  const size_t rounded = (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  for (size_t g = 0; g < std::min(count_, kGroups); ++g) {
    groups_[g].scratch.reset(
        static_cast<std::byte*>(std::aligned_alloc(kScratchAlignment, rounded)));
    if (groups_[g].scratch == nullptr) throw std::bad_alloc();
    groups_[g].addresses.reserve(chunks_per_group_);
  }
  if (count_ < 2) return;
  try {
    meeting_->worker = std::thread([this] { work(); });
  } catch (const std::system_error&) {
    // No thread to be had: next() prepares, one group at a time.
  }
}

ChunkFeed::~ChunkFeed() {
  if (process_.forked()) {
    static_cast<void>(meeting_.release());
    return;
  }
  stop();
  for (Group& group : groups_) give_back(&group);
}

void ChunkFeed::stop() noexcept {
  if (!meeting_->worker.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(meeting_->mutex);
    stopping_ = true;
  }
  meeting_->changed.notify_all();
  meeting_->worker.join();
}

const std::vector<const std::byte*>& ChunkFeed::next() {
  process_.require("snapshot writer");
  if (taken_ > emptied_) {
    give_back(&group(emptied_));
    const std::lock_guard<std::mutex> lock(meeting_->mutex);
    ++emptied_;
  }
  meeting_->changed.notify_all();
  if (taken_ == count_) return none_;
  if (meeting_->worker.joinable()) {
    std::unique_lock<std::mutex> lock(meeting_->mutex);
    meeting_->changed.wait(lock, [this] { return filled_ > taken_; });
  } else {
    fill(taken_);
  }
  Group& ready = group(taken_);
  if (ready.error) std::rethrow_exception(ready.error);
  ++taken_;
  return ready.addresses;
}

void ChunkFeed::work() {
  for (size_t number = 0; number < count_; ++number) {
    {
      std::unique_lock<std::mutex> lock(meeting_->mutex);
      meeting_->changed.wait(lock, [&] { return stopping_ || number < emptied_ + kGroups; });
      if (stopping_) return;
    }
    fill(number);
    const bool failed = group(number).error != nullptr;
    {
      const std::lock_guard<std::mutex> lock(meeting_->mutex);
      filled_ = number + 1;
    }
    meeting_->changed.notify_all();
    if (failed) return;
  }
}

// Borrows what it can: after an error the addresses are those of the chunks to be given back.
void ChunkFeed::fill(size_t number) noexcept {
  Group& g = group(number);
  g.first = number * chunks_per_group_;
  const size_t end = std::min(g.first + chunks_per_group_, which_.size());
  try {
    for (size_t i = g.first; i < end; ++i) {
      std::byte* scratch =
          g.scratch.get() + (i - g.first) * static_cast<size_t>(layout_.chunk_bytes());
      g.addresses.push_back(content_.borrow_chunk(which_[i], scratch));
      prepare(i, g.addresses.back());
    }
  } catch (...) {
    g.error = std::current_exception();
  }
}

void ChunkFeed::prepare(size_t i, const std::byte* payload) {
  SharedArray<uint64_t>& given = (*records_)[i].slice_checksum;
  std::vector<uint64_t> found;
  for (int layer = 0; layer < layout_.layers; ++layer) {
    const uint64_t computed =
        slice_checksum(payload + layout_.slice_offset(layer), layout_.slice_bytes(layer));
    found.push_back(computed);
    const uint64_t expected = given.empty() ? computed : given[static_cast<size_t>(layer)];
    if (computed != expected) {
      throw CorruptSnapshotError(
          str(path_, ": not saved: chunk ", which_[i], ", layer ", layer, " has bytes of checksum ",
              computed, ", expected ", expected, ", that of the bytes when the chunk was sealed"),
          which_[i], layer, which_[i] * layout_.chunk_tokens, (*records_)[i].valid);
    }
  }
  if (given.empty()) given = std::move(found);
}

void ChunkFeed::give_back(Group* group) noexcept {
  for (size_t i = 0; i < group->addresses.size(); ++i) {
    content_.give_back_chunk(which_[group->first + i]);
  }
  group->addresses.clear();
}

}  // namespace kvpager::snapshot
