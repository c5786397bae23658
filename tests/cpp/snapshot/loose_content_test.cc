#include "snapshot/loose_content.h"

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "content.h"
#include "kvpager/error.h"
#include "sample.h"

namespace kvpager::snapshot_test {
namespace {

using snapshot::LooseContent;

struct Parts {
  std::vector<TokenId> tokens;
  std::vector<LooseContent::Chunk> chunks;
};

Parts parts(const Layout& layout, uint64_t count) {
  Parts out;
  for (uint64_t c = 0; c < count; ++c) {
    auto bytes = std::make_shared<std::vector<std::byte>>(
        noise(static_cast<size_t>(layout.chunk_bytes()), c));
    LooseContent::Chunk chunk;
    chunk.chain_hash = {c + 1, ~c};
    chunk.provenance = c % 2 == 0 ? Provenance::kExact : Provenance::kApproximate;
    chunk.payload = std::shared_ptr<const std::byte>(bytes, bytes->data());
    out.chunks.push_back(std::move(chunk));
    for (int32_t i = 0; i < layout.chunk_tokens; ++i) {
      out.tokens.push_back(static_cast<TokenId>((c * 31 + static_cast<uint64_t>(i)) % 256));
    }
  }
  return out;
}

Layout layout_of_chunks() {
  Layout layout = small_layout();
  layout.chunk_tokens = 16;
  layout.k_dim = layout.v_dim = 16;
  return layout;
}

}  // namespace

TEST_CASE("LooseChunksAreReadBackFromAFileAsTheyWereGiven") {
  const Layout layout = layout_of_chunks();
  const Parts given = parts(layout, 3);
  const LooseContent content(layout, given.tokens, given.chunks);
  const TemporaryFolder folder;
  const std::string path = folder.file("states.kvsnap");
  {
    SnapshotWriter writer(path, layout);
    writer.write_content(content, all_chunks(content), R"({"of":"states"})", R"({"n":3})", nullptr);
    writer.publish();
  }

  const auto reader = SnapshotReader::open(path);
  CHECK(reader->meta().fingerprint == R"({"of":"states"})");
  CHECK(reader->meta().tokens == content.meta().tokens);
  REQUIRE(reader->meta().chunks.size() == 3);
  std::vector<std::byte> read(static_cast<size_t>(layout.chunk_bytes()));
  for (size_t c = 0; c < 3; ++c) {
    const SnapshotChunk& found = reader->meta().chunks[c];
    CHECK(found.chain_hash == given.chunks[c].chain_hash);
    CHECK(found.provenance == given.chunks[c].provenance);
    CHECK(found.content_id() == content.meta().chunks[c].content_id());
    reader->read_chunk(static_cast<int64_t>(c), read.data());
    CHECK(std::memcmp(read.data(), given.chunks[c].payload.get(), read.size()) == 0);
  }
  CHECK(reader->verify(1, nullptr).empty());
}

TEST_CASE("LooseChunksThatChangedAfterTheyWereGivenAreNotSaved") {
  const Layout layout = layout_of_chunks();
  Parts given = parts(layout, 2);
  auto bytes =
      std::make_shared<std::vector<std::byte>>(noise(static_cast<size_t>(layout.chunk_bytes()), 7));
  given.chunks[1].payload = std::shared_ptr<const std::byte>(bytes, bytes->data());
  const LooseContent content(layout, given.tokens, given.chunks);
  (*bytes)[5] ^= std::byte{1};
  const TemporaryFolder folder;
  CHECK_THROWS_AS(save_content(folder.file("states.kvsnap"), content), CorruptSnapshotError);
}

TEST_CASE("ThePayloadOfLooseChunksLivesAsLongAsTheirContent") {
  const Layout layout = layout_of_chunks();
  Parts given = parts(layout, 1);
  const std::weak_ptr<const std::byte> watched = given.chunks[0].payload;
  auto content =
      std::make_unique<LooseContent>(layout, std::move(given.tokens), std::move(given.chunks));
  CHECK_FALSE(watched.expired());
  content.reset();
  CHECK(watched.expired());
}

TEST_CASE("LooseContentRefusesChunksThatCouldNotBeReadBack") {
  const Layout layout = layout_of_chunks();
  CHECK_THROWS_AS(LooseContent(layout, {}, {}), InvalidArgumentError);
  CHECK_THROWS_AS(LooseContent(Layout{}, {}, parts(layout, 1).chunks), InvalidArgumentError);
  Parts given = parts(layout, 2);
  given.tokens.pop_back();
  CHECK_THROWS_AS(LooseContent(layout, given.tokens, given.chunks), InvalidArgumentError);
  given = parts(layout, 2);
  given.chunks[1].chain_hash = {};
  CHECK_THROWS_AS(LooseContent(layout, given.tokens, given.chunks), InvalidArgumentError);
  given = parts(layout, 2);
  given.chunks[0].payload = nullptr;
  CHECK_THROWS_AS(LooseContent(layout, given.tokens, given.chunks), InvalidArgumentError);
  const Parts sound = parts(layout, 2);
  const LooseContent content(layout, sound.tokens, sound.chunks);
  CHECK_THROWS_AS(content.borrow_chunk(2, nullptr), InvalidArgumentError);
  CHECK_THROWS_AS(content.borrow_chunk(-1, nullptr), InvalidArgumentError);
}

}  // namespace kvpager::snapshot_test
