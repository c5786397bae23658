#include "snapshot/byte_watch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace kvpager::snapshot {

namespace {

constexpr int64_t kPieceBlocks = ByteWatch::kPieceBytes / ByteWatch::kBlockBytes;

int64_t parts(int64_t bytes, int64_t of) { return (bytes + of - 1) / of; }

}  // namespace

ByteWatch::ByteWatch(std::vector<Region> regions, int threads, uint64_t seed)
    : regions_(std::move(regions)), hash_(seed) {
  size_t blocks = 0, pieces = 0;
  for (const Region& region : regions_) {
    first_.push_back(blocks);
    first_piece_.push_back(pieces);
    blocks += static_cast<size_t>(blocks_of(region));
    pieces += static_cast<size_t>(parts(region.bytes, kPieceBytes));
    total_bytes_ += region.bytes;
  }
  first_piece_.push_back(pieces);
  checksums_.resize(blocks);
  digests_.resize(pieces);
  std::atomic<size_t> next{0};
  const auto read = [&] {
    for (size_t piece = next++; piece < pieces; piece = next++) {
      const auto after = std::upper_bound(first_piece_.begin(), first_piece_.end(), piece);
      const size_t region = static_cast<size_t>(after - first_piece_.begin()) - 1;
      digests_[piece] = read_piece(region, static_cast<int64_t>(piece - first_piece_[region]));
    }
  };
  const size_t count = std::min(static_cast<size_t>(std::max(1, threads)), pieces);
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

std::vector<Hash128> ByteWatch::digests(size_t region) const {
  const auto at = [&](size_t i) {
    return digests_.begin() + static_cast<std::ptrdiff_t>(first_piece_[i]);
  };
  return {at(region), at(region + 1)};
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
  return parts(region.bytes, kBlockBytes);
}

ByteWatch::Region ByteWatch::block_of(const Region& region, int64_t block) const {
  const int64_t begin = block * kBlockBytes;
  return {region.data + begin, std::min(kBlockBytes, region.bytes - begin)};
}

// The last block of a region has zeros after its end.
const std::byte* ByteWatch::whole_block(const Region& region, int64_t block,
                                        std::byte* room) const {
  const Region read = block_of(region, block);
  if (read.bytes == kBlockBytes) return read.data;
  std::memset(room, 0, kBlockBytes);
  std::memcpy(room, read.data, static_cast<size_t>(read.bytes));
  return room;
}

Hash128 ByteWatch::read_piece(size_t region, int64_t piece) {
  const int64_t begin = piece * kPieceBlocks;
  const int64_t end = std::min(begin + kPieceBlocks, blocks_of(regions_[region]));
  std::array<std::byte, kBlockBytes> room;
  std::array<Hash128, kPieceBlocks> hashes{};
  for (int64_t block = begin; block < end; ++block) {
    const std::byte* data = whole_block(regions_[region], block, room.data());
    const Hash128 hash = hash_.hash128(data, kBlockBytes);
    hashes[static_cast<size_t>(block - begin)] = hash;
    checksums_[first_[region] + static_cast<size_t>(block)] = static_cast<uint32_t>(hash.low);
  }
  return hash_.hash128(hashes.data(), sizeof hashes);
}

void ByteWatch::prefetch(size_t drawn) const {
  const auto [region, block] = drawn_[drawn];
  const Region read = block_of(regions_[region], block);
  for (int64_t at = 0; at < read.bytes; at += 64) __builtin_prefetch(read.data + at);
  __builtin_prefetch(&checksums_[first_[region] + static_cast<size_t>(block)]);
  asm volatile("");  // or GCC sees a function without effects, and leaves out its calls
}

bool ByteWatch::same(size_t region, int64_t block) const {
  std::array<std::byte, kBlockBytes> room;
  const std::byte* data = whole_block(regions_[region], block, room.data());
  return static_cast<uint32_t>(hash_.hash64(data, kBlockBytes)) ==
         checksums_[first_[region] + static_cast<size_t>(block)];
}

}  // namespace kvpager::snapshot
