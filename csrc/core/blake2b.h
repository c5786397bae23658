// BLAKE2b (RFC 7693): a cryptographic hash, with a key of up to 64 bytes and a personalization that keeps
// the uses of a key apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpager {

class Blake2b {
 public:
  static constexpr size_t kMostKeyBytes = 64;
  using Digest = std::array<uint64_t, 8>;  // little-endian words; the first digest_bytes count
  using Person = std::array<char, 16>;

  // The key is compressed here, once for all messages. REQUIRES: digest_bytes is 1 to 64, and
  // key_bytes at most kMostKeyBytes.
  Blake2b(size_t digest_bytes, const void* key, size_t key_bytes, const Person& person);

  Digest operator()(const void* message, size_t bytes) const;
  // Of `count` messages of `bytes` bytes, which is faster than one after the other; out[count].
  void each(const void* const* messages, size_t bytes, size_t count, Digest* out) const;

 private:
  static constexpr size_t kBlockBytes = 128;
  using State = Digest;

  // `counted`: bytes of key and message up to the end of this block.
  static void compress(State* state, const unsigned char* block, uint64_t counted, bool last);

  State start_;       // before any block
  State keyed_;       // after the key's block; start_ without a key
  uint64_t counted_;  // bytes of the key's block
  std::array<unsigned char, kBlockBytes> key_block_{};
};

}  // namespace kvpager
