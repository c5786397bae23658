// Fuzzes SnapshotReader: whatever the bytes, it opens them or throws a typed error; what it opened
// it reads, or says is damaged, without touching memory it does not own; and what it read whole is
// written again byte for byte.
//
// The first byte of an input says what the rest is (see Mode); libFuzzer's own mutations are mixed
// with some that know sections (tests/fuzz/mutate.h). tests/fuzz/run.sh builds it with clang and
// runs it from the corpus. Without libFuzzer (-DKVPAGER_FUZZ_MAIN) it
//   snapshot_fuzz FILE|FOLDER...   replays inputs
//   snapshot_fuzz --seeds FOLDER   writes the inputs to start from
//   snapshot_fuzz --crafted FOLDER writes the snapshots of tests/fuzz/crafted.h
//   snapshot_fuzz --mutate N       makes N random damages of seeds and crafted snapshots
#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cpp/snapshot/parts.h"
#include "../cpp/snapshot/store_fixture.h"
#include "crafted.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "mutate.h"

namespace {

using kvpager::CorruptSnapshotError;
using kvpager::InvalidArgumentError;
using kvpager::SnapshotChunk;
using kvpager::SnapshotMeta;
using kvpager::SnapshotReader;
using kvpager::StorageError;
using kvpager::UnsupportedVersionError;
using namespace kvpager::snapshot_test;  // NOLINT(build/namespaces)

[[noreturn]] void violated(const char* what) {
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

// Whether `read` got its bytes; damage is a CorruptSnapshotError and nothing else.
template <class Read>
bool whole(const Read& read) {
  try {
    read();
    return true;
  } catch (const CorruptSnapshotError&) {
    return false;
  }
}

struct Everything {
  Sample sample;
  bool sound = true;
  bool damaged = false;  // what verify says
};

// Reads by every way there is and compares them with each other.
Everything read_everything(const SnapshotReader& reader) {
  Everything out;
  const SnapshotMeta& meta = reader.meta();
  const kvpager::Layout& layout = meta.layout;
  if (layout.broken_rule()) violated("a layout that was read is one that a pager takes");
  for (int layer = 0; layer < layout.layers; ++layer) {
    // As rows are read from a slice: by page, of one layer alone.
    const int64_t page = layout.of_layer(layer).page_bytes();
    if (page <= 0 || page * layout.kv_heads != layout.slice_bytes(layer)) {
      violated("a slice has the pages of its layer");
    }
  }
  out.sample.meta = meta;
  const auto chunks = static_cast<int64_t>(meta.chunks.size());
  std::vector<std::byte> chunk;
  std::vector<std::byte> slice;
  if (chunks > 0) chunk.resize(static_cast<size_t>(layout.chunk_bytes()));
  if (chunks > 0) slice.resize(static_cast<size_t>(layout.largest_slice_bytes()));
  for (int64_t c = 0; c < chunks; ++c) {
    const bool all = whole([&] { reader.read_chunk(c, chunk.data()); });
    bool slices = true;
    for (int layer = 0; layer < layout.layers; ++layer) {
      const bool one = whole([&] { reader.read_slice(c, layer, slice.data()); });
      slices = slices && one;
      if (all && one &&
          std::memcmp(slice.data(), chunk.data() + layout.slice_offset(layer),
                      static_cast<size_t>(layout.slice_bytes(layer))) != 0) {
        violated("a slice differs from its part of the chunk");
      }
    }
    if (all != slices) violated("a chunk is whole exactly if its slices are");
    out.sound = out.sound && all;
    out.sample.payload.push_back(chunk);
  }
  const auto sealed = static_cast<size_t>(meta.sealed_chunks());
  const auto each = static_cast<size_t>(meta.summary_bytes_per_chunk());
  std::vector<std::byte> summaries(sealed * each);
  const bool together =
      whole([&] { reader.read_summaries(0, static_cast<int64_t>(sealed), summaries.data()); });
  bool apart = true;
  for (size_t c = 0; c < sealed; ++c) {
    std::vector<std::byte> one(each);
    const bool good = whole([&] { reader.read_summary(static_cast<int64_t>(c), one.data()); });
    apart = apart && good;
    if (together && good &&
        !std::equal(one.begin(), one.end(),
                    summaries.begin() + static_cast<std::ptrdiff_t>(c * each))) {
      violated("a summary differs from its part of all summaries");
    }
    out.sample.summaries.push_back(std::move(one));
  }
  if (together != apart) violated("the summaries are whole exactly if each one is");
  out.sound = out.sound && together;
  out.damaged = !reader.verify(1, {}).empty();
  if (out.damaged == out.sound) violated("verify finds damage exactly where reading does");
  return out;
}

// What a file held, written again.
std::string written_again(const Everything& all, const std::string& path) {
  kvpager::SnapshotWriter writer(path, all.sample.meta.layout);
  const auto sealed = static_cast<size_t>(all.sample.meta.sealed_chunks());
  const bool manifest = !all.sample.meta.packs.empty();
  for (size_t c = manifest ? sealed : 0; c < all.sample.payload.size(); ++c) {
    writer.add_chunk(all.sample.payload[c].data());
  }
  for (size_t c = 0; c < (manifest ? 0 : sealed); ++c) {
    writer.add_summary(all.sample.summaries[c].data(),
                       static_cast<int64_t>(all.sample.summaries[c].size()));
  }
  writer.finish(all.sample.meta);
  return read_bytes(path);
}

// Its sealed chunks, backwards, behind one of a file that is sound.
void gather_backwards(const std::shared_ptr<SnapshotReader>& reader,
                      const std::shared_ptr<SnapshotReader>& sound) {
  std::vector<std::pair<std::shared_ptr<SnapshotReader>, int64_t>> chunks = {{sound, 0}};
  for (int64_t c = reader->meta().sealed_chunks(); c-- > 0;) chunks.emplace_back(reader, c);
  try {
    const auto gathered = SnapshotReader::gather(chunks, "gathered");
    if (gathered->meta().chunks.size() != chunks.size()) violated("gather keeps every chunk");
    read_everything(*gathered);
  } catch (const InvalidArgumentError&) {  // another layout or scorer
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static StoreFixture store;
  std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if ((data[0] & kResealed) != 0) reseal(&bytes);
  const bool as_pack = (data[0] & kAsPack) != 0;
  store.replace(as_pack ? store.victim_pack() : store.victim(), bytes);
  try {
    const auto reader = SnapshotReader::open(as_pack ? store.manifest() : store.victim());
    const Everything all = read_everything(*reader);
    if (!as_pack && all.sound && written_again(all, store.scratch()) != bytes) {
      violated("write(read(x)) == x");
    }
    if (as_pack && all.sound && bytes.size() < store.manifest_payload_bytes()) {
      violated("a manifest reads whole although its pack cannot hold the chunks");
    }
    gather_backwards(reader, store.sound());
  } catch (const CorruptSnapshotError&) {
  } catch (const UnsupportedVersionError&) {
  } catch (const StorageError&) {  // a pack that is missing
  }
  return 0;
}

#ifndef KVPAGER_FUZZ_MAIN
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  Random random(seed);
  if (size < 2 || random.below(3) == 0) return LLVMFuzzerMutate(data, size, max_size);
  const auto mutate_bytes = [](std::string* bytes, size_t most) {
    std::vector<uint8_t> buffer(bytes->begin(), bytes->end());
    buffer.resize(std::max<size_t>(most, 1));
    buffer.resize(LLVMFuzzerMutate(buffer.data(), bytes->size(), buffer.size()));
    bytes->assign(buffer.begin(), buffer.end());
  };
  std::string input(reinterpret_cast<const char*>(data), size);
  mutate_sections(&input, &random, mutate_bytes);
  if (input.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::copy(input.begin(), input.end(), data);
  return input.size();
}
#else
namespace {

// Self-contained files, manifests over one and two packs, and a pack: as they are, and resealed.
std::vector<std::string> seeds() {
  const StoreFixture store;
  std::vector<std::string> out;
  const auto add = [&out](int mode, const std::string& path) {
    for (const int sealing : {0, int{kResealed}}) {
      out.push_back(static_cast<char>(mode | sealing) + read_bytes(path));
    }
  };
  for (const Sample& sample : {make_sample(small_layout(), 0), make_sample(small_layout(), 5),
                               make_sample(small_layout(), 32, 0), small_sample(),
                               make_sample(codes_and_floats(), 18, 8)}) {
    write_sample(store.victim(), sample);
    add(0, store.victim());
  }
  store.write_two_packs(store.victim());
  add(0, store.victim());
  add(0, store.manifest());
  add(kAsPack, store.victim_pack());
  return out;
}

void replay(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

// Random bytes, where libFuzzer's own mutations are not at hand.
void mutate_bytes(std::string* bytes, size_t most, Random* random) {
  if (bytes->empty() || random->below(8) == 0) bytes->append(random->below(24), '\0');
  if (bytes->size() > most) bytes->resize(most);
  for (uint64_t n = random->below(3); n > 0 && !bytes->empty(); --n) {
    (*bytes)[random->below(bytes->size())] = static_cast<char>(random->below(256));
  }
}

int replay_all(int count, char** names) {
  int replayed = 0;
  for (int i = 0; i < count; ++i) {
    std::vector<std::string> files = {names[i]};
    if (DIR* folder = ::opendir(names[i])) {
      files.clear();
      while (const dirent* entry = ::readdir(folder)) {
        if (entry->d_name[0] != '.') files.push_back(std::string(names[i]) + "/" + entry->d_name);
      }
      ::closedir(folder);
    }
    for (const std::string& file : files) {
      const std::string input = read_bytes(file);
      if (input.empty()) {
        std::fprintf(stderr, "%s: empty or unreadable\n", file.c_str());
        return 1;
      }
      replay(input);
      ++replayed;
    }
  }
  std::printf("%d inputs replayed\n", replayed);
  return replayed > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--seeds" && argc == 3) {
    const std::vector<std::string> all = seeds();
    for (size_t i = 0; i < all.size(); ++i) {
      write_bytes(std::string(argv[2]) + "/seed" + std::to_string(i), all[i]);
    }
    return 0;
  }
  if (mode == "--crafted" && argc == 3) {
    for (const Crafted& one : crafted_snapshots()) {
      write_bytes(std::string(argv[2]) + "/" + one.name + ".kvsnap", one.bytes);
    }
    return 0;
  }
  if (mode == "--mutate" && argc == 3) {
    std::vector<std::string> all = seeds();
    for (const Crafted& one : crafted_snapshots()) all.push_back(std::string(1, '\0') + one.bytes);
    Random random(1);
    for (long n = std::atol(argv[2]); n > 0; --n) {
      std::string input = all[random.below(all.size())];
      for (uint64_t times = 1 + random.below(3); times > 0; --times) {
        if (random.below(2) == 0) {
          damage(&input, &random);
        } else {
          mutate_sections(&input, &random, [&random](std::string* bytes, size_t most) {
            mutate_bytes(bytes, most, &random);
          });
        }
      }
      replay(input);
    }
    return 0;
  }
  if (argc > 1 && mode[0] != '-') return replay_all(argc - 1, argv + 1);
  std::fprintf(stderr, "usage: %s FILE|FOLDER... | --seeds FOLDER | --mutate N\n", argv[0]);
  return 2;
}
#endif
