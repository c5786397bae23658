// Bytes on their way into an OutputFile, one behind the other: small ones through a buffer, large
// ones from where they are. Tells the system to begin writing to disk as it goes, so that the sync
// at the end finds little left to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "snapshot/output_file.h"

namespace kvpager::snapshot {

class OutputStream {
 public:
  // The first `front_bytes` are left for write_front.
  OutputStream(OutputFile* file, uint64_t front_bytes);

  void append(const void* data, uint64_t bytes);
  // `bytes` from each of the addresses.
  void append_all(const std::vector<const std::byte*>& addresses, uint64_t bytes);
  void write_front(const std::string& front);
  // Everything appended is in the file afterwards.
  void flush();
  // Bytes so far, buffered ones and the front included.
  uint64_t size() const { return flushed_ + buffered_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  void write(std::vector<iovec> parts, uint64_t bytes);

  OutputFile* file_;
  std::unique_ptr<std::byte, Free> buffer_;
  uint64_t flushed_;
  uint64_t buffered_ = 0;
  uint64_t handed_over_;  // up to here the system was told to begin
};

}  // namespace kvpager::snapshot
