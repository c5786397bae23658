#include "core/legacy_chain.h"

#include <cstring>
#include <vector>

#include "hash/xxh3.h"

namespace kvpager {

Hash128 legacy_root(const std::string& namespace_key, const std::string& salt) {
  // Lengths first: no two (key, salt) pairs can spell the same bytes.
  const uint64_t lengths[2] = {namespace_key.size(), salt.size()};
  std::string bytes(reinterpret_cast<const char*>(lengths), sizeof lengths);
  bytes += namespace_key;
  bytes += salt;
  return xxh3_128(bytes.data(), bytes.size());
}

Hash128 legacy_next(const Hash128& parent, const TokenId* tokens, int64_t count,
                    Provenance provenance) {
  thread_local std::vector<uint64_t> buffer;
  const size_t bytes = static_cast<size_t>(count) * sizeof(TokenId);
  if (buffer.size() < 3 + (bytes + 7) / 8) buffer.resize(3 + (bytes + 7) / 8);
  buffer[0] = parent.low;
  buffer[1] = parent.high;
  buffer[2] = static_cast<uint64_t>(provenance);
  std::memcpy(buffer.data() + 3, tokens, bytes);
  return xxh3_128(buffer.data(), 3 * sizeof(uint64_t) + bytes);
}

}  // namespace kvpager
