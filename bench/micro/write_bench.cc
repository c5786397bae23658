// Micro benchmark of saving: SnapshotWriter::write_content beside memcpy and beside plain
// write + fsync of the same bytes, and the ways of writing it was chosen from. Every round runs all
// subjects once, in an order that moves on, so that a disk that is slow for a while is slow for
// all; ratios are medians over rounds. Prints one JSON object per line.
//
//   write_bench [--folder F] [--rounds N] [--mib M]... [--chunk-kib K] [--all]
//
//   g++ -std=c++17 -O3 -pthread -Icsrc -Icsrc/include bench/micro/write_bench.cc
//       csrc/snapshot/*.cc csrc/hash/xxh3.cc csrc/memory/fault.cc -o write_bench
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"

namespace {

using kvpager::Layout;
using kvpager::SnapshotContent;
using kvpager::SnapshotMeta;
using Clock = std::chrono::steady_clock;

constexpr size_t kMiB = size_t{1} << 20;

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory memory_of(size_t bytes) {
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(2 * kMiB, bytes)));
  if (memory == nullptr) std::abort();
  uint64_t state = 1;
  for (size_t i = 0; i < bytes / 8; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::memcpy(memory.get() + 8 * i, &state, 8);
  }
  return memory;
}

double seconds_of(const std::function<void()>& run) {
  const auto start = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void require(bool ok, const char* what) {
  if (ok) return;
  std::perror(what);
  std::exit(1);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Chunks that lie in memory, as a pager's do; `checked` ones come with their checksums.
class MemoryContent final : public SnapshotContent {
 public:
  MemoryContent(const Layout& layout, const std::byte* bytes, int64_t chunks, bool checked)
      : bytes_(bytes) {
    meta_.layout = layout;
    meta_.scorer = "bits2";
    meta_.summary_page_bytes = layout.k_dim / 4;
    meta_.tokens =
        std::vector<kvpager::TokenId>(static_cast<size_t>(chunks * layout.chunk_tokens), 7);
    for (int64_t c = 0; c < chunks; ++c) {
      kvpager::SnapshotChunk chunk;
      chunk.valid = layout.chunk_tokens;
      chunk.chain_hash = {static_cast<uint64_t>(c) + 1, 1};
      std::vector<uint64_t> slices;
      for (int layer = 0; checked && layer < layout.layers; ++layer) {
        slices.push_back(kvpager::slice_checksum(
            bytes + c * layout.chunk_bytes() + layout.slice_offset(layer), layout.slice_bytes(0)));
      }
      chunk.slice_checksum = std::move(slices);
      meta_.chunks.push_back(std::move(chunk));
    }
  }
  const SnapshotMeta& meta() const override { return meta_; }
  const std::byte* borrow_chunk(int64_t chunk, std::byte*) const override {
    return bytes_ + chunk * meta_.layout.chunk_bytes();
  }
  void give_back_chunk(int64_t) const override {}
  void read_summary(int64_t chunk, std::byte* out) const override {
    std::memcpy(out, bytes_ + chunk, static_cast<size_t>(meta_.summary_bytes_per_chunk()));
  }

 private:
  const std::byte* bytes_;
  SnapshotMeta meta_;
};

// One way of writing a file without a format.
struct RawWrite {
  size_t block = 4 * kMiB;
  bool reserve = false;
  size_t writeback = 0;
  bool direct = false;

  void operator()(const std::string& path, const std::byte* bytes, size_t size) const {
    const int flags = O_CREAT | O_EXCL | O_WRONLY | (direct ? O_DIRECT : 0);
    const int fd = ::open(path.c_str(), flags, 0644);
    require(fd >= 0, "open");
    if (reserve) require(::fallocate(fd, 0, 0, static_cast<off_t>(size)) == 0, "fallocate");
    size_t begun = 0;
    for (size_t at = 0; at < size;) {
      const size_t part = std::min(block, size - at);
      const ssize_t n = ::pwrite(fd, bytes + at, part, static_cast<off_t>(at));
      require(n > 0, "pwrite");
      at += static_cast<size_t>(n);
      if (writeback > 0 && at - begun >= writeback) {
        ::sync_file_range(fd, static_cast<off_t>(begun), static_cast<off_t>(at - begun),
                          SYNC_FILE_RANGE_WRITE);
        begun = at;
      }
    }
    require(::fsync(fd) == 0, "fsync");
    ::close(fd);
  }
};

struct Subject {
  std::string name;
  std::function<void(const std::string& path)> run;
  std::vector<double> seconds;
};

void measure(size_t bytes, int rounds, const Layout& layout, const std::string& folder, bool all) {
  const int64_t chunks = std::max<int64_t>(1, static_cast<int64_t>(bytes) / layout.chunk_bytes());
  bytes = static_cast<size_t>(chunks * layout.chunk_bytes());
  const size_t rounded = (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  const Memory from = memory_of(rounded);
  const Memory to = memory_of(rounded);
  const MemoryContent checked(layout, from.get(), chunks, true);
  const MemoryContent unchecked(layout, from.get(), chunks, false);
  std::vector<int64_t> which(static_cast<size_t>(chunks));
  for (int64_t c = 0; c < chunks; ++c) which[static_cast<size_t>(c)] = c;

  const auto save = [&](const MemoryContent& content) {
    return [&](const std::string& path) {
      kvpager::SnapshotWriter writer(path, layout);
      writer.write_content(content, which, "{}", "{}", nullptr);
      writer.publish();
    };
  };
  const auto raw = [&](const RawWrite& how) {
    return [&, how](const std::string& path) { how(path, from.get(), bytes); };
  };
  std::vector<Subject> subjects;
  subjects.push_back(
      {"memcpy", [&](const std::string&) { std::memcpy(to.get(), from.get(), bytes); }, {}});
  subjects.push_back({"write+fsync 4M", raw({}), {}});
  subjects.push_back({"write_content", save(checked), {}});
  if (all) {
    subjects.push_back({"write_content, no checksums given", save(unchecked), {}});
    subjects.push_back({"write+fsync 1M", raw({kMiB}), {}});
    subjects.push_back({"write+fsync 16M", raw({16 * kMiB}), {}});
    subjects.push_back({"reserve", raw({4 * kMiB, true}), {}});
    for (const size_t stride : {size_t{4}, size_t{8}, size_t{16}, size_t{32}, size_t{64}}) {
      subjects.push_back(
          {kvpager::str("writeback ", stride, "M"), raw({4 * kMiB, false, stride * kMiB}), {}});
    }
    subjects.push_back({"reserve + writeback 8M", raw({4 * kMiB, true, 8 * kMiB}), {}});
    subjects.push_back({"reserve + writeback 32M", raw({4 * kMiB, true, 32 * kMiB}), {}});
    subjects.push_back({"direct 4M", raw({4 * kMiB, false, 0, true}), {}});
    subjects.push_back({"reserve + direct 4M", raw({4 * kMiB, true, 0, true}), {}});
    subjects.push_back({"reserve + direct 16M", raw({16 * kMiB, true, 0, true}), {}});
  }
  const std::string path = folder + "/write_bench.kvsnap";
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < subjects.size(); ++i) {
      Subject& subject = subjects[(i + static_cast<size_t>(round)) % subjects.size()];
      ::unlink(path.c_str());
      subject.seconds.push_back(seconds_of([&] { subject.run(path); }));
    }
  }
  ::unlink(path.c_str());

  double load[1] = {0};
  static_cast<void>(::getloadavg(load, 1));
  const double plain = std::max(median(subjects[0].seconds), median(subjects[1].seconds));
  for (const Subject& subject : subjects) {
    std::vector<double> ratio;
    for (size_t r = 0; r < subject.seconds.size(); ++r) {
      ratio.push_back(subjects[1].seconds[r] / subject.seconds[r]);
    }
    const double typical = median(subject.seconds);
    std::printf(
        "{\"subject\": \"%s\", \"mib\": %.1f, \"chunk_kib\": %.0f, \"rounds\": %d, "
        "\"gb_per_s\": %.3f, \"best_gb_per_s\": %.3f, \"of_slower_of_memcpy_and_fsync\": %.2f, "
        "\"of_fsync_by_round\": %.2f, \"load\": %.2f}\n",
        subject.name.c_str(), static_cast<double>(bytes) / kMiB,
        static_cast<double>(layout.chunk_bytes()) / 1024, rounds,
        static_cast<double>(bytes) / typical * 1e-9,
        static_cast<double>(bytes) /
            *std::min_element(subject.seconds.begin(), subject.seconds.end()) * 1e-9,
        plain / typical, median(ratio), load[0]);
    std::fflush(stdout);
  }
}

// Layers of a slice of 64 KiB: 4 heads, 64 tokens, bf16, dimensions of 64.
Layout layout_of(int64_t chunk_kib) {
  Layout layout;
  layout.kv_heads = 4;
  layout.k_dim = layout.v_dim = 64;
  layout.k_dtype = layout.v_dtype = kvpager::DType::kBFloat16;
  layout.layers = 1;
  layout.layers =
      static_cast<int32_t>(std::max<int64_t>(1, chunk_kib * 1024 / layout.slice_bytes(0)));
  return layout;
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder = ".";
  std::vector<size_t> sizes;
  int rounds = 7;
  int64_t chunk_kib = 512;
  bool all = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const bool more = i + 1 < argc;
    if (option == "--all") {
      all = true;
    } else if (option == "--folder" && more) {
      folder = argv[++i];
    } else if (option == "--rounds" && more) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else if (option == "--mib" && more) {
      sizes.push_back(static_cast<size_t>(std::atoi(argv[++i])));
    } else if (option == "--chunk-kib" && more) {
      chunk_kib = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr,
                   "write_bench [--folder F] [--rounds N] [--mib M]... [--chunk-kib K] [--all]\n");
      return 2;
    }
  }
  if (sizes.empty()) sizes = {32, 128, 512, 2048};
  for (const size_t mib : sizes) measure(mib * kMiB, rounds, layout_of(chunk_kib), folder, all);
  return 0;
}
