// Invariant 5: a block or slot is read after it was written, and written after it was read, by
// whichever lane. Each wait is shown to be needed: without it the wrong bytes arrive.
#include <cstring>
#include <random>
#include <set>

#include "device/timeline.h"
#include "devices.h"

namespace kvpager::testing {
using namespace device;
namespace {

constexpr int64_t kBytes = 4096;
constexpr int kHost = 3;
constexpr const char* kWho[] = {"compute", "up", "down", "host"};
enum class Hazard { kReadAfterWrite, kWriteAfterWrite, kWriteAfterRead };

// "<waiter> reads after <writer>", ...
std::string name_of(Hazard hazard, int waiter, int other) {
  const std::string first = kWho[waiter];
  const std::string last = kWho[other];
  switch (hazard) {
    case Hazard::kReadAfterWrite:
      return first + " reads after " + last;
    case Hazard::kWriteAfterWrite:
      return first + " writes after " + last + " wrote";
    default:
      return first + " writes after " + last + " read";
  }
}

// One place, read and written by two parties in turn; memory of all kinds, so that every lane can
// do both.
class Scene {
 public:
  Scene(const std::shared_ptr<Device>& device, bool host_place)
      : device_(device),
        on_device_(device->allocate("blocks", 4 * kBytes)),
        on_host_(device->pin("slots", 4 * kBytes)),
        caller_(*device),
        timeline_(device),
        host_place_(host_place) {
    timeline_.set_compute(caller_);
    std::memset(on_host_.data(), 0, static_cast<size_t>(on_host_.bytes()));
    const Stream stream = timeline_.stream(Lane::kUp);
    for (int block = 0; block < 4; ++block) {
      // Block 0 or slot 0 is the place: 'A'. Sources: 'B' and 'C'. The sink is block 3.
      std::memset(host(block), 'A' + block, kBytes);
      kvpager::device::copy_up(*device_, stream, block_at(block), host(block), kBytes);
    }
    timeline_.finish();
  }

  void write(int who, int source) {
    if (who == kHost) {
      timeline_.host_before_write(place_);
      std::memset(host(0), 'A' + source, kBytes);
      place_ = Place();
      return;
    }
    const Lane lane = static_cast<Lane>(who);
    timeline_.before_write(place_, lane);
    copy(target(), block_at(source), lane, host_place_ ? Direction::kDown : Direction::kWithin);
    Timeline::wrote(&place_, timeline_.take(lane));
  }

  // What is read shows in result().
  void read(int who) {
    if (who == kHost) {
      timeline_.host_before_read(place_);
      std::memcpy(host(2), host(0), kBytes);
      return;
    }
    const Lane lane = static_cast<Lane>(who);
    timeline_.before_read(place_, lane);
    copy(block_at(3), target(), lane, host_place_ ? Direction::kUp : Direction::kWithin);
    Timeline::reads(&place_, timeline_.take(lane));
  }

  // Lets one lane come to its end before the others.
  void finish(int first) {
    if (first != kHost) {
      timeline_.wait(timeline_.take(static_cast<Lane>(first)), "test");
    }
    timeline_.finish();
  }

  // The byte that the last read saw, or that the place holds in the end; 0 if they differ.
  int seen(bool by_host) {
    if (!by_host) fetch(block_at(3), host(2));
    return only(host(2));
  }
  int held() {
    if (!host_place_) fetch(block_at(0), host(0));
    return only(host(0));
  }

 private:
  std::byte* host(int i) { return on_host_.data() + i * kBytes; }
  std::byte* block_at(int i) { return on_device_.data() + i * kBytes; }
  std::byte* target() { return host_place_ ? host(0) : block_at(0); }
  void copy(void* to, const void* from, Lane lane, Direction direction) {
    device_->check(device_->api().copy(device_->context(), to, from, kBytes, direction,
                                       timeline_.stream(lane)),
                   "copying");
  }
  void fetch(const std::byte* from, std::byte* to) {
    kvpager::device::copy_down(*device_, timeline_.stream(Lane::kDown), to, from, kBytes);
    timeline_.finish();
  }
  static int only(const std::byte* bytes) {
    for (int64_t i = 1; i < kBytes; ++i) {
      if (bytes[i] != bytes[0]) return 0;
    }
    return static_cast<int>(bytes[0]);
  }

  std::shared_ptr<Device> device_;
  Memory on_device_, on_host_;
  OwnStream caller_;
  Timeline timeline_;
  Place place_;
  bool host_place_;
};

// Whether the bytes are those of the order in which things were asked for.
bool right(const std::shared_ptr<Device>& device, Hazard hazard, int waiter, int other,
           bool host_place) {
  Scene scene(device, host_place);
  switch (hazard) {
    case Hazard::kReadAfterWrite:
      scene.write(other, 1);
      scene.read(waiter);
      scene.finish(waiter);
      return scene.seen(waiter == kHost) == 'B';
    case Hazard::kWriteAfterWrite:
      scene.write(other, 1);
      scene.write(waiter, 2);
      scene.finish(waiter);
      return scene.held() == 'C';
    default:
      scene.read(other);
      scene.write(waiter, 2);
      scene.finish(waiter);
      return scene.seen(other == kHost) == 'A' && scene.held() == 'C';
  }
}

template <class Function>
void for_each_hazard(const Function& function) {
  for (const Hazard hazard :
       {Hazard::kReadAfterWrite, Hazard::kWriteAfterWrite, Hazard::kWriteAfterRead}) {
    for (int waiter = 0; waiter <= kHost; ++waiter) {
      for (int other = 0; other < kHost; ++other) {
        if (waiter == other) continue;
        for (const bool host_place : {false, true}) {
          if (waiter == kHost && !host_place) continue;
          CAPTURE(name_of(hazard, waiter, other));
          CAPTURE(host_place);
          function(hazard, waiter, other, host_place);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("every pair of lanes, and the host, keeps its order at a place") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    for (uint64_t seed = 1; seed <= (kind == "shim" && !small_tests() ? 24u : 1u); ++seed) {
      CAPTURE(seed);
      const std::shared_ptr<Device> device = kind == "shim" ? shim(seed) : Device::open(kind);
      for_each_hazard([&](Hazard hazard, int waiter, int other, bool host_place) {
        CHECK(right(device, hazard, waiter, other, host_place));
      });
    }
  }
}

TEST_CASE("every wait between lanes, and of the host, is needed") {
  for_each_hazard([&](Hazard hazard, int waiter, int other, bool host_place) {
    const LeaveOut leave(name_of(hazard, waiter, other));
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 16; ++seed) {
      if (!right(shim(seed), hazard, waiter, other, host_place)) ++wrong;
    }
    CHECK(wrong > 0);
  });
}

namespace {

// Blocks and slots in use by all lanes at once, as the pager uses them; each holds the number of
// the write it was last given.
class Storm {
 public:
  Storm(const std::shared_ptr<Device>& device, uint64_t seed)
      : device_(device),
        on_device_(device->allocate("blocks", kPlaces * kSize)),
        on_host_(device->pin("slots", kPlaces * kSize)),
        caller_(*device),
        timeline_(device),
        random_(seed) {
    timeline_.set_compute(caller_);
    for (int i = 0; i < kPlaces; ++i) {
      expected_host_[i] = i;
      expected_block_[i] = i;
      put(slot(i), i);
      kvpager::device::copy_up(*device_, timeline_.stream(Lane::kUp), block(i), slot(i), kSize);
    }
    timeline_.finish();
  }

  // Whether everything that was read and everything that is left was as told.
  bool run(int steps) {
    for (int i = 0; i < steps; ++i) step();
    timeline_.finish();
    for (int i = 0; i < kPlaces; ++i) good_ = good_ && holds(slot(i), expected_host_[i]);
    for (int i = 0; i < kPlaces; ++i) {
      kvpager::device::copy_down(*device_, timeline_.stream(Lane::kDown), slot(i), block(i), kSize);
    }
    timeline_.finish();
    for (int i = 0; i < kPlaces; ++i) good_ = good_ && holds(slot(i), expected_block_[i]);
    return good_;
  }

 private:
  static constexpr int kPlaces = 3;
  static constexpr int64_t kSize = 256;

  void step() {
    const int from = draw();
    const int to = draw();
    switch (random_() % 12) {
      case 0:
      case 1:
      case 2:  // promotion
        move(Lane::kUp, blocks_[to], block(to), slots_[from], slot(from), Direction::kUp);
        expected_block_[to] = expected_host_[from];
        break;
      case 3:
      case 4:
      case 5:  // write-through
        move(Lane::kDown, slots_[to], slot(to), blocks_[from], block(from), Direction::kDown);
        expected_host_[to] = expected_block_[from];
        break;
      case 6:
      case 7:  // a kernel that reads one block and writes another
        if (from == to) break;
        move(Lane::kCompute, blocks_[to], block(to), blocks_[from], block(from),
             Direction::kWithin);
        expected_block_[to] = expected_block_[from];
        break;
      case 8:  // a kernel that reads pinned memory in place
        move(Lane::kCompute, blocks_[to], block(to), slots_[from], slot(from), Direction::kUp);
        expected_block_[to] = expected_host_[from];
        break;
      case 9:  // one that writes it
        move(Lane::kCompute, slots_[to], slot(to), blocks_[from], block(from), Direction::kDown);
        expected_host_[to] = expected_block_[from];
        break;
      case 10:  // a checksum
        timeline_.host_before_read(slots_[from]);
        good_ = good_ && holds(slot(from), expected_host_[from]);
        break;
      default:  // a read from disk into the slot
        timeline_.host_before_write(slots_[to]);
        put(slot(to), ++writes_);
        slots_[to] = Place();
        expected_host_[to] = writes_;
        break;
    }
  }

  void move(Lane lane, Place& to, std::byte* target, Place& from, const std::byte* source,
            Direction direction) {
    timeline_.before_write(to, lane);
    timeline_.before_read(from, lane);
    device_->check(device_->api().copy(device_->context(), target, source, kSize, direction,
                                       timeline_.stream(lane)),
                   "copying");
    const Ticket ticket = timeline_.take(lane);
    Timeline::wrote(&to, ticket);
    if (lane == Lane::kCompute) {
      timeline_.compute_may_read(&from);
    } else {
      Timeline::reads(&from, ticket);
    }
  }

  std::byte* block(int i) { return on_device_.data() + i * kSize; }
  std::byte* slot(int i) { return on_host_.data() + i * kSize; }
  int draw() { return static_cast<int>(random_() % kPlaces); }
  static void put(std::byte* to, int64_t value) {
    for (int64_t at = 0; at < kSize; at += 8) std::memcpy(to + at, &value, 8);
  }
  static bool holds(const std::byte* at, int64_t value) {
    for (int64_t i = 0; i < kSize; i += 8) {
      if (std::memcmp(at + i, &value, 8) != 0) return false;
    }
    return true;
  }

  std::shared_ptr<Device> device_;
  Memory on_device_, on_host_;
  OwnStream caller_;
  Timeline timeline_;
  std::mt19937_64 random_;
  Place blocks_[kPlaces], slots_[kPlaces];
  int64_t expected_block_[kPlaces] = {}, expected_host_[kPlaces] = {};
  int64_t writes_ = kPlaces;
  bool good_ = true;
};

}  // namespace

TEST_CASE("a storm of copies on all lanes leaves what one after another would have left") {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    for (uint64_t seed = 1; seed <= (small_tests() ? 2u : 100u); ++seed) {
      CAPTURE(seed);
      const std::shared_ptr<Device> device = kind == "shim" ? shim(seed) : Device::open(kind);
      CHECK(Storm(device, seed).run(300));
    }
  }
}

TEST_CASE("the storm notices each wait that is left out") {
  // Who reads and writes what there: blocks by up, down and compute, slots by these and the host.
  constexpr int kCompute = 0, kUp = 1, kDown = 2;
  const std::set<int> block_writers = {kCompute, kUp}, block_readers = {kCompute, kDown};
  const std::set<int> slot_writers = {kCompute, kDown, kHost},
                      slot_readers = {kCompute, kUp, kHost};
  int tried = 0;
  for_each_hazard([&](Hazard hazard, int waiter, int other, bool host_place) {
    const std::set<int>& writers = host_place ? slot_writers : block_writers;
    const std::set<int>& readers = host_place ? slot_readers : block_readers;
    const bool waits_to_read = hazard == Hazard::kReadAfterWrite;
    const bool after_write = hazard != Hazard::kWriteAfterRead;
    if ((waits_to_read ? readers : writers).count(waiter) == 0) return;
    if ((after_write ? writers : readers).count(other) == 0) return;
    ++tried;
    const LeaveOut leave(name_of(hazard, waiter, other));
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 40 && wrong == 0; ++seed) {
      if (!Storm(shim(seed), seed).run(300)) ++wrong;
    }
    CHECK(wrong > 0);
  });
  CHECK(tried == 22);
}

}  // namespace kvpager::testing
