// What tests of devices share: which plug-ins they run on, and the shim's settings.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "../cuda/shim_hooks.h"
#include "device/device.h"

namespace kvpager::testing {

// Sets an environment variable while it lives.
class Environment {
 public:
  Environment(std::string name, const std::string& value) : name_(std::move(name)) {
    if (const char* before = std::getenv(name_.c_str())) before_ = before;
    setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Environment() { before_ ? setenv(name_.c_str(), before_->c_str(), 1) : unsetenv(name_.c_str()); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::string name_;
  std::optional<std::string> before_;
};

// KVPAGER_TEST_DEVICES, a comma list of which each must be there; else the shim, and a GPU if there
// is one.
inline std::vector<std::string> test_devices() {
  std::vector<std::string> kinds;
  if (const char* wanted = std::getenv("KVPAGER_TEST_DEVICES")) {
    std::string rest = wanted;
    while (!rest.empty()) {
      const size_t end = std::min(rest.find(','), rest.size());
      if (end > 0) kinds.push_back(rest.substr(0, end));
      rest.erase(0, end + 1);
    }
    return kinds;
  }
  kinds.emplace_back("shim");
  if (device::probe("cuda").why_not.empty()) kinds.emplace_back("cuda");
  return kinds;
}

// KVPAGER_TEST_SMALL: fewer and smaller cases, for tools that slow kernels down a hundred times.
inline bool small_tests() {
  const char* small = std::getenv("KVPAGER_TEST_SMALL");
  return small != nullptr && *small != 0 && std::string(small) != "0";
}

// The shim with another order of whatever nothing orders.
inline std::shared_ptr<device::Device> shim(uint64_t seed) {
  const Environment environment("KVPAGER_SHIM_SEED", std::to_string(seed));
  return device::Device::open("shim");
}

// A stream of the device, destroyed at the end.
class OwnStream {
 public:
  explicit OwnStream(device::Device& device) : device_(device) {
    device.check(device.api().create_stream(device.context(), &stream_), "creating a stream");
  }
  ~OwnStream() { device_.api().destroy_stream(device_.context(), stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator device::Stream() const { return stream_; }

 private:
  device::Device& device_;
  device::Stream stream_ = nullptr;
};

class OwnEvent {
 public:
  explicit OwnEvent(device::Device& device) : device_(device) {
    device.check(device.api().create_event(device.context(), &event_), "creating an event");
  }
  ~OwnEvent() { device_.api().destroy_event(device_.context(), event_); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;

  void record(device::Stream stream) {
    device_.check(device_.api().record(device_.context(), event_, stream), "recording");
  }
  void hold(device::Stream stream) {
    device_.check(device_.api().wait(device_.context(), stream, event_), "waiting");
  }
  void synchronize() {
    device_.check(device_.api().synchronize(device_.context(), event_), "synchronizing");
  }
  bool done() {
    bool yes = false;
    device_.check(device_.api().done(device_.context(), event_, &yes), "querying");
    return yes;
  }
  operator device::Event() const { return event_; }

 private:
  device::Device& device_;
  device::Event event_ = nullptr;
};

}  // namespace kvpager::testing
