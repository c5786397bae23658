// The entry points of the shim for tests, of the plug-in that probe() finds.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdint>

#include "device/device.h"

namespace kvpager::testing {

struct ShimHooks {
  int (*begin_capture)(void* stream) = nullptr;
  int (*end_capture)(void* stream, void** graph) = nullptr;
  int (*replay)(void* graph, void* stream) = nullptr;
  int (*release)(void* graph) = nullptr;
  int64_t (*unfinished)() = nullptr;
  void (*drain)() = nullptr;

  ShimHooks() {
    const device::Report report = device::probe("shim");
    REQUIRE(report.why_not.empty());
    void* const library = dlopen(report.plugin.c_str(), RTLD_NOW | RTLD_NOLOAD);
    REQUIRE(library != nullptr);
    find(library, "kvpager_shim_begin_capture", &begin_capture);
    find(library, "kvpager_shim_end_capture", &end_capture);
    find(library, "kvpager_shim_replay", &replay);
    find(library, "kvpager_shim_release", &release);
    find(library, "kvpager_shim_unfinished", &unfinished);
    find(library, "kvpager_shim_drain", &drain);
  }

 private:
  template <class Function>
  static void find(void* library, const char* name, Function* function) {
    void* const symbol = dlsym(library, name);
    REQUIRE(symbol != nullptr);
    *function = reinterpret_cast<Function>(symbol);
  }
};

}  // namespace kvpager::testing
