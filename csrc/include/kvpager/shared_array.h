// An immutable array that many may hold: a copy costs a count and not the elements, and a part of a
// large array needs no memory of its own. What it is a part of lives as long as any part.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "kvpager/require.h"

namespace kvpager {

template <class T>
class SharedArray {
 public:
  SharedArray() = default;
  SharedArray(std::vector<T> elements) : size_(elements.size()) {  // NOLINT(runtime/explicit)
    if (size_ == 0) return;
    const auto owner = std::make_shared<const std::vector<T>>(std::move(elements));
    data_ = std::shared_ptr<const T>(owner, owner->data());
  }
  // `size` elements that `data` keeps alive, as a part of something larger (an aliasing pointer).
  SharedArray(std::shared_ptr<const T> data, size_t size) : data_(std::move(data)), size_(size) {}

  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  // REQUIRES: i < size().
  const T& operator[](size_t i) const {
    KVPAGER_REQUIRE(i < size_);
    return data()[i];
  }

  // REQUIRES: count <= size().
  SharedArray first(size_t count) const {
    KVPAGER_REQUIRE(count <= size_);
    return SharedArray(data_, count);
  }
  // Views that keep nothing, of all elements or of [from, from + count). REQUIRES: from + count <=
  // size(), and the holder of one keeps what this is a part of.
  SharedArray borrow() const { return borrow(0, size_); }
  SharedArray borrow(size_t from, size_t count) const {
    KVPAGER_REQUIRE(from <= size_ && count <= size_ - from);
    return SharedArray(std::shared_ptr<const T>(std::shared_ptr<const T>(), data() + from), count);
  }
  // Elements [begin, begin + count). REQUIRES: begin + count <= size().
  SharedArray part(size_t begin, size_t count) const {
    KVPAGER_REQUIRE(begin <= size_ && count <= size_ - begin);
    return SharedArray(std::shared_ptr<const T>(data_, data() + begin), count);
  }
  // Expires with the last array that keeps these elements.
  std::weak_ptr<const T> watch() const { return data_; }
  std::vector<T> to_vector() const { return std::vector<T>(begin(), end()); }

  friend bool operator==(const SharedArray& a, const SharedArray& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::shared_ptr<const T> data_;
  size_t size_ = 0;
};

}  // namespace kvpager
