#include "snapshot/metadata.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kvpager/error.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"

namespace kvpager::snapshot {

namespace {

// Layout section: fixed fields, then the scorer's name.
constexpr size_t kDtypesAt = 20;
constexpr size_t kScorerBytesAt = 22;
constexpr size_t kSummaryPageBytesAt = 24;
constexpr size_t kLayoutFixedBytes = 32;

// Chunk table entry: fixed fields, then a checksum per layer.
constexpr size_t kProvenanceAt = 4;
constexpr size_t kChainHashAt = 8;
constexpr size_t kSummaryChecksumAt = 24;
constexpr size_t kChunkFixedBytes = 32;

constexpr size_t kHintsFixedBytes = 8;

constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxKvHeads = 4096;
constexpr int64_t kMaxChunkTokens = 65536;
constexpr int64_t kMaxHeadDim = 65536;
constexpr int64_t kMaxSummaryPageBytes = int64_t{1} << 30;
// So chunk_bytes < 2^12 * 2^12 * 2 * (2^34 + 64) < 2^60, and a chunk's summary is at most 2^54
// bytes.

std::optional<Problem> check_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return std::nullopt;
  return Problem{field, str(value), str(low, "..", high)};
}

[[noreturn]] void corrupt_problem(const std::string& path, const Problem& problem) {
  corrupt(path, problem.field, problem.value, problem.expected);
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

void decode_layout(const Section& section, SnapshotMeta* meta, const std::string& path) {
  if (section.entry.size < kLayoutFixedBytes) {
    corrupt(path, "layout.size", section.entry.size, "at least ", kLayoutFixedBytes);
  }
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
    if (!is_supported(dtype)) {
      throw UnsupportedVersionError(str(path, ": layout.", name, " is ", int(dtype),
                                        ", this reader knows 0 (f32), 1 (f16) and 2 (bf16)"));
    }
  }
  if (const auto problem = check_geometry(layout, meta->summary_page_bytes)) {
    corrupt_problem(path, *problem);
  }
  const auto scorer_bytes = load<uint16_t>(from + kScorerBytesAt);
  if (scorer_bytes > kMaxScorerBytes) {
    corrupt(path, "layout.scorer_bytes", scorer_bytes, "at most ", kMaxScorerBytes);
  }
  expect_size(section, kLayoutFixedBytes + scorer_bytes,
              str(kLayoutFixedBytes, " and a scorer of ", scorer_bytes, " bytes"), path);
  meta->scorer.assign(reinterpret_cast<const char*>(from + kLayoutFixedBytes), scorer_bytes);
}

std::string decode_json(const Section& section, const std::string& path) {
  if (section.entry.size > kMaxJsonBytes) {
    corrupt(path, section_name(section.entry.type) + ".size", section.entry.size, "at most ",
            kMaxJsonBytes);
  }
  return to_text(section);
}

void decode_tokens(const Section& section, SnapshotMeta* meta, const std::string& path) {
  const uint64_t count = section.entry.size / sizeof(TokenId);
  expect_size(section, count * sizeof(TokenId), "a whole number of 4-byte token ids", path);
  meta->tokens.resize(count);
  if (count > 0) std::memcpy(meta->tokens.data(), section.data, section.entry.size);
}

uint64_t checked_product(uint64_t a, uint64_t b, const std::string& what, const std::string& path) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    corrupt(path, what, str(a, " * ", b), "a product below 2^64");
  }
  return product;
}

void decode_chunks(const Section& section, SnapshotMeta* meta,
                   std::vector<uint64_t>* summary_checksum, const std::string& path) {
  const auto count = static_cast<uint64_t>(chunk_count(meta->layout, meta->tokens.size()));
  const uint64_t stride = chunk_entry_bytes(meta->layout);
  expect_size(section, checked_product(count, stride, "chunks.size", path),
              str(count, " chunks for ", meta->tokens.size(), " tokens, ", stride, " bytes each"),
              path);
  const auto layers = static_cast<size_t>(meta->layout.layers);
  const auto sealed = static_cast<uint64_t>(meta->sealed_chunks());
  meta->chunks.resize(count);
  summary_checksum->resize(sealed);
  for (uint64_t c = 0; c < count; ++c) {
    const std::byte* from = section.data + c * stride;
    SnapshotChunk& chunk = meta->chunks[c];
    chunk.valid = load<int32_t>(from);
    chunk.provenance = static_cast<Provenance>(load<uint8_t>(from + kProvenanceAt));
    chunk.chain_hash.low = load<uint64_t>(from + kChainHashAt);
    chunk.chain_hash.high = load<uint64_t>(from + kChainHashAt + 8);
    chunk.slice_checksum.resize(layers);
    std::memcpy(chunk.slice_checksum.data(), from + kChunkFixedBytes, layers * sizeof(uint64_t));
    if (!all_zero(from + kProvenanceAt + 1, kChainHashAt - kProvenanceAt - 1)) {
      corrupt(path, str("chunks[", c, "].reserved"), "not zero", "zero");
    }
    const auto summary = load<uint64_t>(from + kSummaryChecksumAt);
    if (c < sealed) {
      (*summary_checksum)[c] = summary;
    } else if (summary != 0) {
      corrupt(path, str("chunks[", c, "].summary_checksum"), summary, "0 (a tail has no summary)");
    }
  }
  if (const auto problem = check_chunks(meta->layout, meta->tokens.size(), meta->chunks))
    corrupt_problem(path, *problem);
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
  if (const auto problem = check_hints(meta->hints, meta->chunks.size())) {
    corrupt_problem(path, *problem);
  }
}

void expect_checksum(const Section& section, uint64_t computed, const std::string& path) {
  if (section.entry.checksum != computed) {
    corrupt(path, section_name(section.entry.type) + ".checksum", section.entry.checksum, computed);
  }
}

Hash128 digest_of(const std::vector<Section>& sections) {
  Digest128 digest;
  digest.add("kvpager snapshot 1", 18);
  for (const SectionType type : {kLayout, kFingerprint, kTokens, kChunks}) {
    const Section& section = sections[type - 1];
    digest.add(section.data, section.entry.size);
  }
  return digest.value();
}

}  // namespace

std::optional<Problem> check_geometry(const Layout& layout, int64_t summary_page_bytes) {
  if (auto p = check_range("layout.layers", layout.layers, 1, kMaxLayers)) return p;
  if (auto p = check_range("layout.kv_heads", layout.kv_heads, 1, kMaxKvHeads)) return p;
  if (auto p = check_range("layout.chunk_tokens", layout.chunk_tokens, 1, kMaxChunkTokens))
    return p;
  if (auto p = check_range("layout.k_dim", layout.k_dim, 1, kMaxHeadDim)) return p;
  if (auto p = check_range("layout.v_dim", layout.v_dim, 1, kMaxHeadDim)) return p;
  if (auto p = check_range("layout.k_dtype", int64_t(layout.k_dtype), 0, 2)) return p;
  if (auto p = check_range("layout.v_dtype", int64_t(layout.v_dtype), 0, 2)) return p;
  return check_range("layout.summary_page_bytes", summary_page_bytes, 0, kMaxSummaryPageBytes);
}

std::optional<Problem> check_chunks(const Layout& layout, uint64_t tokens,
                                    const std::vector<SnapshotChunk>& chunks) {
  const int64_t count = chunk_count(layout, tokens);
  const int64_t chunk_tokens = layout.chunk_tokens;
  if (count > std::numeric_limits<int32_t>::max()) {
    return Problem{"chunks", str(count), str("at most ", std::numeric_limits<int32_t>::max())};
  }
  if (static_cast<int64_t>(chunks.size()) != count) {
    return Problem{"chunks", str(chunks.size()), str(count, " for ", tokens, " tokens")};
  }
  for (int64_t c = 0; c < count; ++c) {
    const SnapshotChunk& chunk = chunks[static_cast<size_t>(c)];
    const int64_t left = static_cast<int64_t>(tokens) - c * chunk_tokens;
    const int64_t valid = std::min(left, chunk_tokens);
    const bool sealed = valid == chunk_tokens;
    const auto problem = [&](const char* field, const std::string& value,
                             const std::string& expected) {
      return Problem{str("chunks[", c, "].", field), value, expected};
    };
    if (chunk.valid != valid) return problem("valid", str(chunk.valid), str(valid));
    if (static_cast<uint8_t>(chunk.provenance) > static_cast<uint8_t>(Provenance::kApproximate)) {
      return problem("provenance", str(int(chunk.provenance)), "0..2");
    }
    if (sealed && chunk.chain_hash == Hash128{}) {
      return problem("chain_hash", "zero", "the hash of a sealed chunk");
    }
    if (!sealed && !(chunk.chain_hash == Hash128{})) {
      return problem("chain_hash", "not zero", "zero (a tail has no hash)");
    }
    if (static_cast<int64_t>(chunk.slice_checksum.size()) != layout.layers) {
      return problem("slice_checksum", str(chunk.slice_checksum.size(), " values"),
                     str("one per layer, ", layout.layers));
    }
  }
  return std::nullopt;
}

std::optional<Problem> check_hints(const SnapshotHints& hints, size_t chunks) {
  const auto wrong = [chunks](size_t size) { return size != 0 && size != chunks; };
  const std::string expected = str("none or one per chunk, ", chunks);
  if (wrong(hints.qk_score.size())) {
    return Problem{"hints.qk_score", str(hints.qk_score.size(), " values"), expected};
  }
  if (wrong(hints.last_use.size())) {
    return Problem{"hints.last_use", str(hints.last_use.size(), " values"), expected};
  }
  for (size_t c = 0; c < hints.qk_score.size(); ++c) {
    if (!std::isfinite(hints.qk_score[c])) {
      return Problem{str("hints.qk_score[", c, "]"), str(hints.qk_score[c]), "a finite score"};
    }
  }
  return std::nullopt;
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
  return out + meta.scorer;
}

std::string encode_tokens(const std::vector<TokenId>& tokens) {
  return std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(TokenId));
}

std::string encode_chunks(const std::vector<SnapshotChunk>& chunks,
                          const std::vector<uint64_t>& summary_checksum) {
  std::string out;
  if (!chunks.empty()) {
    out.reserve(chunks.size() *
                (kChunkFixedBytes + chunks[0].slice_checksum.size() * sizeof(uint64_t)));
  }
  for (size_t c = 0; c < chunks.size(); ++c) {
    const SnapshotChunk& chunk = chunks[c];
    append(&out, chunk.valid);
    append(&out, static_cast<uint32_t>(chunk.provenance));
    append(&out, chunk.chain_hash.low);
    append(&out, chunk.chain_hash.high);
    append(&out, c < summary_checksum.size() ? summary_checksum[c] : uint64_t{0});
    out.append(reinterpret_cast<const char*>(chunk.slice_checksum.data()),
               chunk.slice_checksum.size() * sizeof(uint64_t));
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

uint64_t payload_checksum(const std::vector<SnapshotChunk>& chunks) {
  std::vector<uint64_t> all;
  if (!chunks.empty()) all.reserve(chunks.size() * chunks[0].slice_checksum.size());
  for (const SnapshotChunk& chunk : chunks) {
    all.insert(all.end(), chunk.slice_checksum.begin(), chunk.slice_checksum.end());
  }
  return xxh3_64(all.data(), all.size() * sizeof(uint64_t));
}

uint64_t summaries_checksum(const std::vector<uint64_t>& summary_checksum) {
  return xxh3_64(summary_checksum.data(), summary_checksum.size() * sizeof(uint64_t));
}

Decoded decode_metadata(const std::vector<Section>& sections, const std::string& path) {
  for (const Section& section : sections) {
    if (section.data != nullptr) {
      expect_checksum(section, xxh3_64(section.data, section.entry.size), path);
    }
  }
  Decoded out;
  SnapshotMeta& meta = out.meta;
  decode_layout(sections[kLayout - 1], &meta, path);
  meta.fingerprint = decode_json(sections[kFingerprint - 1], path);
  meta.session = decode_json(sections[kSession - 1], path);
  decode_tokens(sections[kTokens - 1], &meta, path);

  // Payload and summaries are sized by tokens and layout; the file's size paid for both, so it pays
  // for the chunk records too.
  const auto count = static_cast<uint64_t>(chunk_count(meta.layout, meta.tokens.size()));
  const auto sealed = static_cast<uint64_t>(meta.sealed_chunks());
  const auto chunk_bytes = static_cast<uint64_t>(meta.layout.chunk_bytes());
  expect_size(sections[kPayload - 1], checked_product(count, chunk_bytes, "payload.size", path),
              str(count, " chunks of ", chunk_bytes, " bytes"), path);
  out.summary_bytes_per_chunk = summary_bytes_per_chunk(meta.layout, meta.summary_page_bytes);
  expect_size(sections[kSummaries - 1],
              checked_product(sealed, out.summary_bytes_per_chunk, "summaries.size", path),
              str(sealed, " sealed chunks of ", out.summary_bytes_per_chunk, " bytes"), path);
  decode_chunks(sections[kChunks - 1], &meta, &out.summary_checksum, path);
  expect_checksum(sections[kPayload - 1], payload_checksum(meta.chunks), path);
  expect_checksum(sections[kSummaries - 1], summaries_checksum(out.summary_checksum), path);

  for (const Section& section : sections) {
    if (!section.entry.known()) {
      meta.unknown.emplace_back(section.entry.tag(), to_text(section));
    } else if (section.entry.type == kHints) {
      decode_hints(section, &meta, path);
    }
  }
  out.logical_digest = digest_of(sections);
  return out;
}

}  // namespace kvpager::snapshot
