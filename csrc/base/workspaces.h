// Memory that calls of kernels need while they run, kept from one call for the next. A thread pool has
// it for all threads that call it: what they keep together is bounded, and counted.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/float_buffer.h"

namespace kvpager {

class Workspaces {
 public:
  // A prompt's 256 rows of 14,336 numbers need half of it. Larger ones go when their call ends.
  static constexpr int64_t kKeptBytes = int64_t{32} << 20;

  Workspaces() { kept_.reserve(kMost + 1); }

  // Kept or in use.
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  friend class Workspace;
  static constexpr size_t kMost = 8;

  // The smallest kept one of at least `count` floats, or a new one. Whoever finds another thread here, as
  // a forked child may do for ever, allocates for itself.
  FloatBuffer take(int64_t count) {
    FloatBuffer taken;
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const FloatBuffer& one) {
        return one.bytes() >= count * static_cast<int64_t>(sizeof(float));
      });
      if (found != kept_.end()) {
        taken = std::move(*found);
        kept_.erase(found);
        return taken;
      }
    }
    taken.reserve(count);
    bytes_ += taken.bytes();
    return taken;
  }

  void give_back(FloatBuffer buffer) noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || buffer.bytes() > kKeptBytes) {
      bytes_ -= buffer.bytes();
      return;
    }
    const auto place = std::find_if(kept_.begin(), kept_.end(), [&](const FloatBuffer& one) {
      return one.bytes() >= buffer.bytes();
    });
    kept_.insert(place, std::move(buffer));
    int64_t kept = 0;
    for (const FloatBuffer& one : kept_) kept += one.bytes();
    while (kept > kKeptBytes || kept_.size() > kMost) {
      kept -= kept_.front().bytes();
      bytes_ -= kept_.front().bytes();
      kept_.erase(kept_.begin());
    }
  }

  std::mutex mutex_;
  std::vector<FloatBuffer> kept_;  // ascending by size; the smallest goes first
  std::atomic<int64_t> bytes_{0};
};

// Floats for one call, which go back when it ends. Of none: nothing is taken.
class Workspace {
 public:
  Workspace(Workspaces& from, int64_t count) : from_(from) {
    if (count > 0) buffer_ = from_.take(count);
  }
  ~Workspace() {
    if (buffer_.bytes() > 0) from_.give_back(std::move(buffer_));
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  float* data() const { return buffer_.data(); }

 private:
  Workspaces& from_;
  FloatBuffer buffer_;
};

}  // namespace kvpager
