// The disk tier: chunk-sized slots in one nameless file, so that a crash leaves nothing behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvpager {

class DiskSpill {
 public:
  // Opens a nameless file in `folder` when slots > 0, and reserves all of it. StorageError with the
  // folder and the system's words.
  DiskSpill(const std::string& folder, int64_t slots, int64_t slot_bytes);
  ~DiskSpill();
  DiskSpill(const DiskSpill&) = delete;
  DiskSpill& operator=(const DiskSpill&) = delete;

  // REQUIRES, here and of read: 0 <= slot < slots().
  void write(int64_t slot, const std::byte* data);
  // Reads [offset, offset + bytes) of a slot. REQUIRES: they lie within it.
  void read(int64_t slot, int64_t offset, int64_t bytes, std::byte* out) const;

  int64_t slots() const { return slots_; }

 private:
  int fd_ = -1;
  std::string folder_;
  int64_t slots_;
  int64_t slot_bytes_;
};

}  // namespace kvpager
