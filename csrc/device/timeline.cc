#include "device/timeline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <set>
#include <utility>

#include "base/fault.h"
#include "base/mutex.h"
#include "kvpager/error.h"

namespace kvpager::device {

namespace {

// Of each lane; the oldest is recorded anew. A wait for its old ticket waits for the
// new one, which is done no sooner.
constexpr uint64_t kEvents = 256;
constexpr int kHost = kLanes;  // as a waiter
constexpr char kStreamChange[] = "compute after the caller's stream before";
constexpr char kFinish[] = "host finishes";

enum Hazard { kReadAfterWrite, kWriteAfterWrite, kWriteAfterRead };

// Names of all waits of places: [hazard][waiter][lane waited for].
const char* hazard_name(Hazard hazard, int waiter, int lane) {
  static const auto* const names = [] {
    constexpr const char* kWho[] = {"compute", "up", "down", "host"};
    auto* all = new std::array<std::array<std::array<std::string, kLanes>, kLanes + 1>, 3>;
    for (size_t w = 0; w <= kLanes; ++w) {
      for (size_t l = 0; l < kLanes; ++l) {
        (*all)[kReadAfterWrite][w][l] = str(kWho[w], " reads after ", kWho[l]);
        (*all)[kWriteAfterWrite][w][l] = str(kWho[w], " writes after ", kWho[l], " wrote");
        (*all)[kWriteAfterRead][w][l] = str(kWho[w], " writes after ", kWho[l], " read");
      }
    }
    return all;
  }();
  return (*names)[hazard][static_cast<size_t>(waiter)][static_cast<size_t>(lane)].c_str();
}

#ifdef KVPAGER_TEST_SEAMS
struct Waits {
  Mutex mutex;
  std::set<std::string, std::less<>> seen KVPAGER_GUARDED_BY(mutex);
  std::multiset<std::string, std::less<>> left_out KVPAGER_GUARDED_BY(mutex);
};

Waits& waits() {
  static auto* const instance = new Waits;
  return *instance;
}

// Whether the wait is to be carried out.
bool admit(const char* name) {
  Waits& w = waits();
  const MutexLock lock(w.mutex);
  if (!w.left_out.empty() && w.left_out.find(name) != w.left_out.end()) return false;
  try {
    if (w.seen.find(name) == w.seen.end()) w.seen.insert(name);
  } catch (const std::bad_alloc&) {  // a note for tests
  }
  return true;
}
#else
constexpr bool admit(const char*) { return true; }
#endif

size_t index(Lane lane) { return static_cast<size_t>(lane); }

void visit(const char* point, const char* what) {
  if (const int error = fault::visit(point)) {
    throw DeviceError(str(what, ": ", std::strerror(error)));
  }
}

}  // namespace

struct Timeline::Impl {
  struct LaneState {
    Stream stream = nullptr;
    std::array<Event, kEvents> events = {};
    uint64_t newest = 0;    // tickets taken
    uint64_t finished = 0;  // all up to this one are known to be done
    // Of each lane the newest ticket that this one was told to wait for.
    std::array<uint64_t, kLanes> ordered = {};
  };

  explicit Impl(std::shared_ptr<Device> of) : device(std::move(of)) {}
  ~Impl() {
    const Api& api = device->api();
    for (const Lane lane : {Lane::kUp, Lane::kDown}) {
      if (lanes[index(lane)].stream != nullptr) {
        api.destroy_stream(device->context(), lanes[index(lane)].stream);
      }
    }
    for (const LaneState& lane : lanes) {
      for (const Event event : lane.events) {
        if (event != nullptr) api.destroy_event(device->context(), event);
      }
    }
  }

  LaneState& at(Lane lane) { return lanes[index(lane)]; }

  // Recorded for the ticket, or since then for a later one of its lane.
  static Event event(const LaneState& lane, uint64_t number) {
    return lane.events[number % kEvents];
  }

  std::shared_ptr<Device> device;
  std::array<LaneState, kLanes> lanes;
  bool compute_known = false;
  bool compute_open = false;  // places name a ticket of compute that is not taken yet
};

Timeline::Timeline(std::shared_ptr<Device> device)
    : impl_(std::make_unique<Impl>(std::move(device))) {
  Device& d = *impl_->device;
  for (const Lane lane : {Lane::kUp, Lane::kDown}) {
    d.check(d.api().create_stream(d.context(), &impl_->at(lane).stream), "creating a stream");
  }
  for (Impl::LaneState& lane : impl_->lanes) {
    for (Event& event : lane.events) {
      d.check(d.api().create_event(d.context(), &event), "creating an event");
    }
  }
}

Timeline::~Timeline() {
  // Memory is released next: nothing may be under way. A device that fails has nothing under way.
  try {
    if (impl_->compute_open) take(Lane::kCompute);
    wait(newest(Lane::kCompute), kFinish);
    wait(take(Lane::kUp), kFinish);
    wait(take(Lane::kDown), kFinish);
  } catch (const std::exception&) {
  }
}

void Timeline::set_compute(Stream stream) {
  Impl::LaneState& compute = impl_->at(Lane::kCompute);
  if (impl_->compute_known && compute.stream == stream) return;
  Device& d = *impl_->device;
  bool yes = false;
  d.check(d.api().capturing(d.context(), stream, &yes), "asking whether a stream is capturing");
  if (yes) {
    throw InvalidArgumentError(
        "stream is being captured into a graph: a forward begins and ends outside of the capture");
  }
  if (impl_->compute_known) {
    const Ticket before = take(Lane::kCompute);
    if (admit(kStreamChange)) {
      visit("device.order", kStreamChange);
      d.check(d.api().wait(d.context(), stream, impl_->event(compute, before.number)),
              kStreamChange);
    }
  }
  compute.stream = stream;
  impl_->compute_known = true;
}

Stream Timeline::stream(Lane lane) const { return impl_->at(lane).stream; }

Ticket Timeline::take(Lane lane) {
  Impl::LaneState& at = impl_->at(lane);
  Device& d = *impl_->device;
  impl_->compute_open = impl_->compute_open || lane == Lane::kCompute;
  visit("device.record", "recording an event");
  const uint64_t number = at.newest + 1;
  d.check(d.api().record(d.context(), at.events[number % kEvents], at.stream),
          "recording an event");
  at.newest = number;
  if (lane == Lane::kCompute) impl_->compute_open = false;
  return {lane, number};
}

Ticket Timeline::newest(Lane lane) const { return {lane, impl_->at(lane).newest}; }

bool Timeline::done(Ticket ticket) {
  Impl::LaneState& lane = impl_->at(ticket.lane);
  if (ticket.number <= lane.finished) return true;
  if (ticket.number > lane.newest) take(ticket.lane);
  Device& d = *impl_->device;
  bool yes = false;
  d.check(d.api().done(d.context(), impl_->event(lane, ticket.number), &yes), "querying an event");
  if (yes) lane.finished = ticket.number;
  return yes;
}

void Timeline::wait(Ticket ticket, const char* name) {
  Impl::LaneState& lane = impl_->at(ticket.lane);
  if (ticket.number <= lane.finished) return;
  if (!admit(name)) return;
  if (ticket.number > lane.newest) take(ticket.lane);
  Device& d = *impl_->device;
  visit("device.wait", name);
  d.check(d.api().synchronize(d.context(), impl_->event(lane, ticket.number)), name);
  lane.finished = std::max(lane.finished, ticket.number);
}

void Timeline::order(Lane waiter, Ticket ticket, const char* name) {
  if (waiter == ticket.lane) return;  // in order anyway
  Impl::LaneState& lane = impl_->at(ticket.lane);
  uint64_t& ordered = impl_->at(waiter).ordered[index(ticket.lane)];
  if (ticket.number <= std::max(lane.finished, ordered)) return;
  if (!admit(name)) return;
  if (ticket.number > lane.newest) take(ticket.lane);
  Device& d = *impl_->device;
  visit("device.order", name);
  d.check(d.api().wait(d.context(), impl_->at(waiter).stream, impl_->event(lane, ticket.number)),
          name);
  ordered = ticket.number;
}

void Timeline::finish() {
  for (const Lane lane : {Lane::kCompute, Lane::kUp, Lane::kDown}) {
    if (lane == Lane::kCompute && !impl_->compute_known) continue;
    wait(take(lane), kFinish);
  }
}

void Timeline::before_read(const Place& place, Lane lane) {
  order(lane, place.written,
        hazard_name(kReadAfterWrite, static_cast<int>(lane), static_cast<int>(place.written.lane)));
}

void Timeline::before_write(const Place& place, Lane lane) {
  const int waiter = static_cast<int>(lane);
  order(lane, place.written,
        hazard_name(kWriteAfterWrite, waiter, static_cast<int>(place.written.lane)));
  for (int reader = 0; reader < kLanes; ++reader) {
    order(lane, {static_cast<Lane>(reader), place.read[static_cast<size_t>(reader)]},
          hazard_name(kWriteAfterRead, waiter, reader));
  }
}

void Timeline::host_before_read(const Place& place) {
  wait(place.written, hazard_name(kReadAfterWrite, kHost, static_cast<int>(place.written.lane)));
}

void Timeline::host_before_write(const Place& place) {
  wait(place.written, hazard_name(kWriteAfterWrite, kHost, static_cast<int>(place.written.lane)));
  for (int reader = 0; reader < kLanes; ++reader) {
    wait({static_cast<Lane>(reader), place.read[static_cast<size_t>(reader)]},
         hazard_name(kWriteAfterRead, kHost, reader));
  }
}

void Timeline::wrote(Place* place, Ticket ticket) {
  // The write waited for all of them, so that a wait for it does too.
  place->written = ticket;
  place->read = {};
}

void Timeline::reads(Place* place, Ticket ticket) {
  uint64_t& newest = place->read[index(ticket.lane)];
  newest = std::max(newest, ticket.number);
}

void Timeline::compute_may_read(Place* place) {
  // A ticket that is not taken yet: the first question takes it. No event per block and forward.
  impl_->compute_open = true;
  reads(place, {Lane::kCompute, impl_->at(Lane::kCompute).newest + 1});
}

namespace {

void copy(Device& device, Stream stream, void* to, const void* from, int64_t bytes,
          Direction direction, const char* what, const char* point) {
  visit(point, what);
  device.check(device.api().copy(device.context(), to, from, bytes, direction, stream), what);
}

}  // namespace

void copy_up(Device& device, Stream stream, void* to, const void* from, int64_t bytes) {
  copy(device, stream, to, from, bytes, Direction::kUp, "copying to the device", "device.up");
}

void copy_up(Device& device, Stream stream, const std::vector<Pieces>& runs) {
  constexpr char kWhat[] = "copying pieces to the device";
  visit("device.up", kWhat);
  const auto count = static_cast<int64_t>(runs.size());
  device.check(
      device.api().copy_pieces(device.context(), runs.data(), count, Direction::kUp, stream),
      kWhat);
}

void copy_down(Device& device, Stream stream, void* to, const void* from, int64_t bytes) {
  copy(device, stream, to, from, bytes, Direction::kDown, "copying to the host", "device.down");
}

#ifdef KVPAGER_TEST_SEAMS
LeaveOut::LeaveOut(std::string name) : name_(std::move(name)) {
  Waits& w = waits();
  const MutexLock lock(w.mutex);
  w.left_out.insert(name_);
}

LeaveOut::~LeaveOut() {
  Waits& w = waits();
  const MutexLock lock(w.mutex);
  w.left_out.erase(w.left_out.find(name_));
}

std::vector<std::string> waits_seen() {
  Waits& w = waits();
  const MutexLock lock(w.mutex);
  return {w.seen.begin(), w.seen.end()};
}
#endif

}  // namespace kvpager::device
