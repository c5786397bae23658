#include "core/chain_hash.h"

#include <vector>

#include "doctest.h"

namespace kvpager {
namespace {

const std::vector<TokenId> kTokens = {5, 6, 7, 8};

Hash128 next(const Hash128& parent, const std::vector<TokenId>& tokens,
             Provenance provenance = Provenance::kExact) {
  return chain_next(parent, tokens.data(), static_cast<int64_t>(tokens.size()), provenance);
}

TEST_CASE("equal chains have equal names") {
  CHECK(chain_root("model", "tenant") == chain_root("model", "tenant"));
  const Hash128 root = chain_root("model", "tenant");
  CHECK(next(root, kTokens) == next(root, kTokens));
}

TEST_CASE("namespace and salt cannot be moved into one another") {
  CHECK_FALSE(chain_root("ab", "c") == chain_root("a", "bc"));
  CHECK_FALSE(chain_root("", "x") == chain_root("x", ""));
  CHECK_FALSE(chain_root("model", "") == chain_root("model", "tenant"));
  CHECK_FALSE(chain_root("model", "alice") == chain_root("model", "carol"));
  CHECK_FALSE(chain_root("model", "") == chain_root("other", ""));
}

TEST_CASE("a chunk's name depends on every token, their order, the parent and the provenance") {
  const Hash128 root = chain_root("model", "");
  const Hash128 name = next(root, kTokens);
  for (size_t i = 0; i < kTokens.size(); ++i) {
    std::vector<TokenId> changed = kTokens;
    ++changed[i];
    CHECK_FALSE(next(root, changed) == name);
  }
  CHECK_FALSE(next(root, {6, 5, 7, 8}) == name);
  CHECK_FALSE(next(name, kTokens) == name);
  CHECK_FALSE(next(chain_root("model", "t"), kTokens) == name);
  CHECK_FALSE(next(root, kTokens, Provenance::kDecode) == name);
  CHECK_FALSE(next(root, kTokens, Provenance::kApproximate) == name);
  CHECK_FALSE(next(root, kTokens, Provenance::kApproximate) ==
              next(root, kTokens, Provenance::kDecode));
}

TEST_CASE("names are those of version 1 of the snapshot format, which stores them") {
  const Hash128 root = chain_root("{}", "");
  const Hash128 name = next(root, kTokens);
  CHECK(root.high == 0xE33C64BFC60FBA40ull);
  CHECK(root.low == 0xBA3C8E966710A01Dull);
  CHECK(name.high == 0x0C5EBB74BDA6B12Cull);
  CHECK(name.low == 0x9981F73ED089C9BFull);
}

}  // namespace
}  // namespace kvpager
