// Launches on the shim's streams, given to a runtime of the test's own.
#include <doctest/doctest.h>

#include <cstring>

#include "died.h"
#include "shim/runtime.h"

namespace shim = kvpager::shim;
using kvpager::device::Direction;
using kvpager::device::Event;
using kvpager::device::kOk;
using kvpager::device::Stream;
using kvpager::testing::last_words;

namespace {

struct Params {
  int64_t number = 3;
  const void* block = nullptr;
  void* out = nullptr;
};

struct Rig {
  Rig() {
    shim::configure();
    shim::create_stream(&stream);
    shim::create_event(&event);
    REQUIRE(shim::allocate(256, false, &block) == kOk);
    REQUIRE(shim::allocate(256, true, &slot) == kOk);
  }
  ~Rig() {
    shim::destroy_stream(stream);
    shim::destroy_event(event);
    if (block) shim::release(block, false);
    shim::release(slot, true);
  }
  Stream stream = nullptr;
  Event event = nullptr;
  void* block = nullptr;
  void* slot = nullptr;
};

}  // namespace

TEST_CASE("a launch runs when its stream gets to it, after what was enqueued before") {
  Rig rig;
  std::memset(rig.slot, 5, 256);
  int seen = 0;
  REQUIRE(shim::copy(rig.block, rig.slot, 256, Direction::kUp, rig.stream) == kOk);
  REQUIRE(shim::enqueue(rig.stream,
                        [&] { seen = static_cast<const unsigned char*>(rig.block)[255]; }) == kOk);
  CHECK(seen == 0);
  shim::record(rig.event, rig.stream);
  shim::synchronize(rig.event);
  CHECK(seen == 5);
}

TEST_CASE("a launch on the caller's stream has run when it returns") {
  Rig rig;
  bool ran = false;
  REQUIRE(shim::enqueue(nullptr, [&] { ran = true; }) == kOk);
  CHECK(ran);
}

TEST_CASE("memory that a launch was given a pointer into is in use until it has run") {
  const std::string words = last_words([] {
    Rig rig;
    const Params params{3, static_cast<const char*>(rig.block) + 255, nullptr};
    shim::enqueue(rig.stream, [] {}, &params, sizeof params);
    shim::release(rig.block, false);
  });
  CHECK(words.find("memory is released that unfinished work reads or writes") != std::string::npos);
  CHECK(last_words([] {
          Rig rig;
          const Params params{3, rig.block, nullptr};
          shim::enqueue(rig.stream, [] {}, &params, sizeof params);
          shim::record(rig.event, rig.stream);
          shim::synchronize(rig.event);
          shim::release(rig.block, false);
          rig.block = nullptr;
        }) == "lived");
}

TEST_CASE("a kernel cannot call the runtime") {
  CHECK(last_words([] {
          Rig rig;
          shim::enqueue(nullptr, [&] { shim::record(rig.event, rig.stream); });
        }).find("a kernel called the runtime") != std::string::npos);
}

TEST_CASE("a launch may be part of a graph and run again and again") {
  Rig rig;
  int runs = 0;
  REQUIRE(kvpager_shim_begin_capture(rig.stream) == kOk);
  shim::enqueue(rig.stream, [&] { ++runs; });
  void* graph = nullptr;
  REQUIRE(kvpager_shim_end_capture(rig.stream, &graph) == kOk);
  CHECK(runs == 0);
  for (int i = 0; i < 3; ++i) kvpager_shim_replay(graph, rig.stream);
  kvpager_shim_drain();
  CHECK(runs == 3);
  kvpager_shim_release(graph);
}
