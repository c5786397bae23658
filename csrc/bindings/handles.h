// Python objects that own what they took of a pager: a sequence, a pin, the running forward. Whoever
// drops one gives it back, so that an exception between two instructions of Python, such as an
// interrupt, leaves nothing behind. The constructor takes, and __enter__ and __exit__ are native:
// there is no instruction of Python between taking and owning.
//
// In a forked child they give nothing back: what they took is the parent's.
//
// They know their pager by identity and keep it from nobody: once it is closed or reset they are of
// no use, and say so.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvpager/pager.h"

namespace kvpager {

using PagerPointer = std::shared_ptr<Pager>;

// `owner` is the pager as Python knows it.
class SequenceHandle {
 public:
  SequenceHandle(const PagerPointer& pager, pybind11::object owner, std::string salt);
  // Of a fork of `other`.
  SequenceHandle(const PagerPointer& pager, pybind11::object owner, const SequenceHandle& other);
  // Of one to come, which holds() names: until then it is unknown to every pager.
  SequenceHandle(const PagerPointer& pager, pybind11::object owner, SequenceId id,
                 std::string salt);
  ~SequenceHandle();
  SequenceHandle(const SequenceHandle&) = delete;
  SequenceHandle& operator=(const SequenceHandle&) = delete;

  void holds(SequenceId id) { id_ = id; }
  int64_t uid() const { return id_.value(); }
  const std::string& salt() const { return salt_; }
  const pybind11::object& owner() const { return owner_; }
  bool closed() const { return closed_ || pager_.expired(); }
  // Its pager. InvalidArgumentError if it is closed, or the pager is.
  PagerPointer pager() const;
  // Its number in `pager`. InvalidArgumentError if it is closed, or another pager's.
  SequenceId id_in(const Pager& pager) const;
  // Closing twice is allowed, also by two threads at once. InvalidArgumentError while it is in a
  // running forward: it stays open.
  // forget: as Pager::destroy_sequence.
  void close(bool forget);

 private:
  std::weak_ptr<Pager> pager_;
  pybind11::object owner_;
  std::string salt_;
  SequenceId id_;
  std::mutex closing_;  // taken without the GIL
  std::atomic<bool> closed_{false};
};

class PinHandle {
 public:
  PinHandle(const SequenceHandle& sequence, int64_t start, int64_t stop);
  ~PinHandle() { release(); }
  PinHandle(const PinHandle&) = delete;
  PinHandle& operator=(const PinHandle&) = delete;

  // Releasing twice is allowed.
  void release();

 private:
  std::weak_ptr<Pager> pager_;
  PinId id_;
  bool held_ = true;
};

class ForwardHandle {
 public:
  // Of a forward to come, which began() names.
  ForwardHandle(const PagerPointer& pager, pybind11::object owner)
      : pager_(pager), owner_(std::move(owner)) {}
  ~ForwardHandle() { abort(); }
  ForwardHandle(const ForwardHandle&) = delete;
  ForwardHandle& operator=(const ForwardHandle&) = delete;

  void began(uint64_t number) { number_ = number; }
  // What the pager's calls take: which forward runs is known only under its lock.
  uint64_t number() const { return number_; }
  const pybind11::object& owner() const { return owner_; }
  // Its pager. InvalidArgumentError if the forward was ended by this object, or the pager is gone; whether
  // it runs, the pager's call says.
  PagerPointer pager() const;
  // The same, if it runs. By the next call another one may.
  PagerPointer running_pager() const;
  // As Pager::attend, of host or device memory as the pager's place is. Without the GIL.
  void attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
              const TensorView& out, const AttendOptions& options);
  double attend_seconds() const { return 1e-9 * static_cast<double>(attend_nanoseconds_); }
  // accepted[i] rows of sequences[i]; None: all rows of all.
  void commit(const pybind11::object& sequences, const std::vector<int64_t>& accepted,
              Provenance provenance);
  void abort();

 private:
  std::weak_ptr<Pager> pager_;
  pybind11::object owner_;
  uint64_t number_ = 0;             // 0: of none
  std::atomic<bool> ended_{false};  // read without the GIL
  std::atomic<int64_t> attend_nanoseconds_{0};
};

}  // namespace kvpager
