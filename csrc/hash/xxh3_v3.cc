#include "hash/xxh3_v3.h"

#include "hash/xxh3_stripes.h"
#include "kvpager/require.h"

namespace kvpager::xxh3 {

void sum_stripes_v3(const uint8_t* data, size_t bytes, const uint8_t* secret, uint64_t* out) {
  KVPAGER_REQUIRE(__builtin_cpu_supports("x86-64-v3"));
  sum_stripes(data, bytes, secret, out);
}

}  // namespace kvpager::xxh3
