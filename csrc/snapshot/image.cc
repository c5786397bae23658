#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "kvpager/require.h"
#include "kvpager/snapshot.h"
#include "snapshot/checksum.h"
#include "snapshot/chunk_feed.h"
#include "snapshot/format.h"
#include "snapshot/metadata.h"
#include "snapshot/sections.h"

namespace kvpager {

using namespace snapshot;  // NOLINT(build/namespaces): this room's own names

struct SnapshotImage::Impl {
  const std::shared_ptr<const SnapshotContent> content;
  SnapshotMeta meta;  // with all checksums
  std::string front;
  std::string metadata;
  Hash128 digest;

  int64_t chunks() const { return static_cast<int64_t>(meta.chunks.size()); }
  // A front, chunks, summaries, the metadata.
  int64_t pieces() const { return 2 + chunks() + meta.sealed_chunks(); }
};

namespace {

const std::string kName = "image";  // for messages

}  // namespace

SnapshotImage::SnapshotImage(std::shared_ptr<const SnapshotContent> content,
                             const std::string& fingerprint, const std::string& session)
    : impl_(std::make_unique<Impl>(Impl{std::move(content), {}, {}, {}, {}})) {
  Impl& image = *impl_;
  const SnapshotMeta& source = image.content->meta();
  refuse_broken(check_geometry(source.layout, source.summary_page_bytes));
  std::vector<int64_t> which(source.chunks.size());
  std::iota(which.begin(), which.end(), 0);
  SnapshotMeta& meta = image.meta = meta_of(source, which, fingerprint, session);
  check_texts(meta);
  {
    ChunkFeed feed(*image.content, which, &meta.chunks, kName);
    while (!feed.next().empty()) {
    }
  }
  std::vector<std::byte> summary(static_cast<size_t>(meta.summary_bytes_per_chunk()));
  for (int64_t i = 0; i < meta.sealed_chunks(); ++i) {
    image.content->read_summary(i, summary.data());
    note_summary(xxh3_64(summary.data(), summary.size()), i, meta.layout, kName,
                 &meta.chunks[static_cast<size_t>(i)]);
  }
  check_sound(meta, meta.chunks);
  const auto behind = static_cast<uint64_t>(image.chunks() * meta.layout.chunk_bytes() +
                                            meta.sealed_chunks() * meta.summary_bytes_per_chunk());
  Sections sections = lay_out(meta, meta.chunks, kFrontBytes + behind);
  refuse_longer("metadata", sections.metadata.size(), kMaxMetadataBytes);
  image.front = encode_front(sections.entries);
  image.front.resize(kFrontBytes, '\0');
  image.metadata = std::move(sections.metadata);
  image.digest = snapshot::logical_digest(meta, meta.chunks);
}

SnapshotImage::~SnapshotImage() = default;

int64_t SnapshotImage::pieces() const { return impl_->pieces(); }

Hash128 SnapshotImage::logical_digest() const { return impl_->digest; }

int64_t SnapshotImage::file_bytes() const {
  const SnapshotMeta& meta = impl_->meta;
  return static_cast<int64_t>(impl_->front.size() + impl_->metadata.size()) +
         impl_->chunks() * meta.layout.chunk_bytes() +
         meta.sealed_chunks() * meta.summary_bytes_per_chunk();
}

int64_t SnapshotImage::piece_bytes(int64_t piece) const {
  const Impl& image = *impl_;
  if (piece < 0 || piece >= image.pieces()) {
    refuse({"piece", str(piece), str("0 to ", image.pieces() - 1)});
  }
  if (piece == 0) return static_cast<int64_t>(image.front.size());
  if (piece <= image.chunks()) return image.meta.layout.chunk_bytes();
  if (piece < image.pieces() - 1) return image.meta.summary_bytes_per_chunk();
  return static_cast<int64_t>(image.metadata.size());
}

void SnapshotImage::read_piece(int64_t piece, std::byte* out) const {
  const Impl& image = *impl_;
  const auto bytes = static_cast<size_t>(piece_bytes(piece));
  const int64_t chunk = piece - 1;
  const int64_t summary = chunk - image.chunks();
  if (piece == 0) {
    std::memcpy(out, image.front.data(), bytes);
  } else if (chunk < image.chunks()) {
    // Verified once more: what is on a disk may have rotted meanwhile.
    const std::vector<int64_t> which = {chunk};
    std::vector<SnapshotChunk> record = {image.meta.chunks[static_cast<size_t>(chunk)]};
    ChunkFeed feed(*image.content, which, &record, kName);
    std::memcpy(out, feed.next().front(), bytes);
  } else if (summary < image.meta.sealed_chunks()) {
    image.content->read_summary(summary, out);
  } else {
    std::memcpy(out, image.metadata.data(), bytes);
  }
}

}  // namespace kvpager
