#include "memory/disk_spill.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/fault.h"
#include "kvpager/error.h"
#include "kvpager/require.h"

namespace kvpager {
namespace {

[[noreturn]] void fail(const std::string& folder, const char* verb, int error) {
  throw StorageError(str("disk spill in ", folder, ": cannot ", verb, ": ", std::strerror(error)));
}

int open_nameless(const std::string& folder) {
  const int fd = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
  // Filesystems without O_TMPFILE: a named file whose name is removed at once.
  std::string name = folder + "/.kvpager-spill-XXXXXX";
  std::vector<char> path(name.begin(), name.end());
  path.push_back('\0');
  const int named = mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) unlink(path.data());
  return named;
}

// Takes the room that the file will need, so that a full disk is met now; what was never written is
// past its end all the same. 0, or what the system says.
int reserve(int fd, int64_t bytes) {
  if (const int error = fault::visit("disk.reserve")) return error;
  while (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    struct statvfs filesystem;  // one that cannot reserve: what is free now is all that can be said
    if (fstatvfs(fd, &filesystem) != 0) return errno;
    const auto block = static_cast<uint64_t>(filesystem.f_frsize);
    return filesystem.f_bavail < (static_cast<uint64_t>(bytes) + block - 1) / block ? ENOSPC : 0;
  }
  return 0;
}

}  // namespace

DiskSpill::DiskSpill(const std::string& folder, int64_t slots, int64_t slot_bytes)
    : folder_(folder), slots_(slots), slot_bytes_(slot_bytes) {
  if (slots == 0) return;
  fd_ = open_nameless(folder);
  if (fd_ < 0) fail(folder, "open a file", errno);
  if (const int error = reserve(fd_, slots * slot_bytes)) {
    close(fd_);
    fail(folder, str("reserve ", slots * slot_bytes, " bytes").c_str(), error);
  }
}

DiskSpill::~DiskSpill() {
  if (fd_ >= 0) close(fd_);
}

void DiskSpill::write(int64_t slot, const std::byte* data) {
  KVPAGER_REQUIRE(slot >= 0 && slot < slots_);
  if (const int error = fault::visit("disk.write")) fail(folder_, "write", error);
  int64_t done = 0;
  while (done < slot_bytes_) {
    const ssize_t n = pwrite(fd_, data + done, static_cast<size_t>(slot_bytes_ - done),
                             slot * slot_bytes_ + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(folder_, "write", errno);
    if (n == 0) fail(folder_, "write", ENOSPC);
    done += n;
  }
}

void DiskSpill::read(int64_t slot, int64_t offset, int64_t bytes, std::byte* out) const {
  KVPAGER_REQUIRE(slot >= 0 && slot < slots_);
  KVPAGER_REQUIRE(offset >= 0 && bytes >= 0 && bytes <= slot_bytes_ - offset);
  if (const int error = fault::visit("disk.read")) fail(folder_, "read", error);
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t n = pread(fd_, out + done, static_cast<size_t>(bytes - done),
                            slot * slot_bytes_ + offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(folder_, "read", errno);
    if (n == 0) fail(folder_, "read past its end", EIO);
    done += n;
  }
}

}  // namespace kvpager
