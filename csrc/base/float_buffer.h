#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include "kvpager/layout.h"

namespace kvpager {

// Floats on a cache line, kept between calls.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  FloatBuffer(FloatBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  FloatBuffer& operator=(FloatBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~FloatBuffer() { release(); }

  // Contents are lost when it grows.
  float* reserve(int64_t count) {
    if (count > size_) {
      release();
      data_ = static_cast<float*>(
          ::operator new(static_cast<size_t>(count) * sizeof(float), kAlignment));
      size_ = count;
    }
    return data_;
  }
  float* data() const { return data_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(float)); }

 private:
  static constexpr std::align_val_t kAlignment{kTileAlignment};
  void release() {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    size_ = 0;
  }
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvpager
