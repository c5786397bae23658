// Bytes on their way into an OutputFile, one behind the other: small ones through a buffer, large
// ones from where they are, all of them through the buffer if they are encrypted. Tells the system to begin writing to disk as it goes, so that the sync
// at the end finds little left to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "snapshot/output_file.h"

namespace kvpager::snapshot {

class OutputStream {
 public:
  // The first `front_bytes` are left for write_front. cipher: null writes plain bytes.
  OutputStream(OutputFile* file, uint64_t front_bytes, FileCipher* cipher = nullptr);

  void append(const void* data, uint64_t bytes);
  // `bytes` from each of the addresses.
  void append_all(const std::vector<const std::byte*>& addresses, uint64_t bytes);
  void write_front(const std::string& front);
  // Everything appended is in the file afterwards. Nothing may follow, if it is encrypted.
  void flush();
  // Bytes so far, buffered ones and the front included.
  uint64_t size() const { return flushed_ + buffered_; }
  // Bytes that a file of so many plain bytes takes.
  uint64_t file_bytes(uint64_t plain_bytes) const;

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  void write(std::vector<iovec> parts, uint64_t bytes);
  void write_blocks(const std::byte* plain, uint64_t bytes);
  const std::vector<std::byte>& encrypted(uint64_t first, const std::byte* plain, uint64_t bytes,
                                          uint64_t blocks);

  OutputFile* file_;
  FileCipher* cipher_;
  uint64_t front_bytes_;
  std::unique_ptr<std::byte, Free> buffer_;
  std::vector<std::byte> text_;  // encrypted
  uint64_t flushed_;
  uint64_t buffered_ = 0;
  uint64_t handed_over_;  // up to here the system was told to begin
};

}  // namespace kvpager::snapshot
