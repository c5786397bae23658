// Finding and loading plug-ins, and what is said where there is none.
#include "device/plugin.h"

#include <filesystem>

#include "devices.h"
#include "kvpager/error.h"

namespace kvpager::testing {
using namespace device;
namespace {

// What is said of `cuda` where the library in this folder of test plug-ins is all there is.
Report probe_in(const std::string& folder) {
  const Environment path("KVPAGER_DEVICE_PATH", std::string(KVPAGER_TEST_PLUGINS "/") + folder);
  return probe("cuda");
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string words_of(const std::string& device) {
  try {
    Device::open(device);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "opened";
}

}  // namespace

TEST_CASE("a plug-in that is nowhere is named with the folders that were searched") {
  const Environment path("KVPAGER_DEVICE_PATH", "/nowhere/one::/nowhere/two");
  const Report report = probe("shim");
  CHECK(report.plugin.empty());
  CHECK(report.devices.empty());
  CHECK(contains(report.why_not, "this build has no 'shim' plug-in"));
  CHECK(contains(report.why_not, "libkvpager_shim.so"));
  CHECK(contains(report.why_not, "/nowhere/one, /nowhere/two"));
  CHECK(contains(words_of("shim"), report.why_not));
}

TEST_CASE("the folder of the library itself is searched first") {
  const std::filesystem::path self = std::filesystem::canonical("/proc/self/exe").parent_path();
  const Environment path("KVPAGER_DEVICE_PATH", "/nowhere");
  CHECK(contains(probe("shim").why_not, self.string() + ", /nowhere"));
}

TEST_CASE("a library that cannot be loaded is reported in the loader's words") {
  const Report report = probe_in("broken");
  CHECK(contains(report.plugin, "broken/libkvpager_cuda.so"));
  CHECK(contains(report.why_not, "cannot be loaded"));
  CHECK(contains(report.why_not, "kvpager_is_defined_nowhere"));
}

TEST_CASE("a library without the entry point is not a plug-in") {
  const Report report = probe_in("no_entry_point");
  CHECK(contains(report.why_not, "is not a plug-in of kvpager: it has no kvpager_device_api"));
}

TEST_CASE("a plug-in of another version of the interface is refused") {
  const Report report = probe_in("other_version");
  const std::string expected = std::to_string(kvpager::device::kAbi);
  CHECK(contains(report.why_not, "has version 99 of the plug-in interface, expected " + expected));
  const Environment path("KVPAGER_DEVICE_PATH", KVPAGER_TEST_PLUGINS "/other_version");
  CHECK(contains(words_of("cuda"), "device 'cuda': " + report.why_not));
}

TEST_CASE("a plug-in with a function missing is refused before it is called") {
  CHECK(contains(probe_in("incomplete").why_not, "is not the 'cuda' plug-in of kvpager"));
}

TEST_CASE("a plug-in of another kind is refused") {
  // The shim under CUDA's name.
  const std::filesystem::path folder = std::filesystem::path(KVPAGER_TEST_PLUGINS) / "renamed";
  std::filesystem::create_directories(folder);
  const std::filesystem::path link = folder / "libkvpager_cuda.so";
  std::filesystem::remove(link);
  std::filesystem::create_symlink(probe("shim").plugin, link);
  CHECK(contains(probe_in("renamed").why_not, "is not the 'cuda' plug-in of kvpager"));
}

TEST_CASE("the shim is one device whose memory the host can read") {
  const Report report = probe("shim");
  REQUIRE(report.why_not.empty());
  CHECK(contains(report.plugin, "libkvpager_shim.so"));
  REQUIRE(report.devices.size() == 1);
  const std::shared_ptr<Device> device = Device::open("shim");
  CHECK(device->name() == "shim:0");
  CHECK(device->api().host_can_read);
  CHECK(device->info().multiprocessors == report.devices[0].multiprocessors);
  CHECK(Device::open("shim:0")->name() == "shim:0");
  CHECK(contains(words_of("shim:1"), "device 'shim:1': there are 1 of this kind, numbered from 0"));
}

TEST_CASE("a name that is no device's is refused with what is expected") {
  for (const char* name : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:99999",
                           "shim ", ":0", "../cuda"}) {
    CAPTURE(name);
    CHECK_THROWS_AS(Device::open(name), InvalidArgumentError);
  }
}

TEST_CASE("cuda is found, or the report says in words why not") {
  const Report report = probe("cuda");
  CAPTURE(report.why_not);
  if (report.why_not.empty()) {
    REQUIRE(!report.devices.empty());
    CHECK(report.devices[0].major >= 8);
    CHECK(report.devices[0].multiprocessors > 0);
    CHECK(report.devices[0].memory_bytes > 0);
    CHECK(Device::open("cuda")->name() == "cuda:0");
    return;
  }
  CHECK(contains(words_of("cuda"), report.why_not));
  if (report.plugin.empty()) {
    CHECK(contains(report.why_not, "this build has no 'cuda' plug-in"));
  } else {
    const bool known = contains(report.why_not, "no NVIDIA driver is installed") ||
                       contains(report.why_not, "but no device that it may use") ||
                       contains(report.why_not, "the NVIDIA driver supports CUDA") ||
                       contains(report.why_not, "has compute capability");
    CHECK(known);
  }
}

TEST_CASE("every device these tests are asked to run on is there") {
  for (const std::string& kind : kvpager::testing::test_devices()) {
    CAPTURE(kind);
    CHECK(probe(kind).why_not == "");
  }
}

}  // namespace kvpager::testing
