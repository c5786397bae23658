// A small directory store for the tests: a snapshot whose sealed chunks lie in two packs.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "sample.h"
#include "snapshot/packs.h"

namespace kvpager::snapshot_test {

// The chunks `which` of a sample as a sample of their own.
inline Sample part_of(const Sample& sample, const std::vector<size_t>& which) {
  Sample out;
  out.meta.layout = sample.meta.layout;
  out.meta.scorer = sample.meta.scorer;
  out.meta.summary_page_bytes = sample.meta.summary_page_bytes;
  out.meta.fingerprint = sample.meta.fingerprint;
  out.meta.session = R"({"pack":true})";
  std::vector<TokenId> tokens;
  for (const size_t c : which) {
    const SnapshotChunk& chunk = sample.meta.chunks[c];
    const TokenId* first = sample.meta.tokens.begin() +
                           static_cast<std::ptrdiff_t>(c) * sample.meta.layout.chunk_tokens;
    tokens.insert(tokens.end(), first, first + chunk.valid);
    out.meta.chunks.push_back(chunk);
    out.payload.push_back(sample.payload[c]);
    if (c < sample.summaries.size()) out.summaries.push_back(sample.summaries[c]);
  }
  out.meta.tokens = std::move(tokens);
  return out;
}

inline int64_t write_manifest(const std::string& path, const Sample& sample,
                              const SnapshotPacks& packs) {
  SnapshotMeta meta = sample.meta;
  meta.packs = packs;
  for (size_t c = 0; c < sample.summaries.size(); ++c) {
    meta.chunks[c].summary_checksum = slice_checksum(
        sample.summaries[c].data(), static_cast<int64_t>(sample.summaries[c].size()));
  }
  SnapshotWriter writer(path, meta.layout);
  if (sample.payload.size() > sample.summaries.size())
    writer.add_chunk(sample.payload.back().data());
  return writer.finish(meta);
}

// Even chunks are in pack 0, odd ones in pack 1.
class StoredSample {
 public:
  explicit StoredSample(Sample given = make_sample(small_layout(), 7 * 16 + 5))
      : sample(std::move(given)) {
    std::filesystem::create_directory(folder_.file("packs"));
    std::filesystem::create_directory(folder_.file("snapshots"));
    std::vector<size_t> chunks[2];
    for (size_t c = 0; c < sample.summaries.size(); ++c) {
      packs.places.push_back({static_cast<uint32_t>(c % 2), static_cast<uint32_t>(c / 2)});
      chunks[c % 2].push_back(c);
    }
    for (uint32_t p = 0; p < 2; ++p) {
      packs.packs.push_back({{0x10 + p, 0xA0 + p}, static_cast<uint32_t>(chunks[p].size())});
      write_sample(pack(p), part_of(sample, chunks[p]));
    }
    write_manifest(manifest(), sample, packs);
  }
  ~StoredSample() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_.file("packs"), ignored);
    std::filesystem::remove_all(folder_.file("snapshots"), ignored);
  }

  std::string folder() const { return folder_.path(); }
  std::string manifest() const { return folder_.file("snapshots/m.kvsnap"); }
  std::string pack(size_t p) const {
    return folder_.file("packs/" + snapshot::pack_file_name(packs.packs[p].id));
  }
  std::shared_ptr<SnapshotReader> open() const { return SnapshotReader::open(manifest()); }
  // The same content in one file.
  std::string self_contained() const {
    const std::string path = folder_.file("snapshots/whole.kvsnap");
    write_sample(path, sample);
    return path;
  }

  Sample sample;
  SnapshotPacks packs;

 private:
  TemporaryFolder folder_;
};

}  // namespace kvpager::snapshot_test
