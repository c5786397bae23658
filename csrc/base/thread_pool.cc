#include "kvpager/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/workspaces.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr int kMostThreads = 4096;
constexpr auto kSpin = std::chrono::microseconds(5);
constexpr auto kAwake = std::chrono::microseconds(50);  // about what waking takes: worth waiting
// From one product of a decode step to the next, with what Python and torch do between them.
constexpr auto kSoon = std::chrono::microseconds(150);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits for `ready` at most `limit` without sleeping. True when it came true.
template <class Ready>
bool spin_until(Ready ready, std::chrono::microseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

void check_count(int threads) {
  if (threads < 1 || threads > kMostThreads) {
    throw InvalidArgumentError(str("threads is ", threads, "; expected 1 to ", kMostThreads));
  }
}

// A run in the threads of an OpenMP runtime, of which any number may be under way.
struct RunInRuntime {
  RunInRuntime(const std::function<void(int64_t, int)>& fn, int64_t count)
      : function(fn), items(count) {}

  const std::function<void(int64_t, int)>& function;
  const int64_t items;
  std::atomic<int64_t> next{0};
  std::atomic<int> threads{0};
  std::mutex mutex;
  std::exception_ptr error;

  static void enter(void* data) {
    RunInRuntime& run = *static_cast<RunInRuntime*>(data);
    const int thread = run.threads.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
      const int64_t item = run.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= run.items) return;
      try {
        run.function(item, thread);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(run.mutex);
        if (!run.error) run.error = std::current_exception();
        run.next.store(run.items, std::memory_order_relaxed);
      }
    }
  }
};

}  // namespace

// A run is open between the caller's publish and its close. A worker joins an open run under the
// mutex and leaves it the same way, so the caller waits only for workers that joined: one that is
// still waking up finds the run closed and sleeps on.
struct ThreadPool::Impl {
  using Function = std::function<void(int64_t, int)>;

  Impl(int count, Runtime of_process)
      : threads(count), waking_nanoseconds(0), runtime(of_process) {}

  Impl(int count, int64_t waking) : threads(count), waking_nanoseconds(waking) {
    workers.reserve(static_cast<size_t>(count - 1));
    try {
      for (int i = 1; i < count; ++i) workers.emplace_back([this, i] { work(i); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Impl() { stop(); }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
      generation.fetch_add(1, std::memory_order_release);
    }
    opened.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  void work(int thread) {
    uint64_t seen = 0;
    bool soon = false;
    for (;;) {
      const auto called = [&] { return generation.load(std::memory_order_acquire) != seen; };
      if (!spin_until(called, soon ? kSoon : kSpin) && awake.load(std::memory_order_relaxed)) {
        spin_until([&] { return called() || !awake.load(std::memory_order_relaxed); }, kAwake);
      }
      soon = false;
      {
        std::unique_lock<std::mutex> lock(mutex);
        opened.wait(lock, [&] { return generation.load(std::memory_order_relaxed) != seen; });
        seen = generation.load(std::memory_order_relaxed);
        if (stopping) return;
        if (function == nullptr) continue;
        joined.fetch_add(1, std::memory_order_relaxed);
        soon = next_run == NextRun::kSoon;
      }
      drain(thread);
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (joined.fetch_sub(1, std::memory_order_release) == 1) left.notify_one();
      }
    }
  }

  void notify(int64_t helpers) {
    if (helpers < threads - 1) {
      for (int64_t i = 0; i < helpers; ++i) opened.notify_one();
    } else {
      opened.notify_all();
    }
  }

  // Calls workers to a run that does not come yet: they find none and wait for it.
  void wake(int64_t helpers) {
    if (runtime.parallel != nullptr) return;
    {
      std::lock_guard<std::mutex> lock(mutex);
      awake.store(true, std::memory_order_relaxed);
      generation.fetch_add(1, std::memory_order_release);
    }
    notify(helpers);
  }

  // Runs items until none is left. After an exception the rest is skipped.
  void drain(int thread) {
    const Function& fn = *function;
    for (;;) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      try {
        fn(item, thread);
      } catch (...) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(items, std::memory_order_relaxed);
      }
    }
  }

  void run(int64_t count, const Function& fn, int wanted, NextRun next_one) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      items = count;
      next.store(0, std::memory_order_relaxed);
      error = nullptr;
      function = &fn;
      next_run = next_one;
      generation.fetch_add(1, std::memory_order_release);
    }
    notify(std::min<int64_t>(count, wanted) - 1);
    drain(0);
    spin_until([&] { return joined.load(std::memory_order_acquire) == 0; }, kAwake);
    {
      std::unique_lock<std::mutex> lock(mutex);
      left.wait(lock, [&] { return joined.load(std::memory_order_acquire) == 0; });
      function = nullptr;
    }
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

  // What waiting threads read again and again, what every item moves, and what is written once per
  // run are kept on lines of their own.
  static constexpr size_t kLines = 128;

  const int threads;
  const int64_t waking_nanoseconds;
  const Runtime runtime = {nullptr};
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable opened;
  std::condition_variable left;
  bool stopping = false;
  alignas(kLines) std::atomic<uint64_t> generation{0};
  std::atomic<bool> awake{false};
  alignas(kLines) std::atomic<int> joined{0};
  alignas(kLines) std::atomic<int64_t> next{0};
  alignas(kLines) const Function* function = nullptr;
  int64_t items = 0;
  NextRun next_run = NextRun::kUnknown;
  std::mutex in_use;  // by a run
  std::mutex error_mutex;
  std::exception_ptr error;
  Workspaces workspaces;
};

ThreadPool::ThreadPool(int threads, int64_t waking_nanoseconds) {
  check_count(threads);
  try {
    impl_ = std::make_unique<Impl>(threads, waking_nanoseconds);
  } catch (const std::system_error& error) {
    throw CapacityError(
        str("threads is ", threads, ", and the system starts no more of them: ", error.what()));
  }
}

ThreadPool::ThreadPool(int threads, Runtime runtime) {
  check_count(threads);
  impl_ = std::make_unique<Impl>(threads, runtime);
}

ThreadPool::~ThreadPool() {
  if (process_.forked()) static_cast<void>(impl_.release());  // a child has no such threads
}

int ThreadPool::threads() const { return impl_->threads; }

Workspaces& ThreadPool::workspaces() { return impl_->workspaces; }

int64_t ThreadPool::workspace_bytes() const { return impl_->workspaces.bytes(); }

int ThreadPool::worth_waking(int64_t nanoseconds) const {
  if (impl_->waking_nanoseconds == 0) return impl_->threads;
  const int64_t wanted = nanoseconds / impl_->waking_nanoseconds;
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, impl_->threads));
}

ThreadPool::Awake::Awake(ThreadPool& pool, int wanted) : pool_(pool) {
  if (std::min(wanted, pool.threads()) > 1) pool.impl_->wake(wanted - 1);
}

ThreadPool::Awake::~Awake() { pool_.impl_->awake.store(false, std::memory_order_relaxed); }

void ThreadPool::run(int64_t items, const std::function<void(int64_t item, int thread)>& fn) {
  run(items, fn, impl_->threads);
}

void ThreadPool::run(int64_t items, const std::function<void(int64_t item, int thread)>& fn,
                     int wanted, NextRun next) {
  if (items > 1 && wanted > 1 && impl_->threads > 1 && impl_->runtime.parallel != nullptr) {
    RunInRuntime run(fn, items);
    // Always as many: a runtime starts and ends threads where their number changes.
    impl_->runtime.parallel(&RunInRuntime::enter, &run, static_cast<unsigned>(impl_->threads), 0);
    if (run.error) std::rethrow_exception(run.error);
    return;
  }
  if (items > 1 && wanted > 1 && impl_->threads > 1) {
    const std::unique_lock<std::mutex> lock(impl_->in_use, std::try_to_lock);
    if (lock.owns_lock()) {
      impl_->run(items, fn, wanted, next);
      return;
    }
  }
  for (int64_t item = 0; item < items; ++item) fn(item, 0);
}

}  // namespace kvpager
