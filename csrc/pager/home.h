#pragma once

#include "kvpager/types.h"

namespace kvpager {

// Where a sealed chunk's own copy below the pool goes. Both empty: its block itself is the home.
struct Home {
  SlotId host;
  SlotId disk;
};

}  // namespace kvpager
