// Memory of devices, its limits, and copies that are refused.
#include <cerrno>
#include <cstring>
#include <utility>

#include "../disarm.h"
#include "device/timeline.h"
#include "devices.h"
#include "kvpager/error.h"

namespace kvpager::testing {
using namespace device;
namespace {

template <class Error, class Function>
std::string words_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("memory is counted while it lives, by kind") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    const std::shared_ptr<Device> device = Device::open(kind);
    const int64_t before_device = total_device_bytes();
    const int64_t before_pinned = total_pinned_bytes();
    {
      Memory pool = device->allocate("the pool", 1000);
      const Memory arena = device->pin("the arena", 3000);
      CHECK(pool.bytes() == 1000);
      CHECK(reinterpret_cast<uintptr_t>(pool.data()) % 256 == 0);
      CHECK(reinterpret_cast<uintptr_t>(arena.data()) % 256 == 0);
      CHECK(total_device_bytes() == before_device + 1000);
      CHECK(total_pinned_bytes() == before_pinned + 3000);

      Memory moved = std::move(pool);
      CHECK(pool.data() == nullptr);
      CHECK(moved.bytes() == 1000);
      CHECK(total_device_bytes() == before_device + 1000);
      moved = Memory();
      CHECK(total_device_bytes() == before_device);
    }
    CHECK(total_pinned_bytes() == before_pinned);
  }
}

TEST_CASE("memory keeps its device open") {
  Memory memory;
  {
    const std::shared_ptr<Device> device = Device::open("shim");
    memory = device->pin("the arena", 64);
  }
  std::memset(memory.data(), 1, 64);
}

TEST_CASE("no bytes are no memory, and less than none an error") {
  const std::shared_ptr<Device> device = Device::open("shim");
  CHECK(device->allocate("nothing", 0).data() == nullptr);
  CHECK(device->pin("nothing", 0).bytes() == 0);
  CHECK_THROWS_AS(device->allocate("the pool", -1), InvalidArgumentError);
}

TEST_CASE("the shim's memory is poison when it is new") {
  const std::shared_ptr<Device> device = Device::open("shim");
  const Memory memory = device->allocate("the pool", 513);
  for (int64_t i = 0; i < 513; ++i) REQUIRE(memory.data()[i] == std::byte{0xFF});
}

TEST_CASE("a device with no room says what for and how much, and gives nothing") {
  const Environment limit("KVPAGER_SHIM_MEMORY", std::to_string(total_device_bytes() + 10000));
  const Environment pinned("KVPAGER_SHIM_PINNED", std::to_string(total_pinned_bytes() + 500));
  const std::shared_ptr<Device> device = Device::open("shim");
  const int64_t before = total_device_bytes();
  {
    const Memory first = device->allocate("the pool", 9000);
    const std::string words =
        words_of<CapacityError>([&] { device->allocate("the tables", 1001); });
    CHECK(words == "the tables: device 'shim:0' has no 1001 bytes of memory left");
    CHECK(total_device_bytes() == before + 9000);
    CHECK(device->allocate("the tables", 1000).bytes() == 1000);
  }
  CHECK(device->allocate("the pool", 10000).bytes() == 10000);
  const std::string words = words_of<CapacityError>([&] { device->pin("the host arena", 501); });
  CHECK(contains(words, "the host arena"));
  CHECK(contains(words, "501 bytes of memory of the host that can be pinned"));
}

TEST_CASE("an allocation no machine has is refused") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    const std::shared_ptr<Device> device = Device::open(kind);
    const std::string words =
        words_of<CapacityError>([&] { device->allocate("the pool", int64_t{1} << 46); });
    CHECK(contains(words, "the pool"));
    CHECK(contains(words, std::to_string(int64_t{1} << 46)));
    // The failure is over with: what comes next works.
    CHECK(device->allocate("the pool", 1 << 20).bytes() == 1 << 20);
  }
}

TEST_CASE("each fault point fails its operation once and leaves the device usable") {
  const Disarm disarm;
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    const std::shared_ptr<Device> device = Device::open(kind);
    Timeline timeline(device);
    const Memory on_device = device->allocate("a block", 4096);
    const Memory on_host = device->pin("a slot", 4096);
    const int64_t before = total_device_bytes() + total_pinned_bytes();
    const auto up = [&] {
      copy_up(*device, timeline.stream(Lane::kUp), on_device.data(), on_host.data(), 4096);
    };
    const auto down = [&] {
      copy_down(*device, timeline.stream(Lane::kDown), on_host.data(), on_device.data(), 4096);
    };

    kvpager::fault::arm("device.allocate", 1, ENOMEM);
    const Memory passes = device->allocate("first", 64);
    CHECK(contains(words_of<CapacityError>([&] { device->allocate("second", 64); }), "second"));
    kvpager::fault::arm("device.pin", 0, ENOMEM);
    CHECK(contains(words_of<CapacityError>([&] { device->pin("third", 64); }), "third"));
    CHECK(total_device_bytes() + total_pinned_bytes() == before + 64);

    std::memset(on_host.data(), 7, 4096);
    kvpager::fault::arm("device.up", 0, EIO);
    CHECK(contains(words_of<DeviceError>(up), "copying to the device: Input/output error"));
    up();
    timeline.wait(timeline.take(Lane::kUp), "test");
    std::memset(on_host.data(), 9, 4096);
    kvpager::fault::arm("device.down", 0, EIO);
    CHECK(contains(words_of<DeviceError>(down), "copying to the host: Input/output error"));
    CHECK(on_host.data()[0] == std::byte{9});  // nothing was enqueued
    down();

    kvpager::fault::arm("device.record", 0, EIO);
    CHECK_THROWS_AS(timeline.take(Lane::kDown), DeviceError);
    CHECK(timeline.newest(Lane::kDown).number == 0);
    const auto ticket = timeline.take(Lane::kDown);
    kvpager::fault::arm("device.order", 0, EIO);
    CHECK_THROWS_AS(timeline.order(Lane::kUp, ticket, "test"), DeviceError);
    timeline.order(Lane::kUp, ticket, "test");
    kvpager::fault::arm("device.wait", 0, EIO);
    CHECK_THROWS_AS(timeline.wait(ticket, "test"), DeviceError);
    timeline.wait(ticket, "test");
    CHECK(on_host.data()[4095] == std::byte{7});
  }
}

}  // namespace kvpager::testing
