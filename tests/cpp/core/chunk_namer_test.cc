#include "core/chunk_namer.h"

#include <doctest/doctest.h>

#include <vector>

namespace kvpager {
namespace {

const std::vector<TokenId> kTokens = {5, 6, 7, 8};

ChunkName name_of(const ChunkNamer& namer, const std::vector<TokenId>& tokens = kTokens,
                  const ChunkName& parent = {}, Provenance provenance = Provenance::kExact) {
  return namer.next(parent, tokens.data(), static_cast<int64_t>(tokens.size()), provenance);
}

TEST_CASE("equal texts have equal names, under equal namespaces and salts") {
  const ChunkNamer namer("model", "tenant");
  CHECK(name_of(namer) == name_of(namer));
  CHECK(name_of(namer) == name_of(ChunkNamer("model", "tenant")));
  CHECK_FALSE(name_of(namer).empty());
}

TEST_CASE("namespace and salt of a name cannot be moved into one another") {
  const auto named = [](const char* space, const char* salt) {
    return name_of(ChunkNamer(space, salt));
  };
  CHECK(named("ab", "c") != named("a", "bc"));
  CHECK(named("", "x") != named("x", ""));
  CHECK(named("model", "") != named("model", "tenant"));
  CHECK(named("model", "alice") != named("model", "carol"));
  CHECK(named("model", "") != named("other", ""));
}

TEST_CASE("a name depends on every token, their order and number, the parent and the provenance") {
  const ChunkNamer namer("model", "");
  const ChunkName name = name_of(namer);
  for (size_t i = 0; i < kTokens.size(); ++i) {
    std::vector<TokenId> changed = kTokens;
    ++changed[i];
    CHECK(name_of(namer, changed) != name);
  }
  CHECK(name_of(namer, {6, 5, 7, 8}) != name);
  CHECK(name_of(namer, {5, 6, 7}) != name);
  CHECK(name_of(namer, {5, 6, 7, 0}) != name_of(namer, {5, 6, 7}));
  for (size_t word = 0; word < name.words.size(); ++word) {
    ChunkName parent = name;
    parent.words[word] ^= 1;
    CHECK(name_of(namer, kTokens, parent) != name_of(namer, kTokens, name));
  }
  CHECK(name_of(namer, kTokens, {}, Provenance::kDecode) != name);
  CHECK(name_of(namer, kTokens, {}, Provenance::kApproximate) != name);
  CHECK(name_of(namer, kTokens, {}, Provenance::kApproximate) !=
        name_of(namer, kTokens, {}, Provenance::kDecode));
}

}  // namespace
}  // namespace kvpager
