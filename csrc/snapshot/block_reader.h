// Blocks of a chunk store, read from open files into memory of the caller's: whole and as they were written, or not
// at all.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "kvpager/process.h"

namespace kvpager::snapshot {

// XXH3-128, as big-endian bytes, of `binding` and of the XXH3-128 of the data.
using BlockCheck = std::array<std::byte, 16>;
BlockCheck block_check(std::string_view binding, const std::byte* data, size_t bytes);

// Whether reads may still write to their destinations. Once closed it stays closed. Thread-safe.
class ReadGate {
 public:
  enum class State { kOpen, kAbandoned, kLate };

  // Closes by itself after `seconds`.
  explicit ReadGate(double seconds = std::numeric_limits<double>::infinity()) : seconds_(seconds) {}

  // Closes the gate; returns when no copy is running.
  void close() KVPAGER_TAKES(copying_);
  bool is_open();
  // Copies a block; false, and nothing is written, if the gate is closed.
  bool copy(std::byte* into, const std::byte* data, size_t bytes) KVPAGER_TAKES(copying_);
  // What `is_open` and `copy` found last.
  State state() const { return state_; }

 private:
  using Clock = std::chrono::steady_clock;

  const MadeIn process_;
  const double seconds_;
  const Clock::time_point made_ = Clock::now();
  std::atomic<bool> abandoned_ = false;
  std::atomic<State> state_ = State::kOpen;
  Mutex copying_;
};

// A block in an open file, and its destination.
struct BlockRead {
  int file;
  int64_t start;
  std::string_view binding;
  std::string_view check;
  std::byte* into;
  size_t bytes;
};

enum class BlockResult {
  kHit,         // copied
  kMiss,        // the gate was closed
  kDamaged,     // not what was written, or the file ends before
  kUnreadable,  // the system's error
};

// Reads blocks one after the other, each into scratch memory; copies those whose check is right.
std::vector<BlockResult> read_blocks(ReadGate& gate, const std::vector<BlockRead>& blocks);

}  // namespace kvpager::snapshot
