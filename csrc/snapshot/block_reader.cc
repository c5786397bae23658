#include "snapshot/block_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "base/fault.h"
#include "hash/xxh3.h"

namespace kvpager::snapshot {

namespace {

BlockCheck big_endian(const Hash128& hash) {
  const uint64_t words[] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};
  BlockCheck bytes;
  std::memcpy(bytes.data(), words, sizeof words);
  return bytes;
}

std::string_view text(const BlockCheck& check) {
  return {reinterpret_cast<const char*>(check.data()), check.size()};
}

BlockResult read_block(ReadGate& gate, const BlockRead& block, std::byte* scratch) {
  if (!gate.is_open()) return BlockResult::kMiss;
  for (size_t done = 0; done < block.bytes;) {
    const int64_t allowed =
        fault::visit_transfer("block.read", static_cast<int64_t>(block.bytes - done));
    if (allowed < 0) errno = static_cast<int>(-allowed);
    const ssize_t n = allowed < 0
                          ? -1
                          : ::pread(block.file, scratch + done, static_cast<size_t>(allowed),
                                    static_cast<off_t>(block.start) + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return BlockResult::kUnreadable;
    if (n == 0) return BlockResult::kDamaged;
    done += static_cast<size_t>(n);
  }
  if (text(block_check(block.binding, scratch, block.bytes)) != block.check) {
    return BlockResult::kDamaged;
  }
  return gate.copy(block.into, scratch, block.bytes) ? BlockResult::kHit : BlockResult::kMiss;
}

}  // namespace

BlockCheck block_check(std::string_view binding, const std::byte* data, size_t bytes) {
  std::string bound(binding);
  bound += text(big_endian(xxh3_128(data, bytes)));
  return big_endian(xxh3_128(bound.data(), bound.size()));
}

void ReadGate::close() {
  abandoned_ = true;
  // In a forked child no copy is running, whatever the mutex says.
  if (process_.forked()) return;
  const MutexLock lock(copying_);
}

bool ReadGate::is_open() {
  const std::chrono::duration<double> passed = Clock::now() - made_;
  if (abandoned_) {
    state_ = State::kAbandoned;
  } else if (passed.count() > seconds_) {
    state_ = State::kLate;
  }
  return state_ == State::kOpen;
}

bool ReadGate::copy(std::byte* into, const std::byte* data, size_t bytes) {
  const MutexLock lock(copying_);
  if (!is_open()) return false;
  std::memcpy(into, data, bytes);
  return true;
}

std::vector<BlockResult> read_blocks(ReadGate& gate, const std::vector<BlockRead>& blocks) {
  size_t most = 0;
  for (const BlockRead& block : blocks) most = std::max(most, block.bytes);
  const std::unique_ptr<std::byte[]> scratch(new std::byte[most]);
  std::vector<BlockResult> results;
  results.reserve(blocks.size());
  for (const BlockRead& block : blocks) results.push_back(read_block(gate, block, scratch.get()));
  return results;
}

}  // namespace kvpager::snapshot
