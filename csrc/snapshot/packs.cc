#include "snapshot/packs.h"

#include <map>

#include "base/mutex.h"
#include "kvpager/error.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot {

namespace {

// The packs this process has open, by the path they were opened under.
class OpenPacks {
 public:
  std::shared_ptr<const InputFile> open(const std::string& path) {
    std::shared_ptr<const InputFile> known = find(path);
    if (known != nullptr && known->is_what_the_name_leads_to()) return known;
    auto file = std::make_shared<InputFile>(path);
    file->lock_shared();
    const MutexLock guard(mutex_);
    files_[path] = file;
    return file;
  }

  void forget_closed() {
    const MutexLock guard(mutex_);
    for (auto it = files_.begin(); it != files_.end();) {
      it = it->second.expired() ? files_.erase(it) : std::next(it);
    }
  }

 private:
  std::shared_ptr<const InputFile> find(const std::string& path) {
    const MutexLock guard(mutex_);
    const auto it = files_.find(path);
    return it == files_.end() ? nullptr : it->second.lock();
  }

  Mutex mutex_;
  std::map<std::string, std::weak_ptr<const InputFile>> files_ KVPAGER_GUARDED_BY(mutex_);
};

OpenPacks& open_files() {
  static OpenPacks* const packs = new OpenPacks;  // outlives every static that holds a reader
  return *packs;
}

void check_sizes(const Front& front, uint64_t chunks, const SnapshotMeta& meta,
                 const std::string& path) {
  if (front.manifest()) corrupt(path, "the pack", "a manifest", "a file that holds its chunks");
  const auto expect = [&](SectionType type, uint64_t each) {
    uint64_t size = 0;
    const bool overflow = __builtin_mul_overflow(chunks, each, &size);
    if (overflow || front[type].size != size) {
      corrupt(path, section_name(type) + ".size", front[type].size, chunks, " * ", each,
              ", as the manifest says of its chunks");
    }
  };
  const auto chunk_tokens = static_cast<uint64_t>(meta.layout.chunk_tokens);
  expect(kTokens, chunk_tokens * sizeof(TokenId));
  // What the pack calls its chunks is not asked: the manifest's names count.
  expect(kChunks, chunk_entry_bytes(meta.layout));
  expect(kPayload, static_cast<uint64_t>(meta.layout.chunk_bytes()));
  expect(kSummaries, summary_bytes_per_chunk(meta.layout, meta.summary_page_bytes));
}

ChunkFile open_pack(const SnapshotPacks::Pack& pack, const SnapshotMeta& meta,
                    const std::string& path, const RangesOpener& opener) {
  ChunkFile out;
  out.file = opener ? opener(path) : open_files().open(path);
  const Front front = read_front(*out.file);
  check_sizes(front, pack.chunks, meta, path);
  out.summaries_at = front[kSummaries].offset;
  return out;
}

}  // namespace

std::string pack_file_name(const Hash128& id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string name;
  for (const uint64_t half : {id.high, id.low}) {
    for (int shift = 60; shift >= 0; shift -= 4) name += kDigits[half >> shift & 15];
  }
  return name + ".kvsnap";
}

std::string packs_folder_of(const std::string& manifest) {
  const size_t slash = manifest.rfind('/');
  return (slash == std::string::npos ? "" : manifest.substr(0, slash + 1)) + "../packs";
}

std::vector<ChunkFile> open_packs(const SnapshotMeta& meta, const std::string& folder,
                                  const std::string& manifest, const RangesOpener& opener) {
  std::vector<ChunkFile> files;
  files.reserve(meta.packs.packs.size() + 1);  // and the manifest itself, for the tail
  for (const SnapshotPacks::Pack& pack : meta.packs.packs) {
    const auto words = [&](const PagerError& e) {
      return str(manifest, ": this snapshot needs a pack that cannot be used: ", e.what());
    };
    try {
      files.push_back(open_pack(pack, meta, str(folder, "/", pack_file_name(pack.id)), opener));
    } catch (const StorageError& e) {
      throw StorageError(words(e));
    } catch (const CorruptSnapshotError& e) {
      throw CorruptSnapshotError(words(e));
    } catch (const UnsupportedVersionError& e) {
      throw UnsupportedVersionError(words(e));
    }
  }
  open_files().forget_closed();
  return files;
}

}  // namespace kvpager::snapshot
