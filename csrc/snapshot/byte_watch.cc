#include "snapshot/byte_watch.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "snapshot/checksum.h"

namespace kvpager::snapshot {

ByteWatch::ByteWatch(std::vector<Region> regions, int threads) : regions_(std::move(regions)) {
  size_t blocks = 0;
  for (const Region& region : regions_) {
    first_.push_back(blocks);
    blocks += static_cast<size_t>(blocks_of(region));
    total_bytes_ += region.bytes;
  }
  checksums_.resize(blocks);
  // Each thread takes the next stretch of blocks, so that one large region keeps all busy.
  constexpr size_t kStretch = 4096;
  const size_t stretches = (blocks + kStretch - 1) / kStretch;
  std::atomic<size_t> next{0};
  const auto read = [&] {
    for (size_t stretch = next++; stretch < stretches; stretch = next++) {
      const size_t begin = stretch * kStretch;
      const size_t end = std::min(blocks, begin + kStretch);
      size_t region = static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), begin) -
                                          first_.begin()) -
                      1;
      for (size_t i = begin; i < end; ++i) {
        while (region + 1 < first_.size() && first_[region + 1] <= i) ++region;
        checksums_[i] = checksum(regions_[region], static_cast<int64_t>(i - first_[region]));
      }
    }
  };
  const size_t count = std::min(static_cast<size_t>(std::max(1, threads)), stretches);
  std::vector<std::thread> others;
  others.reserve(count);
  try {
    while (others.size() + 1 < count) others.emplace_back(read);
  } catch (const std::system_error&) {
    // No more threads to be had: those there are do it.
  } catch (const std::bad_alloc&) {
    // Nor memory for one.
  }
  read();
  for (std::thread& other : others) other.join();
}

int64_t ByteWatch::sample(int64_t blocks) {
  drawn_.clear();
  for (size_t i = 0; i < regions_.size(); ++i) {
    const auto held = static_cast<uint64_t>(blocks_of(regions_[i]));
    for (int64_t n = 0; n < blocks && held > 0; ++n) {
      // xorshift64 (Marsaglia 2003), scaled to the region by its upper half.
      random_ ^= random_ << 13;
      random_ ^= random_ >> 7;
      random_ ^= random_ << 17;
      drawn_.emplace_back(i, static_cast<int64_t>(((random_ >> 32) * held) >> 32));
    }
  }
  // Random places are in no cache: those a few blocks ahead are asked for.
  constexpr size_t kAhead = 4;
  for (size_t d = 0; d < std::min(kAhead, drawn_.size()); ++d) prefetch(d);
  for (size_t d = 0; d < drawn_.size(); ++d) {
    if (d + kAhead < drawn_.size()) prefetch(d + kAhead);
    if (!same(drawn_[d].first, drawn_[d].second)) return static_cast<int64_t>(drawn_[d].first);
  }
  return -1;
}

int64_t ByteWatch::sweep(int64_t bytes) {
  if (total_bytes_ == 0) return -1;
  for (int64_t left = std::min(bytes, total_bytes_); left > 0;) {
    const Region& region = regions_[sweep_region_];
    if (sweep_block_ >= blocks_of(region)) {
      sweep_region_ = (sweep_region_ + 1) % regions_.size();
      sweep_block_ = 0;
      continue;
    }
    if (!same(sweep_region_, sweep_block_)) return static_cast<int64_t>(sweep_region_);
    left -= std::min(kBlockBytes, region.bytes - sweep_block_ * kBlockBytes);
    ++sweep_block_;
  }
  return -1;
}

int64_t ByteWatch::blocks_of(const Region& region) const {
  return (region.bytes + kBlockBytes - 1) / kBlockBytes;
}

ByteWatch::Region ByteWatch::block_of(const Region& region, int64_t block) const {
  const int64_t begin = block * kBlockBytes;
  return {region.data + begin, std::min(kBlockBytes, region.bytes - begin)};
}

uint32_t ByteWatch::checksum(const Region& region, int64_t block) const {
  const Region read = block_of(region, block);
  return static_cast<uint32_t>(xxh3_64(read.data, static_cast<size_t>(read.bytes)));
}

void ByteWatch::prefetch(size_t drawn) const {
  const auto [region, block] = drawn_[drawn];
  const Region read = block_of(regions_[region], block);
  for (int64_t at = 0; at < read.bytes; at += 64) __builtin_prefetch(read.data + at);
  __builtin_prefetch(&checksums_[first_[region] + static_cast<size_t>(block)]);
  asm volatile("");  // or GCC sees a function without effects, and leaves out its calls
}

bool ByteWatch::same(size_t region, int64_t block) const {
  return checksum(regions_[region], block) ==
         checksums_[first_[region] + static_cast<size_t>(block)];
}

}  // namespace kvpager::snapshot
