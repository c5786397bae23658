// Adds the seconds of its lifetime to a counter.
#pragma once

#include <chrono>

namespace kvpager {

class ScopedTimer {
 public:
  explicit ScopedTimer(double* seconds) : seconds_(seconds), start_(Clock::now()) {}
  ~ScopedTimer() { *seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point start_;
};

}  // namespace kvpager
