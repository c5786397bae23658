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
#include "snapshot/utf8.h"

namespace kvpager {

using namespace snapshot;  // NOLINT(build/namespaces): this room's own names

namespace {

// Asking a callback costs little, but what it waits for may not.
constexpr int64_t kProgressBytes = int64_t{16} << 20;

[[noreturn]] void refuse(const BrokenRule& problem) {
  throw InvalidArgumentError(
      str("snapshot: ", problem.field, " is ", problem.value, ", expected ", problem.expected));
}

void refuse_longer(const char* field, uint64_t bytes, uint64_t limit) {
  if (bytes > limit) refuse({field, str(bytes, " bytes"), str("at most ", limit)});
}

uint32_t required_tag(SectionType type) {
  SectionEntry entry;
  entry.type = type;
  entry.flags = kFlagRequired;
  return entry.tag();
}

uint32_t layout_tag(const Layout& layout) {
  SectionEntry entry = SectionEntry::from_tag(required_tag(kLayout));
  entry.version = layout_version(layout);
  return entry.tag();
}

uint32_t chunks_tag(bool legacy_names) {
  SectionEntry entry = SectionEntry::from_tag(required_tag(kChunks));
  if (!legacy_names) entry.version = kChunksVersion;
  return entry.tag();
}

// The sections that not every file has, ascending by type.
std::vector<std::pair<uint32_t, std::string>> further_sections(const SnapshotMeta& meta) {
  auto sections = meta.unknown;
  for (const auto& [tag, bytes] : sections) {
    const SectionEntry entry = SectionEntry::from_tag(tag);
    if (entry.type <= kRequiredSections || entry.known() || entry.flags != 0) {
      refuse({"unknown section tag", str(tag), "an optional section this version does not know"});
    }
  }
  if (!meta.hints.qk_score.empty() || !meta.hints.last_use.empty()) {
    SectionEntry hints;
    hints.type = kHints;
    sections.emplace_back(hints.tag(), encode_hints(meta.hints));
  }
  if (!meta.packs.empty()) sections.emplace_back(required_tag(kPacks), encode_packs(meta.packs));
  const auto type = [](const auto& section) { return SectionEntry::from_tag(section.first).type; };
  std::sort(sections.begin(), sections.end(),
            [&](const auto& a, const auto& b) { return type(a) < type(b); });
  const auto twice =
      std::adjacent_find(sections.begin(), sections.end(),
                         [&](const auto& a, const auto& b) { return type(a) == type(b); });
  if (twice != sections.end()) refuse({"unknown", str("section ", type(*twice), " twice"), "once"});
  if (sections.size() + kRequiredSections > kMaxSections) {
    refuse({"unknown", str(sections.size(), " sections"),
            str("at most ", kMaxSections - kRequiredSections)});
  }
  return sections;
}

// The sections in file order: what the table says of them, and the bytes of those that follow the
// summaries.
struct Sections {
  uint64_t metadata_at;
  std::vector<SectionEntry> entries;
  std::string metadata;

  void describe(uint32_t tag, uint64_t offset, uint64_t size, uint64_t checksum) {
    SectionEntry entry = SectionEntry::from_tag(tag);
    entry.offset = offset;
    entry.size = size;
    entry.checksum = checksum;
    entries.push_back(entry);
  }

  void add(uint32_t tag, const std::string& bytes) {
    const uint64_t offset = align_up(metadata_at + metadata.size(), kSectionAlignment);
    metadata.resize(offset - metadata_at, '\0');
    metadata += bytes;
    describe(tag, offset, bytes.size(), xxh3_64(bytes.data(), bytes.size()));
  }
};

void check_text(const char* field, const std::string& text, uint64_t limit) {
  refuse_longer(field, text.size(), limit);
  if (!is_utf8(text)) refuse({field, "not UTF-8", "UTF-8"});
}

void check_texts(const SnapshotMeta& meta) {
  check_text("scorer", meta.scorer, kMaxScorerBytes);
  check_text("fingerprint", meta.fingerprint, kMaxJsonBytes);
  check_text("session", meta.session, kMaxJsonBytes);
}

template <class T>
std::vector<T> pick(const std::vector<T>& from, const std::vector<int64_t>& which) {
  std::vector<T> out;
  if (from.empty()) return out;
  out.reserve(which.size());
  for (const int64_t i : which) out.push_back(from[static_cast<size_t>(i)]);
  return out;
}

int64_t packs_bytes(int64_t packs, int64_t sealed) {
  SnapshotPacks some;
  some.packs.resize(static_cast<size_t>(packs));
  some.places.resize(static_cast<size_t>(sealed));
  return static_cast<int64_t>(encode_packs(some).size());
}

// What the file says of these chunks of the content alone.
SnapshotMeta meta_of(const SnapshotMeta& content, const std::vector<int64_t>& which,
                     const std::string& fingerprint, const std::string& session) {
  SnapshotMeta out;
  out.layout = content.layout;
  out.scorer = content.scorer;
  out.summary_page_bytes = content.summary_page_bytes;
  out.fingerprint = fingerprint;
  out.session = session;
  out.chunks = pick(content.chunks, which);
  out.legacy_names = content.legacy_names;
  out.hints.qk_score = pick(content.hints.qk_score, which);
  out.hints.last_use = pick(content.hints.last_use, which);
  std::vector<TokenId> tokens;
  for (const int64_t chunk : which) {
    const TokenId* first = content.tokens.begin() + chunk * content.layout.chunk_tokens;
    tokens.insert(tokens.end(), first, first + content.chunks[static_cast<size_t>(chunk)].valid);
  }
  out.tokens = std::move(tokens);
  return out;
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
  Impl(const std::string& path, const Layout& file_layout, int64_t reserve_bytes, uint32_t mode)
      : layout(checked(file_layout)), file(path, mode), stream(&file, kFrontBytes) {
    if (reserve_bytes < 0) refuse({"reserve_bytes", str(reserve_bytes), "0 or more"});
    file.reserve(static_cast<uint64_t>(reserve_bytes));
  }

  static const Layout& checked(const Layout& layout) {
    if (const auto problem = check_geometry(layout, 0)) refuse(*problem);
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
  Sections lay_out(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks) const;

  void note_added(const SharedArray<uint64_t>& slices);
  void stream_chunks(const SnapshotContent& content, const std::vector<int64_t>& which,
                     std::vector<SnapshotChunk>* records, const SnapshotProgress& progress);
  // Runs `write`; whatever it throws undoes all that this writer did.
  template <class Write>
  int64_t all_or_nothing(const Write& write) {
    try {
      return write();
    } catch (...) {
      file.discard();
      throw;
    }
  }

  Layout layout;
  OutputFile file;
  OutputStream stream;
  std::vector<uint64_t> slice_checksum;    // [chunks][layers] of what was added
  std::vector<uint64_t> summary_checksum;  // [summaries added]
  int64_t chunks_added = 0;
  int64_t summary_bytes = 0;  // of each summary added
  std::vector<SnapshotChunk> written;
  Hash128 digest;  // once sealed
};

SnapshotWriter::SnapshotWriter(const std::string& path, const Layout& layout, int64_t reserve_bytes,
                               uint32_t mode)
    : impl_(std::make_unique<Impl>(path, layout, reserve_bytes, mode)) {}

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
  if (const auto problem = check_geometry(meta.layout, meta.summary_page_bytes)) refuse(*problem);
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

Sections SnapshotWriter::Impl::lay_out(const SnapshotMeta& meta,
                                       const std::vector<SnapshotChunk>& chunks) const {
  const auto further = further_sections(meta);
  const OwnChunks own = own_chunks(meta);

  Sections out{stream.size(), {}, {}};
  const auto payload_bytes = static_cast<uint64_t>(chunks_added * layout.chunk_bytes());
  const uint64_t summaries_at = kFrontBytes + payload_bytes;
  out.describe(required_tag(kPayload), kFrontBytes, payload_bytes, payload_checksum(chunks, own));
  out.describe(required_tag(kSummaries), summaries_at, stream.size() - summaries_at,
               summaries_checksum(chunks, own));
  out.add(layout_tag(meta.layout), encode_layout(meta));
  out.add(required_tag(kFingerprint), meta.fingerprint);
  out.add(required_tag(kSession), meta.session);
  out.add(required_tag(kTokens), encode_tokens(meta.tokens));
  out.add(chunks_tag(meta.legacy_names), encode_chunks(chunks, meta.legacy_names));
  for (const auto& [tag, bytes] : further) out.add(tag, bytes);
  return out;
}

int64_t SnapshotWriter::seal(const SnapshotMeta& meta) {
  Impl& w = *impl_;
  w.require_open("seal");
  w.check_against_added(meta);
  check_texts(meta);
  const std::vector<SnapshotChunk> chunks = w.with_computed_checksums(meta);
  if (const auto problem = check_chunks(meta.layout, meta.tokens.size(), chunks)) refuse(*problem);
  if (const auto problem = check_hints(meta.hints, chunks.size())) refuse(*problem);
  if (!meta.packs.empty()) {
    if (const auto problem = check_packs(meta.packs, meta.sealed_chunks())) refuse(*problem);
  }
  const Sections sections = w.lay_out(meta, chunks);
  w.digest = snapshot::logical_digest(meta, chunks);
  refuse_longer("metadata", sections.metadata.size(), kMaxMetadataBytes);

  w.stream.append(sections.metadata.data(), sections.metadata.size());
  w.stream.flush();
  w.stream.write_front(encode_front(sections.entries));
  w.file.seal(w.stream.size());
  return static_cast<int64_t>(w.stream.size());
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
    w.file.reserve(static_cast<uint64_t>(
        snapshot_file_bytes(meta, sealed, tail, fingerprint, session, /*packs=*/0)));
    w.stream_chunks(content, which, &meta.chunks, progress);
    const int64_t bytes = meta.summary_bytes_per_chunk();
    std::vector<std::byte> summary(static_cast<size_t>(bytes));
    for (int64_t i = 0; i < sealed; ++i) {
      const int64_t chunk = which[static_cast<size_t>(i)];
      content.read_summary(chunk, summary.data());
      add_summary(summary.data(), bytes);
      uint64_t& expected = meta.chunks[static_cast<size_t>(i)].summary_checksum;
      const uint64_t computed = w.summary_checksum.back();
      if (expected != 0 && expected != computed) {
        throw CorruptSnapshotError(
            str(w.file.path(), ": not saved: the summary of chunk ", chunk,
                " has bytes of checksum ", computed, ", expected ", expected),
            chunk, -1, chunk * meta.layout.chunk_tokens, meta.chunks[static_cast<size_t>(i)].valid);
      }
      expected = computed;
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
  if (sealed > 0 || !packs.empty()) {  // without sealed chunks it is an ordinary file
    if (const auto problem = check_packs(packs, meta.sealed_chunks())) refuse(*problem);
  }
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
  const auto each_record = static_cast<int64_t>(chunk_entry_bytes(meta.layout, meta.legacy_names));
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
