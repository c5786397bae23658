// A file that is read: one descriptor, its size, reads that say what they were after. Never a
// mapping: a file that shrinks or rots underneath gives an error, not a signal. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "snapshot/descriptor.h"
#include "snapshot/format.h"

namespace kvpager::snapshot {

class InputFile {
 public:
  // StorageError: there is none, a folder, not a regular file, no permission.
  explicit InputFile(const std::string& path);

  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }  // when it was opened
  // Whether the name leads to this very file, with the size it had.
  bool is_what_the_name_leads_to() const;

  // A shared flock, held until the file is closed: a process that cannot have an exclusive one knows that
  // it is being read. Waits a moment for a writer that is about to release it; StorageError if it does
  // not, or if the file was removed meanwhile. Goes on without on file systems that have no locks.
  void lock_shared();

  // describe() gives the words for errors: StorageError when the system refuses,
  // CorruptSnapshotError when the file has ended before.
  template <class Describe>
  void read(std::byte* out, uint64_t bytes, uint64_t offset, const Describe& describe) const {
    uint64_t done = 0;
    const int error = read_some(out, bytes, offset, &done);
    if (done < bytes) fail_read(error, bytes, offset, done, describe());
  }
  // The system may begin to read these bytes; nothing waits for it.
  void will_need(uint64_t bytes, uint64_t offset) const noexcept;

 private:
  // All of it, or as much as there is before an error (an errno) or the end of the file (0).
  int read_some(std::byte* out, uint64_t bytes, uint64_t offset, uint64_t* done) const;
  [[noreturn]] void fail_read(int error, uint64_t bytes, uint64_t offset, uint64_t done,
                              const std::string& what) const;
  [[noreturn]] void fail(int error, const std::string& what) const;

  std::string path_;
  Descriptor file_;
  uint64_t bytes_ = 0;
  uint64_t device_ = 0;
  uint64_t inode_ = 0;
};

// One read; with every check of decode_front.
Front read_front(const InputFile& file);

}  // namespace kvpager::snapshot
