// The devices a test of the pager runs on, and forwards of host tensors on any of them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../device/devices.h"
#include "device/device.h"
#include "device/timeline.h"
#include "kvpager/pager.h"

namespace kvpager::pager_test {

// Where pagers of small_options() are: set by PAGER_TEST.
inline std::string& test_device() {
  static std::string name = "cpu";
  return name;
}
inline bool on_device() { return test_device() != "cpu"; }

// Of KVPAGER_TEST_DEVICES ("shim,cuda"), which must be there; else the shim, if it was built, and a
// GPU if there is one.
inline const std::vector<std::string>& device_plugins() {
  static const std::vector<std::string> names = [] {
    const bool named = std::getenv("KVPAGER_TEST_DEVICES") != nullptr;
    std::vector<std::string> found;
    for (const std::string& name : testing::test_devices()) {
      const device::Report report = device::probe(name);
      if (named || !report.plugin.empty()) REQUIRE_MESSAGE(!report.devices.empty(), report.why_not);
      if (!report.devices.empty()) found.push_back(name);
    }
    return found;
  }();
  return names;
}

inline bool has_shim() {
  const std::vector<std::string>& names = device_plugins();
  return std::find(names.begin(), names.end(), "shim") != names.end();
}

// All of these and, unless the environment names some, the processor.
inline std::vector<std::string> test_devices() {
  std::vector<std::string> names = device_plugins();
  if (std::getenv("KVPAGER_TEST_DEVICES") == nullptr) names.insert(names.begin(), "cpu");
  return names;
}

class OnDevice {
 public:
  explicit OnDevice(const std::string& name) : before_(test_device()) { test_device() = name; }
  ~OnDevice() { test_device() = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  std::string before_;
};

// A test case that holds wherever the pool is.
#define PAGER_TEST(name) PAGER_TEST_ON(test_devices(), DOCTEST_ANONYMOUS(pager_test_body_), name)
// One that is about devices.
#define DEVICE_TEST(name) PAGER_TEST_ON(device_plugins(), DOCTEST_ANONYMOUS(pager_test_body_), name)
#define PAGER_TEST_ON(devices, body, name)        \
  static void body();                             \
  TEST_CASE(name) {                               \
    for (const std::string& device : (devices)) { \
      CAPTURE(device);                            \
      const OnDevice on(device);                  \
      body();                                     \
    }                                             \
  }                                               \
  static void body()

// Memory and a stream of the caller's, as torch would have them.
class Caller {
 public:
  explicit Caller(const std::string& name)
      : device_(device::Device::open(name)),
        on_device_(device_->allocate("tensors of a test", kBytes)),
        on_host_(device_->pin("tensors of a test", kBytes)) {
    for (device::Stream& stream : streams_) {
      check(api().create_stream(device_->context(), &stream));
    }
    check(api().create_event(device_->context(), &event_));
  }
  // The current one; lives as long as the process.
  static Caller& current() {
    static auto* const all = new std::map<std::string, std::unique_ptr<Caller>>;
    std::unique_ptr<Caller>& caller = (*all)[test_device()];
    if (!caller) caller = std::make_unique<Caller>(test_device());
    return *caller;
  }

  // Two of them, so that a test can go from one to the other.
  void* stream() const { return streams_[now_]; }
  void change_stream() { now_ = 1 - now_; }
  const device::Api& api() const { return device_->api(); }
  device::Context context() const { return device_->context(); }

  // A copy of a tensor in device memory, on its way on the stream.
  TensorView upload(const TensorView& view) {
    TensorView copy = view;
    const int64_t bytes = extent(view);
    const int64_t offset = room(bytes);
    const int64_t low = lowest(view);
    std::memcpy(on_host_.data() + offset, static_cast<const std::byte*>(view.data) + low,
                static_cast<size_t>(bytes));
    check(api().copy(context(), on_device_.data() + offset, on_host_.data() + offset, bytes,
                     device::Direction::kUp, stream()));
    copy.data = on_device_.data() + offset - low;
    return copy;
  }
  // The other way: the bytes of `from` when the stream has come so far, into `to` at finish().
  void download(const TensorView& from, const TensorView& to) {
    const int64_t bytes = extent(from);
    const int64_t offset = room(bytes);
    const int64_t low = lowest(from);
    check(api().copy(context(), on_host_.data() + offset,
                     static_cast<const std::byte*>(from.data) + low, bytes,
                     device::Direction::kDown, stream()));
    downloads_.push_back({static_cast<std::byte*>(to.data) + low, on_host_.data() + offset, bytes});
  }
  // Waits for the streams; what was uploaded is gone.
  void finish() {
    for (const device::Stream stream : streams_) {
      check(api().record(context(), event_, stream));
      check(api().synchronize(context(), event_));
    }
    for (const Download& each : downloads_) {
      std::memcpy(each.to, each.from, static_cast<size_t>(each.bytes));
    }
    downloads_.clear();
    used_ = 0;
  }
  void check(int code) const { device_->check(code, "a test"); }

 private:
  static constexpr int64_t kBytes = int64_t{4} << 20;
  struct Download {
    std::byte* to;
    const std::byte* from;
    int64_t bytes;
  };
  static int64_t extent(const TensorView& view) {
    return ((view.rows - 1) * std::abs(view.row_stride) +
            (view.heads - 1) * std::abs(view.head_stride) + view.dim) *
           dtype_bytes(view.dtype);
  }
  // Where a tensor with negative strides begins, in bytes from its data.
  static int64_t lowest(const TensorView& view) {
    return (std::min<int64_t>(0, (view.rows - 1) * view.row_stride) +
            std::min<int64_t>(0, (view.heads - 1) * view.head_stride)) *
           dtype_bytes(view.dtype);
  }
  int64_t room(int64_t bytes) {
    const int64_t offset = used_;
    used_ += (bytes + 255) / 256 * 256;
    REQUIRE(used_ <= kBytes);
    return offset;
  }

  std::shared_ptr<device::Device> device_;
  device::Memory on_device_, on_host_;
  device::Stream streams_[2] = {};
  int now_ = 0;
  device::Event event_ = nullptr;
  std::vector<Download> downloads_;
  int64_t used_ = 0;
};

// Attention of host tensors, complete when it returns.
inline void attend_on_device(Pager& pager, int layer, const TensorView& q, const TensorView& k,
                             const TensorView& v, const TensorView& out, AttendOptions options) {
  if (!on_device()) return pager.attend(layer, q, k, v, out, options);
  Caller& caller = Caller::current();
  options.stream = caller.stream();
  const TensorView result = caller.upload(out);
  try {
    pager.attend(layer, caller.upload(q), caller.upload(k), caller.upload(v), result, options);
  } catch (...) {
    caller.finish();
    throw;
  }
  caller.download(result, out);
  caller.finish();
}

// One tensor per layer of either.
inline void give_on_device(Pager& pager, std::vector<TensorView> k, std::vector<TensorView> v) {
  if (!on_device()) return pager.give(k, v);
  Caller& caller = Caller::current();
  try {
    for (TensorView& layer : k) layer = caller.upload(layer);
    for (TensorView& layer : v) layer = caller.upload(layer);
    pager.give(k, v, caller.stream());
  } catch (...) {
    caller.finish();
    throw;
  }
  caller.finish();
}

inline void write_on_device(Pager& pager, int layer, const TensorView& k, const TensorView& v) {
  if (!on_device()) return pager.write(layer, k, v);
  Caller& caller = Caller::current();
  try {
    pager.write(layer, caller.upload(k), caller.upload(v), caller.stream());
  } catch (...) {
    caller.finish();
    throw;
  }
  caller.finish();
}

}  // namespace kvpager::pager_test
