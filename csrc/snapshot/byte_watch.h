// Tells whether memory that belongs to others still holds what it held: the weights of a model. Reads
// all of it once, and then a little of it again whenever asked. Not thread-safe.
//
// Memory is taken in blocks of kBlockBytes, each known by 32 bits of its hash: an accident or a program
// that does not know of this is found by it, somebody who wants to hide a change is not. Digests are
// of the whole hashes: one reading is enough to know weights again and to watch them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hash/xxh3.h"

namespace kvpager::snapshot {

class ByteWatch {
 public:
  static constexpr int64_t kBlockBytes = 1024;
  static constexpr int64_t kPieceBytes = 1 << 20;

  // A range [data, data + bytes). REQUIRES: it stays readable while the watch lives.
  struct Region {
    const std::byte* data;
    int64_t bytes;
  };

  // Reads every region, on up to `threads` threads. seed: of the hashes.
  ByteWatch(std::vector<Region> regions, int threads, uint64_t seed);

  // What a region held, as a digest of each kPieceBytes of it; depends on nothing but its bytes and
  // the seed, without which two contents of one digest are not to be found.
  std::vector<Hash128> digests(size_t region) const;

  // Reads `blocks` blocks of each region again, at random places; returns the number of the first
  // region that was found changed, -1 if none was.
  int64_t sample(int64_t blocks);

  // Reads about `bytes` again from where the last call ended, round and round; returns as `sample`.
  // Calls whose bytes add up to total_bytes() and a block per call have read everything.
  int64_t sweep(int64_t bytes);

  int64_t total_bytes() const { return total_bytes_; }
  size_t regions() const { return regions_.size(); }

 private:
  int64_t blocks_of(const Region& region) const;
  Region block_of(const Region& region, int64_t block) const;
  const std::byte* whole_block(const Region& region, int64_t block, std::byte* room) const;
  Hash128 read_piece(size_t region, int64_t piece);
  void prefetch(size_t drawn) const;
  bool same(size_t region, int64_t block) const;

  std::vector<Region> regions_;
  SeededXxh3 hash_;
  std::vector<size_t> first_;        // of each region, where its blocks begin in checksums_
  std::vector<size_t> first_piece_;  // and its pieces in digests_; one more: their number
  std::vector<uint32_t> checksums_;
  std::vector<Hash128> digests_;
  std::vector<std::pair<size_t, int64_t>> drawn_;  // region and block; of the call under way
  int64_t total_bytes_ = 0;
  size_t sweep_region_ = 0;
  int64_t sweep_block_ = 0;
  uint64_t random_ = 0x9E3779B97F4A7C15;
};

}  // namespace kvpager::snapshot
