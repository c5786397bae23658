#include "bindings/handles.h"

#include <chrono>
#include <utility>

#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

using Release = py::gil_scoped_release;

SequenceHandle::SequenceHandle(const PagerPointer& pager, py::object owner, std::string salt)
    : pager_(pager), owner_(std::move(owner)), salt_(std::move(salt)) {
  const Release release;
  id_ = pager->create_sequence(salt_);
}

SequenceHandle::SequenceHandle(const PagerPointer& pager, py::object owner,
                               const SequenceHandle& other)
    : pager_(pager), owner_(std::move(owner)), salt_(other.salt_) {
  const SequenceId from = other.id_in(*pager);
  const Release release;
  id_ = pager->fork(from);
}

SequenceHandle::SequenceHandle(const PagerPointer& pager, py::object owner, SequenceId id,
                               std::string salt)
    : pager_(pager), owner_(std::move(owner)), salt_(std::move(salt)), id_(id) {}

SequenceHandle::~SequenceHandle() {
  if (closed_) return;
  const Release release;
  if (const PagerPointer pager = pager_.lock()) pager->drop_sequence(id_);
}

PagerPointer SequenceHandle::pager() const {
  if (closed_) {
    throw InvalidArgumentError(str("sequence ", uid(), " is closed; make a new one"));
  }
  PagerPointer pager = pager_.lock();
  if (pager == nullptr) {
    throw InvalidArgumentError(
        str("sequence ", uid(), " is of a pager that was closed or reset since; make a new one"));
  }
  return pager;
}

SequenceId SequenceHandle::id_in(const Pager& other) const {
  if (pager().get() != &other) {
    throw InvalidArgumentError(
        str("sequence ", uid(), " is of another pager, expected one that this pager has made"));
  }
  return id_;
}

void SequenceHandle::close(bool forget) {
  if (closed_) return;
  const Release release;
  const std::lock_guard<std::mutex> lock(closing_);
  if (closed_) return;  // by the thread that was waited for
  const PagerPointer pager = pager_.lock();
  if (pager != nullptr && !pager->forked()) pager->destroy_sequence(id_, forget);
  closed_ = true;
}

PinHandle::PinHandle(const SequenceHandle& sequence, int64_t start, int64_t stop) {
  const PagerPointer pager = sequence.pager();
  const SequenceId id(sequence.uid());
  const Release release;
  id_ = pager->pin(id, start, stop);
  pager_ = pager;
}

void PinHandle::release() {
  if (!std::exchange(held_, false)) return;
  const Release release;
  const PagerPointer pager = pager_.lock();
  if (pager != nullptr && !pager->forked()) pager->unpin(id_);
}

PagerPointer ForwardHandle::pager() const {
  PagerPointer pager = ended_ ? nullptr : pager_.lock();
  if (pager == nullptr) throw InvalidArgumentError(kForwardEnded);
  return pager;
}

PagerPointer ForwardHandle::running_pager() const {
  PagerPointer running = pager();
  if (running->running_forward() != number_) throw InvalidArgumentError(kForwardEnded);
  return running;
}

void ForwardHandle::attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
                           const TensorView& out, const AttendOptions& options) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  pager()->attend(layer, q, k, v, out, options, number_);
  attend_nanoseconds_ += std::chrono::nanoseconds(Clock::now() - start).count();
}

void ForwardHandle::commit(const py::object& sequences, const std::vector<int64_t>& accepted,
                           Provenance provenance) {
  const PagerPointer running = pager();
  if (sequences.is_none()) {
    const Release release;
    running->commit_all(provenance, number_);
    ended_ = true;
    return;
  }
  std::vector<SequenceId> ids;
  for (const py::handle sequence : sequences) {
    ids.push_back(py::cast<const SequenceHandle&>(sequence).id_in(*running));
  }
  const Release release;
  running->commit(ids, accepted, provenance, number_);
  ended_ = true;
}

void ForwardHandle::abort() {
  if (ended_.exchange(true)) return;
  const Release release;
  const PagerPointer pager = pager_.lock();
  if (pager != nullptr && !pager->forked()) pager->abort(number_);
}

}  // namespace kvpager
