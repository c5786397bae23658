// Numbers of sequences, pins and forwards. No two in a process are equal, whatever they number and
// whichever pager they belong to: one that is handed to the wrong place is unknown there.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvpager {

// Thread-safe. 1, 2, ...
inline int64_t unique_number() noexcept {
  static std::atomic<int64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace kvpager
