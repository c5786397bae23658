// The fault seam: named points where tests make the next operation fail, stop half way or take the
// process with it. Only builds for tests have it (KVPAGER_TEST_SEAMS); elsewhere no visit fails.
#pragma once

#include <cstdint>

#ifdef KVPAGER_TEST_SEAMS
#include <atomic>
#include <string>
#endif

namespace kvpager::fault {

#ifdef KVPAGER_TEST_SEAMS

// Instead of an errno: the process dies at this visit, as by SIGKILL.
inline constexpr int kKill = -1;

// Known points: "host.write", "disk.reserve", "disk.write", "disk.read", "block.read", "snapshot.read",
// "snapshot.share" (the lock on a pack that is read), and of a snapshot being written "snapshot.create",
// "snapshot.lock", "snapshot.look", "snapshot.reserve", "snapshot.write", "snapshot.truncate",
// "snapshot.fsync" (file, then folder), "snapshot.rename". Of a device: "device.allocate", "device.pin",
// "device.up" and "device.down" (a copy is refused when it is enqueued), "device.record" (a ticket cannot be
// taken), "device.order" (a lane cannot be told to wait), "device.wait" (the host's wait reports that earlier
// work failed) and "device.launch" (a kernel is refused).
// Makes the `after`-th next visit of `point` (0: the very next) report `error_number`, once.
void arm(const std::string& point, int64_t after, int error_number);
// Makes that visit a short one: of what it was asked to transfer it moves `bytes`, at least 1.
// Points that transfer nothing, or not through visit_transfer, pass it unharmed.
void arm_short(const std::string& point, int64_t after, int64_t bytes);
void disarm_all();

extern std::atomic<bool> any_armed;
int visit_slow(const char* point);
int64_t visit_transfer_slow(const char* point, int64_t bytes);
// 0, or the errno this visit must fail with.
inline int visit(const char* point) {
  return any_armed.load(std::memory_order_relaxed) ? visit_slow(point) : 0;
}
// How many of `bytes` this visit may transfer, or -errno.
inline int64_t visit_transfer(const char* point, int64_t bytes) {
  return any_armed.load(std::memory_order_relaxed) ? visit_transfer_slow(point, bytes) : bytes;
}
#else
constexpr int visit(const char*) { return 0; }
constexpr int64_t visit_transfer(const char*, int64_t bytes) { return bytes; }
#endif

}  // namespace kvpager::fault
