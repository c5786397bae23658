// Small snapshots for the tests of this room, and the tools to damage them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../folder.h"
#include "kvpager/snapshot.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot_test {

using TemporaryFolder = testing::Folder;
using testing::read_bytes;
using testing::write_bytes;

inline Layout small_layout() {
  Layout layout;
  layout.layers = 2;
  layout.kv_heads = 1;
  layout.chunk_tokens = 16;
  layout.k_dim = 16;
  layout.v_dim = 16;
  layout.k_dtype = DType::kFloat16;
  layout.v_dtype = DType::kBFloat16;
  return layout;
}

// Codes, rotated, beside two layers of floats.
inline Layout mixed_layout() {
  Layout layout;
  layout.layers = 5;
  layout.kv_heads = 2;
  layout.chunk_tokens = 16;
  layout.k_dim = 32;
  layout.v_dim = 32;
  layout.k_dtype = DType::kQ8;
  layout.v_dtype = DType::kQ4;
  layout.v_rotated = true;
  layout.float_layers.add(0);
  layout.float_layers.add(3);
  layout.float_dtype = DType::kBFloat16;
  return layout;
}

// A chunk of 2 MiB: written without passing the writer's buffer.
inline Layout large_layout() {
  Layout layout;
  layout.layers = 4;
  layout.kv_heads = 4;
  layout.chunk_tokens = 64;
  layout.k_dim = 256;
  layout.v_dim = 256;
  return layout;
}

// What a snapshot is written from.
struct Sample {
  SnapshotMeta meta;
  std::vector<std::vector<std::byte>> payload;
  std::vector<std::vector<std::byte>> summaries;
};

inline std::vector<std::byte> noise(size_t bytes, uint64_t seed) {
  std::vector<std::byte> out(bytes);
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (std::byte& b : out) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    b = static_cast<std::byte>(state >> 56);
  }
  return out;
}

// Changes a copy of a shared array's elements and puts it in its place.
template <class T, class Change>
void edit(SharedArray<T>* array, const Change& change) {
  std::vector<T> elements = array->to_vector();
  change(&elements);
  *array = std::move(elements);
}

inline Sample make_sample(const Layout& layout, int64_t tokens, int64_t summary_page_bytes = 80) {
  Sample out;
  SnapshotMeta& meta = out.meta;
  meta.layout = layout;
  meta.scorer = "minmax";
  meta.summary_page_bytes = summary_page_bytes;
  meta.fingerprint = R"({"weights":"sha256:c0ffee","rope":{"theta":10000.0}})";
  meta.session = R"({"pending":17})";
  std::vector<TokenId> ids;
  for (int64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<TokenId>(t * 7919 % 32000));
  meta.tokens = std::move(ids);
  const int64_t chunks = snapshot::chunk_count(layout, static_cast<uint64_t>(tokens));
  for (int64_t c = 0; c < chunks; ++c) {
    const auto seed = static_cast<uint64_t>(c);
    SnapshotChunk chunk;
    const int64_t left = tokens - c * layout.chunk_tokens;
    chunk.valid = static_cast<int32_t>(std::min<int64_t>(left, layout.chunk_tokens));
    chunk.provenance = static_cast<Provenance>(c % 3);
    if (chunk.valid == layout.chunk_tokens)
      chunk.chain_hash = {{seed + 1, ~seed, seed + 2, ~seed - 1}};
    out.payload.push_back(noise(static_cast<size_t>(layout.chunk_bytes()), seed));
    std::vector<uint64_t> slices;
    for (int layer = 0; layer < layout.layers; ++layer) {
      slices.push_back(slice_checksum(out.payload.back().data() + layout.slice_offset(layer),
                                      layout.slice_bytes(layer)));
    }
    chunk.slice_checksum = std::move(slices);
    meta.chunks.push_back(chunk);
    if (chunk.valid == layout.chunk_tokens) {
      const uint64_t bytes = snapshot::summary_bytes_per_chunk(layout, summary_page_bytes);
      out.summaries.push_back(noise(bytes, 1000 + seed));
    }
  }
  return out;
}

// Three sealed chunks and a tail of five tokens, hints, two sections from the future.
inline Sample small_sample() {
  Sample sample = make_sample(small_layout(), 3 * 16 + 5);
  sample.meta.hints.qk_score = {0.5, -0.0, 3.25, 1e300};
  sample.meta.hints.last_use = {4, 3, 2, UINT64_MAX};
  sample.meta.unknown = {{0x00030009u, ""}, {0x0001FFFFu, "a section from the future"}};
  return sample;
}

inline void add_all(const Sample& sample, SnapshotWriter* writer) {
  for (const auto& chunk : sample.payload) writer->add_chunk(chunk.data());
  for (const auto& summary : sample.summaries) {
    writer->add_summary(summary.data(), static_cast<int64_t>(summary.size()));
  }
}

inline int64_t write_sample(const std::string& path, const Sample& sample) {
  SnapshotWriter writer(path, sample.meta.layout);
  add_all(sample, &writer);
  return writer.finish(sample.meta);
}

// Everything a reader gives, to be written again or compared.
inline Sample read_all(const SnapshotReader& reader) {
  Sample out;
  out.meta = reader.meta();
  const Layout& layout = out.meta.layout;
  for (size_t c = 0; c < out.meta.chunks.size(); ++c) {
    out.payload.emplace_back(static_cast<size_t>(layout.chunk_bytes()));
    reader.read_chunk(static_cast<int64_t>(c), out.payload.back().data());
  }
  const uint64_t each = snapshot::summary_bytes_per_chunk(layout, out.meta.summary_page_bytes);
  const auto sealed = static_cast<size_t>(out.meta.sealed_chunks());
  std::vector<std::byte> all(each * sealed);
  reader.read_summaries(0, static_cast<int64_t>(sealed), all.data());
  for (size_t c = 0; c < sealed; ++c) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(c * each);
    out.summaries.emplace_back(first, first + static_cast<std::ptrdiff_t>(each));
  }
  return out;
}

}  // namespace kvpager::snapshot_test
