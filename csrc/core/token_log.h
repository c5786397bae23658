// The token ids of a sequence: what a snapshot holds is shared with it, what came since is its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "kvpager/require.h"
#include "kvpager/shared_array.h"
#include "kvpager/types.h"

namespace kvpager {

class TokenLog {
 public:
  TokenLog() = default;
  explicit TokenLog(SharedArray<TokenId> first) : shared_(std::move(first)) {}

  size_t size() const { return shared_.size() + own_.size(); }
  // REQUIRES: i < size().
  TokenId operator[](size_t i) const {
    KVPAGER_REQUIRE(i < size());
    return i < shared_.size() ? shared_[i] : own_[i - shared_.size()];
  }
  // Whether the ids from position `at` on are these. REQUIRES: at + count <= size().
  bool equals(size_t at, const TokenId* ids, size_t count) const {
    KVPAGER_REQUIRE(at <= size() && count <= size() - at);
    for (size_t i = 0; i < count; ++i) {
      if ((*this)[at + i] != ids[i]) return false;
    }
    return true;
  }
  // Copies ids [begin, end) to `out`. REQUIRES: begin <= end <= size().
  void copy(size_t begin, size_t end, TokenId* out) const {
    KVPAGER_REQUIRE(begin <= end && end <= size());
    const size_t split = std::clamp(shared_.size(), begin, end);
    if (split > begin) out = std::copy(shared_.data() + begin, shared_.data() + split, out);
    std::copy(own_.begin() + index(split), own_.begin() + index(end), out);
  }
  // REQUIRES: count <= size().
  std::vector<TokenId> first(size_t count) const {
    KVPAGER_REQUIRE(count <= size());
    std::vector<TokenId> ids;
    ids.reserve(count);
    const size_t split = std::min(shared_.size(), count);
    ids.assign(shared_.begin(), shared_.begin() + split);
    ids.insert(ids.end(), own_.begin(), own_.begin() + index(count));
    return ids;
  }

  void append(const TokenId* ids, size_t count) { own_.insert(own_.end(), ids, ids + count); }
  // Room for `size` ids, growing geometrically: reserving what is needed alone would copy everything
  // at every forward.
  void grow(size_t size) {
    const size_t own = size - std::min(size, shared_.size());
    if (own > own_.capacity()) own_.reserve(std::max(own, own_.capacity() * 2));
  }
  // Keeps the first `size`. REQUIRES: size <= size().
  void resize(size_t size) {
    KVPAGER_REQUIRE(size <= this->size());
    own_.resize(size - std::min(size, shared_.size()));
    shared_ = shared_.first(std::min(size, shared_.size()));
  }
  template <class It>
  void assign(It begin, It end) {
    own_.assign(begin, end);
    shared_ = {};
  }

 private:
  // Of position `i` in own_, 0 for those before it.
  std::ptrdiff_t index(size_t i) const {
    return static_cast<std::ptrdiff_t>(i - std::min(i, shared_.size()));
  }

  SharedArray<TokenId> shared_;
  std::vector<TokenId> own_;  // behind shared_
};

}  // namespace kvpager
