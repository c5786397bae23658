// Chunks of a content on their way into a file: borrowed, and their checksums checked or computed,
// a few groups ahead of the thread that writes them. The preparing is done by a thread of its own, so that
// it costs no time beside writing; a content of one group is prepared by the caller.
//
// Bounded: kGroups groups, each of one chunk or of about kGroupBytes, are borrowed at any time.
// Every borrowed chunk is given back: by the next call of next(), or by the destructor. The
// content's functions are called by both threads; everything else is for the caller's alone.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvpager/process.h"
#include "kvpager/snapshot.h"

namespace kvpager::snapshot {

class ChunkFeed {
 public:
  // `records`, one for each of `which`, hold the checksums that the bytes must have, or none, and
  // then take those of the bytes. `path` is for messages. All three outlive this object.
  ChunkFeed(const SnapshotContent& content, const std::vector<int64_t>& which,
            std::vector<SnapshotChunk>* records, const std::string& path);
  ~ChunkFeed();
  ChunkFeed(const ChunkFeed&) = delete;
  ChunkFeed& operator=(const ChunkFeed&) = delete;

  // Where the next chunks are, in order; good until the next call. Empty: there are no more.
  // Rethrows what borrowing threw; CorruptSnapshotError for a chunk whose bytes do not have its
  // checksums.
  const std::vector<const std::byte*>& next();

 private:
  static constexpr size_t kGroups = 3;
  static constexpr int64_t kGroupBytes = int64_t{2} << 20;
  static constexpr int64_t kMostChunks = 256;  // in a group, of chunks that are very small

  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  struct Group {
    size_t first = 0;  // in which_
    std::vector<const std::byte*> addresses;
    std::unique_ptr<std::byte, Free> scratch;  // a chunk's room for each of its chunks
    std::exception_ptr error;
  };

  Group& group(size_t number) { return groups_[number % kGroups]; }
  void fill(size_t number) noexcept;
  void prepare(size_t i, const std::byte* payload);
  void give_back(Group* group) noexcept;
  void work();
  void stop() noexcept;

  const SnapshotContent& content_;
  const std::vector<int64_t>& which_;
  std::vector<SnapshotChunk>* records_;
  const std::string& path_;
  const Layout layout_;
  size_t chunks_per_group_;
  size_t count_;  // of groups in all
  Group groups_[kGroups];
  std::vector<const std::byte*> none_;

  // A forked child has no such thread, and cannot even end what it may have waited for.
  struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    std::thread worker;
  };
  const MadeIn process_;
  std::unique_ptr<Meeting> meeting_ = std::make_unique<Meeting>();
  size_t filled_ =
      0;  // groups [taken_, filled_) wait for next(); guarded by the mutex, as all below
  size_t taken_ = 0;    // groups handed out; the last one of these is still the caller's
  size_t emptied_ = 0;  // groups given back
  bool stopping_ = false;
};

}  // namespace kvpager::snapshot
