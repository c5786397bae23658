// A local file that is read through a descriptor. Never a mapping: a file that shrinks or rots
// underneath gives an error, not a signal. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kvpager/snapshot.h"
#include "snapshot/descriptor.h"
#include "snapshot/format.h"

namespace kvpager::snapshot {

class InputFile : public ByteRanges {
 public:
  // StorageError: there is none, a folder, not a regular file, no permission.
  explicit InputFile(const std::string& path);

  const std::string& path() const override { return path_; }
  uint64_t bytes() const override { return bytes_; }  // when it was opened
  // Whether the name leads to this very file, with the size it had.
  bool is_what_the_name_leads_to() const;

  // A shared flock, held until the file is closed: a process that cannot have an exclusive one knows that
  // it is being read. Waits a moment for a writer that is about to release it; StorageError if it does
  // not, or if the file was removed meanwhile. Goes on without on file systems that have no locks.
  void lock_shared();

  void read(std::byte* out, uint64_t bytes, uint64_t offset,
            const std::function<std::string()>& what) const override;
  void will_need(uint64_t bytes, uint64_t offset) const noexcept override;

 private:
  [[noreturn]] void fail(int error, const std::string& what) const;

  std::string path_;
  Descriptor file_;
  uint64_t bytes_ = 0;
  uint64_t device_ = 0;
  uint64_t inode_ = 0;
};

// One read; with every check of decode_front.
Front read_front(const ByteRanges& file);

}  // namespace kvpager::snapshot
