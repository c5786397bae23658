#include "core/legacy_chain.h"

#include <cstring>
#include <vector>

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace kvpager {
namespace {

Hash128 digest(XXH3_state_t* state) {
  const XXH128_hash_t h = XXH3_128bits_digest(state);
  return {h.low64, h.high64};
}

}  // namespace

Hash128 legacy_root(const std::string& namespace_key, const std::string& salt) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  // Lengths first: no two (key, salt) pairs can spell the same bytes.
  const uint64_t lengths[2] = {namespace_key.size(), salt.size()};
  XXH3_128bits_update(&state, lengths, sizeof lengths);
  XXH3_128bits_update(&state, namespace_key.data(), namespace_key.size());
  XXH3_128bits_update(&state, salt.data(), salt.size());
  return digest(&state);
}

Hash128 legacy_next(const Hash128& parent, const TokenId* tokens, int64_t count,
                    Provenance provenance) {
  // One buffer, one call: a streaming state costs more to set up than these few hundred bytes to
  // hash.
  thread_local std::vector<uint64_t> buffer;
  const size_t bytes = static_cast<size_t>(count) * sizeof(TokenId);
  if (buffer.size() < 3 + (bytes + 7) / 8) buffer.resize(3 + (bytes + 7) / 8);
  buffer[0] = parent.low;
  buffer[1] = parent.high;
  buffer[2] = static_cast<uint64_t>(provenance);
  std::memcpy(buffer.data() + 3, tokens, bytes);
  const XXH128_hash_t h = XXH3_128bits(buffer.data(), 3 * sizeof(uint64_t) + bytes);
  return {h.low64, h.high64};
}

}  // namespace kvpager
