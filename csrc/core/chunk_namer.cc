#include "core/chunk_namer.h"

#include <algorithm>
#include <cstring>

#include "kvpager/require.h"

namespace kvpager {
namespace {

constexpr size_t kNameBytes = sizeof(ChunkName::words);  // of a key too
constexpr Blake2b::Person kKeyPerson = {"kvpager key"};
constexpr Blake2b::Person kChunkPerson = {"kvpager chunk"};

Blake2b keyed_by(const std::string& namespace_key, const std::string& salt) {
  // Lengths first: no two (namespace, salt) pairs can spell the same bytes.
  const uint64_t lengths[2] = {namespace_key.size(), salt.size()};
  std::string message(reinterpret_cast<const char*>(lengths), sizeof lengths);
  message += namespace_key;
  message += salt;
  const auto key = Blake2b(kNameBytes, nullptr, 0, kKeyPerson)(message.data(), message.size());
  return Blake2b(kNameBytes, key.data(), kNameBytes, kChunkPerson);
}

}  // namespace

ChunkNamer::ChunkNamer(const std::string& namespace_key, const std::string& salt)
    : hash_(keyed_by(namespace_key, salt)) {}

ChunkName ChunkNamer::next(const ChunkName& parent, const TokenId* tokens, int64_t count,
                           Provenance provenance) const {
  const Link link = {&parent, tokens, provenance};
  ChunkName name;
  next_of_each(&link, 1, count, &name);
  return name;
}

void ChunkNamer::next_of_each(const Link* links, size_t count, int64_t tokens,
                              ChunkName* out) const {
  constexpr size_t kMost = 4;   // at a time
  constexpr size_t kFront = 6;  // words before the ids
  KVPAGER_REQUIRE(tokens <= kMostChunkTokens);
  uint64_t messages[kMost][kFront + kMostChunkTokens * sizeof(TokenId) / sizeof(uint64_t)];
  const size_t id_bytes = static_cast<size_t>(tokens) * sizeof(TokenId);
  for (size_t first = 0; first < count; first += kMost) {
    const size_t some = std::min(kMost, count - first);
    const void* from[kMost] = {};
    for (size_t i = 0; i < some; ++i) {
      const Link& link = links[first + i];
      uint64_t* message = messages[i];
      std::memcpy(message, link.parent->words.data(), kNameBytes);
      message[4] = static_cast<uint64_t>(link.provenance);
      message[5] = static_cast<uint64_t>(tokens);
      std::memcpy(message + kFront, link.tokens, id_bytes);
      from[i] = message;
    }
    Blake2b::Digest digests[kMost];
    hash_.each(from, kFront * sizeof(uint64_t) + id_bytes, some, digests);
    for (size_t i = 0; i < some; ++i) {
      std::copy_n(digests[i].begin(), 4, out[first + i].words.begin());
    }
  }
}

}  // namespace kvpager
