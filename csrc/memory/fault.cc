#include "base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>

#include "base/mutex.h"

namespace kvpager::fault {

namespace {

struct Armed {
  int64_t visits_left;
  int error_number;      // 0: a short transfer
  int64_t transfer = 0;  // bytes
};

struct Registry {
  Mutex mutex;
  std::map<std::string, Armed> points KVPAGER_GUARDED_BY(mutex);
};

Registry& registry() {
  static Registry instance;
  return instance;
}

void arm(const std::string& point, const Armed& armed) {
  Registry& r = registry();
  const MutexLock lock(r.mutex);
  r.points[point] = armed;
  any_armed.store(true, std::memory_order_relaxed);
}

// What this visit meets, once.
std::optional<Armed> take(const char* point) {
  Registry& r = registry();
  const MutexLock lock(r.mutex);
  const auto it = r.points.find(point);
  if (it == r.points.end() || it->second.visits_left-- > 0) return std::nullopt;
  const Armed met = it->second;
  r.points.erase(it);
  any_armed.store(!r.points.empty(), std::memory_order_relaxed);
  if (met.error_number == kKill) ::kill(::getpid(), SIGKILL);
  return met;
}

}  // namespace

std::atomic<bool> any_armed{false};

void arm(const std::string& point, int64_t after, int error_number) {
  arm(point, Armed{after, error_number});
}

void arm_short(const std::string& point, int64_t after, int64_t bytes) {
  arm(point, Armed{after, 0, std::max<int64_t>(1, bytes)});
}

void disarm_all() {
  Registry& r = registry();
  const MutexLock lock(r.mutex);
  r.points.clear();
  any_armed.store(false, std::memory_order_relaxed);
}

int visit_slow(const char* point) {
  const auto met = take(point);
  return met ? met->error_number : 0;
}

int64_t visit_transfer_slow(const char* point, int64_t bytes) {
  const auto met = take(point);
  if (!met) return bytes;
  return met->error_number != 0 ? -met->error_number : std::min(bytes, met->transfer);
}

}  // namespace kvpager::fault
