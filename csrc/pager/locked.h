// How every public function runs: under the pager's lock, one at a time.
#pragma once

#include <exception>

#include "pager/impl.h"

namespace kvpager {

// Whether this thread is in a check of the invariants, whose own allocations tests of failing ones do
// not count.
inline thread_local bool checking_invariants = false;

// A step names the mutex by the pager that it is a step of, which is none of locked()'s names for it.
template <class Step>
decltype(auto) run_step(const Step& step) KVPAGER_UNCHECKED_LOCKING {
  return step();
}

// Runs a step under the lock. Checking builds restate the invariants after it, also when it failed:
// a failed step must leave a pager as sound as a successful one.
template <class Step>
auto locked(Pager::Impl& impl, const Step& step) {
  impl.process.require("pager");  // first: a thread the child has not may hold the lock for ever
  const MutexLock lock(impl.mutex);
#ifdef KVPAGER_CHECK_INVARIANTS
  const auto restate = [&impl] {
    struct Checking {
      Checking() { checking_invariants = true; }
      ~Checking() { checking_invariants = false; }
    } const checking;
    impl.mutex.held();
    impl.check_invariants();
  };
  struct Check {
    const decltype(restate)& check;
    ~Check() noexcept(false) {
      if (std::uncaught_exceptions() == 0) check();
    }
  } at_end{restate};
  try {
    return run_step(step);
  } catch (...) {
    restate();
    throw;
  }
#else
  return run_step(step);
#endif
}

}  // namespace kvpager
