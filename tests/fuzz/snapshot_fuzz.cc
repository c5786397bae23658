// Fuzzes SnapshotReader: whatever the bytes, it opens them or throws a typed error, and what it
// opened it reads, or says is damaged, without touching memory it does not own.
//
// The first byte of the input chooses: odd, and all checksums are recomputed, so that damage
// reaches the checks behind them. The rest is the file.
//
//   clang++-19 -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -Icsrc -Icsrc/include
//   -Icsrc/third_party
//       tests/fuzz/snapshot_fuzz.cc csrc/snapshot/*.cc csrc/memory/fault.cc -o snapshot_fuzz
//   g++ the same without -fsanitize=fuzzer and with -DKVPAGER_FUZZ_MAIN:
//     snapshot_fuzz FILE...         replays inputs
//     snapshot_fuzz --seeds FOLDER  writes the inputs to start from
//     snapshot_fuzz --mutate N      N random damages of the seeds
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../cpp/snapshot/reseal.h"
#include "../cpp/snapshot/sample.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"

namespace {

using kvpager::CorruptSnapshotError;
using kvpager::SnapshotReader;
using kvpager::UnsupportedVersionError;

// A file that lives in memory, under a name that `open` can be given.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("snapshot_fuzz", MFD_CLOEXEC)) {
    if (fd_ < 0) std::abort();
    path_ = "/proc/self/fd/" + std::to_string(fd_);
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  const std::string& path() const { return path_; }
  void fill(const std::string& bytes) {
    if (::ftruncate(fd_, 0) != 0 ||
        ::pwrite(fd_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      std::abort();
    }
  }

 private:
  int fd_;
  std::string path_;
};

template <class Read>
void read_or_report(const Read& read) {
  try {
    read();
  } catch (const CorruptSnapshotError&) {
  }
}

void read_everything(const SnapshotReader& reader) {
  const kvpager::SnapshotMeta& meta = reader.meta();
  const kvpager::Layout& layout = meta.layout;
  std::vector<std::byte> out;
  if (!meta.chunks.empty()) out.resize(static_cast<size_t>(layout.chunk_bytes()));
  for (int64_t c = 0; c < static_cast<int64_t>(meta.chunks.size()); ++c) {
    read_or_report([&] { reader.read_chunk(c, out.data()); });
    read_or_report([&] { reader.read_slice(c, layout.layers - 1, out.data()); });
  }
  out.resize(static_cast<size_t>(meta.sealed_chunks()) *
             kvpager::snapshot::summary_bytes_per_chunk(layout, meta.summary_page_bytes));
  read_or_report([&] { reader.read_summaries(out.data()); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static MemoryFile file;
  std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 1) kvpager::snapshot_test::reseal(&bytes);
  file.fill(bytes);
  try {
    read_everything(*SnapshotReader::open(file.path()));
  } catch (const CorruptSnapshotError&) {
  } catch (const UnsupportedVersionError&) {
  }
  return 0;
}

#ifdef KVPAGER_FUZZ_MAIN
namespace {

using namespace kvpager::snapshot_test;  // NOLINT(build/namespaces)

std::vector<std::string> seeds() {
  const TemporaryFolder folder;
  std::vector<Sample> samples = {make_sample(small_layout(), 0), make_sample(small_layout(), 5),
                                 make_sample(small_layout(), 16, 0), small_sample()};
  std::vector<std::string> out;
  for (const Sample& sample : samples) {
    write_sample(folder.file("seed"), sample);
    for (const char mode : {'\0', '\1'}) out.push_back(mode + read_bytes(folder.file("seed")));
  }
  return out;
}

uint64_t next_random(uint64_t* state) {
  *state = *state * 6364136223846793005ull + 1442695040888963407ull;
  return *state >> 33;
}

// A few damages of the kinds a length or an offset suffers, mostly outside the payload.
std::string damage(std::string input, uint64_t* random) {
  const auto pick = [&](uint64_t below) {
    return static_cast<size_t>(next_random(random) % below);
  };
  static constexpr uint64_t kExtremes[] = {0, 1, 255, 1u << 31, UINT32_MAX, 1ull << 63, UINT64_MAX};
  for (size_t n = 1 + pick(3); n > 0 && input.size() > 64; --n) {
    const size_t front = std::min<size_t>(input.size(), 1 + 64 + 10 * 32);
    const size_t at =
        pick(2) == 0 ? 1 + pick(front - 1) : input.size() - 1 - pick(input.size() / 4);
    switch (pick(5)) {
      case 0:
        input[at] = static_cast<char>(input[at] ^ (1 << pick(8)));
        break;
      case 1:
        input[at] = static_cast<char>(pick(256));
        break;
      case 2:
        if (at + 8 <= input.size()) put(&input, at, kExtremes[pick(7)]);
        break;
      case 3:
        input.resize(pick(8) == 0 ? at : input.size() - std::min<size_t>(input.size(), pick(64)));
        break;
      default:
        input.append(pick(128), '\0');
    }
  }
  return input;
}

void replay(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--seeds" && argc == 3) {
    const std::vector<std::string> all = seeds();
    for (size_t i = 0; i < all.size(); ++i) {
      write_bytes(std::string(argv[2]) + "/seed" + std::to_string(i), all[i]);
    }
  } else if (mode == "--mutate" && argc == 3) {
    const std::vector<std::string> all = seeds();
    uint64_t random = 1;
    for (long n = std::atol(argv[2]); n > 0; --n) {
      replay(damage(all[next_random(&random) % all.size()], &random));
    }
  } else if (argc > 1 && mode[0] != '-') {
    for (int i = 1; i < argc; ++i) replay(read_bytes(argv[i]));
  } else {
    std::fprintf(stderr, "usage: %s FILE... | --seeds FOLDER | --mutate N\n", argv[0]);
    return 2;
  }
  return 0;
}
#endif
