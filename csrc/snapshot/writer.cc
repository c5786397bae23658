#include <algorithm>
#include <limits>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"
#include "snapshot/format.h"
#include "snapshot/metadata.h"
#include "snapshot/output_file.h"

namespace kvpager {

using namespace snapshot;  // NOLINT(build/namespaces): this room's own names

namespace {

[[noreturn]] void refuse(const Problem& problem) {
  throw InvalidArgumentError(
      str("snapshot: ", problem.field, " is ", problem.value, ", expected ", problem.expected));
}

void refuse_longer(const char* field, uint64_t bytes, uint64_t limit) {
  if (bytes > limit) refuse({field, str(bytes, " bytes"), str("at most ", limit)});
}

// The optional sections, ascending by type.
std::vector<std::pair<uint32_t, std::string>> optional_sections(const SnapshotMeta& meta) {
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

uint32_t required_tag(SectionType type) {
  SectionEntry entry;
  entry.type = type;
  entry.flags = kFlagRequired;
  return entry.tag();
}

}  // namespace

struct SnapshotWriter::Impl {
  Impl(const std::string& path, const Layout& file_layout)
      : layout(checked(file_layout)), file(path) {
    file.reserve_front(kFrontBytes);
  }

  static const Layout& checked(const Layout& layout) {
    if (const auto problem = check_geometry(layout, 0)) refuse(*problem);
    return layout;
  }

  void require_open(const char* call) const {
    if (!file.is_open()) {
      throw InvalidArgumentError(
          str("snapshot: ", call, " on a writer that has finished or failed; start a new one"));
    }
  }

  void check_against_added(const SnapshotMeta& meta) const;
  std::vector<SnapshotChunk> with_computed_checksums(std::vector<SnapshotChunk> chunks) const;
  Sections lay_out(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks) const;

  Layout layout;
  OutputFile file;
  std::vector<uint64_t> slice_checksum;    // [chunks][layers] of what was added
  std::vector<uint64_t> summary_checksum;  // [summaries added]
  int64_t chunks_added = 0;
  int64_t summary_bytes = 0;  // of each summary added
};

SnapshotWriter::SnapshotWriter(const std::string& path, const Layout& layout)
    : impl_(std::make_unique<Impl>(path, layout)) {}

SnapshotWriter::~SnapshotWriter() = default;

void SnapshotWriter::add_chunk(const std::byte* payload) {
  Impl& w = *impl_;
  w.require_open("add_chunk");
  if (!w.summary_checksum.empty()) {
    throw InvalidArgumentError("snapshot: add_chunk after add_summary, expected all chunks first");
  }
  for (int layer = 0; layer < w.layout.layers; ++layer) {
    w.slice_checksum.push_back(
        kvpager::slice_checksum(payload + w.layout.slice_offset(layer), w.layout.slice_bytes()));
  }
  ++w.chunks_added;
  w.file.append(payload, static_cast<uint64_t>(w.layout.chunk_bytes()));
}

void SnapshotWriter::add_summary(const std::byte* summary, int64_t bytes) {
  Impl& w = *impl_;
  w.require_open("add_summary");
  if (bytes < 0 || (!w.summary_checksum.empty() && bytes != w.summary_bytes)) {
    refuse({"summary bytes", str(bytes), str(w.summary_bytes, ", as of the summaries before")});
  }
  w.summary_bytes = bytes;
  w.summary_checksum.push_back(xxh3_64(summary, static_cast<size_t>(bytes)));
  w.file.append(summary, static_cast<uint64_t>(bytes));
}

void SnapshotWriter::Impl::check_against_added(const SnapshotMeta& meta) const {
  if (!(meta.layout == layout)) refuse({"layout", "another one", "the writer's"});
  if (const auto problem = check_geometry(meta.layout, meta.summary_page_bytes)) refuse(*problem);
  const auto chunks = static_cast<int64_t>(meta.chunks.size());
  if (chunks != chunks_added) refuse({"chunks", str(chunks), str(chunks_added, ", as were added")});
  const auto summaries = static_cast<int64_t>(summary_checksum.size());
  const auto bytes =
      static_cast<int64_t>(summary_bytes_per_chunk(meta.layout, meta.summary_page_bytes));
  const bool nothing_to_add = summaries == 0 && bytes == 0;
  if (!nothing_to_add && summaries != meta.sealed_chunks()) {
    refuse({"summaries", str(summaries), str(meta.sealed_chunks(), ", one per sealed chunk")});
  }
  if (summaries > 0 && summary_bytes != bytes) {
    refuse({"summary bytes", str(summary_bytes), str(bytes, " for layout and summary_page_bytes")});
  }
}

// A chunk that comes with checksums must have those of the bytes that were added; one without takes
// them.
std::vector<SnapshotChunk> SnapshotWriter::Impl::with_computed_checksums(
    std::vector<SnapshotChunk> chunks) const {
  const auto layers = static_cast<size_t>(layout.layers);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const uint64_t* added = slice_checksum.data() + c * layers;
    auto& checksums = chunks[c].slice_checksum;
    if (checksums.empty()) checksums.assign(added, added + layers);
    for (size_t layer = 0; layer < std::min(layers, checksums.size()); ++layer) {
      if (checksums[layer] != added[layer]) {
        refuse({str("chunks[", c, "].slice_checksum[", layer, "]"), str(checksums[layer]),
                str(added[layer], ", that of the bytes given to add_chunk")});
      }
    }
  }
  return chunks;
}

Sections SnapshotWriter::Impl::lay_out(const SnapshotMeta& meta,
                                       const std::vector<SnapshotChunk>& chunks) const {
  const auto optional = optional_sections(meta);
  std::vector<uint64_t> summaries = summary_checksum;
  summaries.resize(static_cast<size_t>(meta.sealed_chunks()), xxh3_64(nullptr, 0));

  Sections out{file.size(), {}, {}};
  const auto payload_bytes = static_cast<uint64_t>(chunks_added * layout.chunk_bytes());
  const uint64_t summaries_at = kFrontBytes + payload_bytes;
  out.describe(required_tag(kPayload), kFrontBytes, payload_bytes, payload_checksum(chunks));
  out.describe(required_tag(kSummaries), summaries_at, file.size() - summaries_at,
               summaries_checksum(summaries));
  out.add(required_tag(kLayout), encode_layout(meta));
  out.add(required_tag(kFingerprint), meta.fingerprint);
  out.add(required_tag(kSession), meta.session);
  out.add(required_tag(kTokens), encode_tokens(meta.tokens));
  out.add(required_tag(kChunks), encode_chunks(chunks, summaries));
  for (const auto& [tag, bytes] : optional) out.add(tag, bytes);
  return out;
}

int64_t SnapshotWriter::finish(const SnapshotMeta& meta) {
  Impl& w = *impl_;
  w.require_open("finish");
  w.check_against_added(meta);
  refuse_longer("scorer", meta.scorer.size(), kMaxScorerBytes);
  refuse_longer("fingerprint", meta.fingerprint.size(), kMaxJsonBytes);
  refuse_longer("session", meta.session.size(), kMaxJsonBytes);
  const std::vector<SnapshotChunk> chunks = w.with_computed_checksums(meta.chunks);
  if (const auto problem = check_chunks(meta.layout, meta.tokens.size(), chunks)) refuse(*problem);
  if (const auto problem = check_hints(meta.hints, chunks.size())) refuse(*problem);
  const Sections sections = w.lay_out(meta, chunks);
  refuse_longer("metadata", sections.metadata.size(), kMaxMetadataBytes);

  w.file.append(sections.metadata.data(), sections.metadata.size());
  w.file.write_front(encode_front(sections.entries));
  w.file.publish();
  return static_cast<int64_t>(sections.entries.back().end());
}

}  // namespace kvpager
