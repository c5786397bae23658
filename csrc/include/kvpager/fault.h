// The fault seam: named points where tests make the next operation fail. Free when nothing is
// armed.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace kvpager::fault {

// Known points: "host.write", "disk.write", "disk.read", "snapshot.write", "snapshot.fsync",
// "snapshot.rename", "snapshot.read". Makes the `after`-th next visit of `point` (0: the very next)
// report `error_number`, once.
void arm(const std::string& point, int64_t after, int error_number);
void disarm_all();

extern std::atomic<bool> any_armed;
int visit_slow(const char* point);
// 0, or the errno this visit must fail with.
inline int visit(const char* point) {
  return any_armed.load(std::memory_order_relaxed) ? visit_slow(point) : 0;
}

}  // namespace kvpager::fault
