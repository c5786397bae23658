// How every public function runs: under the pager's lock, one at a time.
#pragma once

#include <exception>
#include <mutex>

#include "pager/impl.h"

namespace kvpager {

// Whether this thread is in a check of the invariants, whose own allocations tests of failing ones do
// not count.
inline thread_local bool checking_invariants = false;

// Runs a step under the lock. Checking builds restate the invariants after it, also when it failed:
// a failed step must leave a pager as sound as a successful one.
template <class Step>
auto locked(Pager::Impl& impl, const Step& step) {
  impl.process.require("pager");  // first: a thread the child has not may hold the lock for ever
  const std::lock_guard<std::mutex> lock(impl.mutex);
#ifdef KVPAGER_CHECK_INVARIANTS
  const auto restate = [&impl] {
    struct Checking {
      Checking() { checking_invariants = true; }
      ~Checking() { checking_invariants = false; }
    } const checking;
    impl.check_invariants();
  };
  struct Check {
    const decltype(restate)& run;
    ~Check() noexcept(false) {
      if (std::uncaught_exceptions() == 0) run();
    }
  } check{restate};
  try {
    return step();
  } catch (...) {
    restate();
    throw;
  }
#else
  return step();
#endif
}

}  // namespace kvpager
