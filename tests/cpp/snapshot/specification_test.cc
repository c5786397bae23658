// The worked examples of docs/snapshot_format.md are the files the writer writes.
#include <doctest/doctest.h>

#include <cstring>
#include <numeric>

#include "kvpager/snapshot.h"
#include "sample.h"
#include "stored.h"

namespace kvpager::snapshot_test {
namespace {

Sample example() {
  Sample out;
  SnapshotMeta& meta = out.meta;
  meta.layout.layers = 1;
  meta.layout.kv_heads = 1;
  meta.layout.chunk_tokens = 16;
  meta.layout.k_dim = 16;
  meta.layout.v_dim = 16;
  meta.scorer = "mean";
  meta.summary_page_bytes = 4;
  meta.fingerprint = R"({"weights":"demo"})";
  meta.session = "{}";
  std::vector<TokenId> tokens(17);
  std::iota(tokens.begin(), tokens.end(), 5);
  meta.tokens = std::move(tokens);
  meta.chunks.resize(2);
  meta.chunks[0].valid = 16;
  meta.chunks[0].chain_hash = {0x1111111111111111u, 0x2222222222222222u};
  meta.chunks[1].valid = 1;
  meta.hints.last_use = {9, 10};
  const auto bytes_of = [](const std::vector<std::pair<size_t, float>>& values, size_t size) {
    std::vector<std::byte> bytes(size);
    for (const auto& [at, value] : values) std::memcpy(bytes.data() + at, &value, sizeof(value));
    return bytes;
  };
  out.payload = {bytes_of({{0, 1.0f}, {4, 2.0f}, {1024, 3.0f}, {1088, 4.0f}}, 2048),
                 bytes_of({{0, 5.0f}, {1024, 6.0f}}, 2048)};
  out.summaries = {bytes_of({{0, 1.5f}}, 4)};
  return out;
}

// As `hexdump` prints it, without the text column.
std::string hexdump(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  static constexpr size_t kRow = 16;
  const auto offset = [](size_t at) {
    std::string text(8, '0');
    for (size_t i = 8; i-- > 0; at /= 16) text[i] = kDigits[at % 16];
    return text;
  };
  const std::string zeros(kRow, '\0');
  std::string out;
  bool after_zeros = false;
  bool folded = false;
  for (size_t at = 0; at < bytes.size(); at += kRow) {
    const std::string row = bytes.substr(at, kRow);
    if (row == zeros && after_zeros) {
      if (!folded) out += "*\n";
      folded = true;
      continue;
    }
    after_zeros = row == zeros;
    folded = false;
    out += offset(at);
    for (size_t i = 0; i < row.size(); ++i) {
      const auto byte = static_cast<unsigned char>(row[i]);
      out += i % 8 == 0 ? "  " : " ";
      out += kDigits[byte / 16];
      out += kDigits[byte % 16];
    }
    out += "\n";
  }
  return out + offset(bytes.size()) + "\n";
}

std::string document() {
  const std::string here = __FILE__;
  const std::string root = here.substr(0, here.rfind("tests/cpp/snapshot/"));
  return read_bytes(root + "docs/snapshot_format.md");
}

// What is between the n-th pair of fences.
std::string documented(size_t n) {
  const std::string text = document();
  const std::string fence = "```hexdump\n";
  size_t from = 0;
  for (size_t i = 0; i <= n; ++i) {
    from = text.find(fence, from);
    REQUIRE(from != std::string::npos);
    from += fence.size();
  }
  return text.substr(from, text.find("```", from) - from);
}

TEST_CASE("TheWorkedExampleOfTheSpecificationIsWhatTheWriterWrites") {
  const TemporaryFolder folder;
  write_sample(folder.file("example"), example());
  CHECK(hexdump(read_bytes(folder.file("example"))) == documented(0));
}

TEST_CASE("TheManifestOfTheSpecificationIsWhatTheWriterWrites") {
  Sample sample = example();
  sample.meta.hints = {};
  sample.meta.chunks[0].slice_checksum = std::vector<uint64_t>(
      static_cast<size_t>(sample.meta.layout.layers),
      slice_checksum(sample.payload[0].data(), sample.meta.layout.slice_bytes(0)));
  SnapshotPacks packs;
  packs.packs = {{{0x8899aabbccddeeffu, 0x0011223344556677u}, 4}};
  packs.places = {{0, 2}};
  const TemporaryFolder folder;
  write_manifest(folder.file("manifest"), sample, packs);
  CHECK(hexdump(read_bytes(folder.file("manifest"))) == documented(1));
  CHECK(document().find("`" + snapshot::pack_file_name(packs.packs[0].id) + "`") !=
        std::string::npos);
}

}  // namespace
}  // namespace kvpager::snapshot_test
