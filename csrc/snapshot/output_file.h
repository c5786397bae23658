// A file that exists under its final name only when it is whole: bytes go to a temporary name in
// the same folder, `publish` syncs, renames and syncs the folder. Every failure is a StorageError,
// removes the temporary and leaves a file that already had the name as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

namespace kvpager::snapshot {

// Closes what it holds.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  void reset(int fd = -1);

 private:
  int fd_;
};

class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile() { discard(); }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Leaves a hole of `bytes`, to be filled by write_front. REQUIRES: nothing was appended.
  void reserve_front(uint64_t bytes) { flushed_ = bytes; }
  void append(const void* data, uint64_t bytes);
  void write_front(const std::string& front) { write_at(front.data(), front.size(), 0); }
  // Bytes so far, buffered ones and the reserved front included.
  uint64_t size() const { return flushed_ + buffered_; }
  bool is_open() const { return file_.get() >= 0; }

  // Flush, fsync, rename, fsync of the folder. The file is closed afterwards.
  void publish();
  // Removes the temporary; does nothing after publish.
  void discard() noexcept;

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  void flush();
  void write_at(const void* data, uint64_t bytes, uint64_t offset);
  void rename_into_place();
  bool roll_back() noexcept;
  bool holds_our_file(const std::string& name) const noexcept;
  [[noreturn]] void fail(int error, const std::string& what);

  std::string path_;
  std::string name_;       // within the folder
  std::string temporary_;  // within the folder; empty when there is none to remove
  Descriptor folder_;
  Descriptor file_;
  std::unique_ptr<std::byte, Free> buffer_;
  uint64_t flushed_ = 0;
  uint64_t buffered_ = 0;
  bool replaced_ = false;   // the rename took the place of an existing file
  bool exchanged_ = false;  // ... which now has the temporary name
};

}  // namespace kvpager::snapshot
