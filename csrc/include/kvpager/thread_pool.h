// A fixed set of worker threads that run index ranges. Which thread runs which item never changes a
// result: items write disjoint memory and nothing is reduced across them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace kvpager {

class ThreadPool {
 public:
  // REQUIRES: threads >= 1. The caller of run() is one of them; threads - 1 workers are started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls fn(item, thread) once for every item in [0, items), thread in [0, threads()), and returns
  // when all are done. Items are handed out dynamically, one at a time. The first exception is
  // rethrown. Workers sleep between calls (a short bounded spin at most). One run() at a time.
  void run(int64_t items, const std::function<void(int64_t item, int thread)>& fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvpager
