#include <algorithm>
#include <utility>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"
#include "snapshot/chunk_feed.h"
#include "snapshot/format.h"
#include "snapshot/metadata.h"
#include "snapshot/output_file.h"
#include "snapshot/output_stream.h"
#include "snapshot/sections.h"

namespace kvpager {

using namespace snapshot;  // NOLINT(build/namespaces): this room's own names

namespace {

// Asking a callback costs little, but what it waits for may not.
constexpr int64_t kProgressBytes = int64_t{16} << 20;

int64_t packs_bytes(int64_t packs, int64_t sealed) {
  SnapshotPacks some;
  some.packs.resize(static_cast<size_t>(packs));
  some.places.resize(static_cast<size_t>(sealed));
  return static_cast<int64_t>(encode_packs(some).size());
}

void check_which(const std::vector<int64_t>& which, size_t chunks) {
  int64_t before = -1;
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i] <= before || which[i] >= static_cast<int64_t>(chunks)) {
      refuse({str("which[", i, "]"), str(which[i]),
              str("ascending chunk numbers, ", before + 1, "..", int64_t(chunks) - 1)});
    }
    before = which[i];
  }
}

}  // namespace

struct SnapshotWriter::Impl {
  Impl(const std::string& path, const Layout& file_layout, int64_t reserve_bytes, uint32_t mode,
       std::shared_ptr<FileCipher> file_cipher)
      : layout(checked(file_layout)),
        file(path, mode),
        cipher(std::move(file_cipher)),
        stream(&file, kFrontBytes, cipher.get()) {
    if (reserve_bytes < 0) refuse({"reserve_bytes", str(reserve_bytes), "0 or more"});
    reserve(reserve_bytes);
  }

  // For a file of so many plain bytes; none for none.
  void reserve(int64_t bytes) {
    if (bytes > 0) file.reserve(stream.file_bytes(static_cast<uint64_t>(bytes)));
  }

  static const Layout& checked(const Layout& layout) {
    refuse_broken(check_geometry(layout, 0));
    return layout;
  }

  void require_open(const char* call) const {
    if (file.state() != OutputFile::State::kWriting) {
      throw InvalidArgumentError(
          str("snapshot: ", call, " on a writer that has finished or failed; start a new one"));
    }
  }
  void require_fresh(const char* call, const Layout& content) const;
  void check_against_added(const SnapshotMeta& meta) const;
  std::vector<SnapshotChunk> with_computed_checksums(const SnapshotMeta& meta) const;

  void note_added(const SharedArray<uint64_t>& slices);
  void stream_chunks(const SnapshotContent& content, const std::vector<int64_t>& which,
                     std::vector<SnapshotChunk>* records, const SnapshotProgress& progress);
  // Runs `write`; whatever it throws ends this writer, whose destructor removes what there is.
  template <class Write>
  int64_t all_or_nothing(const Write& write) {
    try {
      return write();
    } catch (...) {
      file.give_up();
      throw;
    }
  }

  Layout layout;
  OutputFile file;
  std::shared_ptr<FileCipher> cipher;
  OutputStream stream;
  std::vector<uint64_t> slice_checksum;    // [chunks][layers] of what was added
  std::vector<uint64_t> summary_checksum;  // [summaries added]
  int64_t chunks_added = 0;
  int64_t summary_bytes = 0;  // of each summary added
  std::vector<SnapshotChunk> written;
  Hash128 digest;  // once sealed
};

SnapshotWriter::SnapshotWriter(const std::string& path, const Layout& layout, int64_t reserve_bytes,
                               uint32_t mode, std::shared_ptr<FileCipher> cipher)
    : impl_(std::make_unique<Impl>(path, layout, reserve_bytes, mode, std::move(cipher))) {}

SnapshotWriter::~SnapshotWriter() = default;

void SnapshotWriter::Impl::note_added(const SharedArray<uint64_t>& slices) {
  slice_checksum.insert(slice_checksum.end(), slices.begin(), slices.end());
  ++chunks_added;
}

void SnapshotWriter::add_chunk(const std::byte* payload) {
  Impl& w = *impl_;
  w.require_open("add_chunk");
  if (!w.summary_checksum.empty()) {
    throw InvalidArgumentError("snapshot: add_chunk after add_summary, expected all chunks first");
  }
  std::vector<uint64_t> slices;
  for (int layer = 0; layer < w.layout.layers; ++layer) {
    slices.push_back(kvpager::slice_checksum(payload + w.layout.slice_offset(layer),
                                             w.layout.slice_bytes(layer)));
  }
  w.note_added(std::move(slices));
  w.stream.append(payload, static_cast<uint64_t>(w.layout.chunk_bytes()));
}

void SnapshotWriter::add_summary(const std::byte* summary, int64_t bytes) {
  Impl& w = *impl_;
  w.require_open("add_summary");
  if (bytes < 0 || (!w.summary_checksum.empty() && bytes != w.summary_bytes)) {
    refuse({"summary bytes", str(bytes), str(w.summary_bytes, ", as of the summaries before")});
  }
  w.summary_bytes = bytes;
  w.summary_checksum.push_back(xxh3_64(summary, static_cast<size_t>(bytes)));
  w.stream.append(summary, static_cast<uint64_t>(bytes));
}

void SnapshotWriter::Impl::check_against_added(const SnapshotMeta& meta) const {
  if (!(meta.layout == layout)) refuse({"layout", "another one", "the writer's"});
  refuse_broken(check_geometry(meta.layout, meta.summary_page_bytes));
  const OwnChunks own = own_chunks(meta);
  const auto chunks = static_cast<int64_t>(meta.chunks.size()) - static_cast<int64_t>(own.first);
  if (chunks != chunks_added) refuse({"chunks", str(chunks), str(chunks_added, ", as were added")});
  const size_t summaries = summary_checksum.size();
  const auto bytes =
      static_cast<int64_t>(summary_bytes_per_chunk(meta.layout, meta.summary_page_bytes));
  const bool nothing_to_add = summaries == 0 && bytes == 0;
  if (!nothing_to_add && summaries != own.sealed) {
    refuse({"summaries", str(summaries), str(own.sealed, ", one per sealed chunk in the file")});
  }
  if (summaries > 0 && summary_bytes != bytes) {
    refuse({"summary bytes", str(summary_bytes), str(bytes, " for layout and summary_page_bytes")});
  }
}

// A chunk that comes with checksums must have those of the bytes that were added; one without takes
// them. Of chunks in packs they must be given.
std::vector<SnapshotChunk> SnapshotWriter::Impl::with_computed_checksums(
    const SnapshotMeta& meta) const {
  std::vector<SnapshotChunk> chunks = meta.chunks;
  const OwnChunks own = own_chunks(meta);
  const auto layers = static_cast<size_t>(layout.layers);
  for (size_t c = 0; c < own.first; ++c) {
    if (chunks[c].summary_checksum == 0) {
      refuse({str("chunks[", c, "].summary_checksum"), "0", "that of the summary in its pack"});
    }
  }
  for (size_t c = own.first; c < chunks.size(); ++c) {
    const uint64_t* added = slice_checksum.data() + (c - own.first) * layers;
    SharedArray<uint64_t>& checksums = chunks[c].slice_checksum;
    if (checksums.empty()) checksums = std::vector<uint64_t>(added, added + layers);
    for (size_t layer = 0; layer < std::min(layers, checksums.size()); ++layer) {
      if (checksums[layer] != added[layer]) {
        refuse({str("chunks[", c, "].slice_checksum[", layer, "]"), str(checksums[layer]),
                str(added[layer], ", that of the bytes given to add_chunk")});
      }
    }
    uint64_t& summary = chunks[c].summary_checksum;
    const bool tail = c >= own.first + own.sealed;
    const uint64_t of_added = tail                       ? 0
                              : summary_checksum.empty() ? xxh3_64(nullptr, 0)
                                                         : summary_checksum[c - own.first];
    if (summary == 0) summary = of_added;
    if (summary != of_added) {
      refuse({str("chunks[", c, "].summary_checksum"), str(summary),
              tail ? "0 (a tail has no summary)"
                   : str(of_added, ", that of the bytes given to add_summary")});
    }
  }
  return chunks;
}

int64_t SnapshotWriter::seal(const SnapshotMeta& meta) {
  Impl& w = *impl_;
  w.require_open("seal");
  w.check_against_added(meta);
  check_texts(meta);
  const std::vector<SnapshotChunk> chunks = w.with_computed_checksums(meta);
  check_sound(meta, chunks);
  const Sections sections = lay_out(meta, chunks, w.stream.size());
  w.digest = snapshot::logical_digest(meta, chunks);
  refuse_longer("metadata", sections.metadata.size(), kMaxMetadataBytes);

  w.stream.append(sections.metadata.data(), sections.metadata.size());
  w.stream.flush();
  w.stream.write_front(encode_front(sections.entries));
  const uint64_t bytes = w.stream.file_bytes(w.stream.size());
  w.file.seal(bytes);
  return static_cast<int64_t>(bytes);
}

void SnapshotWriter::publish() {
  if (impl_->file.state() != OutputFile::State::kSealed) {
    throw InvalidArgumentError(
        "snapshot: publish of a file that is not sealed, or no longer; expected once after seal");
  }
  impl_->file.publish();
}

int64_t SnapshotWriter::finish(const SnapshotMeta& meta) {
  const int64_t bytes = seal(meta);
  publish();
  return bytes;
}

void SnapshotWriter::Impl::require_fresh(const char* call, const Layout& content) const {
  require_open(call);
  if (chunks_added > 0 || !summary_checksum.empty()) {
    throw InvalidArgumentError(
        str("snapshot: ", call, " after add_chunk or add_summary, expected a writer of its own"));
  }
  if (!(content == layout)) refuse({"content.layout", "another one", "the writer's"});
}

void SnapshotWriter::Impl::stream_chunks(const SnapshotContent& content,
                                         const std::vector<int64_t>& which,
                                         std::vector<SnapshotChunk>* records,
                                         const SnapshotProgress& progress) {
  const int64_t each = layout.chunk_bytes();
  const int64_t total = static_cast<int64_t>(which.size()) * each;
  int64_t done = 0;
  int64_t reported = 0;
  ChunkFeed feed(content, which, records, file.path());
  for (;;) {
    const auto& addresses = feed.next();
    if (addresses.empty()) break;
    stream.append_all(addresses, static_cast<uint64_t>(each));
    done += static_cast<int64_t>(addresses.size()) * each;
    if (progress && (done - reported >= kProgressBytes || done == total)) {
      progress(done, total);
      reported = done;
    }
  }
  for (const SnapshotChunk& record : *records) note_added(record.slice_checksum);
}

int64_t SnapshotWriter::write_content(const SnapshotContent& content,
                                      const std::vector<int64_t>& which,
                                      const std::string& fingerprint, const std::string& session,
                                      const SnapshotProgress& progress) {
  Impl& w = *impl_;
  const SnapshotMeta& source = content.meta();
  w.require_fresh("write_content", source.layout);
  check_which(which, source.chunks.size());
  SnapshotMeta meta = meta_of(source, which, fingerprint, session);
  check_texts(meta);
  const int64_t sealed = meta.sealed_chunks();
  const bool tail = sealed < static_cast<int64_t>(which.size());

  return w.all_or_nothing([&] {
    // Not enough room is better known now than after most of the writing.
    w.reserve(snapshot_file_bytes(meta, sealed, tail, fingerprint, session, /*packs=*/0));
    w.stream_chunks(content, which, &meta.chunks, progress);
    const int64_t bytes = meta.summary_bytes_per_chunk();
    std::vector<std::byte> summary(static_cast<size_t>(bytes));
    for (int64_t i = 0; i < sealed; ++i) {
      const int64_t chunk = which[static_cast<size_t>(i)];
      content.read_summary(chunk, summary.data());
      add_summary(summary.data(), bytes);
      note_summary(w.summary_checksum.back(), chunk, meta.layout, w.file.path(),
                   &meta.chunks[static_cast<size_t>(i)]);
    }
    const int64_t size = seal(meta);
    w.written = std::move(meta.chunks);
    return size;
  });
}

int64_t SnapshotWriter::write_manifest(const SnapshotContent& content, const SnapshotPacks& packs,
                                       const std::vector<uint64_t>& summary_checksum,
                                       const std::string& fingerprint, const std::string& session) {
  Impl& w = *impl_;
  SnapshotMeta meta = content.meta();
  w.require_fresh("write_manifest", meta.layout);
  const auto sealed = static_cast<size_t>(meta.sealed_chunks());
  if (summary_checksum.size() != sealed) {
    refuse({"summary_checksum", str(summary_checksum.size(), " values"),
            str("one per sealed chunk, ", sealed)});
  }
  // Without sealed chunks it is an ordinary file.
  if (sealed > 0 || !packs.empty()) refuse_broken(check_packs(packs, meta.sealed_chunks()));
  meta.fingerprint = fingerprint;
  meta.session = session;
  meta.packs = packs;
  meta.unknown.clear();
  for (size_t c = 0; c < sealed; ++c) meta.chunks[c].summary_checksum = summary_checksum[c];
  check_texts(meta);

  return w.all_or_nothing([&] {
    if (meta.chunks.size() > sealed) {
      std::vector<SnapshotChunk> tail = {meta.chunks.back()};
      w.stream_chunks(content, {static_cast<int64_t>(sealed)}, &tail, nullptr);
      meta.chunks.back() = std::move(tail[0]);
    }
    return seal(meta);
  });
}

const std::vector<SnapshotChunk>& SnapshotWriter::written() const { return impl_->written; }

Hash128 SnapshotWriter::logical_digest() const {
  if (impl_->file.state() == OutputFile::State::kWriting) {
    throw InvalidArgumentError("snapshot: logical_digest of a file that is not sealed yet");
  }
  return impl_->digest;
}

const std::string& SnapshotWriter::temporary() const { return impl_->file.temporary(); }

int64_t snapshot_file_bytes(const SnapshotMeta& meta, int64_t sealed, bool tail,
                            const std::string& fingerprint, const std::string& session,
                            int64_t packs) {
  if (sealed < 0 || sealed > meta.sealed_chunks()) {
    refuse({"sealed", str(sealed), str("0 to ", meta.sealed_chunks(), ", which the content has")});
  }
  if (packs < 0 || packs > sealed) {
    refuse({"packs", str(packs), str("0 to ", sealed, ", the number of sealed chunks")});
  }
  const int64_t chunks = sealed + (tail ? 1 : 0);
  const int64_t own_sealed = packs > 0 ? 0 : sealed;
  const auto each_record = static_cast<int64_t>(chunk_entry_bytes(meta.layout));
  const int64_t sections[] = {
      (own_sealed + (tail ? 1 : 0)) * meta.layout.chunk_bytes(),
      own_sealed * meta.summary_bytes_per_chunk(),
      static_cast<int64_t>(encode_layout(meta).size()),
      static_cast<int64_t>(fingerprint.size()),
      static_cast<int64_t>(session.size()),
      chunks * meta.layout.chunk_tokens * static_cast<int64_t>(sizeof(TokenId)),
      chunks * each_record,
      static_cast<int64_t>(encode_hints({}).size()) + 16 * chunks,
      packs > 0 ? packs_bytes(packs, sealed) : 0,
  };
  int64_t bytes = kFrontBytes;
  for (const int64_t section : sections) bytes += section + kSectionAlignment;
  return bytes;
}

}  // namespace kvpager
