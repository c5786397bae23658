#include <algorithm>
#include <array>
#include <map>
#include <memory>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "snapshot/bytes.h"
#include "snapshot/chunk_source.h"
#include "snapshot/format.h"
#include "snapshot/input_file.h"
#include "snapshot/metadata.h"
#include "snapshot/packs.h"
#include "snapshot/verify.h"

namespace kvpager {

using namespace snapshot;  // NOLINT(build/namespaces): this room's own names

namespace {

// Everything behind payload and summaries, in one read.
SnapshotMeta read_metadata(const ByteRanges& file, const Front& front) {
  const uint64_t metadata_at = front[kSummaries].end();
  const uint64_t metadata_bytes = file.bytes() - metadata_at;
  // As far from an aligned address as in the file, so that sections are aligned here too.
  const uint64_t shift = metadata_at % kSectionAlignment;
  const std::shared_ptr<std::byte> room = aligned_bytes(kSectionAlignment, shift + metadata_bytes);
  std::byte* const metadata = room.get() + shift;
  file.read(metadata, metadata_bytes, metadata_at, [] { return std::string("the metadata"); });
  std::vector<Section> sections;
  uint64_t end = metadata_at;
  for (const SectionEntry& entry : front.entries) {
    Section section{entry, nullptr};
    if (entry.type > kSummaries) {
      section.data = metadata + (entry.offset - metadata_at);
      if (!all_zero(metadata + (end - metadata_at), entry.offset - end)) {
        corrupt(file.path(), "padding before " + section_name(entry.type), "not zero", "zero");
      }
      end = entry.end();
    }
    sections.push_back(section);
  }
  return decode_metadata(sections, room, file.path());
}

constexpr int kMostThreads = 1024;  // that verify starts, whatever it is allowed

void require_range(const std::string& name, const char* field, int64_t value, int64_t limit) {
  if (value < 0 || value >= limit) {
    throw InvalidArgumentError(
        str(name, ": ", field, " is ", value, ", expected [0, ", limit, ")"));
  }
}

void require_chunk(const ChunkSource& source, int64_t chunk) {
  require_range(source.name, "chunk", chunk, static_cast<int64_t>(source.places.size()));
}

}  // namespace

struct SnapshotReader::Impl : ChunkSource {};

SnapshotReader::SnapshotReader() : impl_(std::make_unique<Impl>()) {}
SnapshotReader::~SnapshotReader() = default;

std::shared_ptr<SnapshotReader> SnapshotReader::open(const std::string& path,
                                                     const std::string& packs_folder,
                                                     const RangesOpener& opener) {
  std::shared_ptr<SnapshotReader> reader(new SnapshotReader());
  Impl& r = *reader->impl_;
  const std::shared_ptr<const ByteRanges> file =
      opener ? opener(path) : std::make_shared<InputFile>(path);
  const Front front = read_front(*file);
  r.name = path;
  r.meta = read_metadata(*file, front);
  r.file_bytes = static_cast<int64_t>(file->bytes());
  if (!r.meta.packs.empty()) {
    r.files = open_packs(r.meta, packs_folder.empty() ? packs_folder_of(path) : packs_folder, path,
                         opener);
  }
  const auto own_file = static_cast<uint32_t>(r.files.size());
  r.files.push_back({file, front[kSummaries].offset});
  r.places.reserve(r.meta.chunks.size());
  for (const SnapshotPacks::Place& place : r.meta.packs.places) {
    r.places.push_back({place.pack, place.chunk});
  }
  for (uint32_t own = 0; r.places.size() < r.meta.chunks.size(); ++own) {
    r.places.push_back({own_file, own});
  }
  return reader;
}

std::shared_ptr<SnapshotReader> SnapshotReader::gather(
    const std::vector<std::pair<std::shared_ptr<SnapshotReader>, int64_t>>& chunks,
    const std::string& name) {
  if (chunks.empty()) throw InvalidArgumentError(str(name, ": no chunks, expected at least one"));
  std::shared_ptr<SnapshotReader> reader(new SnapshotReader());
  Impl& r = *reader->impl_;
  r.name = name;
  std::map<const ByteRanges*, uint32_t> known;
  std::vector<TokenId> ids;
  for (const auto& [from, chunk] : chunks) {
    if (from == nullptr) throw InvalidArgumentError(str(name, ": a reader is null"));
    const Impl& source = *from->impl_;
    const SnapshotMeta& theirs = source.meta;
    SnapshotMeta& meta = r.meta;
    if (r.places.empty()) {
      meta.layout = theirs.layout;
      meta.scorer = theirs.scorer;
      meta.summary_page_bytes = theirs.summary_page_bytes;
      meta.fingerprint = theirs.fingerprint;
      meta.session = "{}";
    }
    if (!(meta.layout == theirs.layout) || meta.scorer != theirs.scorer ||
        meta.summary_page_bytes != theirs.summary_page_bytes) {
      throw InvalidArgumentError(str(name, ": ", source.name, " has another layout or scorer than ",
                                     chunks[0].first->path(), ", expected the same"));
    }
    require_range(source.name, "chunk", chunk, theirs.sealed_chunks());
    const ChunkSource::Place& place = source.place(chunk);
    const ChunkFile& file = source.files[place.file];
    const auto [index, fresh] =
        known.emplace(file.file.get(), static_cast<uint32_t>(r.files.size()));
    if (fresh) r.files.push_back(file);
    r.places.push_back({index->second, place.chunk});
    const TokenId* tokens = theirs.tokens.begin() + chunk * meta.layout.chunk_tokens;
    ids.insert(ids.end(), tokens, tokens + meta.layout.chunk_tokens);
    meta.chunks.push_back(source.record(chunk));
  }
  r.meta.tokens = SharedArray(std::move(ids));
  return reader;
}

const std::string& SnapshotReader::path() const { return impl_->name; }
const SnapshotMeta& SnapshotReader::meta() const { return impl_->meta; }
int64_t SnapshotReader::file_bytes() const { return impl_->file_bytes; }
Hash128 SnapshotReader::logical_digest() const { return impl_->logical_digest(); }
int64_t SnapshotReader::payload_bytes_read() const { return impl_->bytes_read; }

void SnapshotReader::read_slice(int64_t chunk, int layer, std::byte* out) const {
  require_chunk(*impl_, chunk);
  require_range(impl_->name, "layer", layer, impl_->layout().layers);
  impl_->read_slice(chunk, layer, out);
}

void SnapshotReader::read_chunk(int64_t chunk, std::byte* out) const {
  require_chunk(*impl_, chunk);
  impl_->read_chunk(chunk, out);
}

void SnapshotReader::will_need(int64_t chunk) const {
  require_chunk(*impl_, chunk);
  impl_->will_need(chunk);
}

void SnapshotReader::read_summaries(int64_t first, int64_t count, std::byte* out) const {
  const int64_t sealed = impl_->meta.sealed_chunks();
  if (first < 0 || count < 0 || first > sealed || count > sealed - first) {
    throw InvalidArgumentError(str(impl_->name, ": summaries [", first, ", ", first, " + ", count,
                                   "), expected a part of [0, ", sealed, ")"));
  }
  impl_->read_summaries(first, count, out);
}

const std::byte* SnapshotReader::borrow_chunk(int64_t chunk, std::byte* scratch) const {
  read_chunk(chunk, scratch);
  return scratch;
}

void SnapshotReader::give_back_chunk(int64_t) const {}

void SnapshotReader::read_summary(int64_t chunk, std::byte* out) const {
  read_summaries(chunk, 1, out);
}

std::vector<SnapshotDamage> SnapshotReader::verify(int threads,
                                                   const SnapshotProgress& progress) const {
  return snapshot::verify(*impl_, std::min(threads, kMostThreads), progress);
}

}  // namespace kvpager
