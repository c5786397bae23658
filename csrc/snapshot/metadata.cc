#include "snapshot/metadata.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"
#include "snapshot/utf8.h"

namespace kvpager {

namespace snapshot {

namespace {

// Layout section: fixed fields, then the scorer's name.
constexpr size_t kDtypesAt = 20;
constexpr size_t kScorerBytesAt = 22;
constexpr size_t kSummaryPageBytesAt = 24;
constexpr size_t kLayoutFixedBytes = 32;
constexpr size_t kCodesBytes = 8;  // more where dtypes are codes
constexpr uint8_t kKeysRotated = 1;
constexpr uint8_t kValuesRotated = 2;

// Chunk table entry: fixed fields, then a checksum per layer.
constexpr size_t kProvenanceAt = 4;
constexpr size_t kNameAt = 8;
constexpr size_t kNameBytes = 32;
constexpr size_t kSummaryChecksumAt = kNameAt + kNameBytes;
constexpr size_t kChunkFixedBytes = kSummaryChecksumAt + sizeof(uint64_t);

constexpr size_t kHintsFixedBytes = 8;

// Packs section: fixed fields, an entry per pack, a place per sealed chunk.
constexpr size_t kPacksFixedBytes = 8;
constexpr size_t kPackBytes = 24;
constexpr size_t kPackChunksAt = 16;
constexpr size_t kPlaceBytes = 8;

constexpr int64_t kMaxSummaryPageBytes = int64_t{1} << 30;
// Of what all chunks of a snapshot have together, so that sums of a few such sizes fit 63 bits.
constexpr uint64_t kMaxBytes = uint64_t{1} << 61;

void expect_kept(const std::string& path, const std::optional<BrokenRule>& rule) {
  if (rule) corrupt(path, rule->field, rule->value, rule->expected);
}

void expect_size(const Section& section, uint64_t expected, const std::string& why,
                 const std::string& path) {
  if (section.entry.size != expected) {
    corrupt(path, section_name(section.entry.type) + ".size", section.entry.size, expected, " (",
            why, ")");
  }
}

std::string to_text(const Section& section) {
  return std::string(reinterpret_cast<const char*>(section.data), section.entry.size);
}

// What a layout with codes says beside its dtypes: docs/snapshot_format.md. `layers` need not be aligned.
void decode_codes(const std::byte* from, const std::byte* layers, SnapshotMeta* meta,
                  const std::string& path) {
  Layout& layout = meta->layout;
  const auto flags = load<uint8_t>(from);
  const auto floats = load<uint16_t>(from + 2);
  if ((flags & ~(kKeysRotated | kValuesRotated)) != 0 || !all_zero(from + 4, 4)) {
    throw UnsupportedVersionError(
        str(path, ": layout.flags is ", int{flags}, " and layout.reserved ",
            all_zero(from + 4, 4) ? "zero" : "not zero",
            ", this reader knows 1 (keys are rotated) and 2 (values are)"));
  }
  layout.k_rotated = (flags & kKeysRotated) != 0;
  layout.v_rotated = (flags & kValuesRotated) != 0;
  layout.float_dtype = static_cast<DType>(load<uint8_t>(from + 1));
  int32_t least = 0;
  for (int i = 0; i < int{floats}; ++i) {
    const int32_t layer = load<uint16_t>(layers + 2 * i);
    const int32_t most = std::min(layout.layers, kMostLayers) - 1;
    if (layer < least || layer > most) {
      corrupt(path, str("layout.float_layers[", i, "]"), layer, least, " to ", most, ", ascending");
    }
    layout.float_layers.add(layer);
    least = layer + 1;
  }
  expect_kept(path, check_geometry(layout, meta->summary_page_bytes));
}

bool has_codes(const Layout& layout) {
  return is_coded(layout.k_dtype) || is_coded(layout.v_dtype);
}

void decode_layout(const Section& section, SnapshotMeta* meta, const std::string& path) {
  const auto expect_at_least = [&](size_t bytes) {
    if (section.entry.size < bytes) {
      corrupt(path, "layout.size", section.entry.size, "at least ", bytes);
    }
  };
  expect_at_least(kLayoutFixedBytes);
  const std::byte* from = section.data;
  Layout& layout = meta->layout;
  layout.layers = load<int32_t>(from);
  layout.kv_heads = load<int32_t>(from + 4);
  layout.chunk_tokens = load<int32_t>(from + 8);
  layout.k_dim = load<int32_t>(from + 12);
  layout.v_dim = load<int32_t>(from + 16);
  layout.k_dtype = static_cast<DType>(load<uint8_t>(from + kDtypesAt));
  layout.v_dtype = static_cast<DType>(load<uint8_t>(from + kDtypesAt + 1));
  meta->summary_page_bytes = load<int64_t>(from + kSummaryPageBytesAt);
  for (const auto& [name, dtype] :
       {std::pair{"k_dtype", layout.k_dtype}, std::pair{"v_dtype", layout.v_dtype}}) {
    if (!is_float(dtype) && !is_coded(dtype)) {
      throw UnsupportedVersionError(
          str(path, ": layout.", name, " is ", int(dtype),
              ", this reader knows 0 (f32), 1 (f16), 2 (bf16), 4 (q8) and 5 (q4)"));
    }
  }
  expect_kept(path, check_geometry(layout, meta->summary_page_bytes));
  const bool coded = has_codes(layout);
  const size_t fixed_bytes = kLayoutFixedBytes + (coded ? kCodesBytes : 0);
  expect_at_least(fixed_bytes);
  const auto scorer_bytes = load<uint16_t>(from + kScorerBytesAt);
  if (scorer_bytes > kMaxScorerBytes) {
    corrupt(path, "layout.scorer_bytes", scorer_bytes, "at most ", kMaxScorerBytes);
  }
  const size_t floats = coded ? load<uint16_t>(from + kLayoutFixedBytes + 2) : 0;
  expect_size(section, fixed_bytes + scorer_bytes + floats * sizeof(uint16_t),
              str(fixed_bytes, ", a scorer of ", scorer_bytes, " bytes and ", floats,
                  " layers in a float dtype"),
              path);
  meta->scorer.assign(reinterpret_cast<const char*>(from + fixed_bytes), scorer_bytes);
  if (coded) decode_codes(from + kLayoutFixedBytes, from + fixed_bytes + scorer_bytes, meta, path);
  if (!is_utf8(meta->scorer)) corrupt(path, "layout.scorer", "not UTF-8", "UTF-8");
}

std::string decode_json(const Section& section, const std::string& path) {
  if (section.entry.size > kMaxJsonBytes) {
    corrupt(path, section_name(section.entry.type) + ".size", section.entry.size, "at most ",
            kMaxJsonBytes);
  }
  std::string text = to_text(section);
  if (!is_utf8(text)) corrupt(path, section_name(section.entry.type), "not UTF-8", "UTF-8");
  return text;
}

// Elements of a section where they are, which `bytes` keeps. Sections and their entries are aligned.
template <class T>
SharedArray<T> part_of(const std::shared_ptr<const std::byte>& bytes, const std::byte* from,
                       size_t count) {
  return SharedArray<T>(std::shared_ptr<const T>(bytes, reinterpret_cast<const T*>(from)), count);
}

void decode_tokens(const Section& section, const std::shared_ptr<const std::byte>& bytes,
                   SnapshotMeta* meta, const std::string& path) {
  const uint64_t count = section.entry.size / sizeof(TokenId);
  expect_size(section, count * sizeof(TokenId), "a whole number of 4-byte token ids", path);
  meta->tokens = part_of<TokenId>(bytes, section.data, count);
}

// Of `count` chunks; refused where no file can hold so much.
uint64_t bytes_of(uint64_t count, uint64_t each, const std::string& what, const std::string& path) {
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(count, each, &bytes) || bytes > kMaxBytes) {
    corrupt(path, what, str(count, " * ", each), "at most ", kMaxBytes);
  }
  return bytes;
}

void decode_chunks(const Section& section, const std::shared_ptr<const std::byte>& bytes,
                   SnapshotMeta* meta, const std::string& path) {
  const auto count = static_cast<uint64_t>(chunk_count(meta->layout, meta->tokens.size()));
  const uint64_t stride = chunk_entry_bytes(meta->layout);
  expect_size(section, bytes_of(count, stride, "chunks.size", path),
              str(count, " chunks for ", meta->tokens.size(), " tokens, ", stride, " bytes each"),
              path);
  const auto layers = static_cast<size_t>(meta->layout.layers);
  const auto sealed = static_cast<uint64_t>(meta->sealed_chunks());
  meta->chunks.resize(count);
  for (uint64_t c = 0; c < count; ++c) {
    const std::byte* from = section.data + c * stride;
    SnapshotChunk& chunk = meta->chunks[c];
    chunk.valid = load<int32_t>(from);
    chunk.provenance = static_cast<Provenance>(load<uint8_t>(from + kProvenanceAt));
    std::memcpy(chunk.chain_hash.words.data(), from + kNameAt, kNameBytes);
    chunk.slice_checksum = part_of<uint64_t>(bytes, from + kChunkFixedBytes, layers);
    if (!all_zero(from + kProvenanceAt + 1, kNameAt - kProvenanceAt - 1)) {
      corrupt(path, str("chunks[", c, "].reserved"), "not zero", "zero");
    }
    chunk.summary_checksum = load<uint64_t>(from + kSummaryChecksumAt);
    if (c >= sealed && chunk.summary_checksum != 0) {
      corrupt(path, str("chunks[", c, "].summary_checksum"), chunk.summary_checksum,
              "0 (a tail has no summary)");
    }
  }
  expect_kept(path, check_chunks(meta->layout, meta->tokens.size(), meta->chunks));
}

void decode_hints(const Section& section, SnapshotMeta* meta, const std::string& path) {
  if (section.entry.size < kHintsFixedBytes) {
    corrupt(path, "hints.size", section.entry.size, "at least ", kHintsFixedBytes);
  }
  const uint64_t scores = load<uint32_t>(section.data);
  const uint64_t uses = load<uint32_t>(section.data + 4);
  if (scores + uses == 0) corrupt(path, "hints", "empty", "no section where there are no hints");
  expect_size(section, kHintsFixedBytes + 8 * (scores + uses),
              str(scores, " scores and ", uses, " last uses"), path);
  const std::byte* from = section.data + kHintsFixedBytes;
  meta->hints.qk_score.resize(scores);
  if (scores > 0) std::memcpy(meta->hints.qk_score.data(), from, scores * 8);
  meta->hints.last_use.resize(uses);
  if (uses > 0) std::memcpy(meta->hints.last_use.data(), from + scores * 8, uses * 8);
  expect_kept(path, check_hints(meta->hints, meta->chunks.size()));
}

void decode_packs(const Section& section, SnapshotMeta* meta, const std::string& path) {
  if (section.entry.size < kPacksFixedBytes) {
    corrupt(path, "packs.size", section.entry.size, "at least ", kPacksFixedBytes);
  }
  const uint64_t count = load<uint32_t>(section.data);
  const auto sealed = static_cast<uint64_t>(meta->sealed_chunks());
  expect_size(section, kPacksFixedBytes + count * kPackBytes + sealed * kPlaceBytes,
              str(count, " packs and ", sealed, " sealed chunks"), path);
  if (load<uint32_t>(section.data + 4) != 0) {
    corrupt(path, "packs.reserved", load<uint32_t>(section.data + 4), 0);
  }
  const std::byte* from = section.data + kPacksFixedBytes;
  meta->packs.packs.resize(count);
  for (uint64_t p = 0; p < count; ++p, from += kPackBytes) {
    SnapshotPacks::Pack& pack = meta->packs.packs[p];
    pack.id.low = load<uint64_t>(from);
    pack.id.high = load<uint64_t>(from + 8);
    pack.chunks = load<uint32_t>(from + kPackChunksAt);
    const auto reserved = load<uint32_t>(from + kPackChunksAt + 4);
    if (reserved != 0) corrupt(path, str("packs[", p, "].reserved"), reserved, 0);
  }
  meta->packs.places.resize(sealed);
  for (SnapshotPacks::Place& place : meta->packs.places) {
    place.pack = load<uint32_t>(from);
    place.chunk = load<uint32_t>(from + 4);
    from += kPlaceBytes;
  }
  expect_kept(path, check_packs(meta->packs, meta->sealed_chunks()));
}

void expect_checksum(const Section& section, uint64_t computed, const std::string& path) {
  if (section.entry.checksum != computed) {
    corrupt(path, section_name(section.entry.type) + ".checksum", section.entry.checksum, computed);
  }
}

bool distinct(const std::vector<SnapshotPacks::Place>& places) {
  std::vector<uint64_t> keys;
  keys.reserve(places.size());
  for (const auto& place : places) keys.push_back(uint64_t{place.pack} << 32 | place.chunk);
  if (!std::is_sorted(keys.begin(), keys.end())) std::sort(keys.begin(), keys.end());
  return std::adjacent_find(keys.begin(), keys.end()) == keys.end();
}

}  // namespace

std::optional<BrokenRule> check_geometry(const Layout& layout, int64_t summary_page_bytes) {
  if (auto problem = layout.broken_rule()) return problem;
  if (summary_page_bytes >= 0 && summary_page_bytes <= kMaxSummaryPageBytes) return std::nullopt;
  return BrokenRule{"layout.summary_page_bytes", str(summary_page_bytes),
                    str("0 to ", kMaxSummaryPageBytes)};
}

std::optional<BrokenRule> check_chunks(const Layout& layout, uint64_t tokens,
                                       const std::vector<SnapshotChunk>& chunks) {
  KVPAGER_REQUIRE(!check_geometry(layout, 0));
  const int64_t count = chunk_count(layout, tokens);
  const int64_t chunk_tokens = layout.chunk_tokens;
  if (count > std::numeric_limits<int32_t>::max()) {
    return BrokenRule{"chunks", str(count), str("at most ", std::numeric_limits<int32_t>::max())};
  }
  if (static_cast<int64_t>(chunks.size()) != count) {
    return BrokenRule{"chunks", str(chunks.size()), str(count, " for ", tokens, " tokens")};
  }
  for (int64_t c = 0; c < count; ++c) {
    const SnapshotChunk& chunk = chunks[static_cast<size_t>(c)];
    const int64_t left = static_cast<int64_t>(tokens) - c * chunk_tokens;
    const int64_t valid = std::min(left, chunk_tokens);
    const bool sealed = valid == chunk_tokens;
    const auto problem = [&](const char* field, const std::string& value,
                             const std::string& expected) {
      return BrokenRule{str("chunks[", c, "].", field), value, expected};
    };
    if (chunk.valid != valid) return problem("valid", str(chunk.valid), str(valid));
    if (static_cast<uint8_t>(chunk.provenance) > static_cast<uint8_t>(Provenance::kApproximate)) {
      return problem("provenance", str(int(chunk.provenance)), "0..2");
    }
    if (sealed && chunk.chain_hash.empty()) {
      return problem("chain_hash", "zero", "the hash of a sealed chunk");
    }
    if (!sealed && !chunk.chain_hash.empty()) {
      return problem("chain_hash", "not zero", "zero (a tail has no hash)");
    }
    if (static_cast<int64_t>(chunk.slice_checksum.size()) != layout.layers) {
      return problem("slice_checksum", str(chunk.slice_checksum.size(), " values"),
                     str("one per layer, ", layout.layers));
    }
  }
  return std::nullopt;
}

std::optional<BrokenRule> check_hints(const SnapshotHints& hints, size_t chunks) {
  const auto wrong = [chunks](size_t size) { return size != 0 && size != chunks; };
  const std::string expected = str("none or one per chunk, ", chunks);
  if (wrong(hints.qk_score.size())) {
    return BrokenRule{"hints.qk_score", str(hints.qk_score.size(), " values"), expected};
  }
  if (wrong(hints.last_use.size())) {
    return BrokenRule{"hints.last_use", str(hints.last_use.size(), " values"), expected};
  }
  for (size_t c = 0; c < hints.qk_score.size(); ++c) {
    if (!std::isfinite(hints.qk_score[c])) {
      return BrokenRule{str("hints.qk_score[", c, "]"), str(hints.qk_score[c]), "a finite score"};
    }
  }
  return std::nullopt;
}

std::optional<BrokenRule> check_packs(const SnapshotPacks& packs, int64_t sealed) {
  const auto count = packs.packs.size();
  const auto most = std::min<uint64_t>(kMaxPacks, static_cast<uint64_t>(sealed));
  if (count < 1 || count > most) {
    return BrokenRule{"packs.count", str(count),
                      str("1..", most, " (", sealed, " sealed chunks, every pack holds one)")};
  }
  if (static_cast<int64_t>(packs.places.size()) != sealed) {
    return BrokenRule{"packs.places", str(packs.places.size()),
                      str("one per sealed chunk, ", sealed)};
  }
  for (size_t p = 0; p < count; ++p) {
    const SnapshotPacks::Pack& pack = packs.packs[p];
    if (pack.chunks < 1 || pack.chunks > std::numeric_limits<int32_t>::max()) {
      return BrokenRule{str("packs[", p, "].chunks"), str(pack.chunks),
                        str("1..", std::numeric_limits<int32_t>::max())};
    }
    for (size_t other = 0; other < p; ++other) {
      if (packs.packs[other].id == pack.id) {
        return BrokenRule{str("packs[", p, "].id"), str("that of packs[", other, "]"),
                          "a pack that is not listed yet"};
      }
    }
  }
  size_t used = 0;
  for (size_t c = 0; c < packs.places.size(); ++c) {
    const SnapshotPacks::Place& place = packs.places[c];
    // In the order of their first use, so that a content has one encoding.
    if (place.pack > used || place.pack >= count) {
      return BrokenRule{str("packs.places[", c, "].pack"), str(place.pack),
                        str("at most ", std::min(used, count - 1), " (", count,
                            " packs, numbered in the order of their first use)")};
    }
    used = std::max<size_t>(used, place.pack + size_t{1});
    const uint32_t chunks = packs.packs[place.pack].chunks;
    if (place.chunk >= chunks) {
      return BrokenRule{str("packs.places[", c, "].chunk"), str(place.chunk),
                        str("less than ", chunks, ", the chunks of pack ", place.pack)};
    }
  }
  if (used != count) {
    return BrokenRule{str("packs[", used, "]"), "used by no chunk", "no pack that is not used"};
  }
  if (!distinct(packs.places)) {
    return BrokenRule{"packs.places", "the same for two chunks",
                      "a place of its own for every chunk"};
  }
  return std::nullopt;
}

OwnChunks own_chunks(const SnapshotMeta& meta) {
  const auto sealed = static_cast<size_t>(meta.sealed_chunks());
  return meta.packs.empty() ? OwnChunks{0, sealed} : OwnChunks{sealed, 0};
}

int64_t chunk_count(const Layout& layout, uint64_t tokens) {
  return static_cast<int64_t>(align_up(tokens, static_cast<uint64_t>(layout.chunk_tokens))) /
         layout.chunk_tokens;
}

uint64_t summary_bytes_per_chunk(const Layout& layout, int64_t summary_page_bytes) {
  return static_cast<uint64_t>(layout.layers) * static_cast<uint64_t>(layout.kv_heads) *
         static_cast<uint64_t>(summary_page_bytes);
}

uint64_t chunk_entry_bytes(const Layout& layout) {
  return kChunkFixedBytes + sizeof(uint64_t) * static_cast<uint64_t>(layout.layers);
}

std::string encode_layout(const SnapshotMeta& meta) {
  std::string out;
  const Layout& layout = meta.layout;
  append(&out, layout.layers);
  append(&out, layout.kv_heads);
  append(&out, layout.chunk_tokens);
  append(&out, layout.k_dim);
  append(&out, layout.v_dim);
  append(&out, static_cast<uint8_t>(layout.k_dtype));
  append(&out, static_cast<uint8_t>(layout.v_dtype));
  append(&out, static_cast<uint16_t>(meta.scorer.size()));
  append(&out, meta.summary_page_bytes);
  if (!has_codes(layout)) return out + meta.scorer;
  std::string floats;
  for (int layer = 0; layer < layout.layers; ++layer) {
    if (layout.float_layers.has(layer)) append(&floats, static_cast<uint16_t>(layer));
  }
  append(&out, static_cast<uint8_t>((layout.k_rotated ? kKeysRotated : 0) |
                                    (layout.v_rotated ? kValuesRotated : 0)));
  append(&out, static_cast<uint8_t>(layout.float_dtype));
  append(&out, static_cast<uint16_t>(floats.size() / sizeof(uint16_t)));
  append(&out, uint32_t{0});
  return out + meta.scorer + floats;
}

std::string encode_chunks(const std::vector<SnapshotChunk>& chunks) {
  if (chunks.empty()) return {};
  const size_t slices = chunks[0].slice_checksum.size() * sizeof(uint64_t);
  std::string out(chunks.size() * (kChunkFixedBytes + slices), '\0');
  char* to = out.data();
  for (const SnapshotChunk& chunk : chunks) {
    KVPAGER_REQUIRE(chunk.slice_checksum.size() * sizeof(uint64_t) == slices);
    store(to, chunk.valid);
    store(to + kProvenanceAt, static_cast<uint32_t>(chunk.provenance));
    std::memcpy(to + kNameAt, chunk.chain_hash.words.data(), kNameBytes);
    store(to + kSummaryChecksumAt, chunk.summary_checksum);
    std::memcpy(to + kChunkFixedBytes, chunk.slice_checksum.data(), slices);
    to += kChunkFixedBytes + slices;
  }
  return out;
}

std::string encode_hints(const SnapshotHints& hints) {
  std::string out;
  append(&out, static_cast<uint32_t>(hints.qk_score.size()));
  append(&out, static_cast<uint32_t>(hints.last_use.size()));
  for (const double score : hints.qk_score) append(&out, score);
  for (const uint64_t use : hints.last_use) append(&out, use);
  return out;
}

std::string encode_packs(const SnapshotPacks& packs) {
  std::string out;
  append(&out, static_cast<uint32_t>(packs.packs.size()));
  append(&out, uint32_t{0});
  for (const SnapshotPacks::Pack& pack : packs.packs) {
    append(&out, pack.id.low);
    append(&out, pack.id.high);
    append(&out, pack.chunks);
    append(&out, uint32_t{0});
  }
  for (const SnapshotPacks::Place& place : packs.places) {
    append(&out, place.pack);
    append(&out, place.chunk);
  }
  return out;
}

uint64_t payload_checksum(const std::vector<SnapshotChunk>& chunks, const OwnChunks& own) {
  std::vector<uint64_t> all;
  if (!chunks.empty()) all.reserve((chunks.size() - own.first) * chunks[0].slice_checksum.size());
  for (size_t c = own.first; c < chunks.size(); ++c) {
    const SharedArray<uint64_t>& slices = chunks[c].slice_checksum;
    all.insert(all.end(), slices.begin(), slices.end());
  }
  return xxh3_64(all.data(), all.size() * sizeof(uint64_t));
}

uint64_t summaries_checksum(const std::vector<SnapshotChunk>& chunks, const OwnChunks& own) {
  std::vector<uint64_t> all;
  all.reserve(own.sealed);
  for (size_t c = own.first; c < own.first + own.sealed; ++c) {
    all.push_back(chunks[c].summary_checksum);
  }
  return xxh3_64(all.data(), all.size() * sizeof(uint64_t));
}

Hash128 logical_digest(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks) {
  const std::string layout = encode_layout(meta), records = encode_chunks(chunks);
  const size_t tokens = meta.tokens.size() * sizeof(TokenId);
  Digest128 digest(layout.size() + meta.fingerprint.size() + tokens + records.size());
  digest.add("kvpager snapshot 1", 18);
  digest.add(layout.data(), layout.size());
  digest.add(meta.fingerprint.data(), meta.fingerprint.size());
  digest.add(meta.tokens.data(), tokens);
  digest.add(records.data(), records.size());
  return digest.value();
}

SnapshotMeta decode_metadata(const std::vector<Section>& sections,
                             const std::shared_ptr<const std::byte>& bytes,
                             const std::string& path) {
  for (const Section& section : sections) {
    if (section.data != nullptr) {
      expect_checksum(section, xxh3_64(section.data, section.entry.size), path);
    }
  }
  SnapshotMeta meta;
  decode_layout(sections[kLayout - 1], &meta, path);
  meta.fingerprint = decode_json(sections[kFingerprint - 1], path);
  meta.session = decode_json(sections[kSession - 1], path);
  decode_tokens(sections[kTokens - 1], bytes, &meta, path);

  // Every section is paid for by the file's size, and tokens and layout fix the size of each.
  const auto packs = std::find_if(sections.begin(), sections.end(), [](const Section& s) {
    return s.entry.type == kPacks && s.entry.known();
  });
  const bool manifest = packs != sections.end();
  const auto count = static_cast<uint64_t>(chunk_count(meta.layout, meta.tokens.size()));
  const auto sealed = static_cast<uint64_t>(meta.sealed_chunks());
  const uint64_t payload_chunks = manifest ? count - sealed : count;
  const uint64_t summaries = manifest ? 0 : sealed;
  const auto chunk_bytes = static_cast<uint64_t>(meta.layout.chunk_bytes());
  const uint64_t summary_bytes = summary_bytes_per_chunk(meta.layout, meta.summary_page_bytes);
  // Of what lies in packs too.
  bytes_of(count, chunk_bytes, "payload.size", path);
  bytes_of(sealed, summary_bytes, "summaries.size", path);
  expect_size(sections[kPayload - 1], payload_chunks * chunk_bytes,
              str(payload_chunks, " chunks of ", chunk_bytes, " bytes"), path);
  expect_size(sections[kSummaries - 1], summaries * summary_bytes,
              str(summaries, " sealed chunks of ", summary_bytes, " bytes"), path);
  decode_chunks(sections[kChunks - 1], bytes, &meta, path);
  if (manifest) decode_packs(*packs, &meta, path);
  const OwnChunks own = own_chunks(meta);
  expect_checksum(sections[kPayload - 1], payload_checksum(meta.chunks, own), path);
  expect_checksum(sections[kSummaries - 1], summaries_checksum(meta.chunks, own), path);

  for (const Section& section : sections) {
    if (!section.entry.known()) {
      meta.unknown.emplace_back(section.entry.tag(), to_text(section));
    } else if (section.entry.type == kHints) {
      decode_hints(section, &meta, path);
    }
  }
  return meta;
}

}  // namespace snapshot

Hash128 SnapshotChunk::content_id() const {
  snapshot::Digest128 digest(slice_checksum.size() * sizeof(uint64_t));
  digest.add("kvpager chunk 1", 15);
  const auto& name = chain_hash.words;
  const uint64_t fields[] = {static_cast<uint64_t>(valid),
                             static_cast<uint64_t>(provenance),
                             name[0],
                             name[1],
                             name[2],
                             name[3]};
  digest.add(fields, sizeof(fields));
  digest.add(slice_checksum.data(), slice_checksum.size() * sizeof(uint64_t));
  return digest.value();
}

}  // namespace kvpager
