// Micro benchmark of what a lazy restore does: scattered reads of chunks, each hashed as it comes,
// with a cold and with a warm page cache. pread by one or more threads, with and without telling the
// system ahead (posix_fadvise), and io_uring, buffered and direct. Every round runs all subjects
// once, in an order that moves on. Prints one JSON object per line.
//
//   read_bench [--folder F] [--rounds N] [--item-kib K]... [--mib M]
//
//   g++ -std=c++17 -O3 -pthread -Icsrc -Icsrc/include bench/micro/read_bench.cc
//       csrc/snapshot/checksum.cc csrc/hash/xxh3.cc -o read_bench
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvpager/snapshot.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kFileBytes = 1024 * kMiB;

void require(bool ok, const char* what) {
  if (ok) return;
  std::perror(what);
  std::exit(1);
}

// As little of io_uring as reading needs.
class Ring {
 public:
  explicit Ring(unsigned depth) {
    io_uring_params params{};
    fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, depth, &params));
    if (fd_ < 0) return;
    bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                      params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    base_ = map(bytes_, IORING_OFF_SQ_RING);
    sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqe_bytes_, IORING_OFF_SQES));
    sq_tail_ = at(params.sq_off.tail);
    sq_mask_ = *at(params.sq_off.ring_mask);
    sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    cq_mask_ = *at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(base_ + params.cq_off.cqes);
  }
  ~Ring() {
    if (fd_ < 0) return;
    ::munmap(base_, bytes_);
    ::munmap(sqes_, sqe_bytes_);
    ::close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  bool works() const { return fd_ >= 0; }

  // REQUIRES: fewer than `depth` reads under way.
  void push(int file, std::byte* out, size_t bytes, size_t offset, uint64_t name) {
    const unsigned tail = *sq_tail_;
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& sqe = sqes_[slot];
    std::memset(&sqe, 0, sizeof(sqe));
    sqe.opcode = IORING_OP_READ;
    sqe.fd = file;
    sqe.addr = reinterpret_cast<uint64_t>(out);
    sqe.len = static_cast<unsigned>(bytes);
    sqe.off = offset;
    sqe.user_data = name;
    sq_array_[slot] = slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++pushed_;
  }

  // Hands over what was pushed and calls done(name, result) for at least one read.
  template <class Done>
  void wait(const Done& done) {
    const long n = ::syscall(__NR_io_uring_enter, fd_, pushed_, 1u, IORING_ENTER_GETEVENTS, nullptr,
                             size_t{0});
    require(n >= 0, "io_uring_enter");
    pushed_ -= static_cast<unsigned>(n);
    unsigned head = *cq_head_;
    for (; head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); ++head) {
      const io_uring_cqe& cqe = cqes_[head & cq_mask_];
      done(cqe.user_data, cqe.res);
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  }

 private:
  std::byte* map(size_t bytes, off_t what) {
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    require(memory != MAP_FAILED, "mmap of a ring");
    return static_cast<std::byte*>(memory);
  }
  unsigned* at(size_t offset) { return reinterpret_cast<unsigned*>(base_ + offset); }

  int fd_ = -1;
  size_t bytes_ = 0;
  size_t sqe_bytes_ = 0;
  std::byte* base_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, pushed_ = 0;
};

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};

struct Subject {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds;
};

// The reads of one measurement: `count` items of `bytes`, anywhere in the file, none twice.
class Reads {
 public:
  Reads(const std::string& path, size_t bytes, size_t total)
      : bytes_(bytes),
        buffered_(::open(path.c_str(), O_RDONLY)),
        direct_(::open(path.c_str(), O_RDONLY | O_DIRECT)),
        out_(static_cast<std::byte*>(std::aligned_alloc(4096, total))) {
    require(buffered_ >= 0, "open");
    std::memset(out_.get(), 0, total);
    for (size_t at = 0; at + bytes <= kFileBytes; at += bytes) offsets_.push_back(at);
    std::shuffle(offsets_.begin(), offsets_.end(), std::mt19937_64(5));
    offsets_.resize(std::min(offsets_.size(), total / bytes));
  }
  ~Reads() {
    ::close(buffered_);
    if (direct_ >= 0) ::close(direct_);
  }
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  size_t count() const { return offsets_.size(); }
  bool has_direct() const { return direct_ >= 0; }
  void forget() { require(::posix_fadvise(buffered_, 0, 0, POSIX_FADV_DONTNEED) == 0, "fadvise"); }

  void by_pread(int threads, bool tell_ahead) {
    if (tell_ahead) {
      for (const size_t offset : offsets_) {
        ::posix_fadvise(buffered_, static_cast<off_t>(offset), static_cast<off_t>(bytes_),
                        POSIX_FADV_WILLNEED);
      }
    }
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < count(); i = next++) {
        const ssize_t n = ::pread(buffered_, item(i), bytes_, static_cast<off_t>(offsets_[i]));
        require(n == static_cast<ssize_t>(bytes_), "pread");
        hash(i);
      }
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }

  void by_ring(unsigned depth, bool direct) {
    Ring ring(depth);
    require(ring.works(), "io_uring_setup");
    size_t begun = 0;
    for (size_t done = 0; done < count();) {
      while (begun < count() && begun - done < depth) {
        ring.push(direct ? direct_ : buffered_, item(begun), bytes_, offsets_[begun], begun);
        ++begun;
      }
      ring.wait([&](uint64_t i, int result) {
        errno = result < 0 ? -result : 0;
        require(result == static_cast<int>(bytes_), "io_uring read");
        hash(i);
        ++done;
      });
    }
  }

 private:
  std::byte* item(size_t i) { return out_.get() + i * bytes_; }
  void hash(size_t i) { sum_ += kvpager::slice_checksum(item(i), static_cast<int64_t>(bytes_)); }

  size_t bytes_;
  int buffered_;
  int direct_;
  std::unique_ptr<std::byte, Free> out_;
  std::vector<size_t> offsets_;
  std::atomic<uint64_t> sum_{0};
};

void make_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
  require(fd >= 0, "open");
  std::vector<uint64_t> block(4 * kMiB / 8);
  uint64_t state = 1;
  for (size_t at = 0; at < kFileBytes; at += 4 * kMiB) {
    for (uint64_t& word : block) word = state = state * 6364136223846793005ull + 1;
    require(::pwrite(fd, block.data(), 4 * kMiB, static_cast<off_t>(at)) == 4 * kMiB, "pwrite");
  }
  require(::fsync(fd) == 0, "fsync");
  ::close(fd);
}

void measure(const std::string& path, size_t item, size_t total, int rounds) {
  Reads reads(path, item, total);
  std::vector<Subject> subjects;
  for (const int threads : {1, 2, 8}) {
    subjects.push_back({"pread, threads " + std::to_string(threads),
                        [&reads, threads] { reads.by_pread(threads, false); },
                        {}});
  }
  for (const int threads : {1, 2}) {
    subjects.push_back({"told ahead, pread, threads " + std::to_string(threads),
                        [&reads, threads] { reads.by_pread(threads, true); },
                        {}});
  }
  if (Ring(8).works()) {
    subjects.push_back({"io_uring, depth 32", [&reads] { reads.by_ring(32, false); }, {}});
    if (reads.has_direct()) {
      subjects.push_back({"io_uring, depth 32, direct", [&reads] { reads.by_ring(32, true); }, {}});
    }
  }
  for (const bool cold : {true, false}) {
    for (Subject& subject : subjects) subject.seconds.clear();
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < subjects.size(); ++i) {
        Subject& subject = subjects[(i + static_cast<size_t>(round)) % subjects.size()];
        if (cold) reads.forget();
        const auto start = Clock::now();
        subject.run();
        subject.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      }
    }
    double load[1] = {0};
    static_cast<void>(::getloadavg(load, 1));
    for (Subject& subject : subjects) {
      std::sort(subject.seconds.begin(), subject.seconds.end());
      const double bytes = static_cast<double>(reads.count() * item);
      std::printf(
          "{\"subject\": \"%s\", \"cache\": \"%s\", \"item_kib\": %zu, \"items\": %zu, "
          "\"rounds\": %d, \"gb_per_s\": %.3f, \"best_gb_per_s\": %.3f, \"load\": %.2f}\n",
          subject.name.c_str(), cold ? "cold" : "warm", item / 1024, reads.count(), rounds,
          bytes / subject.seconds[subject.seconds.size() / 2] * 1e-9,
          bytes / subject.seconds[0] * 1e-9, load[0]);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder = ".";
  std::vector<size_t> items;
  size_t mib = 128;
  int rounds = 7;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const bool more = i + 1 < argc;
    if (option == "--folder" && more) {
      folder = argv[++i];
    } else if (option == "--rounds" && more) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else if (option == "--item-kib" && more) {
      items.push_back(static_cast<size_t>(std::max(4, std::atoi(argv[++i]))) * 1024);
    } else if (option == "--mib" && more) {
      mib = static_cast<size_t>(std::clamp(std::atoi(argv[++i]), 1, 1024));
    } else {
      std::fprintf(stderr,
                   "usage: read_bench [--folder F] [--rounds N] [--item-kib K]... [--mib M]\n");
      return 2;
    }
  }
  if (items.empty()) items = {64 * 1024, 1024 * 1024};
  const std::string path = folder + "/read_bench.bin";
  make_file(path);
  for (const size_t item : items) measure(path, item, mib * kMiB, rounds);
  ::unlink(path.c_str());
  return 0;
}
