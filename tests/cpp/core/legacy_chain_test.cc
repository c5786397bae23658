#include "core/legacy_chain.h"

#include <doctest/doctest.h>

#include <vector>

namespace kvpager {
namespace {

const std::vector<TokenId> kTokens = {5, 6, 7, 8};

Hash128 next(const Hash128& parent, const std::vector<TokenId>& tokens,
             Provenance provenance = Provenance::kExact) {
  return legacy_next(parent, tokens.data(), static_cast<int64_t>(tokens.size()), provenance);
}

TEST_CASE("equal chains have equal legacy hashes") {
  CHECK(legacy_root("model", "tenant") == legacy_root("model", "tenant"));
  const Hash128 root = legacy_root("model", "tenant");
  CHECK(next(root, kTokens) == next(root, kTokens));
}

TEST_CASE("in a legacy hash namespace and salt cannot be moved into one another") {
  CHECK_FALSE(legacy_root("ab", "c") == legacy_root("a", "bc"));
  CHECK_FALSE(legacy_root("", "x") == legacy_root("x", ""));
  CHECK_FALSE(legacy_root("model", "") == legacy_root("model", "tenant"));
  CHECK_FALSE(legacy_root("model", "alice") == legacy_root("model", "carol"));
  CHECK_FALSE(legacy_root("model", "") == legacy_root("other", ""));
}

TEST_CASE(
    "a chunk's legacy hash depends on every token, their order, the parent and the provenance") {
  const Hash128 root = legacy_root("model", "");
  const Hash128 name = next(root, kTokens);
  for (size_t i = 0; i < kTokens.size(); ++i) {
    std::vector<TokenId> changed = kTokens;
    ++changed[i];
    CHECK_FALSE(next(root, changed) == name);
  }
  CHECK_FALSE(next(root, {6, 5, 7, 8}) == name);
  CHECK_FALSE(next(name, kTokens) == name);
  CHECK_FALSE(next(legacy_root("model", "t"), kTokens) == name);
  CHECK_FALSE(next(root, kTokens, Provenance::kDecode) == name);
  CHECK_FALSE(next(root, kTokens, Provenance::kApproximate) == name);
  CHECK_FALSE(next(root, kTokens, Provenance::kApproximate) ==
              next(root, kTokens, Provenance::kDecode));
}

TEST_CASE("hashes are those that files of versions 1.0 and 1.1 hold") {
  const Hash128 root = legacy_root("{}", "");
  const Hash128 name = next(root, kTokens);
  CHECK(root.high == 0xE33C64BFC60FBA40ull);
  CHECK(root.low == 0xBA3C8E966710A01Dull);
  CHECK(name.high == 0x0C5EBB74BDA6B12Cull);
  CHECK(name.low == 0x9981F73ED089C9BFull);
}

}  // namespace
}  // namespace kvpager
