// A step that is made to fail at every point where it can.
#pragma once

#include "small_pager.h"

namespace kvpager::pager_test {

// Arms `point` at its nth visit for n = 0, 1, ... < most, until `step` gets through without meeting
// the fault; returns n, or -1. Every failure must be an Error; `check` then looks at the pager. A
// fault that was met may not be swallowed, unless `survivable`, and then `check` looks all the same.
template <class Error, class Step, class Check>
int64_t fail_at_visits(const char* point, int64_t most, bool survivable, const Step& step,
                       const Check& check) {
  const Disarm disarm;
  for (int64_t nth = 0; nth < most; ++nth) {
    CAPTURE(point);
    CAPTURE(nth);
    fault::arm(point, nth, EIO);
    bool failed = false;
    try {
      step();
    } catch (const Error& error) {
      failed = true;
      CHECK(contains(error.what(), "Input/output error"));
    }
    const bool unmet = fault::any_armed.load();
    fault::disarm_all();
    if (!failed && unmet) return nth;
    if (!failed) REQUIRE(survivable);
    check();
  }
  return -1;
}

}  // namespace kvpager::pager_test
