// A small directory store: packs, manifests that name them, and room for a file whose bytes are an
// attack. It lies in memory where the system has a folder for that.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "sample.h"

namespace kvpager::snapshot_test {

class StoreFixture {
 public:
  StoreFixture() {
    const char* base = std::getenv("TMPDIR");
    if (base == nullptr) base = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    folder_ = std::string(base) + "/kvpager_store_XXXXXX";
    if (::mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    make_folder("packs");
    make_folder("snapshots");
    sample_ = make_sample(small_layout(), 7 * 16 + 5);
    write_pack(kPackA, {1, 3, 5});
    write_pack(kPackB, {0, 2, 4, 6});
    write_pack(kVictimPack, {0, 1, 2, 3, 4, 5, 6});
    write_manifest(manifest(), {{kVictimPack, 7}},
                   {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {0, 6}});
    sound_ = SnapshotReader::open(pack_path(kPackB));
  }
  ~StoreFixture() {
    for (const std::string& path :
         {pack_path(kPackA), pack_path(kPackB), victim_pack(), manifest(), victim(), scratch()}) {
      ::unlink(path.c_str());
    }
    for (const char* name : {"/packs", "/snapshots", ""}) ::rmdir((folder_ + name).c_str());
  }
  StoreFixture(const StoreFixture&) = delete;
  StoreFixture& operator=(const StoreFixture&) = delete;

  std::string victim() const { return folder_ + "/snapshots/victim.kvsnap"; }
  std::string scratch() const { return folder_ + "/snapshots/scratch.kvsnap"; }
  // A sound manifest whose only pack is the victim pack.
  std::string manifest() const { return folder_ + "/snapshots/manifest.kvsnap"; }
  std::string victim_pack() const { return pack_path(kVictimPack); }
  const std::shared_ptr<SnapshotReader>& sound() const { return sound_; }
  size_t manifest_payload_bytes() const {
    return 7 * static_cast<size_t>(sample_.meta.layout.chunk_bytes());
  }

  // In place, as a disk rots: the name keeps its inode.
  void replace(const std::string& path, const std::string& bytes) const {
    write_bytes(path, bytes);
  }

  // The sample every file of the store was written from: seven sealed chunks and a tail.
  const Sample& sample() const { return sample_; }
  // Where each sealed chunk of two_packs() is.
  static std::vector<SnapshotPacks::Place> two_pack_places() {
    return {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}, {0, 3}};
  }
  // Writes a manifest over packs b (chunks 0, 2, 4, 6) and a (1, 3, 5).
  void write_two_packs(const std::string& path) const {
    write_manifest(path, {{kPackB, 4}, {kPackA, 3}}, two_pack_places());
  }
  std::string pack_a() const { return pack_path(kPackA); }
  std::string pack_b() const { return pack_path(kPackB); }

 private:
  static constexpr Hash128 kPackA{0x1111111111111111, 0xAAAAAAAAAAAAAAAA};
  static constexpr Hash128 kPackB{0x2222222222222222, 0xBBBBBBBBBBBBBBBB};
  static constexpr Hash128 kVictimPack{0x3333333333333333, 0xCCCCCCCCCCCCCCCC};
  void make_folder(const std::string& name) const {
    if (::mkdir((folder_ + "/" + name).c_str(), 0777) != 0) {
      throw std::runtime_error("mkdir failed");
    }
  }

  std::string pack_path(const Hash128& id) const {
    char name[48];
    std::snprintf(name, sizeof(name), "%016llx%016llx.kvsnap",
                  static_cast<unsigned long long>(id.high),
                  static_cast<unsigned long long>(id.low));
    return folder_ + "/packs/" + name;
  }

  void write_pack(const Hash128& id, const std::vector<size_t>& chunks) const {
    Sample pack;
    pack.meta = sample_.meta;
    pack.meta.session = R"({"pack":true})";
    std::vector<TokenId> tokens;
    pack.meta.chunks.clear();
    for (const size_t c : chunks) {
      const TokenId* first = sample_.meta.tokens.begin() + c * 16;
      tokens.insert(tokens.end(), first, first + 16);
      pack.meta.chunks.push_back(sample_.meta.chunks[c]);
      pack.payload.push_back(sample_.payload[c]);
      pack.summaries.push_back(sample_.summaries[c]);
    }
    pack.meta.tokens = std::move(tokens);
    write_sample(pack_path(id), pack);
  }

  void write_manifest(const std::string& path, const std::vector<SnapshotPacks::Pack>& packs,
                      const std::vector<SnapshotPacks::Place>& places) const {
    SnapshotMeta meta = sample_.meta;
    meta.packs.packs = packs;
    meta.packs.places = places;
    for (size_t c = 0; c < sample_.summaries.size(); ++c) {
      meta.chunks[c].summary_checksum = slice_checksum(
          sample_.summaries[c].data(), static_cast<int64_t>(sample_.summaries[c].size()));
    }
    SnapshotWriter writer(path, meta.layout);
    writer.add_chunk(sample_.payload.back().data());
    writer.finish(meta);
  }

  std::string folder_;
  Sample sample_;
  std::shared_ptr<SnapshotReader> sound_;
};

}  // namespace kvpager::snapshot_test
