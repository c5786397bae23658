#include "snapshot/output_file.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>

#include "base/fault.h"
#include "kvpager/error.h"
#include "kvpager/require.h"

namespace kvpager::snapshot {

namespace {

constexpr int kNameAttempts = 16;

// 0, or the errno of a call that an interruption makes repeat; `point` is where it can be made to
// fail.
template <class Call>
int error_of(const char* point, const Call& call) {
  for (;;) {
    int error = fault::visit(point);
    if (error == 0 && call() < 0) error = errno;
    if (error != EINTR) return error;
  }
}

// Swaps two names atomically. False where system or file system cannot, or where `b` does not
// exist.
bool exchange(int folder, const std::string& a, const std::string& b) {
#ifdef SYS_renameat2
  constexpr unsigned kExchange =
      2;  // RENAME_EXCHANGE; older C libraries lack the wrapper and the name
  return syscall(SYS_renameat2, folder, a.c_str(), folder, b.c_str(), kExchange) == 0;
#else
  static_cast<void>(folder), static_cast<void>(a), static_cast<void>(b);
  return false;
#endif
}

// Short whatever the snapshot's own name, which may be as long as the file system allows.
std::string temporary_name() {
  std::random_device random;
  char name[48];
  std::snprintf(name, sizeof(name), ".kvsnap-%08x%08x.tmp", random(), random());
  return name;
}

uint64_t total_bytes(const std::vector<iovec>& parts) {
  uint64_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

// Takes the first `bytes` bytes away, which may end within a part.
void drop_front(std::vector<iovec>* parts, size_t bytes) {
  size_t whole = 0;
  while (whole < parts->size() && bytes >= (*parts)[whole].iov_len) {
    bytes -= (*parts)[whole++].iov_len;
  }
  parts->erase(parts->begin(), parts->begin() + static_cast<std::ptrdiff_t>(whole));
  if (bytes > 0) {
    parts->front().iov_base = static_cast<char*>(parts->front().iov_base) + bytes;
    parts->front().iov_len -= bytes;
  }
}

// The first `bytes` bytes alone.
std::vector<iovec> front_of(const std::vector<iovec>& parts, uint64_t bytes) {
  std::vector<iovec> front;
  for (const iovec& part : parts) {
    if (bytes == 0) break;
    front.push_back({part.iov_base, std::min<size_t>(part.iov_len, bytes)});
    bytes -= front.back().iov_len;
  }
  return front;
}

}  // namespace

OutputFile::OutputFile(const std::string& path, uint32_t mode) : path_(path), mode_(mode) {
  if ((mode & ~0666U) != 0 || (mode & kPrivateMode) != kPrivateMode) {
    throw InvalidArgumentError(
        str(path, ": mode is ", mode, ", expected 0600 (384), and more bits of 0666 for others"));
  }
  if (path.find('\0') != std::string::npos) {
    throw InvalidArgumentError(str("path: \"", path.c_str(), "\" and a NUL byte, ",
                                   "expected a name that the system does not cut short"));
  }
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  name_ = slash == std::string::npos ? path : path.substr(slash + 1);
  try {
    open(folder);
  } catch (...) {
    discard();  // there will be no destructor
    throw;
  }
}

void OutputFile::open(const std::string& folder) {
  folder_.reset(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_.get() < 0) fail(errno, str("cannot open the folder ", folder));
  struct stat existing;
  if (name_.empty()) fail(path_.empty() ? ENOENT : EISDIR, "cannot write a snapshot here");
  if (::fstatat(folder_.get(), name_.c_str(), &existing, 0) == 0) {
    if (S_ISDIR(existing.st_mode)) fail(EISDIR, "cannot replace a folder by a snapshot");
    if (!S_ISREG(existing.st_mode)) fail(EEXIST, "cannot replace what is not a regular file");
  } else if (errno != ENOENT) {
    fail(errno, "cannot look up the name");
  }
  for (int attempt = 0; temporary_.empty(); ++attempt) {
    create_temporary();
    lock();
    const int error =
        error_of("snapshot.look", [&] { return holds_our_file(temporary_) ? 0 : -1; });
    if (error == 0) break;
    if (error != ENOENT) fail(error, "cannot look at the temporary file");
    // Between the two steps it looked like a dead writer's, and somebody swept it away.
    temporary_.clear();
    if (attempt >= kNameAttempts) fail(EBUSY, "the temporary file is removed again and again");
  }
}

void OutputFile::create_temporary() {
  for (int attempt = 0;; ++attempt) {
    const std::string name = temporary_name();
    file_.reset();
    const int error = error_of("snapshot.create", [&] {
      file_.reset(::openat(folder_.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                           kPrivateMode));
      return file_.get();
    });
    if (error == 0) {
      temporary_ = name;
      return;
    }
    if (error != EEXIST || attempt >= kNameAttempts) {
      fail(error, "cannot create a temporary file in its folder");
    }
  }
}

void OutputFile::lock() {
  const int error =
      error_of("snapshot.lock", [&] { return ::flock(file_.get(), LOCK_EX | LOCK_NB); });
  // Where nothing can be locked, nobody can find the file unlocked either. EWOULDBLOCK: somebody is
  // about to sweep it away.
  if (error != 0 && error != EOPNOTSUPP && error != ENOSYS && error != EWOULDBLOCK) {
    fail(error, "cannot lock the temporary file");
  }
  if (error == EWOULDBLOCK) {
    ::unlinkat(folder_.get(), temporary_.c_str(), 0);
  }
}

void OutputFile::reserve(uint64_t bytes) {
  process_.require("snapshot writer");
  KVPAGER_REQUIRE(state_ == State::kWriting);
  if (bytes <= reserved_) return;
  const auto size = static_cast<off_t>(bytes);
  int error = error_of("snapshot.reserve", [&] { return ::fallocate(file_.get(), 0, 0, size); });
  if (error == EOPNOTSUPP || error == ENOSYS) {
    error = error_of("snapshot.truncate", [&] { return ::ftruncate(file_.get(), size); });
  }
  if (error != 0) fail(error, str("cannot reserve ", bytes, " bytes"));
  reserved_ = bytes;
}

void OutputFile::write_at(uint64_t offset, std::vector<iovec> parts) {
  process_.require("snapshot writer");
  KVPAGER_REQUIRE(state_ == State::kWriting);
  uint64_t left = total_bytes(parts);
  while (left > 0) {
    const auto allowed = fault::visit_transfer("snapshot.write", static_cast<int64_t>(left));
    const auto write = [&](const std::vector<iovec>& from) {
      const auto count = static_cast<int>(std::min<size_t>(from.size(), IOV_MAX));
      return ::pwritev(file_.get(), from.data(), count, static_cast<off_t>(offset));
    };
    ssize_t n = -1;
    if (allowed < 0) {
      errno = static_cast<int>(-allowed);
    } else {
      const auto bytes = static_cast<uint64_t>(allowed);
      n = bytes < left ? write(front_of(parts, bytes)) : write(parts);
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      fail(errno, str("cannot write ", left, " bytes at offset ", offset));
    }
    if (n == 0) fail(ENOSPC, str("nothing was written at offset ", offset));
    offset += static_cast<uint64_t>(n);
    left -= static_cast<uint64_t>(n);
    drop_front(&parts, static_cast<size_t>(n));
  }
}

void OutputFile::start_writeback(uint64_t offset, uint64_t bytes) noexcept {
#ifdef SYNC_FILE_RANGE_WRITE
  // A hint: what goes wrong here, fsync reports.
  ::sync_file_range(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                    SYNC_FILE_RANGE_WRITE);
#else
  static_cast<void>(offset), static_cast<void>(bytes);
#endif
}

void OutputFile::sync(int fd, const std::string& what) {
  const int error = error_of("snapshot.fsync", [&] { return ::fsync(fd); });
  if (error != 0) fail(error, what);
}

// A file system without permissions is what it was mounted as.
void OutputFile::set_mode() {
  struct stat there;
  uint32_t wanted = mode_;
  if (::fstatat(folder_.get(), name_.c_str(), &there, 0) == 0) wanted &= there.st_mode;
  struct stat ours;
  if (::fstat(file_.get(), &ours) == 0 && (ours.st_mode & 07777) == wanted) return;
  const int error =
      error_of("snapshot.mode", [&] { return ::fchmod(file_.get(), static_cast<mode_t>(wanted)); });
  if (error != 0 && error != EPERM && error != EOPNOTSUPP && error != ENOSYS) {
    fail(error, "cannot set the permissions of the temporary file");
  }
}

void OutputFile::seal(uint64_t bytes) {
  process_.require("snapshot writer");
  KVPAGER_REQUIRE(state_ == State::kWriting);
  if (reserved_ > bytes) {
    const int error = error_of("snapshot.truncate",
                               [&] { return ::ftruncate(file_.get(), static_cast<off_t>(bytes)); });
    if (error != 0) fail(error, str("cannot give back what was reserved beyond ", bytes, " bytes"));
  }
  set_mode();
  sync(file_.get(), "cannot sync the file to disk");
  state_ = State::kSealed;
}

void OutputFile::publish() {
  process_.require("snapshot writer");
  KVPAGER_REQUIRE(state_ == State::kSealed);
  rename_into_place();
  const int error = error_of("snapshot.fsync", [&] { return ::fsync(folder_.get()); });
  if (error != 0 && error != EINVAL) {  // EINVAL: a file system without folders to sync
    const bool undone = roll_back();
    fail(error,
         undone ? "cannot sync the folder to disk (the rename was undone)"
                : "cannot sync the folder to disk (the snapshot is in place and whole, but may not "
                  "survive a power failure)");
  }
  if (exchanged_) ::unlinkat(folder_.get(), temporary_.c_str(), 0);  // the file that was replaced
  temporary_.clear();
  state_ = State::kPublished;
}

// Exchanging keeps the old file until the folder is synced, so that a failed sync can be undone.
void OutputFile::rename_into_place() {
  struct stat existing;
  const int error = error_of("snapshot.rename", [&] {
    replaced_ = ::fstatat(folder_.get(), name_.c_str(), &existing, AT_SYMLINK_NOFOLLOW) == 0;
    exchanged_ =
        replaced_ && !S_ISDIR(existing.st_mode) && exchange(folder_.get(), temporary_, name_);
    if (exchanged_) return 0;
    return ::renameat(folder_.get(), temporary_.c_str(), folder_.get(), name_.c_str());
  });
  if (error != 0) fail(error, "cannot rename the temporary file to its name");
}

// After a rename whose folder could not be synced: the old state of the name, where that is still
// possible. Leaves in temporary_ what discard has to remove.
bool OutputFile::roll_back() noexcept {
  const bool ours = holds_our_file(name_);
  if (exchanged_) {
    return ours && exchange(folder_.get(), temporary_, name_);
  }
  temporary_.clear();
  return ours && !replaced_ && ::unlinkat(folder_.get(), name_.c_str(), 0) == 0;
}

// If not, errno says why: ENOENT where the name leads to nothing or to another file.
bool OutputFile::holds_our_file(const std::string& name) const noexcept {
  struct stat there;
  struct stat ours;
  if (::fstatat(folder_.get(), name.c_str(), &there, AT_SYMLINK_NOFOLLOW) != 0 ||
      ::fstat(file_.get(), &ours) != 0) {
    return false;
  }
  if (there.st_dev == ours.st_dev && there.st_ino == ours.st_ino) return true;
  errno = ENOENT;
  return false;
}

void OutputFile::discard() noexcept {
  if (!temporary_.empty() && !process_.forked()) ::unlinkat(folder_.get(), temporary_.c_str(), 0);
  temporary_.clear();
  file_.reset();
  state_ = State::kGone;
}

void OutputFile::fail(int error, const std::string& what) {
  give_up();
  throw StorageError(str(path_, ": ", what, ": ", std::generic_category().message(error)));
}

}  // namespace kvpager::snapshot
