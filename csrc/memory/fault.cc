#include "kvpager/fault.h"

#include <map>
#include <mutex>

namespace kvpager::fault {

namespace {

struct Armed {
  int64_t visits_left;
  int error_number;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, Armed> points;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

std::atomic<bool> any_armed{false};

void arm(const std::string& point, int64_t after, int error_number) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.points[point] = Armed{after, error_number};
  any_armed.store(true, std::memory_order_relaxed);
}

void disarm_all() {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.points.clear();
  any_armed.store(false, std::memory_order_relaxed);
}

int visit_slow(const char* point) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto it = r.points.find(point);
  if (it == r.points.end()) return 0;
  if (it->second.visits_left-- > 0) return 0;
  const int error_number = it->second.error_number;
  r.points.erase(it);
  any_armed.store(!r.points.empty(), std::memory_order_relaxed);
  return error_number;
}

}  // namespace kvpager::fault
