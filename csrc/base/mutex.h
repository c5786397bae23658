// A mutex that a static analysis knows, and the words in which declarations tell it what the mutex guards.
// Clang checks them (-Wthread-safety, `make tidy`); to other compilers they are nothing.
// Source of the words: https://clang.llvm.org/docs/ThreadSafetyAnalysis.html
#pragma once

#include <mutex>

#if defined(__clang__)
#define KVPAGER_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define KVPAGER_THREAD_ATTRIBUTE(...)
#endif

// Of a member: it is read and written by those alone who hold the mutex.
#define KVPAGER_GUARDED_BY(mutex) KVPAGER_THREAD_ATTRIBUTE(guarded_by(mutex))
// Of a function: its caller holds the mutex.
#define KVPAGER_HOLDS(...) KVPAGER_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
// Of a function that takes the mutex: its caller does not hold it.
#define KVPAGER_TAKES(...) KVPAGER_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// Of a function whose way of locking cannot be said in these words.
#define KVPAGER_UNCHECKED_LOCKING KVPAGER_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace kvpager {

class KVPAGER_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() KVPAGER_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void unlock() KVPAGER_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  // Tells the analysis, where it cannot see it, that this thread holds the mutex. Does nothing.
  void held() const KVPAGER_THREAD_ATTRIBUTE(assert_capability(this)) {}
  // For condition variables.
  std::mutex& native() { return mutex_; }

 private:
  std::mutex mutex_;
};

class KVPAGER_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) KVPAGER_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() KVPAGER_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace kvpager
