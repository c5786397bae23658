// What a pager is made of. Its public functions take the lock and ask one of these; none of them asks one
// that stands below it.
//
//   Residency       where chunks are: blocks, homes, eviction, loading              residency.h
//   Sequences       which chunks a sequence uses, windows, pins                     sequences.h
//   RunningForward  begin, attend, commit, abort                                    running_forward.h
//   Snapshots       freeze and restore                                              snapshots.h
//
// Records are in the Ledger; bytes are moved and computed on by a Backend (backend.h), which knows none of
// these.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "core/ledger.h"
#include "kvpager/pager.h"
#include "kvpager/process.h"
#include "kvpager/thread_pool.h"
#include "pager/backend.h"
#include "pager/chunk_files.h"
#include "pager/config.h"
#include "pager/residency.h"
#include "pager/running_forward.h"
#include "pager/sequences.h"
#include "pager/snapshots.h"

namespace kvpager {

struct Pager::Impl {
  explicit Impl(const PagerOptions& options);

  // --- inspect.cc
  std::vector<ChunkInfo> inspect(SequenceId id) const KVPAGER_HOLDS(mutex);
  PagerStats stats() const KVPAGER_HOLDS(mutex);
  void check_invariants() const KVPAGER_HOLDS(mutex);
  void read_kv(SequenceId id, int layer, int64_t start, int64_t stop, std::byte* k, std::byte* v)
      KVPAGER_HOLDS(mutex);
  std::vector<std::vector<int32_t>> select(SequenceId id, int layer, const TensorView& q,
                                           int64_t position, int64_t window) KVPAGER_HOLDS(mutex);

  // Not of a child that was forked since: locked() refuses there, and it is never destroyed.
  const MadeIn process;
  const Config config;
  mutable Mutex mutex;
  std::atomic<uint64_t> running{0};  // number of the running forward, without the lock; 0: none

  const std::shared_ptr<ThreadPool> workers;
  ThreadPool& threads;
  ChunkFiles files;
  PagerStats counters KVPAGER_GUARDED_BY(mutex);
  Ledger ledger KVPAGER_GUARDED_BY(mutex);
  const std::unique_ptr<Backend> backend;

  Residency residency KVPAGER_GUARDED_BY(mutex);
  Sequences sequences KVPAGER_GUARDED_BY(mutex);
  RunningForward forward KVPAGER_GUARDED_BY(mutex);
  Snapshots snapshots KVPAGER_GUARDED_BY(mutex);

 private:
  PagerParts parts() {
    return {config, config.options, config.layout, ledger, *backend, files, threads, counters};
  }
};

}  // namespace kvpager
