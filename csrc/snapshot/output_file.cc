#include "snapshot/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <system_error>

#include "kvpager/error.h"
#include "kvpager/fault.h"

namespace kvpager::snapshot {

namespace {

constexpr uint64_t kBufferBytes = uint64_t{4} << 20;
constexpr uint64_t kBufferAlignment = 4096;
// What is at least this large goes to the file straight from the caller's memory.
constexpr uint64_t kDirectBytes = uint64_t{1} << 20;
constexpr int kNameAttempts = 16;

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

}  // namespace

void Descriptor::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

OutputFile::OutputFile(const std::string& path) : path_(path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  name_ = slash == std::string::npos ? path : path.substr(slash + 1);
  folder_.reset(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_.get() < 0) fail(errno, str("cannot open the folder ", folder));
  struct stat existing;
  if (name_.empty()) fail(path.empty() ? ENOENT : EISDIR, "cannot write a snapshot here");
  if (::fstatat(folder_.get(), name_.c_str(), &existing, 0) == 0) {
    if (S_ISDIR(existing.st_mode)) fail(EISDIR, "cannot replace a folder by a snapshot");
    if (!S_ISREG(existing.st_mode)) fail(EEXIST, "cannot replace what is not a regular file");
  } else if (errno != ENOENT) {
    fail(errno, "cannot look up the name");
  }
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kBufferAlignment, kBufferBytes)));
  if (buffer_ == nullptr) throw std::bad_alloc();
  for (int attempt = 0; file_.get() < 0; ++attempt) {
    const std::string name = temporary_name();
    file_.reset(
        ::openat(folder_.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (file_.get() >= 0) {
      temporary_ = name;
    } else if (errno != EINTR && (errno != EEXIST || attempt >= kNameAttempts)) {
      fail(errno, "cannot create a temporary file in its folder");
    }
  }
}

void OutputFile::append(const void* data, uint64_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  if (bytes >= kDirectBytes) {
    flush();
    write_at(from, bytes, flushed_);
    flushed_ += bytes;
    return;
  }
  while (bytes > 0) {
    const uint64_t part = std::min(bytes, kBufferBytes - buffered_);
    std::memcpy(buffer_.get() + buffered_, from, part);
    buffered_ += part;
    from += part;
    bytes -= part;
    if (buffered_ == kBufferBytes) flush();
  }
}

void OutputFile::flush() {
  if (buffered_ == 0) return;
  write_at(buffer_.get(), buffered_, flushed_);
  flushed_ += buffered_;
  buffered_ = 0;
}

void OutputFile::write_at(const void* data, uint64_t bytes, uint64_t offset) {
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const int injected = fault::visit("snapshot.write");
    if (injected != 0) errno = injected;
    const ssize_t n =
        injected != 0 ? -1 : ::pwrite(file_.get(), from, bytes, static_cast<off_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      fail(errno, str("cannot write ", bytes, " bytes at offset ", offset));
    }
    if (n == 0) fail(ENOSPC, str("nothing was written at offset ", offset));
    from += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
}

void OutputFile::publish() {
  flush();
  int error = fault::visit("snapshot.fsync");
  if (error == 0 && ::fsync(file_.get()) != 0) error = errno;
  if (error != 0) fail(error, "cannot sync the file to disk");
  rename_into_place();
  error = fault::visit("snapshot.fsync");
  if (error == 0 && ::fsync(folder_.get()) != 0) error = errno;
  if (error != 0 && error != EINVAL) {  // EINVAL: a file system without folders to sync
    const bool undone = roll_back();
    fail(error,
         undone ? "cannot sync the folder to disk (the rename was undone)"
                : "cannot sync the folder to disk (the snapshot is in place and whole, but may not "
                  "survive a power failure)");
  }
  if (exchanged_) ::unlinkat(folder_.get(), temporary_.c_str(), 0);  // the file that was replaced
  temporary_.clear();
  file_.reset();
}

// Exchanging keeps the old file until the folder is synced, so that a failed sync can be undone.
void OutputFile::rename_into_place() {
  const int error = fault::visit("snapshot.rename");
  if (error != 0) fail(error, "cannot rename the temporary file to its name");
  struct stat existing;
  replaced_ = ::fstatat(folder_.get(), name_.c_str(), &existing, AT_SYMLINK_NOFOLLOW) == 0;
  exchanged_ =
      replaced_ && !S_ISDIR(existing.st_mode) && exchange(folder_.get(), temporary_, name_);
  if (exchanged_) return;
  if (::renameat(folder_.get(), temporary_.c_str(), folder_.get(), name_.c_str()) != 0) {
    fail(errno, "cannot rename the temporary file to its name");
  }
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

bool OutputFile::holds_our_file(const std::string& name) const noexcept {
  struct stat there;
  struct stat ours;
  return ::fstatat(folder_.get(), name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         ::fstat(file_.get(), &ours) == 0 && there.st_dev == ours.st_dev &&
         there.st_ino == ours.st_ino;
}

void OutputFile::discard() noexcept {
  if (!temporary_.empty()) ::unlinkat(folder_.get(), temporary_.c_str(), 0);
  temporary_.clear();
  file_.reset();
  buffered_ = 0;
}

void OutputFile::fail(int error, const std::string& what) {
  discard();
  throw StorageError(str(path_, ": ", what, ": ", std::generic_category().message(error)));
}

}  // namespace kvpager::snapshot
