// XXH3-64 once more, for processors with 256-bit integers: the same value, in half the time. Compiled
// with the instruction set's flags; whoever calls it has asked the processor.
#include "snapshot/checksum_v3.h"

#include "kvpager/require.h"

#define XXH_INLINE_ALL  // and static: nothing here can be taken for the baseline's
#include "xxhash.h"

namespace kvpager::snapshot {

uint64_t xxh3_64_v3(const void* data, size_t bytes) {
  KVPAGER_REQUIRE(__builtin_cpu_supports("x86-64-v3"));
  return XXH3_64bits(data, bytes);
}

}  // namespace kvpager::snapshot
