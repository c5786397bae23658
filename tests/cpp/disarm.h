// Takes back the faults of a test when it ends.
#pragma once

#include "base/fault.h"

namespace kvpager::testing {

struct Disarm {
  ~Disarm() { fault::disarm_all(); }
};

}  // namespace kvpager::testing
