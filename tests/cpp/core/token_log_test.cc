#include "core/token_log.h"

#include <doctest/doctest.h>

#include <memory>
#include <vector>

using kvpager::SharedArray;
using kvpager::TokenId;
using kvpager::TokenLog;

namespace {

// Ids 0, 1, 2 ..., of which the first `shared` are a snapshot's.
TokenLog log_of(size_t shared, size_t own) {
  std::vector<TokenId> first;
  for (size_t i = 0; i < shared; ++i) first.push_back(static_cast<TokenId>(i));
  TokenLog log{SharedArray<TokenId>(std::move(first))};
  std::vector<TokenId> more;
  for (size_t i = 0; i < own; ++i) more.push_back(static_cast<TokenId>(shared + i));
  log.append(more.data(), own);
  return log;
}

bool counts_to(const TokenLog& log, size_t size) {
  if (log.size() != size) return false;
  for (size_t i = 0; i < size; ++i) {
    if (log[i] != static_cast<TokenId>(i)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("ids read the same whether they are shared, its own, or on both sides of the seam") {
  for (const size_t shared : {0, 1, 5, 9}) {
    const TokenLog log = log_of(shared, 9 - shared);
    CHECK(counts_to(log, 9));
    for (size_t begin = 0; begin <= 9; ++begin) {
      CHECK(log.first(begin).size() == begin);
      for (size_t end = begin; end <= 9; ++end) {
        std::vector<TokenId> part(end - begin);
        log.copy(begin, end, part.data());
        CHECK(log.equals(begin, part.data(), part.size()));
        for (size_t i = 0; i < part.size(); ++i) CHECK(part[i] == static_cast<TokenId>(begin + i));
      }
    }
    const std::vector<TokenId> all = log.first(9);
    for (size_t i = 0; i < 9; ++i) CHECK(all[i] == static_cast<TokenId>(i));
    const TokenId other[] = {4, 5, 7};
    CHECK_FALSE(log.equals(4, other, 3));
  }
}

TEST_CASE("a log that is cut within what it shares goes on with ids of its own") {
  for (const size_t kept : {0, 3, 6, 8}) {
    TokenLog log = log_of(6, 3);
    const TokenLog copy = log;
    log.resize(kept);
    CHECK(counts_to(log, kept));
    for (size_t i = kept; i < 12; ++i) {
      const TokenId id = static_cast<TokenId>(i);
      log.append(&id, 1);
    }
    CHECK(counts_to(log, 12));
    CHECK(counts_to(copy, 9));
  }
}

TEST_CASE("what a log shares lives as long as the last that shares it") {
  auto ids = std::make_shared<const std::vector<TokenId>>(4, 7);
  const std::weak_ptr<const std::vector<TokenId>> watch = ids;
  TokenLog log{SharedArray<TokenId>(std::shared_ptr<const TokenId>(ids, ids->data()), 4)};
  TokenLog copy = log;
  ids.reset();
  log.resize(2);
  CHECK(log[1] == 7);
  const TokenId none[] = {0};
  log.assign(none, none);
  CHECK(log.size() == 0);
  CHECK_FALSE(watch.expired());
  copy.resize(0);
  copy = TokenLog();
  log = TokenLog();
  CHECK(watch.expired());
}
