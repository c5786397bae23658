// One opened device: its memory, its copies and the order between them. The pager owns one; it
// calls under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/api.h"

namespace kvpager::device {

// What was found of one kind of device ("cuda", "shim"), and why not.
struct Report {
  std::string kind;
  std::string plugin;   // path of the library; empty: none was found
  std::string why_not;  // empty: devices can be opened
  std::vector<Info> devices;
};
Report probe(const std::string& kind);

class Device;

// Memory of a device, or pinned memory of the host that its kernels can read. Move-only. Nothing
// that was enqueued may use it any more when it is destroyed: Timeline::finish().
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class Device;
  std::shared_ptr<Device> device_;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  bool pinned_ = false;
};

class Device : public std::enable_shared_from_this<Device> {
 public:
  // "cuda", "cuda:1" or "shim". InvalidArgumentError for another name, DeviceError with what was
  // found where there is no such device.
  static std::shared_ptr<Device> open(const std::string& name);
  ~Device();

  const Api& api() const;
  const Info& info() const;
  Context context() const;
  const std::string& name() const;  // as opened, with its number: "cuda:0"
  int32_t ordinal() const;

  // Not zeroed; 0 bytes have no data(). CapacityError with `what` and the bytes. Fault points
  // "device.allocate", "device.pin".
  Memory allocate(const char* what, int64_t bytes);
  Memory pin(const char* what, int64_t bytes);

  // DeviceError naming `what` unless code is kOk.
  void check(int code, const char* what) const;

 private:
  Device() = default;
  Memory obtain(const char* what, int64_t bytes, bool pinned);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes in all live Memory of this process, by kind.
int64_t total_device_bytes();
int64_t total_pinned_bytes();

}  // namespace kvpager::device
