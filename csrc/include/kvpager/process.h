// Which process this is. Threads, the locks they hold, devices and places in shared files are not a
// forked child's: what was made in another process is refused there, or left alone.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "kvpager/error.h"

namespace kvpager {

// Its number, at the price of reading a variable: a fork changes it in the child.
inline int64_t process_id() noexcept {
  static std::atomic<int64_t> number{0};
  static const int failed = [] {
    number = getpid();
    return pthread_atfork(nullptr, nullptr, [] { number = getpid(); });
  }();
  return failed ? getpid() : number.load(std::memory_order_relaxed);
}

// The process in which it was made.
class MadeIn {
 public:
  // In a child that was forked since, or in a child of that.
  bool forked() const noexcept { return process_id() != number_; }
  // InvalidArgumentError in such a child; `what` is what belongs to the parent.
  void require(const char* what) const {
    if (!forked()) return;
    throw InvalidArgumentError(
        str("this ", what, " was made by process ", number_, ", and this is process ", process_id(),
            ", forked from it, which has neither its threads nor a share in its files; make one of "
            "your own after the fork, or start the process by \"spawn\" (multiprocessing)"));
  }

 private:
  const int64_t number_ = process_id();
};

}  // namespace kvpager
