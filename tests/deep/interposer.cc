// System calls of one process below one folder: counted, failed at a chosen call, recorded.
// Preloaded (LD_PRELOAD), so that what is tested needs no seam for it. KVPAGER_DEEP_ROOT names the
// folder; without it every call goes through unseen.
//
// The record is a file of events: a line of tab-separated fields, the last one the number of bytes
// of data that follow it. power.py reads it.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

// Never destroyed: calls come until the very end of the process.
struct State {
  std::string root;
  std::mutex mutex;
  std::map<int, std::string> paths;  // of open descriptors below the root
  std::map<DIR*, std::string> folders;
  std::string failed_call;
  std::string failed_path;
  int log = -1;
};

State& state() {
  static State* const one = [] {
    auto* made = new State;
    const char* root = std::getenv("KVPAGER_DEEP_ROOT");
    if (root != nullptr) made->root = root;
    return made;
  }();
  return *one;
}

std::atomic<bool> armed{false};
std::atomic<long> visits{0};
std::atomic<long> target{-1};
std::atomic<int> wanted_error{0};

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static const auto real_call = real<decltype(&name)>(#name)

bool below_root(const std::string& path) {
  const std::string& root = state().root;
  return !root.empty() && path.compare(0, root.size(), root) == 0 &&
         (path.size() == root.size() || path[root.size()] == '/');
}

std::string path_of(int descriptor) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.paths.find(descriptor);
  return found == all.paths.end() ? std::string() : found->second;
}

// The absolute path, if it is below the root; else nothing.
std::string watched(int folder, const char* path) {
  if (path == nullptr || state().root.empty()) return {};
  std::filesystem::path full(path);
  if (full.is_relative()) {
    if (folder == AT_FDCWD) {
      std::array<char, 4096> current;
      if (::getcwd(current.data(), current.size()) == nullptr) return {};
      full = std::filesystem::path(current.data()) / full;
    } else {
      const std::string above = path_of(folder);
      if (above.empty()) return {};
      full = *path == '\0' ? std::filesystem::path(above) : std::filesystem::path(above) / full;
    }
  }
  std::string text = full.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return below_root(text) ? text : std::string();
}

void remember(int descriptor, const std::string& path) {
  if (descriptor < 0 || path.empty()) return;
  const std::lock_guard lock(state().mutex);
  state().paths[descriptor] = path;
}

// Whether this call is the one that fails; errno is set then.
bool fails(const char* call, const std::string& path) {
  if (path.empty() || !armed) return false;
  if (visits++ != target) return false;
  {
    const std::lock_guard lock(state().mutex);
    state().failed_call = call;
    state().failed_path = path;
  }
  errno = wanted_error;
  return true;
}

void log_event(const std::vector<std::string>& fields, const iovec* parts = nullptr, int count = 0,
               size_t bytes = 0) {
  State& all = state();
  const int before = errno;
  const std::lock_guard lock(all.mutex);
  if (all.log >= 0) {
    static const auto write_through = real<decltype(&::write)>("write");
    std::string text;
    for (const std::string& field : fields) text += field + "\t";
    text += std::to_string(bytes) + "\n";
    for (int i = 0; i < count && bytes > 0; ++i) {
      const size_t take = std::min(bytes, parts[i].iov_len);
      text.append(static_cast<const char*>(parts[i].iov_base), take);
      bytes -= take;
    }
    size_t done = 0;
    while (done < text.size()) {
      const ssize_t n = write_through(all.log, text.data() + done, text.size() - done);
      if (n <= 0) std::abort();  // a record with a hole proves nothing
      done += static_cast<size_t>(n);
    }
  }
  errno = before;
}

std::string inode_of(int descriptor) {
  struct stat status;
  static const auto look = real<decltype(&::fstat)>("fstat");
  return look(descriptor, &status) == 0 ? std::to_string(status.st_ino) : "0";
}

bool there(const std::string& path) {
  static const auto look = real<decltype(&::lstat)>("lstat");
  struct stat status;
  const int before = errno;
  const bool found = look(path.c_str(), &status) == 0;
  errno = before;
  return found;
}

void note_opened(int descriptor, const std::string& path, int flags, bool existed) {
  remember(descriptor, path);
  if (descriptor < 0 || path.empty()) return;
  if ((flags & O_CREAT) != 0 && !existed) log_event({"create", path, inode_of(descriptor)});
  if ((flags & O_TRUNC) != 0 && existed) log_event({"truncate", inode_of(descriptor), "0"});
}

template <class Call>
int opened(const char* name, int folder, const char* path, int flags, const Call& call) {
  const std::string full = watched(folder, path);
  if (fails(name, full)) return -1;
  const bool existed = !full.empty() && there(full);
  const int descriptor = call();
  note_opened(descriptor, full, flags, existed);
  return descriptor;
}

void note_write(int descriptor, const std::string& path, const iovec* parts, int count,
                off_t offset, ssize_t done) {
  if (path.empty() || done <= 0) return;
  log_event({"write", inode_of(descriptor), std::to_string(offset)}, parts, count,
            static_cast<size_t>(done));
}

// A call on one path, and what the record says of it once it went through.
template <class Call>
int on_path(const char* name, int folder, const char* path, const Call& call,
            const char* event = nullptr) {
  const std::string full = watched(folder, path);
  if (fails(name, full)) return -1;
  const int result = call();
  if (result == 0 && event != nullptr && !full.empty()) log_event({event, full});
  return result;
}

template <class Call>
int on_paths(const char* name, int from_folder, const char* from, int to_folder, const char* to,
             const Call& call, const char* event) {
  const std::string source = watched(from_folder, from), goal = watched(to_folder, to);
  if (fails(name, goal.empty() ? source : goal)) return -1;
  const int result = static_cast<int>(call());
  if (result == 0 && !goal.empty()) log_event({event, source, goal});
  return result;
}

template <class Call>
auto on_descriptor(const char* name, int descriptor, const Call& call) {
  using Result = decltype(call());
  if (fails(name, path_of(descriptor))) return static_cast<Result>(-1);
  return call();
}

int synced(const char* name, int descriptor, int (*call)(int)) {
  const std::string path = path_of(descriptor);
  if (fails(name, path)) return -1;
  const int result = call(descriptor);
  if (result == 0 && !path.empty()) {
    struct stat status;
    static const auto look = real<decltype(&::fstat)>("fstat");
    look(descriptor, &status);
    if (S_ISDIR(status.st_mode)) {
      log_event({"sync-folder", path});
    } else {
      log_event({"sync", std::to_string(status.st_ino)});
    }
  }
  return result;
}

int resized(const char* name, const char* event, int descriptor, off_t size,
            int (*call)(int, off_t)) {
  const std::string path = path_of(descriptor);
  if (fails(name, path)) return -1;
  const int result = call(descriptor, size);
  if (result == 0 && !path.empty()) {
    log_event({event, inode_of(descriptor), std::to_string(size)});
  }
  return result;
}

}  // namespace

extern "C" {

// The interface for the test, through ctypes.

void deep_arm(long after, int error) {
  visits = 0;
  target = after;
  wanted_error = error;
  {
    const std::lock_guard lock(state().mutex);
    state().failed_call.clear();
    state().failed_path.clear();
  }
  armed = true;
}

// Returns how many calls were seen since deep_arm.
long deep_disarm() {
  armed = false;
  return visits;
}

// "" if none has failed.
const char* deep_failed_call() { return state().failed_call.c_str(); }
const char* deep_failed_path() { return state().failed_path.c_str(); }

// Records from now on to a descriptor; -1 ends it.
void deep_record(int log) {
  const std::lock_guard lock(state().mutex);
  state().log = log;
}

void deep_mark(const char* text) { log_event({"mark", text}); }

// The wrappers. Those of 64-bit offsets are the same functions on this system's ABI.

#define MODE_OF(flags)                          \
  mode_t mode = 0;                              \
  if (((flags) & (O_CREAT | O_TMPFILE)) != 0) { \
    va_list more;                               \
    va_start(more, flags);                      \
    mode = va_arg(more, mode_t);                \
    va_end(more);                               \
  }

int open(const char* path, int flags, ...) {
  REAL(open);
  MODE_OF(flags)
  return opened("open", AT_FDCWD, path, flags, [&] { return real_call(path, flags, mode); });
}

int open64(const char* path, int flags, ...) {
  REAL(open64);
  MODE_OF(flags)
  return opened("open", AT_FDCWD, path, flags, [&] { return real_call(path, flags, mode); });
}

int openat(int folder, const char* path, int flags, ...) {
  REAL(openat);
  MODE_OF(flags)
  return opened("openat", folder, path, flags,
                [&] { return real_call(folder, path, flags, mode); });
}

int openat64(int folder, const char* path, int flags, ...) {
  REAL(openat64);
  MODE_OF(flags)
  return opened("openat", folder, path, flags,
                [&] { return real_call(folder, path, flags, mode); });
}

// The descriptor is closed whatever it says, as Linux does.
int close(int descriptor) {
  REAL(close);
  std::string path;
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    const auto found = all.paths.find(descriptor);
    if (found != all.paths.end()) {
      path = found->second;
      all.paths.erase(found);
    }
  }
  const int result = real_call(descriptor);
  return fails("close", path) ? -1 : result;
}

ssize_t read(int descriptor, void* data, size_t bytes) {
  REAL(read);
  return on_descriptor("read", descriptor, [&] { return real_call(descriptor, data, bytes); });
}

ssize_t pread(int descriptor, void* data, size_t bytes, off_t offset) {
  REAL(pread);
  return on_descriptor("pread", descriptor,
                       [&] { return real_call(descriptor, data, bytes, offset); });
}

ssize_t pread64(int descriptor, void* data, size_t bytes, off64_t offset) {
  REAL(pread64);
  return on_descriptor("pread", descriptor,
                       [&] { return real_call(descriptor, data, bytes, offset); });
}

ssize_t preadv(int descriptor, const iovec* parts, int count, off_t offset) {
  REAL(preadv);
  return on_descriptor("preadv", descriptor,
                       [&] { return real_call(descriptor, parts, count, offset); });
}

ssize_t write(int descriptor, const void* data, size_t bytes) {
  REAL(write);
  const std::string path = path_of(descriptor);
  if (fails("write", path)) return -1;
  const ssize_t done = real_call(descriptor, data, bytes);
  const iovec part{const_cast<void*>(data), bytes};
  if (!path.empty() && done > 0) {
    note_write(descriptor, path, &part, 1, ::lseek(descriptor, 0, SEEK_CUR) - done, done);
  }
  return done;
}

ssize_t writev(int descriptor, const iovec* parts, int count) {
  REAL(writev);
  const std::string path = path_of(descriptor);
  if (fails("writev", path)) return -1;
  const ssize_t done = real_call(descriptor, parts, count);
  if (!path.empty() && done > 0) {
    note_write(descriptor, path, parts, count, ::lseek(descriptor, 0, SEEK_CUR) - done, done);
  }
  return done;
}

ssize_t pwrite(int descriptor, const void* data, size_t bytes, off_t offset) {
  REAL(pwrite);
  const std::string path = path_of(descriptor);
  if (fails("pwrite", path)) return -1;
  const ssize_t done = real_call(descriptor, data, bytes, offset);
  const iovec part{const_cast<void*>(data), bytes};
  note_write(descriptor, path, &part, 1, offset, done);
  return done;
}

ssize_t pwrite64(int descriptor, const void* data, size_t bytes, off64_t offset) {
  return pwrite(descriptor, data, bytes, offset);
}

ssize_t pwritev(int descriptor, const iovec* parts, int count, off_t offset) {
  REAL(pwritev);
  const std::string path = path_of(descriptor);
  if (fails("pwritev", path)) return -1;
  const ssize_t done = real_call(descriptor, parts, count, offset);
  note_write(descriptor, path, parts, count, offset, done);
  return done;
}

ssize_t pwritev64(int descriptor, const iovec* parts, int count, off64_t offset) {
  return pwritev(descriptor, parts, count, offset);
}

ssize_t pwritev2(int descriptor, const iovec* parts, int count, off_t offset, int) {
  return pwritev(descriptor, parts, count, offset);  // no flag that is used here changes what lasts
}

ssize_t pwritev64v2(int descriptor, const iovec* parts, int count, off64_t offset, int flags) {
  return pwritev2(descriptor, parts, count, offset, flags);
}

int fsync(int descriptor) {
  REAL(fsync);
  return synced("fsync", descriptor, real_call);
}

int fdatasync(int descriptor) {
  REAL(fdatasync);
  return synced("fdatasync", descriptor, real_call);
}

int ftruncate(int descriptor, off_t size) {
  REAL(ftruncate);
  return resized("ftruncate", "truncate", descriptor, size, real_call);
}

int ftruncate64(int descriptor, off64_t size) { return ftruncate(descriptor, size); }

int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  REAL(fallocate);
  const std::string path = path_of(descriptor);
  if (fails("fallocate", path)) return -1;
  const int result = real_call(descriptor, mode, offset, bytes);
  if (result == 0 && !path.empty() && mode == 0) {
    log_event({"allocate", inode_of(descriptor), std::to_string(offset + bytes)});
  }
  if (result == 0 && !path.empty() && (mode & FALLOC_FL_PUNCH_HOLE) != 0) {
    const std::vector<char> zeros(static_cast<size_t>(bytes));
    const iovec part{const_cast<char*>(zeros.data()), zeros.size()};
    note_write(descriptor, path, &part, 1, offset, static_cast<ssize_t>(bytes));
  }
  return result;
}

int fallocate64(int descriptor, int mode, off64_t offset, off64_t bytes) {
  return fallocate(descriptor, mode, offset, bytes);
}

int posix_fallocate(int descriptor, off_t offset, off_t bytes) {
  return fallocate(descriptor, 0, offset, bytes) == 0 ? 0 : errno;
}

int posix_fallocate64(int descriptor, off64_t offset, off64_t bytes) {
  return posix_fallocate(descriptor, offset, bytes);
}

int truncate(const char* path, off_t size) {
  const int descriptor = ::open(path, O_WRONLY);
  if (descriptor < 0) return -1;
  const int result = ftruncate(descriptor, size);
  ::close(descriptor);
  return result;
}

int truncate64(const char* path, off64_t size) { return truncate(path, size); }

void* mmap(void* at, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
  REAL(mmap);
  if (descriptor >= 0 && fails("mmap", path_of(descriptor))) return MAP_FAILED;
  return real_call(at, bytes, protection, flags, descriptor, offset);
}

int flock(int descriptor, int operation) {
  static const auto real_call = real<int (*)(int, int)>("flock");
  return on_descriptor("flock", descriptor, [&] { return real_call(descriptor, operation); });
}

int rename(const char* from, const char* to) {
  REAL(rename);
  return on_paths(
      "rename", AT_FDCWD, from, AT_FDCWD, to, [&] { return real_call(from, to); }, "rename");
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  REAL(renameat);
  return on_paths(
      "renameat", from_folder, from, to_folder, to,
      [&] { return real_call(from_folder, from, to_folder, to); }, "rename");
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  REAL(renameat2);
  return on_paths(
      "renameat2", from_folder, from, to_folder, to,
      [&] { return real_call(from_folder, from, to_folder, to, flags); },
      (flags & RENAME_EXCHANGE) != 0 ? "exchange" : "rename");
}

// Older code reaches renameat2 this way.
long syscall(long number, ...) {
  static const auto real_call = real<long (*)(long, ...)>("syscall");
  va_list more;
  va_start(more, number);
  std::array<long, 6> a;
  for (long& argument : a) argument = va_arg(more, long);
  va_end(more);
  const auto call = [&] { return real_call(number, a[0], a[1], a[2], a[3], a[4], a[5]); };
  if (number != SYS_renameat2) return call();
  return on_paths("renameat2", static_cast<int>(a[0]), reinterpret_cast<const char*>(a[1]),
                  static_cast<int>(a[2]), reinterpret_cast<const char*>(a[3]), call,
                  (a[4] & RENAME_EXCHANGE) != 0 ? "exchange" : "rename");
}

int link(const char* from, const char* to) {
  REAL(link);
  return on_paths(
      "link", AT_FDCWD, from, AT_FDCWD, to, [&] { return real_call(from, to); }, "link");
}

int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  REAL(linkat);
  return on_paths(
      "linkat", from_folder, from, to_folder, to,
      [&] { return real_call(from_folder, from, to_folder, to, flags); }, "link");
}

int unlink(const char* path) {
  REAL(unlink);
  return on_path("unlink", AT_FDCWD, path, [&] { return real_call(path); }, "unlink");
}

int unlinkat(int folder, const char* path, int flags) {
  REAL(unlinkat);
  return on_path(
      "unlinkat", folder, path, [&] { return real_call(folder, path, flags); },
      (flags & AT_REMOVEDIR) != 0 ? "rmdir" : "unlink");
}

int mkdir(const char* path, mode_t mode) {
  REAL(mkdir);
  return on_path("mkdir", AT_FDCWD, path, [&] { return real_call(path, mode); }, "mkdir");
}

int mkdirat(int folder, const char* path, mode_t mode) {
  REAL(mkdirat);
  return on_path("mkdirat", folder, path, [&] { return real_call(folder, path, mode); }, "mkdir");
}

int rmdir(const char* path) {
  REAL(rmdir);
  return on_path("rmdir", AT_FDCWD, path, [&] { return real_call(path); }, "rmdir");
}

int chmod(const char* path, mode_t mode) {
  REAL(chmod);
  return on_path("chmod", AT_FDCWD, path, [&] { return real_call(path, mode); });
}

int fchmod(int descriptor, mode_t mode) {
  REAL(fchmod);
  return on_descriptor("fchmod", descriptor, [&] { return real_call(descriptor, mode); });
}

int access(const char* path, int mode) {
  REAL(access);
  return on_path("access", AT_FDCWD, path, [&] { return real_call(path, mode); });
}

int utimensat(int folder, const char* path, const timespec times[2], int flags) {
  static const auto real_call = real<int (*)(int, const char*, const timespec*, int)>("utimensat");
  return on_path("utimensat", folder, path, [&] { return real_call(folder, path, times, flags); });
}

int futimens(int descriptor, const timespec times[2]) {
  static const auto real_call = real<int (*)(int, const timespec*)>("futimens");
  return on_descriptor("futimens", descriptor, [&] { return real_call(descriptor, times); });
}

int stat(const char* path, struct stat* status) {
  REAL(stat);
  return on_path("stat", AT_FDCWD, path, [&] { return real_call(path, status); });
}

int stat64(const char* path, struct stat64* status) {
  REAL(stat64);
  return on_path("stat", AT_FDCWD, path, [&] { return real_call(path, status); });
}

int lstat(const char* path, struct stat* status) {
  REAL(lstat);
  return on_path("lstat", AT_FDCWD, path, [&] { return real_call(path, status); });
}

int lstat64(const char* path, struct stat64* status) {
  REAL(lstat64);
  return on_path("lstat", AT_FDCWD, path, [&] { return real_call(path, status); });
}

int fstat(int descriptor, struct stat* status) {
  REAL(fstat);
  return on_descriptor("fstat", descriptor, [&] { return real_call(descriptor, status); });
}

int fstat64(int descriptor, struct stat64* status) {
  REAL(fstat64);
  return on_descriptor("fstat", descriptor, [&] { return real_call(descriptor, status); });
}

int fstatat(int folder, const char* path, struct stat* status, int flags) {
  REAL(fstatat);
  return on_path("fstatat", folder, path, [&] { return real_call(folder, path, status, flags); });
}

int fstatat64(int folder, const char* path, struct stat64* status, int flags) {
  REAL(fstatat64);
  return on_path("fstatat", folder, path, [&] { return real_call(folder, path, status, flags); });
}

int statx(int folder, const char* path, int flags, unsigned mask, struct statx* status) {
  static const auto real_call =
      real<int (*)(int, const char*, int, unsigned, struct statx*)>("statx");
  return on_path("statx", folder, path,
                 [&] { return real_call(folder, path, flags, mask, status); });
}

DIR* opendir(const char* path) {
  REAL(opendir);
  const std::string full = watched(AT_FDCWD, path);
  if (fails("opendir", full)) return nullptr;
  DIR* const folder = real_call(path);
  if (folder != nullptr && !full.empty()) {
    const std::lock_guard lock(state().mutex);
    state().folders[folder] = full;
  }
  return folder;
}

dirent64* readdir64(DIR* folder) {
  REAL(readdir64);
  std::string path;
  {
    const std::lock_guard lock(state().mutex);
    const auto found = state().folders.find(folder);
    if (found != state().folders.end()) path = found->second;
  }
  return fails("readdir", path) ? nullptr : real_call(folder);
}

int closedir(DIR* folder) {
  REAL(closedir);
  {
    const std::lock_guard lock(state().mutex);
    state().folders.erase(folder);
  }
  return real_call(folder);
}

}  // extern "C"
