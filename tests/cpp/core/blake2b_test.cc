#include "core/blake2b.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

namespace kvpager {
namespace {

std::string hash(size_t digest_bytes, const std::string& message, const std::string& key = {},
                 const Blake2b::Person& person = {}) {
  const Blake2b blake(digest_bytes, key.data(), key.size(), person);
  const Blake2b::Digest digest = blake(message.data(), message.size());
  return std::string(reinterpret_cast<const char*>(digest.data()), digest_bytes);
}

std::string hex(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    for (const int digit : {byte >> 4, byte & 15}) out += "0123456789abcdef"[digit];
  }
  return out;
}

// The deterministic bytes of RFC 7693, appendix E.
std::string self_test_bytes(uint32_t count) {
  uint32_t a = 0xDEAD4BAD * count;
  uint32_t b = 1;
  std::string out;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t t = a + b;
    a = b;
    b = t;
    out += static_cast<char>(t >> 24);
  }
  return out;
}

TEST_CASE("BLAKE2b of abc is that of RFC 7693, appendix A") {
  CHECK(hex(hash(64, "abc")) ==
        "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
        "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
}

TEST_CASE("all digests, keys and lengths of the self-test of RFC 7693, appendix E, agree") {
  std::string all;
  for (const uint32_t digest_bytes : {20u, 32u, 48u, 64u}) {
    for (const uint32_t message_bytes : {0u, 3u, 128u, 129u, 255u, 1024u}) {
      const std::string message = self_test_bytes(message_bytes);
      all += hash(digest_bytes, message);
      all += hash(digest_bytes, message, self_test_bytes(digest_bytes));
    }
  }
  CHECK(hex(hash(32, all)) == "c23a7800d98123bd10f506c61e29da5603d763b8bbad2e737f5e765a7bccd475");
}

TEST_CASE("a personalization and a key change every digest, and one hash serves many messages") {
  const Blake2b::Person person = {"kvpager chunk"};
  CHECK(hash(32, "abc") != hash(32, "abc", {}, person));
  CHECK(hash(32, "abc") != hash(32, "abc", "key"));
  CHECK(hash(32, "", "key") != hash(32, "", "kez"));
  const Blake2b blake(32, "key", 3, person);
  const auto first = blake("abc", 3);
  CHECK(blake("abd", 3) != first);
  CHECK(blake("abc", 3) == first);
}

TEST_CASE("several messages at a time have the digests of each alone, at every length") {
  const Blake2b blake(32, "key", 3, {"lanes"});
  for (uint32_t bytes = 0; bytes <= 400; ++bytes) {
    for (const size_t count : {1u, 3u, 4u, 5u, 9u}) {
      const std::string all = self_test_bytes(static_cast<uint32_t>(count) * bytes + 1);
      std::vector<const void*> messages;
      for (size_t i = 0; i < count; ++i) messages.push_back(all.data() + i * bytes);
      std::vector<Blake2b::Digest> digests(count);
      blake.each(messages.data(), bytes, count, digests.data());
      for (size_t i = 0; i < count; ++i) REQUIRE(digests[i] == blake(messages[i], bytes));
    }
  }
}

}  // namespace
}  // namespace kvpager
