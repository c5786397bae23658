// Graphs of the shim: what CUDA forbids while a stream is captured is an error, and a graph runs
// its nodes in the order that its streams and events gave them.
#include <cstring>
#include <set>

#include "devices.h"
#include "kvpager/error.h"

namespace kvpager::testing {
using namespace device;
namespace {

constexpr int64_t kBytes = 64;

struct Rig {
  explicit Rig(uint64_t seed) : device(shim(seed)), stream(*device), side(*device) {
    memory = device->allocate("blocks", 8 * kBytes);
    reset();
  }
  void reset() const {
    for (int i = 0; i < 8; ++i) std::memset(block(i), i, kBytes);
  }
  std::byte* block(int i) const { return memory.data() + i * kBytes; }
  int at(int i) const { return static_cast<int>(block(i)[0]); }
  void copy(int to, int from, Stream on) const {
    device->check(device->api().copy(device->context(), block(to), block(from), kBytes,
                                     Direction::kWithin, on),
                  "copying");
  }
  bool capturing(Stream on) const {
    bool yes = false;
    device->check(device->api().capturing(device->context(), on, &yes), "asking");
    return yes;
  }

  const ShimHooks tools;
  std::shared_ptr<Device> device;
  OwnStream stream, side;
  Memory memory;
};

// What end_capture says of a capture in which `misuse` happened.
template <class Function>
int end_after(Rig& rig, const Function& misuse) {
  REQUIRE(rig.tools.begin_capture(rig.stream) == kOk);
  rig.copy(1, 2, rig.stream);
  misuse();
  void* graph = nullptr;
  const int code = rig.tools.end_capture(rig.stream, &graph);
  CHECK((graph == nullptr) == (code != kOk));
  if (graph) rig.tools.release(graph);
  CHECK(!rig.capturing(rig.stream));
  return code;
}

}  // namespace

TEST_CASE("a captured stream runs nothing until its graph is replayed, as often as one likes") {
  Rig rig(1);
  REQUIRE(!rig.capturing(rig.stream));
  REQUIRE(rig.tools.begin_capture(rig.stream) == kOk);
  CHECK(rig.capturing(rig.stream));
  CHECK(!rig.capturing(rig.side));
  rig.copy(1, 2, rig.stream);
  rig.copy(3, 1, rig.stream);
  void* graph = nullptr;
  REQUIRE(rig.tools.end_capture(rig.stream, &graph) == kOk);
  CHECK(rig.at(1) == 1);
  CHECK(rig.tools.unfinished() == 0);
  for (int round = 40; round < 43; ++round) {
    std::memset(rig.block(2), round, kBytes);
    REQUIRE(rig.tools.replay(graph, rig.side) == kOk);
    CHECK(rig.at(3) == round - (round == 40 ? 37 : 1));  // not yet
    rig.tools.drain();
    CHECK(rig.at(1) == round);
    CHECK(rig.at(3) == round);
  }
  rig.tools.release(graph);
}

TEST_CASE("a replay on the caller's stream is over when the call returns") {
  Rig rig(1);
  REQUIRE(rig.tools.begin_capture(rig.stream) == kOk);
  rig.copy(1, 2, rig.stream);
  void* graph = nullptr;
  REQUIRE(rig.tools.end_capture(rig.stream, &graph) == kOk);
  REQUIRE(rig.tools.replay(graph, nullptr) == kOk);
  CHECK(rig.at(1) == 2);
  rig.tools.release(graph);
}

TEST_CASE("a graph may be released while its replay is under way") {
  Rig rig(1);
  REQUIRE(rig.tools.begin_capture(rig.stream) == kOk);
  rig.copy(1, 2, rig.stream);
  void* graph = nullptr;
  REQUIRE(rig.tools.end_capture(rig.stream, &graph) == kOk);
  REQUIRE(rig.tools.replay(graph, rig.stream) == kOk);
  rig.tools.release(graph);
  rig.tools.drain();
  CHECK(rig.at(1) == 2);
}

TEST_CASE("allocating, releasing and host waits fail while a stream is captured") {
  Rig rig(1);
  const auto& api = rig.device->api();
  const Memory kept = rig.device->allocate("kept", 64);
  OwnEvent event(*rig.device);
  event.record(rig.side);
  CHECK(end_after(rig, [] {}) == kOk);
  CHECK(end_after(rig, [&] {
          void* memory = nullptr;
          CHECK(api.allocate(rig.device->context(), 64, &memory) != kOk);
        }) != kOk);
  CHECK(end_after(rig, [&] { CHECK_THROWS_AS(rig.device->pin("slots", 64), DeviceError); }) != kOk);
  CHECK(end_after(rig, [&] { CHECK(api.release(rig.device->context(), kept.data()) != kOk); }) !=
        kOk);
  CHECK(end_after(rig, [&] { CHECK_THROWS_AS(event.synchronize(), DeviceError); }) != kOk);
  CHECK(end_after(rig, [&] { CHECK_THROWS_AS(event.done(), DeviceError); }) != kOk);
}

TEST_CASE("a captured stream cannot wait for what happened outside") {
  Rig rig(1);
  OwnEvent outside(*rig.device);
  outside.record(rig.side);
  CHECK(end_after(rig, [&] { CHECK_THROWS_AS(outside.hold(rig.stream), DeviceError); }) != kOk);
  OwnEvent never(*rig.device);
  CHECK(end_after(rig, [&] { CHECK_THROWS_AS(never.hold(rig.stream), DeviceError); }) != kOk);
}

TEST_CASE("after the first error every further call on the capture fails") {
  Rig rig(1);
  OwnEvent outside(*rig.device);
  outside.record(rig.side);
  CHECK(end_after(rig, [&] {
          CHECK_THROWS_AS(outside.hold(rig.stream), DeviceError);
          CHECK_THROWS_AS(rig.copy(1, 2, rig.stream), DeviceError);
          CHECK_THROWS_AS(outside.record(rig.stream), DeviceError);
        }) != kOk);
  rig.copy(1, 2, rig.stream);  // the stream itself is well
  rig.tools.drain();
  CHECK(rig.at(1) == 2);
}

TEST_CASE("an event recorded in a capture means nothing outside of it") {
  Rig rig(1);
  OwnEvent event(*rig.device);
  CHECK(end_after(rig, [&] { event.record(rig.stream); }) == kOk);
  CHECK_THROWS_AS(event.synchronize(), DeviceError);
  CHECK_THROWS_AS(event.done(), DeviceError);
  CHECK_THROWS_AS(event.hold(rig.side), DeviceError);
  event.record(rig.side);
  event.synchronize();
}

TEST_CASE("a stream joins a capture by waiting for it, and has to be waited for") {
  Rig rig(1);
  OwnEvent fork(*rig.device);
  OwnEvent join(*rig.device);
  CHECK(end_after(rig, [&] {
          fork.record(rig.stream);
          fork.hold(rig.side);
          CHECK(rig.capturing(rig.side));
          rig.copy(3, 4, rig.side);
        }) != kOk);
  CHECK(!rig.capturing(rig.side));
  CHECK(end_after(rig, [&] {
          fork.record(rig.stream);
          fork.hold(rig.side);
          rig.copy(3, 4, rig.side);
          join.record(rig.side);
          join.hold(rig.stream);
        }) == kOk);
}

TEST_CASE("branches of a graph keep the order of their events and no other") {
  std::set<int> unordered;
  for (uint64_t seed = 1; seed <= 32; ++seed) {
    CAPTURE(seed);
    Rig rig(seed);
    OwnEvent fork(*rig.device);
    OwnEvent join(*rig.device);
    REQUIRE(rig.tools.begin_capture(rig.stream) == kOk);
    rig.copy(1, 2, rig.stream);
    fork.record(rig.stream);
    fork.hold(rig.side);
    rig.copy(3, 1, rig.side);  // after the copy into block 1
    rig.copy(7, 4, rig.side);  // these two race
    rig.copy(7, 5, rig.stream);
    join.record(rig.side);
    join.hold(rig.stream);
    rig.copy(6, 3, rig.stream);  // after both branches
    void* graph = nullptr;
    REQUIRE(rig.tools.end_capture(rig.stream, &graph) == kOk);
    for (int round = 0; round < 2; ++round) {
      rig.reset();
      REQUIRE(rig.tools.replay(graph, nullptr) == kOk);
      CHECK(rig.at(6) == 2);
      unordered.insert(rig.at(7));
    }
    rig.tools.release(graph);
  }
  CHECK(unordered == std::set<int>{4, 5});
}

}  // namespace kvpager::testing
