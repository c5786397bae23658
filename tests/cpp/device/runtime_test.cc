// The shim's streams and events are CUDA's, with the worst that CUDA allows.
#include <cstring>
#include <set>
#include <thread>

#include "devices.h"
#include "died.h"

namespace kvpager::testing {
using namespace device;
namespace {

constexpr int64_t kBytes = 64;

struct Rig {
  explicit Rig(uint64_t seed) : device(shim(seed)) {
    memory = device->allocate("blocks", 8 * kBytes);
    pinned = device->pin("slots", 8 * kBytes);
    for (int i = 0; i < 8; ++i) {
      std::memset(block(i), i, kBytes);
      std::memset(slot(i), 0x10 + i, kBytes);
    }
  }
  ~Rig() { tools.drain(); }  // nothing may be under way when memory goes
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;
  std::byte* block(int i) const { return memory.data() + i * kBytes; }
  std::byte* slot(int i) const { return pinned.data() + i * kBytes; }
  int at(int i) const { return static_cast<int>(block(i)[kBytes - 1]); }
  int code(void* to, const void* from, Direction direction, Stream stream) const {
    return device->api().copy(device->context(), to, from, kBytes, direction, stream);
  }
  void copy(int to, int from, Stream stream) const {
    device->check(code(block(to), block(from), Direction::kWithin, stream), "copying");
  }

  std::shared_ptr<Device> device;
  Memory memory, pinned;
  const ShimHooks tools;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("pieces are copied with what lies between them left alone, and begin and end together") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const Rig rig(seed);
    const OwnStream stream(*rig.device);
    kvpager::device::Pieces pieces{rig.block(1), rig.slot(2), 2 * kBytes, kBytes, kBytes / 2, 3};
    const kvpager::device::Pieces other{rig.block(6), rig.slot(7), kBytes, kBytes, kBytes / 2, 1};
    const auto copy = [&] {
      const kvpager::device::Pieces runs[] = {pieces, other};
      return rig.device->api().copy_pieces(rig.device->context(), runs, 2, Direction::kUp, stream);
    };
    const int64_t before = rig.tools.unfinished();
    CHECK(copy() == kOk);
    CHECK(rig.tools.unfinished() <= before + 1);
    rig.tools.drain();
    for (int i = 0; i < 8; ++i) {
      const bool copied = i == 1 || i == 3 || i == 5;
      const int expected = copied ? 0x12 + (i - 1) / 2 : i == 6 ? 0x17 : i;
      CHECK(static_cast<int>(rig.block(i)[0]) == expected);
      CHECK(rig.at(i) == i);
    }
    pieces.from_stride = pieces.bytes - 1;
    CHECK(copy() != kOk);
  }
}

TEST_CASE("a copy is poison from when it may begin, and reads its source when it ends") {
  Rig rig(1);
  const OwnStream stream(*rig.device);
  OwnEvent event(*rig.device);
  rig.copy(1, 2, stream);
  event.record(stream);
  CHECK(rig.at(1) == 0xFF);
  CHECK(rig.tools.unfinished() == 1);
  std::memset(rig.block(2), 99, kBytes);
  event.synchronize();
  CHECK(rig.at(1) == 99);
  CHECK(rig.tools.unfinished() == 0);
}

TEST_CASE("a copy that is told to wait leaves its destination alone until then") {
  Rig rig(1);
  const OwnStream first(*rig.device);
  const OwnStream second(*rig.device);
  OwnEvent read(*rig.device);
  OwnEvent end(*rig.device);
  rig.copy(3, 1, first);  // reads block 1
  read.record(first);
  read.hold(second);
  rig.copy(1, 2, second);  // writes it
  end.record(second);
  CHECK(rig.at(1) == 1);
  end.synchronize();
  CHECK(rig.at(3) == 1);
  CHECK(rig.at(1) == 2);
}

TEST_CASE("a fill is poison first as well") {
  Rig rig(1);
  const OwnStream stream(*rig.device);
  OwnEvent event(*rig.device);
  const auto& api = rig.device->api();
  REQUIRE(api.fill(rig.device->context(), rig.block(1), 0, kBytes, stream) == kOk);
  event.record(stream);
  CHECK(rig.at(1) == 0xFF);
  event.synchronize();
  CHECK(rig.at(1) == 0);
}

TEST_CASE("work on one stream is in order, whatever the seed") {
  for (uint64_t seed = 1; seed <= 32; ++seed) {
    CAPTURE(seed);
    Rig rig(seed);
    const OwnStream stream(*rig.device);
    OwnEvent event(*rig.device);
    rig.copy(1, 2, stream);
    rig.copy(2, 3, stream);
    rig.copy(3, 1, stream);
    event.record(stream);
    event.synchronize();
    CHECK(rig.at(1) == 2);
    CHECK(rig.at(2) == 3);
    CHECK(rig.at(3) == 2);
  }
}

TEST_CASE("streams that nothing orders run in any order") {
  std::set<int> seen;
  for (uint64_t seed = 1; seed <= 64; ++seed) {
    Rig rig(seed);
    const OwnStream first(*rig.device);
    const OwnStream second(*rig.device);
    rig.copy(1, 2, first);
    rig.copy(1, 3, second);
    rig.tools.drain();
    seen.insert(rig.at(1));
  }
  CHECK(seen == std::set<int>{2, 3});
}

TEST_CASE("some seeds run work before anything asks for it, and the first one does not") {
  int early = 0;
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    Rig rig(seed);
    const OwnStream stream(*rig.device);
    for (int i = 0; i < 6; ++i) rig.copy(1, 2, stream);
    const bool all = rig.tools.unfinished() == 6;
    if (!all) ++early;
    if (seed == 1) CHECK(all);
  }
  CHECK(early >= 4);
  CHECK(early <= 12);
}

TEST_CASE("the same seed gives the same order") {
  const auto run = [](uint64_t seed) {
    Rig rig(seed);
    const OwnStream first(*rig.device);
    const OwnStream second(*rig.device);
    std::vector<int64_t> trace;
    for (int i = 0; i < 40; ++i) {
      rig.copy(1, 2, i % 3 == 0 ? first : second);
      trace.push_back(rig.tools.unfinished());
    }
    return trace;
  };
  for (uint64_t seed = 1; seed <= 8; ++seed) CHECK(run(seed) == run(seed));
  CHECK(run(2) != run(6));
}

TEST_CASE(
    "the caller's stream is done when the call returns, and takes along only what it waits for") {
  Rig rig(1);
  const OwnStream wanted(*rig.device);
  const OwnStream other(*rig.device);
  OwnEvent event(*rig.device);
  int torch = 0;  // any handle that was not made here
  for (Stream caller : {static_cast<Stream>(nullptr), static_cast<Stream>(&torch)}) {
    std::memset(rig.block(1), 1, kBytes);
    rig.copy(1, 2, wanted);
    event.record(wanted);
    rig.copy(6, 2, wanted);  // after the event
    rig.copy(4, 5, other);
    event.hold(caller);
    CHECK(rig.at(1) == 2);
    rig.copy(3, 1, caller);
    CHECK(rig.at(3) == 2);
    CHECK(rig.at(6) == 0xFF);
    CHECK(rig.at(4) == 0xFF);
    rig.tools.drain();
  }
}

TEST_CASE("an event never recorded is done, and holds nobody") {
  Rig rig(1);
  const OwnStream stream(*rig.device);
  OwnEvent event(*rig.device);
  CHECK(event.done());
  event.synchronize();
  event.hold(stream);
  rig.copy(1, 2, stream);
  CHECK(rig.at(1) == 0xFF);  // began at once
  rig.tools.drain();
}

TEST_CASE("a wait is for the recording there was when it was asked for") {
  Rig rig(1);
  const OwnStream first(*rig.device);
  const OwnStream second(*rig.device);
  OwnEvent event(*rig.device);
  OwnEvent end(*rig.device);
  rig.copy(1, 2, first);
  event.record(first);
  event.hold(second);
  rig.copy(4, 5, first);
  event.record(first);  // again: second does not wait for this one
  rig.copy(3, 1, second);
  end.record(second);
  end.synchronize();
  CHECK(rig.at(3) == 2);
  CHECK(rig.at(4) == 0xFF);
  CHECK(!event.done());
  event.synchronize();
  CHECK(rig.at(4) == 5);
}

TEST_CASE("an event may be destroyed while streams wait for it") {
  Rig rig(1);
  const OwnStream first(*rig.device);
  const OwnStream second(*rig.device);
  OwnEvent end(*rig.device);
  {
    OwnEvent event(*rig.device);
    rig.copy(1, 2, first);
    event.record(first);
    event.hold(second);
  }
  rig.copy(3, 1, second);
  end.record(second);
  end.synchronize();
  CHECK(rig.at(3) == 2);
}

TEST_CASE("a long chain across streams is followed to its beginning") {
  Rig rig(1);
  const OwnStream first(*rig.device);
  const OwnStream second(*rig.device);
  OwnEvent event(*rig.device);
  rig.copy(1, 2, first);
  for (int i = 0; i < 20000; ++i) {
    const Stream from = i % 2 == 0 ? first : second;
    const Stream to = i % 2 == 0 ? second : first;
    event.record(from);
    event.hold(to);
    rig.copy(i % 2 == 0 ? 3 : 1, i % 2 == 0 ? 1 : 3, to);
  }
  event.record(first);
  event.synchronize();
  CHECK(rig.at(1) == 2);
}

TEST_CASE("what a stream was given is done after its destruction too, some day") {
  Rig rig(1);
  OwnEvent event(*rig.device);
  {
    const OwnStream stream(*rig.device);
    rig.copy(1, 2, stream);
    event.record(stream);
    rig.copy(3, 4, stream);
  }
  CHECK(rig.at(1) == 0xFF);
  CHECK(rig.tools.unfinished() == 2);
  event.synchronize();
  CHECK(rig.at(1) == 2);
  rig.tools.drain();
  CHECK(rig.at(3) == 4);
}

TEST_CASE("memory that unfinished work uses cannot be released") {
  const std::string words = last_words([] {
    Rig rig(1);
    const OwnStream stream(*rig.device);
    rig.copy(1, 2, stream);
    rig.memory = Memory();
  });
  CHECK(contains(words, "memory is released that unfinished work reads or writes"));
  CHECK(last_words([] {
          Rig rig(1);
          const OwnStream stream(*rig.device);
          Memory other = rig.device->allocate("other", kBytes);
          rig.copy(1, 2, stream);
          other = Memory();
          rig.tools.drain();
        }) == "lived");
}

TEST_CASE("misuse that a GPU does not report ends the process with its name") {
  const auto ends_with = [](const char* words, void (*misuse)(Rig& rig, const Api& api)) {
    CHECK(contains(last_words([&] {
                     Rig rig(1);
                     misuse(rig, rig.device->api());
                   }),
                   words));
  };
  ends_with("memory is released that was not allocated",
            [](Rig& rig, const Api& api) { api.release(rig.device->context(), rig.block(1)); });
  ends_with("pinned memory is released as the device's",
            [](Rig& rig, const Api& api) { api.release(rig.device->context(), rig.slot(0)); });
  ends_with("runs past the end of its memory", [](Rig& rig, const Api& api) {
    api.copy(rig.device->context(), rig.block(7), rig.slot(0), 2 * kBytes, Direction::kUp, nullptr);
  });
  ends_with("direction is not that of its memory", [](Rig& rig, const Api&) {
    rig.code(rig.slot(1), rig.block(1), Direction::kUp, nullptr);
  });
  ends_with("source and destination overlap", [](Rig& rig, const Api& api) {
    api.copy(rig.device->context(), rig.block(1), rig.block(0), kBytes + 1, Direction::kWithin,
             nullptr);
  });
  ends_with("a stream is used after it was destroyed", [](Rig& rig, const Api& api) {
    Stream gone = nullptr;
    api.create_stream(rig.device->context(), &gone);
    api.destroy_stream(rig.device->context(), gone);
    rig.copy(1, 2, gone);
  });
  ends_with("KVPAGER_SHIM_SEED is 'many', expected a number >= 0", [](Rig&, const Api&) {
    const kvpager::testing::Environment seed("KVPAGER_SHIM_SEED", "many");
    Device::open("shim");
  });
}

TEST_CASE("threads may use one device at a time each for itself") {
  Rig rig(6);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&rig, t] {
      const OwnStream stream(*rig.device);
      OwnEvent event(*rig.device);
      for (int i = 0; i < 200; ++i) {
        rig.copy(2 * t, 2 * t + 1, stream);
        event.record(stream);
        event.synchronize();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t) CHECK(rig.at(2 * t) == 2 * t + 1);
}

}  // namespace kvpager::testing
