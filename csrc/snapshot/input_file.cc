#include "snapshot/input_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/fault.h"
#include "kvpager/error.h"

namespace kvpager::snapshot {

namespace {

constexpr std::chrono::milliseconds kLockPatience{2000};
constexpr std::chrono::milliseconds kLockPause{2};

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  if (path.find('\0') != std::string::npos) {
    throw InvalidArgumentError(str("path: \"", path.c_str(), "\" and a NUL byte, ",
                                   "expected a name that the system does not cut short"));
  }
  // O_NONBLOCK: opening a pipe must not wait for its other end. It means nothing for a regular
  // file.
  int fd;
  do {
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(errno, "open the snapshot");
  file_.reset(fd);
  struct stat status;
  if (::fstat(fd, &status) != 0) fail(errno, "look at the snapshot");
  if (S_ISDIR(status.st_mode)) fail(EISDIR, "read a snapshot");
  if (!S_ISREG(status.st_mode)) fail(EINVAL, "read a snapshot from what is not a regular file");
  bytes_ = static_cast<uint64_t>(status.st_size);
  device_ = static_cast<uint64_t>(status.st_dev);
  inode_ = static_cast<uint64_t>(status.st_ino);
}

bool InputFile::is_what_the_name_leads_to() const {
  struct stat status;
  return ::stat(path_.c_str(), &status) == 0 && static_cast<uint64_t>(status.st_dev) == device_ &&
         static_cast<uint64_t>(status.st_ino) == inode_ &&
         static_cast<uint64_t>(status.st_size) == bytes_;
}

void InputFile::lock_shared() {
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  const auto lock = [&] {
    const int injected = fault::visit("snapshot.share");
    if (injected != 0) errno = injected;
    return injected == 0 && ::flock(file_.get(), LOCK_SH | LOCK_NB) == 0;
  };
  while (!lock()) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) break;  // no locks here
    if (std::chrono::steady_clock::now() >= deadline) {
      fail(EWOULDBLOCK, "lock the file for reading (whoever writes or removes it does not end)");
    }
    std::this_thread::sleep_for(kLockPause);
  }
  struct stat status;
  if (::fstat(file_.get(), &status) != 0) fail(errno, "look at the snapshot");
  if (status.st_nlink == 0) fail(ENOENT, "keep the file, which was removed while it was opened");
}

void InputFile::read(std::byte* out, uint64_t bytes, uint64_t offset,
                     const std::function<std::string()>& what) const {
  for (uint64_t done = 0; done < bytes;) {
    const int64_t allowed =
        fault::visit_transfer("snapshot.read", static_cast<int64_t>(bytes - done));
    if (allowed < 0) errno = static_cast<int>(-allowed);
    const ssize_t n = allowed < 0 ? -1
                                  : ::pread(file_.get(), out + done, static_cast<size_t>(allowed),
                                            static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(errno, str("read ", what(), " at offset ", offset + done));
    if (n == 0) {
      corrupt(path_, "the end of the file while reading " + what(), offset + done, "at least ",
              offset + bytes, " (the file became shorter after it was opened)");
    }
    done += static_cast<uint64_t>(n);
  }
}

void InputFile::will_need(uint64_t bytes, uint64_t offset) const noexcept {
  ::posix_fadvise(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                  POSIX_FADV_WILLNEED);
}

void InputFile::fail(int error, const std::string& what) const {
  throw StorageError(str(path_, ": cannot ", what, ": ", std::generic_category().message(error)));
}

Front read_front(const ByteRanges& file) {
  if (file.bytes() < kFrontBytes) {
    std::array<char, sizeof(kMagic)> begin = {};
    file.read(reinterpret_cast<std::byte*>(begin.data()),
              std::min<uint64_t>(begin.size(), file.bytes()), 0,
              [] { return std::string("the header"); });
    const bool cut_off = std::equal(begin.begin(), begin.end(), kMagic);
    throw CorruptSnapshotError(
        str(file.path(),
            cut_off ? ": corrupt snapshot: " : ": not a kvpager snapshot: ", "file size is ",
            file.bytes(), ", expected at least ", kFrontBytes, " (header and section table)"));
  }
  std::array<std::byte, kFrontBytes> front;
  file.read(front.data(), front.size(), 0, [] { return std::string("the header"); });
  return decode_front(front.data(), file.bytes(), file.path());
}

}  // namespace kvpager::snapshot
