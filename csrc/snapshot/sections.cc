#include "snapshot/sections.h"

#include <algorithm>
#include <utility>

#include "kvpager/error.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"
#include "snapshot/utf8.h"

namespace kvpager::snapshot {

namespace {

uint32_t required_tag(SectionType type) {
  SectionEntry entry;
  entry.type = type;
  entry.flags = kFlagRequired;
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

void check_text(const char* field, const std::string& text, uint64_t limit) {
  refuse_longer(field, text.size(), limit);
  if (!is_utf8(text)) refuse({field, "not UTF-8", "UTF-8"});
}

template <class T>
std::vector<T> pick(const std::vector<T>& from, const std::vector<int64_t>& which) {
  std::vector<T> out;
  if (from.empty()) return out;
  out.reserve(which.size());
  for (const int64_t i : which) out.push_back(from[static_cast<size_t>(i)]);
  return out;
}

}  // namespace

void Sections::describe(uint32_t tag, uint64_t offset, uint64_t size, uint64_t checksum) {
  SectionEntry entry = SectionEntry::from_tag(tag);
  entry.offset = offset;
  entry.size = size;
  entry.checksum = checksum;
  entries.push_back(entry);
}

void Sections::add(uint32_t tag, const void* data, size_t bytes) {
  const uint64_t offset = align_up(metadata_at + metadata.size(), kSectionAlignment);
  metadata.resize(offset - metadata_at, '\0');
  metadata.append(static_cast<const char*>(data), bytes);
  describe(tag, offset, bytes, xxh3_64(data, bytes));
}

Sections lay_out(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks,
                 uint64_t payload_and_summaries_end) {
  const auto further = further_sections(meta);
  const OwnChunks own = own_chunks(meta);

  Sections out{payload_and_summaries_end, {}, {}};
  const auto payload_bytes =
      static_cast<uint64_t>(meta.layout.chunk_bytes()) * (chunks.size() - own.first);
  const uint64_t summaries_at = kFrontBytes + payload_bytes;
  out.describe(required_tag(kPayload), kFrontBytes, payload_bytes, payload_checksum(chunks, own));
  out.describe(required_tag(kSummaries), summaries_at, payload_and_summaries_end - summaries_at,
               summaries_checksum(chunks, own));
  out.add(required_tag(kLayout), encode_layout(meta));
  out.add(required_tag(kFingerprint), meta.fingerprint);
  out.add(required_tag(kSession), meta.session);
  const std::string records = encode_chunks(chunks);
  const size_t tokens = meta.tokens.size() * sizeof(TokenId);
  out.metadata.reserve(out.metadata.size() + tokens + records.size() + kSectionAlignment);
  out.add(required_tag(kTokens), meta.tokens.data(), tokens);
  out.add(required_tag(kChunks), records);
  for (const auto& [tag, bytes] : further) out.add(tag, bytes);
  return out;
}

SnapshotMeta meta_of(const SnapshotMeta& content, const std::vector<int64_t>& which,
                     const std::string& fingerprint, const std::string& session) {
  SnapshotMeta out;
  out.layout = content.layout;
  out.scorer = content.scorer;
  out.summary_page_bytes = content.summary_page_bytes;
  out.fingerprint = fingerprint;
  out.session = session;
  out.chunks = pick(content.chunks, which);
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

void note_summary(uint64_t computed, int64_t chunk, const Layout& layout, const std::string& path,
                  SnapshotChunk* record) {
  uint64_t& expected = record->summary_checksum;
  if (expected != 0 && expected != computed) {
    throw CorruptSnapshotError(str(path, ": not saved: the summary of chunk ", chunk,
                                   " has bytes of checksum ", computed, ", expected ", expected),
                               chunk, -1, chunk * layout.chunk_tokens, record->valid);
  }
  expected = computed;
}

void check_texts(const SnapshotMeta& meta) {
  check_text("scorer", meta.scorer, kMaxScorerBytes);
  check_text("fingerprint", meta.fingerprint, kMaxJsonBytes);
  check_text("session", meta.session, kMaxJsonBytes);
}

void check_sound(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks) {
  refuse_broken(check_chunks(meta.layout, meta.tokens.size(), chunks));
  refuse_broken(check_hints(meta.hints, chunks.size()));
  if (!meta.packs.empty()) refuse_broken(check_packs(meta.packs, meta.sealed_chunks()));
}

void refuse_longer(const char* field, uint64_t bytes, uint64_t limit) {
  if (bytes > limit) refuse({field, str(bytes, " bytes"), str("at most ", limit)});
}

void refuse_broken(const std::optional<BrokenRule>& rule) {
  if (rule) refuse(*rule);
}

void refuse(const BrokenRule& problem) {
  throw InvalidArgumentError(
      str("snapshot: ", problem.field, " is ", problem.value, ", expected ", problem.expected));
}

}  // namespace kvpager::snapshot
