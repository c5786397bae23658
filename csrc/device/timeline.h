// Three lanes of work on one device and the order between them (invariant 5). Tickets stand for
// events: a ticket is done when all that was enqueued on its lane before it was taken is done.
//
//   compute   the caller's stream: kernels, uploads of tables
//   up        host to device: promotions, staged slices
//   down      device to host: write-through, summaries
//
// A Place is a block of the pool or a slot of the host arena; it remembers which tickets have to be
// done before it may be read and before it may be written. Every wait has a name, by which errors
// call it and tests leave it out.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

namespace kvpager::device {

enum class Lane : uint8_t { kCompute = 0, kUp = 1, kDown = 2 };
inline constexpr int kLanes = 3;

struct Ticket {
  Lane lane = Lane::kCompute;
  uint64_t number = 0;  // 0: always done
};

// Tickets that guard one block or slot.
struct Place {
  Ticket written;                          // its bytes are complete when this is done
  std::array<uint64_t, kLanes> read = {};  // newest ticket per lane that reads it
};

class Timeline {
 public:
  explicit Timeline(std::shared_ptr<Device> device);
  // Waits for up, down, and compute's tickets: take one after the last of its work. The caller's
  // stream may be gone by then.
  ~Timeline();

  // The caller's stream of the forward at hand. Another one than before first waits for the old
  // one, which must still exist. InvalidArgumentError if the stream is being captured.
  void set_compute(Stream stream);
  Stream stream(Lane lane) const;

  // A ticket may also be the next one, newest + 1: the first wait or question takes it.
  // Fault points "device.record" of take, "device.wait" of wait, "device.order" of order.
  Ticket take(Lane lane);          // a ticket for all that is enqueued on the lane by now
  Ticket newest(Lane lane) const;  // the last one taken
  bool done(Ticket ticket);        // never blocks
  void wait(Ticket ticket, const char* name);                // the host waits
  void order(Lane waiter, Ticket ticket, const char* name);  // what follows in the lane waits
  void finish();  // the host waits for everything on all lanes

  // Hazards, by the operation that is about to be enqueued on `lane` (or done by the host). Names
  // of the waits: "<waiter> reads after <writer>", "<waiter> writes after <writer> wrote",
  // "<waiter> writes after <reader> read", with compute, up, down and host.
  void before_read(const Place& place, Lane lane);
  void before_write(const Place& place, Lane lane);
  void host_before_read(const Place& place);
  void host_before_write(const Place& place);
  // After it was enqueued and `ticket` taken. After the host wrote: *place = Place().
  static void wrote(Place* place, Ticket ticket);
  static void reads(Place* place, Ticket ticket);
  // All that compute has been given so far may read the place. Costs nothing on the device: the
  // ticket is taken when somebody asks for it.
  void compute_may_read(Place* place);
  bool complete(const Place& place) { return done(place.written); }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Copies on a lane, checked, with fault points "device.up" and "device.down".
void copy_up(Device& device, Stream stream, void* to, const void* from, int64_t bytes);
void copy_up(Device& device, Stream stream, const std::vector<Pieces>& runs);
void copy_down(Device& device, Stream stream, void* to, const void* from, int64_t bytes);

#ifdef KVPAGER_TEST_SEAMS
// Waits of this name are left out while it lives. Beside those of places there are
// "compute after the caller's stream before", "host finishes", and the names callers give.
class LeaveOut {
 public:
  explicit LeaveOut(std::string name);
  ~LeaveOut();
  LeaveOut(const LeaveOut&) = delete;
  LeaveOut& operator=(const LeaveOut&) = delete;

 private:
  std::string name_;
};
// The names of waits that were carried out since the process began.
std::vector<std::string> waits_seen();
#endif

}  // namespace kvpager::device
