// How every public function runs: under the pager's lock, one at a time.
#pragma once

#include <exception>
#include <mutex>

#include "pager/impl.h"

namespace kvpager {

// Runs a step under the lock. Checking builds restate the invariants after it, also when it failed:
// a failed step must leave a pager as sound as a successful one.
template <class Step>
auto locked(Pager::Impl& impl, const Step& step) {
  impl.process.require("pager");  // first: a thread the child has not may hold the lock for ever
  const std::lock_guard<std::mutex> lock(impl.mutex);
#ifdef KVPAGER_CHECK_INVARIANTS
  struct Check {
    Pager::Impl& impl;
    ~Check() noexcept(false) {
      if (std::uncaught_exceptions() == 0) impl.check_invariants();
    }
  } check{impl};
  try {
    return step();
  } catch (...) {
    impl.check_invariants();
    throw;
  }
#else
  return step();
#endif
}

}  // namespace kvpager
