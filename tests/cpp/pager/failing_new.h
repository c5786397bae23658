// Allocations that fail: operator new of this program, replaced.
#pragma once

#include <cstdint>

namespace kvpager::pager_test {

// While it lives, the `nth` next allocation (0: the very next) of this thread throws std::bad_alloc,
// once. What the invariants' check allocates is not counted.
class FailingNew {
 public:
  explicit FailingNew(int64_t nth);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
  bool met() const;
};

}  // namespace kvpager::pager_test
