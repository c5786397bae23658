// Tickets, the order between lanes, and the caller's stream.
#include "device/timeline.h"

#include <cstring>

#include "devices.h"
#include "kvpager/error.h"

namespace kvpager::testing {
using namespace device;
namespace {

constexpr int64_t kBytes = 1000;

// Copies within a device on any stream, and what arrived.
struct Blocks {
  explicit Blocks(std::shared_ptr<Device> of)
      : device(std::move(of)),
        block(device->allocate("blocks", 8 * kBytes)),
        slot(device->pin("slots", 8 * kBytes)) {}

  std::byte* at(int i) const { return block.data() + i * kBytes; }
  std::byte* pinned(int i) const { return slot.data() + i * kBytes; }
  void fill(int i, int byte) const { std::memset(pinned(i), byte, kBytes); }
  bool holds(int i, int byte) const {
    for (int64_t b = 0; b < kBytes; ++b) {
      if (pinned(i)[b] != static_cast<std::byte>(byte)) return false;
    }
    return true;
  }
  void up(Stream stream, int to, int from) const {
    kvpager::device::copy_up(*device, stream, at(to), pinned(from), kBytes);
  }
  void down(Stream stream, int to, int from) const {
    kvpager::device::copy_down(*device, stream, pinned(to), at(from), kBytes);
  }

  std::shared_ptr<Device> device;
  Memory block, slot;
};

}  // namespace

TEST_CASE("tickets of a lane count from one, and the number zero is always done") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    Timeline timeline(Device::open(kind));
    CHECK(timeline.newest(Lane::kUp).number == 0);
    CHECK(timeline.done({Lane::kDown, 0}));
    timeline.wait({Lane::kDown, 0}, "test");
    timeline.order(Lane::kUp, {Lane::kDown, 0}, "test");
    const Ticket first = timeline.take(Lane::kUp);
    const Ticket second = timeline.take(Lane::kUp);
    CHECK(first.number == 1);
    CHECK(second.number == 2);
    CHECK(timeline.newest(Lane::kUp).number == 2);
    CHECK(timeline.newest(Lane::kDown).number == 0);
    timeline.wait(second, "test");
    CHECK(timeline.done(first));
  }
}

TEST_CASE("a ticket is done when what was enqueued before it is, and not sooner") {
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  blocks.fill(0, 3);
  blocks.up(timeline.stream(Lane::kUp), 0, 0);
  const Ticket first = timeline.take(Lane::kUp);
  blocks.fill(1, 4);
  blocks.up(timeline.stream(Lane::kUp), 1, 1);
  const Ticket second = timeline.take(Lane::kUp);
  CHECK(!timeline.done(first));
  timeline.wait(first, "test");
  CHECK(timeline.done(first));
  CHECK(blocks.at(0)[7] == std::byte{3});
  CHECK(!timeline.done(second));
  CHECK(blocks.at(1)[7] == std::byte{0xFF});
  timeline.wait(second, "test");
  CHECK(blocks.at(1)[7] == std::byte{4});
}

TEST_CASE("a ticket that is asked for again and again comes to be done") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Blocks blocks(shim(seed));
    Timeline timeline(blocks.device);
    blocks.up(timeline.stream(Lane::kUp), 0, 0);
    const Ticket ticket = timeline.take(Lane::kUp);
    int asked = 1;
    while (!timeline.done(ticket)) ++asked;
    CHECK(asked <= 8);
  }
}

TEST_CASE("tickets older than a lane has events for are waited for all the same") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    Blocks blocks(Device::open(kind));
    Timeline timeline(blocks.device);
    blocks.fill(0, 5);
    blocks.up(timeline.stream(Lane::kUp), 0, 0);
    const Ticket old = timeline.take(Lane::kUp);
    for (int i = 0; i < 1000; ++i) {
      blocks.up(timeline.stream(Lane::kUp), 1, 1);
      timeline.take(Lane::kUp);
    }
    timeline.order(Lane::kDown, old, "test");
    blocks.down(timeline.stream(Lane::kDown), 2, 0);
    timeline.wait(timeline.take(Lane::kDown), "test");
    CHECK(blocks.holds(2, 5));
    timeline.wait(old, "test");
    CHECK(timeline.done(old));
    timeline.finish();
    CHECK(timeline.done({Lane::kUp, 1001}));
  }
}

TEST_CASE("a ticket known to be done is not asked for again") {
  // While a graph is captured every question to the device is an error.
  const ShimHooks tools;
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  const OwnStream captured(*blocks.device);
  const Ticket known = timeline.take(Lane::kUp);
  const Ticket also = timeline.take(Lane::kUp);
  while (!timeline.done(also)) {
  }
  const Ticket unknown = timeline.take(Lane::kDown);
  REQUIRE(tools.begin_capture(captured) == 0);
  CHECK(timeline.done(known));
  CHECK(timeline.done(also));
  timeline.wait(known, "test");
  CHECK_THROWS_AS(timeline.done(unknown), kvpager::DeviceError);
  void* graph = nullptr;
  CHECK(tools.end_capture(captured, &graph) != 0);
}

TEST_CASE("another stream of the caller waits for the one before") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    Blocks blocks(Device::open(kind));
    Timeline timeline(blocks.device);
    const OwnStream first(*blocks.device);
    const OwnStream second(*blocks.device);
    timeline.set_compute(first);
    CHECK(timeline.stream(Lane::kCompute) == static_cast<Stream>(first));
    blocks.fill(0, 6);
    blocks.up(first, 0, 0);
    timeline.set_compute(second);
    blocks.down(second, 1, 0);
    timeline.wait(timeline.take(Lane::kCompute), "test");
    CHECK(blocks.holds(1, 6));
    timeline.finish();
  }
}

TEST_CASE("without that wait the new stream overtakes the old one") {
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  const OwnStream first(*blocks.device);
  const OwnStream second(*blocks.device);
  timeline.set_compute(first);
  blocks.fill(0, 6);
  blocks.up(first, 0, 0);
  {
    const LeaveOut leave("compute after the caller's stream before");
    timeline.set_compute(second);
  }
  blocks.down(second, 1, 0);
  OwnEvent after(*blocks.device);
  after.record(second);
  after.synchronize();
  CHECK(!blocks.holds(1, 6));
}

TEST_CASE("a stream that is being captured cannot become the compute lane") {
  const ShimHooks tools;
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  const OwnStream stream(*blocks.device);
  REQUIRE(tools.begin_capture(stream) == 0);
  CHECK_THROWS_AS(timeline.set_compute(stream), InvalidArgumentError);
  void* graph = nullptr;
  REQUIRE(tools.end_capture(stream, &graph) == 0);  // the capture was left alone
  tools.release(graph);
  timeline.set_compute(stream);
  timeline.finish();
}

TEST_CASE("compute may read what it was given after its newest ticket") {
  // The mark is for work that no ticket covers yet: whoever has to wait takes one.
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  const OwnStream caller(*blocks.device);
  timeline.set_compute(caller);
  blocks.fill(0, 1);
  blocks.up(caller, 0, 0);
  timeline.finish();
  const uint64_t before = timeline.newest(Lane::kCompute).number;
  Place place;
  blocks.down(caller, 1, 0);  // reads block 0
  timeline.compute_may_read(&place);
  timeline.compute_may_read(&place);
  CHECK(timeline.newest(Lane::kCompute).number == before);
  blocks.fill(2, 2);
  timeline.before_write(place, Lane::kUp);
  CHECK(timeline.newest(Lane::kCompute).number == before + 1);
  blocks.up(timeline.stream(Lane::kUp), 0, 2);
  timeline.finish();
  CHECK(blocks.holds(1, 1));
}

TEST_CASE("asking whether compute's last read is over takes the ticket that tells") {
  Blocks blocks(shim(1));
  const OwnStream caller(*blocks.device);
  Timeline timeline(blocks.device);
  timeline.set_compute(caller);
  Place place;
  blocks.down(caller, 1, 0);
  timeline.compute_may_read(&place);
  const Ticket read{Lane::kCompute, place.read[0]};
  CHECK(!timeline.done(read));
  CHECK(timeline.newest(Lane::kCompute).number == read.number);
  int asked = 1;
  while (!timeline.done(read) && asked < 100) ++asked;
  CHECK(asked <= 8);
}

TEST_CASE("of two reads a place remembers the later one") {
  Place place;
  Timeline::reads(&place, {Lane::kUp, 5});
  Timeline::reads(&place, {Lane::kUp, 3});
  Timeline::reads(&place, {Lane::kDown, 2});
  CHECK(place.read == std::array<uint64_t, 3>{0, 5, 2});
  Timeline::wrote(&place, {Lane::kCompute, 9});
  CHECK(place.read == std::array<uint64_t, 3>{0, 0, 0});
}

TEST_CASE("the end of a timeline is the end of its work") {
  const ShimHooks tools;
  Blocks blocks(shim(1));
  const OwnStream caller(*blocks.device);
  for (const Lane lane : {Lane::kUp, Lane::kDown, Lane::kCompute}) {
    for (const bool marked : {false, true}) {
      {
        Timeline timeline(blocks.device);
        timeline.set_compute(caller);
        blocks.fill(0, 8);
        blocks.up(timeline.stream(lane), 0, 0);
        Place place;
        if (marked) {
          timeline.compute_may_read(&place);
        } else {
          timeline.take(lane);
        }
        CHECK(tools.unfinished() == 1);
      }
      CHECK(tools.unfinished() == 0);
      CHECK(blocks.at(0)[0] == std::byte{8});
    }
  }
}

TEST_CASE("a timeline may end after the caller's last stream") {
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  const OwnStream caller(*blocks.device);
  timeline.set_compute(caller);
  blocks.up(caller, 0, 0);
  timeline.take(Lane::kCompute);
}

TEST_CASE("waits that were carried out are on record by name, those left out are not") {
  Blocks blocks(shim(1));
  Timeline timeline(blocks.device);
  const auto seen = [](const std::string& name) {
    const std::vector<std::string> all = waits_seen();
    return std::find(all.begin(), all.end(), name) != all.end();
  };
  const Ticket ticket = timeline.take(Lane::kUp);
  {
    const LeaveOut leave("a wait of this test");
    {
      const LeaveOut twice("a wait of this test");
    }
    timeline.order(Lane::kDown, ticket, "a wait of this test");
    timeline.wait(ticket, "a wait of this test");
  }
  CHECK(!seen("a wait of this test"));
  timeline.order(Lane::kDown, ticket, "a wait of this test");
  CHECK(seen("a wait of this test"));
}

}  // namespace kvpager::testing
