#include "snapshot/checksum.h"

#define XXH_INLINE_ALL
#include "kvpager/snapshot.h"
#include "snapshot/checksum_v3.h"
#include "xxhash.h"

namespace kvpager {

namespace {

#ifdef KVPAGER_SNAPSHOT_V3
bool has_v3() {
  static const bool has = (__builtin_cpu_init(), __builtin_cpu_supports("x86-64-v3") != 0);
  return has;
}
#endif

}  // namespace

uint64_t slice_checksum(const std::byte* data, int64_t bytes) {
  return snapshot::xxh3_64(data, static_cast<size_t>(bytes));
}

namespace snapshot {

uint64_t xxh3_64(const void* data, size_t bytes) {
#ifdef KVPAGER_SNAPSHOT_V3
  if (has_v3()) return xxh3_64_v3(data, bytes);
#endif
  return XXH3_64bits(data, bytes);
}

struct Digest128::State {
  XXH3_state_t xxh;  // asks for 64-byte alignment, which operator new honours in C++17
};

Digest128::Digest128() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }

Digest128::~Digest128() = default;

void Digest128::add(const void* data, size_t bytes) {
  const uint64_t length = bytes;
  XXH3_128bits_update(&state_->xxh, &length, sizeof(length));
  XXH3_128bits_update(&state_->xxh, data, bytes);
}

Hash128 Digest128::value() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh);
  return Hash128{hash.low64, hash.high64};
}

}  // namespace snapshot
}  // namespace kvpager
