// A file that exists under its final name only when it is whole: bytes go to a temporary name in
// the same folder, `seal` syncs them, `publish` renames and syncs the folder. Every failure is a
// StorageError and leaves a file that already had the name as it was. The temporary of what failed
// stays until `discard`, so that its owner can remove it under a lock of its own.
//
//   state      is left by                       the file
//   kWriting   write_at, reserve: kWriting      has its temporary name, locked
//              seal: kSealed
//   kSealed    publish: kPublished              the same, on disk
//   kPublished                                  has its name, still locked
//   kFailed    discard: kGone                   a call failed, or give_up: the same as kWriting
//   kGone                                       discard: nothing is left
//
// The file is its owner's alone until it is sealed. Then it gets the permissions asked for, whatever
// the umask; of a file that has the name already, none that this one had not.
//
// The lock is flock's, exclusive, on the file itself: it is there before the file has a byte, goes
// with the file through the rename, and ends with this object or with the process.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvpager/process.h"
#include "snapshot/descriptor.h"

namespace kvpager::snapshot {

inline constexpr uint32_t kPrivateMode = 0600;

class OutputFile {
 public:
  enum class State { kWriting, kSealed, kPublished, kFailed, kGone };

  // mode: permissions for a new file; see above.
  explicit OutputFile(const std::string& path, uint32_t mode = kPrivateMode);
  ~OutputFile() { discard(); }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& path() const { return path_; }
  // Its name within the folder until it is published; empty then.
  const std::string& temporary() const { return temporary_; }
  State state() const { return state_; }

  // Disk space for the first `bytes` bytes, where the file system can promise it; a file of that
  // size in any case. REQUIRES, here and of what follows: the state above; here, that nothing is written
  // beyond them yet.
  void reserve(uint64_t bytes);
  // Writes `parts` behind each other, from `offset` on.
  void write_at(uint64_t offset, std::vector<iovec> parts);
  // Asks the system to begin writing these bytes to disk, so that less is left for `seal`.
  void start_writeback(uint64_t offset, uint64_t bytes) noexcept;

  // Cuts the file to `bytes`, if more was reserved, gives it its permissions, and syncs it.
  void seal(uint64_t bytes);
  // Rename, fsync of the folder.
  void publish();
  // Allows nothing but discard from now on.
  void give_up() noexcept { state_ = State::kFailed; }
  // Removes the temporary and lets the lock go.
  void discard() noexcept;

 private:
  void open(const std::string& folder);
  void create_temporary();
  void lock();
  void set_mode();
  void sync(int fd, const std::string& what);
  void rename_into_place();
  bool roll_back() noexcept;
  bool holds_our_file(const std::string& name) const noexcept;
  [[noreturn]] void fail(int error, const std::string& what);

  std::string path_;
  uint32_t mode_;
  std::string name_;       // within the folder
  std::string temporary_;  // within the folder; empty when there is none to remove
  Descriptor folder_;
  Descriptor file_;
  State state_ = State::kWriting;
  MadeIn process_;  // a forked child neither writes to the file nor removes it
  uint64_t reserved_ = 0;
  bool replaced_ = false;   // the rename took the place of an existing file
  bool exchanged_ = false;  // ... which now has the temporary name
};

}  // namespace kvpager::snapshot
