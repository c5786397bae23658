// A fixed set of worker threads that run index ranges. Which thread runs which item never changes a
// result: items write disjoint memory and nothing is reduced across them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "kvpager/process.h"

namespace kvpager {

class Workspaces;

class ThreadPool {
 public:
  // Work that takes one thread less than this is not worth waking another for: a sleeping thread
  // takes tens of microseconds to begin on a virtual machine, and the call that wakes it several.
  static constexpr int64_t kWakingNanoseconds = 25000;

  // REQUIRES: threads >= 1. The caller of run() is one of them; threads - 1 workers are started.
  // waking_nanoseconds 0: worth_waking always says all (for tests of small problems).
  explicit ThreadPool(int threads, int64_t waking_nanoseconds = kWakingNanoseconds);

  // An OpenMP runtime, by its GOMP_parallel (libgomp's manual, "Implementing PARALLEL construct"; LLVM's
  // has it too): calls function(data) in so many threads, the caller among them.
  struct Runtime {
    void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
  };
  // A pool without workers of its own: the threads are those of a runtime that the process has anyway.
  // Its workers spin after each call, so that others beside them would have to share their processors.
  ThreadPool(int threads, Runtime runtime);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // What calls that use these threads need while they run (base/workspaces.h), and its bytes.
  Workspaces& workspaces();
  int64_t workspace_bytes() const;

  // How many threads work that takes one thread about this long should be shared by, in
  // [1, threads()].
  int worth_waking(int64_t nanoseconds) const;

  // While it lives, up to wanted - 1 workers wait for the next run() without sleeping, a bounded time
  // each: for a caller that has a little to do by itself before and between runs. Waking begins at
  // once. One at a time.
  class Awake {
   public:
    Awake(ThreadPool& pool, int wanted);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

  // When a run is expected to follow: kSoon has workers wait for it without sleeping, for 150 us.
  enum class NextRun { kUnknown, kSoon };

  // Calls fn(item, thread) once for every item in [0, items), thread in [0, threads()), and returns
  // when all are done. Items are handed out dynamically, one at a time. The first exception is
  // rethrown. Workers sleep between calls, after a short bounded spin. Any thread may call it; while
  // the workers are another's, the caller does all its work alone.
  void run(int64_t items, const std::function<void(int64_t item, int thread)>& fn);
  // As above, waking at most wanted - 1 workers; 1 keeps the work on the caller.
  void run(int64_t items, const std::function<void(int64_t item, int thread)>& fn, int wanted,
           NextRun next = NextRun::kUnknown);

 private:
  struct Impl;
  const MadeIn process_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvpager
