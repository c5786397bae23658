// Files and locks that a native object owns from the first instant on. An interrupt between two
// instructions of Python loses neither a descriptor nor a lock: __enter__ and __exit__ are native,
// and what nobody holds any more is closed.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "base/fault.h"
#include "bindings/bind.h"
#include "kvpager/error.h"
#include "kvpager/process.h"

namespace kvpager {

namespace py = pybind11;

namespace {

[[noreturn]] void throw_os_error(int error, const std::string& path) {
  errno = error;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw py::error_already_set();
}

// 0, or the errno of a call that may wait; `point` ("file.open", "file.lock") is where it can be made to fail. A signal's
// handler runs where one arrives.
template <class Call>
int error_of(const char* point, const Call& call) {
  for (;;) {
    int error = fault::visit(point);
    if (error == 0) {
      const py::gil_scoped_release release;
      if (call() < 0) error = errno;
    }
    if (error != EINTR) return error;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// A descriptor, which stays open while somebody waits for its lock.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags, int mode) {
    const int error = error_of("file.open", [&] {
      number_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
      return number_;
    });
    if (error != 0) throw_os_error(error, path);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }

 private:
  int number_ = -1;
};

// An open file. It is closed on exec.
class OwnedFile {
 public:
  OwnedFile(std::string path, int flags, int mode)
      : path_(std::move(path)), file_(std::make_shared<Descriptor>(path_, flags, mode)) {}
  OwnedFile(const OwnedFile&) = delete;
  OwnedFile& operator=(const OwnedFile&) = delete;

  int descriptor() const {
    require_open();
    return file_->number();
  }

  void close() { file_.reset(); }

  // False if somebody else has it and `operation` says not to wait. InvalidArgumentError if another thread
  // closes the file meanwhile.
  bool lock(int operation) {
    require_open();
    const std::shared_ptr<Descriptor> file =
        file_;  // its number is no other file's while this waits
    const int error = error_of("file.lock", [&] { return ::flock(file->number(), operation); });
    if (error == EWOULDBLOCK) return false;
    if (error != 0) throw_os_error(error, path_);
    require_open();
    return true;
  }

  // Also from forked children, who have a copy of the descriptor. One of these that ends a block
  // it was forked in does not take the lock from its parent.
  void unlock() {
    if (file_ != nullptr && !process_.forked()) ::flock(file_->number(), LOCK_UN);
  }

 private:
  void require_open() const {
    if (file_ == nullptr) throw InvalidArgumentError(str(path_, " was closed"));
  }

  const MadeIn process_;
  const std::string path_;
  std::shared_ptr<Descriptor> file_;  // read and changed with the GIL
};

// Who has an flock() on a file, as the system tells it: "process 12 (python, stopped)".
std::string holder_of(int descriptor) {
  struct stat status;
  if (::fstat(descriptor, &status) != 0) return "another process";
  const std::string inode = str(":", status.st_ino, " ");
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, access;
    int64_t process = 0;
    words >> number >> kind >> advisory >> access >> process;
    if (kind != "FLOCK" || line.find(inode) == std::string::npos) continue;
    if (process <= 0) return "a process outside this container";
    std::string name, state;
    std::ifstream about(str("/proc/", process, "/status"));
    for (std::string field; std::getline(about, field);) {
      if (field.rfind("Name:\t", 0) == 0) name = field.substr(6);
      if (field.rfind("State:\tT", 0) == 0) state = ", stopped";
    }
    return str("process ", process, name.empty() ? "" : str(" (", name, state, ")"));
  }
  return "another process, on another machine or gone by now";
}

// flock() for as long as a block runs.
class ExclusiveLock {
 public:
  ExclusiveLock(std::string path, double timeout_seconds)
      : path_(std::move(path)), timeout_seconds_(timeout_seconds) {
    if (!(timeout_seconds >= 0)) {
      throw InvalidArgumentError(
          str("timeout_seconds is ", timeout_seconds, ", expected a number that is not negative"));
    }
  }
  ~ExclusiveLock() { release(); }
  ExclusiveLock(const ExclusiveLock&) = delete;
  ExclusiveLock& operator=(const ExclusiveLock&) = delete;

  void acquire() {
    if (file_ != nullptr) throw InvalidArgumentError(str(path_, " is locked here already"));
    try {
      std::unique_ptr<OwnedFile> file = open();
      try {
        wait_for(*file);
      } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_OSError)) throw;
        throw StorageError(str(path_, ": cannot lock the store: ", words_of(error),
                               "; a directory store needs a file system with flock(), such as a "
                               "local one"));
      }
      file_ = std::move(file);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_OSError)) throw;
      throw StorageError(str(path_, ": ", words_of(error)));
    }
  }

  void release() {
    if (file_ == nullptr) return;
    file_->unlock();
    file_.reset();
  }

 private:
  // flock() knows no time-out, and a signal may interrupt the wait.
  void wait_for(OwnedFile& file) const {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    std::chrono::microseconds pause(200);
    while (!file.lock(LOCK_EX | LOCK_NB)) {
      const std::chrono::duration<double> waited = Clock::now() - begin;
      if (waited.count() >= timeout_seconds_) {
        throw StorageError(str(path_, ": has been locked for ", timeout_seconds_, " s, by ",
                               holder_of(file.descriptor()),
                               "; end that process or let it go on, or wait longer with "
                               "lock_timeout"));
      }
      {
        const py::gil_scoped_release release;
        std::this_thread::sleep_for(pause);
      }
      pause = std::min(2 * pause, std::chrono::microseconds(20'000));
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  static std::string words_of(const py::error_already_set& error) {
    return py::cast<std::string>(error.value().attr("strerror"));
  }

  std::unique_ptr<OwnedFile> open() const {
    try {
      return std::make_unique<OwnedFile>(path_, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    } catch (py::error_already_set& error) {
      // A store that may only be read is locked all the same.
      if (!error.matches(PyExc_OSError)) throw;
      const int number = py::cast<int>(error.value().attr("errno"));
      if (number != EACCES && number != EROFS && number != EPERM) throw;
    }
    return std::make_unique<OwnedFile>(path_, O_RDONLY | O_NOFOLLOW, 0);
  }

  const std::string path_;
  const double timeout_seconds_;
  std::unique_ptr<OwnedFile> file_;
};

// Calls undone() until no interrupt comes in between: what it undoes must not outlast the lock.
void undo(const py::object& self) {
  for (int tries = 0; tries < 8; ++tries) {
    try {
      self.attr("undone")();
      return;
    } catch (const py::error_already_set&) {
    }
  }
}

// Takes the lock and calls entered(), without an instant between them.
py::object enter_locked(const py::object& self) {
  auto& lock = py::cast<ExclusiveLock&>(self);
  lock.acquire();
  try {
    return self.attr("entered")();
  } catch (...) {
    undo(self);
    lock.release();
    throw;
  }
}

void leave_locked(const py::object& self, const py::object&, const py::object& error,
                  const py::object&) {
  auto& lock = py::cast<ExclusiveLock&>(self);
  try {
    self.attr("leaving")(error);
  } catch (...) {
    undo(self);
    lock.release();
    throw;
  }
  lock.release();
}

// A lock that knows who holds it, and that cannot be taken any more once it was ended.
class Turns {
 public:
  void enter() {
    wait();
    holder_ = std::this_thread::get_id();
    if (!ended_) return;
    exit();
    throw InvalidArgumentError("the engine is closed; make a new Engine(model, ...)");
  }

  void exit() {
    if (!held_here()) {
      throw InvalidArgumentError("no forward is running in this thread; there is none to end");
    }
    holder_ = std::thread::id();
    mutex_.unlock();
  }

  void end() {
    wait();
    ended_ = true;
    mutex_.unlock();
  }

  bool held_here() const { return holder_ == std::this_thread::get_id(); }
  bool ended() const { return ended_; }

 private:
  // A signal interrupts the wait.
  void wait() {
    if (held_here()) {
      throw InvalidArgumentError("a forward is already running, in this thread; let it end");
    }
    if (mutex_.try_lock()) return;
    for (;;) {
      {
        const py::gil_scoped_release release;
        if (mutex_.try_lock_for(std::chrono::milliseconds(50))) return;
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  std::timed_mutex mutex_;
  std::atomic<std::thread::id> holder_{std::thread::id()};
  std::atomic<bool> ended_ = false;
};

// What one thread at a time may have, without waiting for it.
struct Place {
  std::atomic<bool> taken = false;
};

// A try to have it for as long as a block runs.
class Claim {
 public:
  explicit Claim(std::shared_ptr<Place> place) : place_(std::move(place)) {}
  ~Claim() { exit(); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  bool enter() { return held_ || (held_ = !place_->taken.exchange(true)); }
  void exit() {
    if (std::exchange(held_, false)) place_->taken = false;
  }

 private:
  const std::shared_ptr<Place> place_;
  bool held_ = false;
};

// A context variable's value for as long as a block runs.
class ContextValue {
 public:
  ContextValue(py::object variable, py::object value)
      : variable_(std::move(variable)), value_(std::move(value)) {
    if (!PyContextVar_CheckExact(variable_.ptr())) {
      throw py::type_error("variable is no ContextVar");
    }
  }

  void set() {
    if (token_) throw InvalidArgumentError("this value is set already; make another ContextValue");
    token_ = py::reinterpret_steal<py::object>(PyContextVar_Set(variable_.ptr(), value_.ptr()));
    if (!token_) throw py::error_already_set();
  }

  void reset() {
    if (!token_) throw InvalidArgumentError("this value is not set; enter the block first");
    const py::object token = std::move(token_);
    if (PyContextVar_Reset(variable_.ptr(), token.ptr()) != 0) throw py::error_already_set();
  }

 private:
  py::object variable_, value_, token_;
};

}  // namespace

void bind_locks(py::module_& m) {
  py::class_<OwnedFile>(m, "OwnedFile", "An open file; closed when it is dropped, and on exec.")
      .def(py::init<std::string, int, int>(), py::arg("path"), py::arg("flags"),
           py::arg("mode") = 0600, "As os.open. Raises OSError.")
      .def("fileno", &OwnedFile::descriptor, "The descriptor, which stays this object's.")
      .def("lock", &OwnedFile::lock, py::arg("operation"),
           "flock(); False if somebody else has it and LOCK_NB is given.")
      .def("unlock", &OwnedFile::unlock, "Takes the lock back; in a forked child nothing.")
      .def("close", &OwnedFile::close, "Closing twice is allowed.")
      .def("__enter__", [](py::object file) { return file; })
      .def("__exit__", exit_by(&OwnedFile::close));
  py::class_<ExclusiveLock>(m, "ExclusiveLock",
                            "Holds a file's flock() for as long as the block runs. The file is "
                            "made where it is missing.")
      .def(py::init<std::string, double>(), py::arg("path"), py::arg("timeout_seconds"))
      .def(
          "entered", [](const ExclusiveLock&) { return py::none(); },
          "What the block gets; called with the lock held.")
      .def(
          "leaving", [](const ExclusiveLock&, const py::object&) {}, py::arg("error"),
          "Called with the lock held, and with what the block raised or None.")
      .def(
          "undone", [](const ExclusiveLock&) {},
          "Called with the lock held if one of these raised; again if it raises itself.")
      .def("__enter__", &enter_locked, "Raises StorageError.")
      .def("__exit__", &leave_locked);
  py::class_<ContextValue>(m, "ContextValue",
                           "Sets a context variable for as long as the block runs.")
      .def(py::init<py::object, py::object>(), py::arg("variable"), py::arg("value"))
      .def("__enter__", &ContextValue::set)
      .def("__exit__", exit_by(&ContextValue::reset));
  py::class_<Place, std::shared_ptr<Place>>(m, "Place",
                                            "What one at a time may have, and nobody waits for.")
      .def(py::init<>());
  py::class_<Claim>(m, "Claim", "Tries to have a place for as long as the block runs.")
      .def(py::init<std::shared_ptr<Place>>(), py::arg("place").none(false))
      .def("__enter__", &Claim::enter, "Whether it is had.")
      .def("__exit__", exit_by(&Claim::exit));
  py::class_<Turns>(m, "Turns",
                    "A lock of forwards that knows who holds it, and that nobody gets any more "
                    "once it was ended.")
      .def(py::init<>())
      .def_property_readonly("held_here", &Turns::held_here, "Whether this thread is in a forward.")
      .def_property_readonly("ended", &Turns::ended, "Whether `end` was called.")
      .def("end", &Turns::end,
           "Waits for the forward that runs; later ones are refused. Twice is harmless.")
      .def("__enter__", &Turns::enter)
      .def("__exit__", exit_by(&Turns::exit));
}

}  // namespace kvpager
