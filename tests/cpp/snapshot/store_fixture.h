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
#include "stored.h"

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
    write_manifest(manifest(), sample_,
                   {{{kVictimPack, 7}}, {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {0, 6}}});
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
    write_manifest(path, sample_, {{{kPackB, 4}, {kPackA, 3}}, two_pack_places()});
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
    return folder_ + "/packs/" + snapshot::pack_file_name(id);
  }
  void write_pack(const Hash128& id, const std::vector<size_t>& chunks) const {
    write_sample(pack_path(id), part_of(sample_, chunks));
  }

  std::string folder_;
  Sample sample_;
  std::shared_ptr<SnapshotReader> sound_;
};

}  // namespace kvpager::snapshot_test
