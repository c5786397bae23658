// Damage of every kind gives a typed error that names what is wrong, and never a crash, a large
// allocation or wrong bytes.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <new>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "reseal.h"
#include "sample.h"
#include "stored.h"

namespace {
thread_local size_t largest_allocation = 0;
}  // namespace

// The whole test program counts, so that "allocates no more than the file justifies" is a fact
// about operator new. Out of line: a compiler that sees only one half inlined takes the pair for a
// mismatch.
[[gnu::noinline]] void* operator new(size_t bytes) {
  largest_allocation = std::max(largest_allocation, bytes);
  if (void* p = std::malloc(bytes != 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, size_t) noexcept { std::free(p); }

namespace kvpager::snapshot_test {
namespace {

using namespace snapshot;  // NOLINT(build/namespaces)

enum class Outcome { kOpened, kCorrupt, kUnsupported };

struct Attempt {
  Outcome outcome = Outcome::kOpened;
  std::string message;
};

// Any other exception fails the test.
Attempt open(const std::string& path) {
  try {
    SnapshotReader::open(path);
    return {};
  } catch (const CorruptSnapshotError& e) {
    return {Outcome::kCorrupt, e.what()};
  } catch (const UnsupportedVersionError& e) {
    return {Outcome::kUnsupported, e.what()};
  }
}

// A small snapshot on disk whose bytes are changed in place.
class Victim {
 public:
  explicit Victim(const Sample& sample = small_sample()) : path_(folder_.file("victim")) {
    write_sample(path_, sample);
    take();
  }
  // A file that is there already.
  explicit Victim(const std::string& path) : path_(path) { take(); }
  ~Victim() { ::close(fd_); }

  const std::string& path() const { return path_; }
  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  size_t metadata_at() const { return entry_of(bytes_, kSummaries - 1).end(); }
  size_t offset_of(SectionType type) const { return entry_of(bytes_, type - 1).offset; }

  void set(size_t at, char value) {
    REQUIRE(::pwrite(fd_, &value, 1, static_cast<off_t>(at)) == 1);
  }
  void restore(size_t at) { set(at, bytes_[at]); }
  void resize(size_t bytes) { REQUIRE(::ftruncate(fd_, static_cast<off_t>(bytes)) == 0); }
  // Puts other bytes in the file.
  void replace(const std::string& bytes) {
    resize(bytes.size());
    REQUIRE(::pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }

 private:
  void take() {
    bytes_ = read_bytes(path_);
    fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  }

  TemporaryFolder folder_;
  std::string path_;
  std::string bytes_;
  int fd_;
};

// Changes a copy, with checksums that agree, and expects the error to name `field`.
void expect_refused(Victim* victim, const std::string& field, Outcome outcome,
                    const std::function<void(std::string*)>& change) {
  std::string bytes = victim->bytes();
  change(&bytes);
  reseal(&bytes);
  victim->replace(bytes);
  largest_allocation = 0;
  const Attempt attempt = open(victim->path());
  CHECK_MESSAGE(attempt.outcome == outcome, field, ": ", attempt.message);
  CHECK_MESSAGE(attempt.message.find(field) != std::string::npos, field, ": ", attempt.message);
  CHECK_MESSAGE(attempt.message.find(victim->path()) == 0, attempt.message);
  CHECK_MESSAGE(largest_allocation <= bytes.size(), field, ": ", largest_allocation);
}

TEST_CASE("TheToolsOfThisTestChangeNothingWhenNothingIsDamaged") {
  Victim victim;
  std::string bytes = victim.bytes();
  reseal(&bytes);
  CHECK(bytes == victim.bytes());
}

TEST_CASE("EveryFlippedBitOfHeaderTableAndMetadataIsATypedError") {
  Victim victim;
  const auto flip_all = [&](size_t begin, size_t end) {
    for (size_t at = begin; at < end; ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        victim.set(at, static_cast<char>(victim.bytes()[at] ^ (1 << bit)));
        const Attempt attempt = open(victim.path());
        if (attempt.outcome == Outcome::kOpened) FAIL("byte ", at, " bit ", bit, " went unseen");
      }
      victim.restore(at);
    }
  };
  flip_all(0, kFrontBytes);
  flip_all(victim.metadata_at(), victim.size());
  CHECK(open(victim.path()).outcome == Outcome::kOpened);
}

TEST_CASE("AFlippedByteOfThePayloadFailsItsSliceAndNoOther") {
  const Sample sample = small_sample();
  const Layout& layout = sample.meta.layout;
  Victim victim(sample);
  const auto slice_bytes = static_cast<size_t>(layout.slice_bytes(0));
  const auto chunk_bytes = static_cast<size_t>(layout.chunk_bytes());
  std::vector<std::byte> out(chunk_bytes);
  for (size_t damaged = 0; damaged < 4 * chunk_bytes; damaged += 37) {
    const size_t at = kFrontBytes + damaged;
    victim.set(at, static_cast<char>(victim.bytes()[at] ^ 0x10));
    const auto reader = SnapshotReader::open(victim.path());
    for (size_t c = 0; c < 4; ++c) {
      const auto chunk = static_cast<int64_t>(c);
      for (size_t layer = 0; layer < 2; ++layer) {
        const auto read = [&] { reader->read_slice(chunk, static_cast<int>(layer), out.data()); };
        if (damaged / slice_bytes != c * 2 + layer) {
          CHECK_NOTHROW(read());
          CHECK(std::memcmp(out.data(), sample.payload[c].data() + layer * slice_bytes,
                            slice_bytes) == 0);
          continue;
        }
        const std::string last = std::to_string(std::min<size_t>(c * 16 + 16, 53));
        const std::string expected = "chunk " + std::to_string(c) + " (tokens [" +
                                     std::to_string(c * 16) + ", " + last + ")), layer " +
                                     std::to_string(layer);
        try {
          read();
          FAIL("a damaged slice was read");
        } catch (const CorruptSnapshotError& e) {
          const std::string message = e.what();
          CHECK_MESSAGE(message.find(expected) != std::string::npos, message);
        }
      }
      if (damaged / chunk_bytes == c) {
        CHECK_THROWS_AS(reader->read_chunk(chunk, out.data()), CorruptSnapshotError);
      } else {
        CHECK_NOTHROW(reader->read_chunk(chunk, out.data()));
      }
    }
    victim.restore(at);
  }
}

TEST_CASE("EveryFlippedByteOfTheSummariesFailsTheirReadAndLeavesThePayloadUsable") {
  Victim victim;
  const size_t begin = victim.offset_of(kSummaries);
  std::vector<std::byte> out(victim.metadata_at() - begin + 4096);
  for (size_t at = begin; at < begin + 480; ++at) {
    victim.set(at, static_cast<char>(victim.bytes()[at] ^ 0x80));
    const auto reader = SnapshotReader::open(victim.path());
    try {
      reader->read_summaries(0, 3, out.data());
      FAIL("damaged summaries were read");
    } catch (const CorruptSnapshotError& e) {
      const std::string expected = "the summary of chunk " + std::to_string((at - begin) / 160);
      const std::string message = e.what();
      CHECK_MESSAGE(message.find(expected) != std::string::npos, message);
    }
    CHECK_NOTHROW(reader->read_chunk(3, out.data()));
    victim.restore(at);
  }
}

TEST_CASE("AFileCutAtAnyLengthIsRefused") {
  Victim victim;
  for (size_t length = victim.size(); length-- > 0;) {
    victim.resize(length);
    const Attempt attempt = open(victim.path());
    if (attempt.outcome != Outcome::kCorrupt) FAIL("opened when cut to ", length);
  }
}

TEST_CASE("AFileWithBytesBehindItsEndIsRefused") {
  Victim victim;
  for (const size_t extra : {size_t{1}, size_t{64}, size_t{4096}, size_t{1} << 20}) {
    victim.resize(victim.size() + extra);
    const Attempt attempt = open(victim.path());
    CHECK(attempt.outcome == Outcome::kCorrupt);
    CHECK(attempt.message.find("file_bytes") != std::string::npos);
  }
  expect_refused(&victim, "file size", Outcome::kCorrupt, [](std::string* bytes) {
    bytes->append(64, '\0');
    put<uint64_t>(bytes, kFileBytesAt, bytes->size());
  });
}

TEST_CASE("AZeroFilledPartIsATypedError") {
  Victim victim;
  const auto zeroed = [&](size_t begin, size_t end) {
    std::string bytes = victim.bytes();
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
              bytes.begin() + static_cast<std::ptrdiff_t>(end), '\0');
    victim.replace(bytes);
  };
  for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, victim.size()},
                                   {0, 64},
                                   {64, 4096},
                                   {0, 4096},
                                   {victim.metadata_at(), victim.size()},
                                   {victim.size() - 32, victim.size()}}) {
    zeroed(begin, end);
    CHECK(open(victim.path()).outcome == Outcome::kCorrupt);
  }
  zeroed(kFrontBytes, victim.metadata_at());
  const auto reader = SnapshotReader::open(victim.path());
  std::vector<std::byte> out(4096);
  for (int64_t c = 0; c < 4; ++c) {
    CHECK_THROWS_AS(reader->read_chunk(c, out.data()), CorruptSnapshotError);
  }
  CHECK_THROWS_AS(reader->read_summaries(0, 3, out.data()), CorruptSnapshotError);
  victim.replace(std::string());
  CHECK(open(victim.path()).outcome == Outcome::kCorrupt);
}

TEST_CASE("ExtremeLengthsAndOffsetsAreRefusedByNameWithoutAllocatingForThem") {
  Victim victim;
  const uint64_t extremes[] = {0,
                               1,
                               uint64_t{1} << 31,
                               (uint64_t{1} << 32) - 1,
                               uint64_t{1} << 63,
                               std::numeric_limits<uint64_t>::max(),
                               std::numeric_limits<uint64_t>::max() - 63,
                               victim.size(),
                               victim.size() - 1};
  for (const uint64_t value : extremes) {
    CAPTURE(value);
    const auto value32 = static_cast<uint32_t>(value);
    expect_refused(&victim, "header.file_bytes", Outcome::kCorrupt, [&](std::string* bytes) {
      put(bytes, kFileBytesAt, value == victim.size() ? value + 1 : value);
    });
    if (value32 > kMaxSections || value32 < kRequiredSections) {
      expect_refused(&victim, "header.section_count", Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, kSectionCountAt, value32); });
    }
    expect_refused(&victim, "header.header_bytes", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, kHeaderBytesAt, value32); });
    expect_refused(&victim, "header.entry_bytes", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, kEntryBytesAt, value32); });
    for (size_t i = 0; i < 10; ++i) {
      const SectionEntry entry = entry_of(victim.bytes(), i);
      expect_refused(&victim, section_name(entry.type) + ".offset", Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, entry_at(i) + 8, value); });
      if (entry.size == value) continue;
      // The wrong size, the offset it gives the next section, or the end it gives the file.
      expect_refused(&victim, "", Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, entry_at(i) + 16, value); });
    }
  }
}

TEST_CASE("SectionsInAnotherOrderTwiceMissingOrOverlappingAreRefused") {
  Victim victim;
  const auto swap_entries = [](std::string* bytes, size_t a, size_t b) {
    std::swap_ranges(bytes->begin() + static_cast<std::ptrdiff_t>(entry_at(a)),
                     bytes->begin() + static_cast<std::ptrdiff_t>(entry_at(a + 1)),
                     bytes->begin() + static_cast<std::ptrdiff_t>(entry_at(b)));
  };
  for (size_t i = 0; i < 7; ++i) {
    expect_refused(&victim, "table[" + std::to_string(i) + "].type", Outcome::kCorrupt,
                   [&](std::string* bytes) { swap_entries(bytes, i, i + 1); });
    expect_refused(&victim, "].type", Outcome::kCorrupt, [&](std::string* bytes) {
      std::memcpy(bytes->data() + entry_at(i + 1), bytes->data() + entry_at(i), 4);
    });
  }
  expect_refused(&victim, "table[8].type", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint16_t>(bytes, entry_at(8), 8); });
  expect_refused(&victim, "fingerprint.offset", Outcome::kCorrupt, [&](std::string* bytes) {
    put(bytes, entry_at(3) + 8, entry_of(*bytes, 2).offset);
  });
  expect_refused(&victim, "tokens.reserved", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint32_t>(bytes, entry_at(5) + 4, 1); });
  expect_refused(&victim, "tokens.flags", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint8_t>(bytes, entry_at(5) + 3, 0); });
  expect_refused(&victim, "hints.flags", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint8_t>(bytes, entry_at(7) + 3, 1); });
  expect_refused(&victim, "packs.flags", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint8_t>(bytes, entry_at(8) + 3, 2); });
  // Nine sections in the header, ten in the file.
  expect_refused(&victim, "padding after the section table", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint32_t>(bytes, kSectionCountAt, 9); });
  expect_refused(&victim, "header.reserved", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint8_t>(bytes, kReservedAt + 3, 9); });
  expect_refused(&victim, "padding before fingerprint", Outcome::kCorrupt, [&](std::string* bytes) {
    put<uint8_t>(bytes, entry_of(*bytes, kLayout - 1).end(), 1);
  });
}

TEST_CASE("ImpossibleLayoutsAndCountsAreRefusedByName") {
  Victim victim;
  const size_t layout = victim.offset_of(kLayout);
  const char* fields[] = {"layout.layers", "layout.kv_heads", "layout.chunk_tokens", "layout.k_dim",
                          "layout.v_dim"};
  for (size_t i = 0; i < 5; ++i) {
    for (const int32_t value : {0, -1, 1 << 30, INT32_MAX, INT32_MIN}) {
      expect_refused(&victim, fields[i], Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, layout + 4 * i, value); });
    }
    // In range, but not the layout of this file.
    for (const int32_t value : {32, 128, 256}) {
      expect_refused(&victim, ".size", Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, layout + 4 * i, value); });
    }
  }
  // What no pager takes, no file has.
  const std::pair<size_t, int32_t> beyond[] = {{0, 1025}, {1, 1025}, {2, 8},   {2, 48},    {2, 512},
                                               {3, 8},    {3, 24},   {3, 528}, {4, 65536}, {4, 1}};
  for (const auto& [field, value] : beyond) {
    expect_refused(&victim, fields[field], Outcome::kCorrupt,
                   [&, at = layout + 4 * field](std::string* bytes) { put(bytes, at, value); });
  }
  for (const int64_t value :
       {int64_t{-1}, INT64_MIN, INT64_MAX, int64_t{1} << 31, int64_t{1} << 63}) {
    expect_refused(&victim, "layout.summary_page_bytes", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, layout + 24, value); });
  }
  expect_refused(&victim, "summaries.size", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<int64_t>(bytes, layout + 24, 1 << 30); });
  expect_refused(&victim, "layout.k_dtype", Outcome::kUnsupported,
                 [&](std::string* bytes) { put<uint8_t>(bytes, layout + 20, 3); });
  expect_refused(&victim, "layout.size", Outcome::kCorrupt,  // codes, in a layout without room
                 [&](std::string* bytes) { put<uint8_t>(bytes, layout + 20, 4); });
  expect_refused(&victim, "layout.v_dtype", Outcome::kUnsupported,
                 [&](std::string* bytes) { put<uint8_t>(bytes, layout + 21, 255); });
  expect_refused(&victim, "layout.scorer_bytes", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint16_t>(bytes, layout + 22, 256); });
  expect_refused(&victim, "layout.size", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint16_t>(bytes, layout + 22, 255); });
  expect_refused(&victim, "layout.size", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint16_t>(bytes, layout + 22, 0); });
}

TEST_CASE("WhatALayoutSaysOfItsCodesIsRefusedByNameWhereItCannotBe") {
  const Sample sample = make_sample(mixed_layout(), 3 * 16 + 5);
  Victim victim(sample);
  const size_t codes = victim.offset_of(kLayout) + 32;
  const size_t layers = codes + 8 + sample.meta.scorer.size();
  for (const uint8_t flags : std::vector<uint8_t>{4, 128, 255}) {
    expect_refused(&victim, "layout.flags", Outcome::kUnsupported,
                   [&](std::string* bytes) { put(bytes, codes, flags); });
  }
  for (const uint8_t dtype : std::vector<uint8_t>{3, 4, 5, 255}) {
    expect_refused(&victim, "layout.float_dtype", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, codes + 1, dtype); });
  }
  for (const uint16_t count : std::vector<uint16_t>{0, 1, 3, 65535}) {
    expect_refused(&victim, "layout.size", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, codes + 2, count); });
  }
  expect_refused(&victim, "layout.reserved", Outcome::kUnsupported,
                 [&](std::string* bytes) { put(bytes, codes + 4, uint32_t{1}); });
  for (const uint16_t layer : std::vector<uint16_t>{0, 5, 1024, 65535}) {
    expect_refused(&victim, "layout.float_layers[1]", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, layers + 2, layer); });
  }
}

TEST_CASE("ChunkRecordsThatContradictTheTokensAreRefusedByName") {
  Victim victim;
  const size_t chunks = victim.offset_of(kChunks);
  constexpr size_t kStride = 48 + 2 * 8;
  for (size_t c = 0; c < 4; ++c) {
    const std::string name = "chunks[" + std::to_string(c) + "].";
    for (const int32_t valid : {0, -1, 4, 17, INT32_MAX, INT32_MIN}) {
      expect_refused(&victim, c < 3 && valid != 16 ? "" : name + "valid", Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, chunks + c * kStride, valid); });
    }
    expect_refused(&victim, name + "provenance", Outcome::kCorrupt,
                   [&](std::string* bytes) { put<uint8_t>(bytes, chunks + c * kStride + 4, 3); });
    expect_refused(&victim, name + "reserved", Outcome::kCorrupt,
                   [&](std::string* bytes) { put<uint8_t>(bytes, chunks + c * kStride + 7, 1); });
    expect_refused(&victim, name + "chain_hash", Outcome::kCorrupt, [&](std::string* bytes) {
      const uint64_t value = c < 3 ? 0 : 1;
      for (size_t word = 0; word < 4; ++word)
        put(bytes, chunks + c * kStride + 8 + 8 * word, value);
    });
  }
  expect_refused(&victim, "chunks[3].summary_checksum", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<uint64_t>(bytes, chunks + 3 * kStride + 40, 1); });
}

TEST_CASE("ABulkChecksumThatContradictsTheChunkTableIsRefused") {
  Victim victim;
  for (const SectionType type : {kPayload, kSummaries}) {
    std::string bytes = victim.bytes();
    put<uint64_t>(&bytes, entry_at(type - 1) + 24, 12345);
    reseal_header(&bytes);
    victim.replace(bytes);
    const Attempt attempt = open(victim.path());
    CHECK(attempt.outcome == Outcome::kCorrupt);
    CHECK(attempt.message.find(section_name(type) + ".checksum") != std::string::npos);
  }
}

TEST_CASE("HintsThatContradictTheChunksAreRefusedByName") {
  Victim victim;
  const size_t hints = victim.offset_of(kHints);
  for (const uint32_t count : {0u, 3u, 5u, 1u << 31, UINT32_MAX}) {
    expect_refused(&victim, "hints", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, hints, count); });
    expect_refused(&victim, "hints", Outcome::kCorrupt,
                   [&](std::string* bytes) { put(bytes, hints + 4, count); });
  }
  expect_refused(&victim, "hints.qk_score", Outcome::kCorrupt, [&](std::string* bytes) {
    put<uint32_t>(bytes, hints, 8);
    put<uint32_t>(bytes, hints + 4, 0);
  });
  expect_refused(&victim, "hints.qk_score[2]", Outcome::kCorrupt, [&](std::string* bytes) {
    put(bytes, hints + 8 + 16, std::numeric_limits<double>::quiet_NaN());
  });
}

// The index of a manifest's packs section in the table: the sample has no hints.
constexpr size_t kPacksIndex = 7;

TEST_CASE("APacksSectionThatContradictsItselfOrTheTokensIsRefusedByName") {
  const StoredSample store;  // 7 sealed chunks: even ones in pack 0, odd ones in pack 1
  Victim victim(store.manifest());
  const size_t packs = entry_of(victim.bytes(), kPacksIndex).offset;
  const size_t places = packs + 8 + 2 * 24;
  const auto refused = [&](const std::string& field, const auto& change) {
    expect_refused(&victim, field, Outcome::kCorrupt, change);
  };
  const auto put_at = [](size_t at, auto value) {
    return [=](std::string* bytes) { put(bytes, at, value); };
  };
  for (const uint32_t count : {0u, 1u, 3u, 7u, 256u, 1u << 31, UINT32_MAX}) {
    refused("packs.size", put_at(packs, count));
  }
  refused("packs.reserved", put_at(packs + 4, 1u));
  refused("packs[1].id is that of packs[0]", [&](std::string* bytes) {
    std::memcpy(bytes->data() + packs + 8 + 24, bytes->data() + packs + 8, 16);
  });
  for (const uint32_t chunks : {0u, 1u << 31, UINT32_MAX}) {
    refused("packs[0].chunks", put_at(packs + 8 + 16, chunks));
  }
  refused("packs[1].reserved", put_at(packs + 8 + 24 + 20, 1u));
  refused("packs.places[6].chunk is 3", put_at(packs + 8 + 16, 3u));  // of 4
  for (const uint32_t pack : {1u, 2u, UINT32_MAX}) {                  // not numbered by first use
    refused("packs.places[0].pack", put_at(places, pack));
  }
  refused("packs.places[3].pack", put_at(places + 3 * 8, 2u));
  for (const uint32_t chunk : {3u, 4u, UINT32_MAX}) {
    refused("packs.places[1].chunk", put_at(places + 8 + 4, chunk));
  }
  refused("packs.places is the same for two chunks", put_at(places + 2 * 8 + 4, 0u));
  refused("packs[1] is used by no chunk", [&](std::string* bytes) {
    put(bytes, packs + 8 + 16, 9u);
    for (uint32_t c = 0; c < 7; ++c) {
      put(bytes, places + c * 8, 0u);
      put(bytes, places + c * 8 + 4, c);
    }
  });
  // Sizes of packs that are there, but not as the manifest says.
  refused("tokens.size", put_at(packs + 8 + 16, 5u));
  refused("tokens.size", put_at(packs + 8 + 16, uint32_t{INT32_MAX}));
  expect_refused(&victim, "packs.version is 2 and the section is required", Outcome::kUnsupported,
                 put_at(entry_at(kPacksIndex) + 2, uint8_t{2}));
  // Without its packs it is a file whose payload is missing.
  refused("payload.size", [&](std::string* bytes) {
    put(bytes, entry_at(kPacksIndex) + 2, uint8_t{2});
    put(bytes, entry_at(kPacksIndex) + 3, uint8_t{0});
  });
  victim.replace(victim.bytes());
  CHECK(open(victim.path()).outcome == Outcome::kOpened);
}

TEST_CASE("AManifestOfOtherTokensThanItsPacksAndTailIsRefusedByName") {
  const StoredSample store;
  Victim victim(store.manifest());
  const size_t layout = victim.offset_of(kLayout);
  for (size_t i = 0; i < 5; ++i) {
    for (const int32_t value : {0, -1, 1 << 30, INT32_MAX, INT32_MIN, 32, 48, 4096}) {
      expect_refused(&victim, "", Outcome::kCorrupt,
                     [&](std::string* bytes) { put(bytes, layout + 4 * i, value); });
    }
  }
  expect_refused(&victim, "summaries.size", Outcome::kCorrupt,
                 [&](std::string* bytes) { put<int64_t>(bytes, layout + 24, 1 << 30); });
}

TEST_CASE("SwappedChunksFailBothAndNoOther") {
  const Sample sample = small_sample();
  Victim victim(sample);
  std::string bytes = victim.bytes();
  const auto at = [&](int chunk) {
    return bytes.begin() + static_cast<std::ptrdiff_t>(kFrontBytes) + chunk * 2048;
  };
  std::swap_ranges(at(0), at(1), at(2));
  victim.replace(bytes);
  const auto reader = SnapshotReader::open(victim.path());
  std::vector<std::byte> out(2048);
  CHECK_THROWS_AS(reader->read_chunk(0, out.data()), CorruptSnapshotError);
  CHECK_THROWS_AS(reader->read_chunk(2, out.data()), CorruptSnapshotError);
  reader->read_chunk(1, out.data());
  CHECK(out == sample.payload[1]);
  reader->read_chunk(3, out.data());
  CHECK(out == sample.payload[3]);
}

TEST_CASE("EveryOtherMajorOrMinorVersionIsRefusedByNameWithTheOneThatIsRead") {
  Victim victim;
  const auto refused = [&](size_t at, uint16_t value, const std::string& version) {
    expect_refused(&victim, "header.version is " + version + ", expected 1.0",
                   Outcome::kUnsupported, [&](std::string* bytes) { put(bytes, at, value); });
  };
  for (const uint16_t other : {2, 3, 65535}) {
    refused(kMajorAt, other, std::to_string(other) + ".0");
    refused(kMinorAt, other, "1." + std::to_string(other));
  }
  refused(kMajorAt, 0, "0.0");
  refused(kMinorAt, 1, "1.1");
}

TEST_CASE("AnUnknownRequiredSectionIsRefusedByNameAndAnUnknownOptionalOneIsKept") {
  Victim victim;
  expect_refused(&victim, "packs.version is 3 and the section is required", Outcome::kUnsupported,
                 [&](std::string* bytes) { put<uint8_t>(bytes, entry_at(8) + 3, 1); });
  expect_refused(&victim, "tokens.version is 2 and the section is required", Outcome::kUnsupported,
                 [&](std::string* bytes) { put<uint8_t>(bytes, entry_at(5) + 2, 2); });
  // Hints of a later version are not understood, and therefore carried.
  std::string bytes = victim.bytes();
  put<uint8_t>(&bytes, entry_at(7) + 2, 2);
  reseal(&bytes);
  victim.replace(bytes);
  const auto reader = SnapshotReader::open(victim.path());
  CHECK(reader->meta().hints.qk_score.empty());
  REQUIRE(reader->meta().unknown.size() == 3);
  CHECK(reader->meta().unknown[0].first == 0x00020008u);
  write_sample(victim.path() + "2", read_all(*reader));
  CHECK(read_bytes(victim.path() + "2") == bytes);
}

TEST_CASE("AFileThatShrinksAfterItWasOpenedGivesAnErrorForWhatIsGone") {
  const Sample sample = small_sample();
  Victim victim(sample);
  const auto reader = SnapshotReader::open(victim.path());
  victim.resize(kFrontBytes + 2048 + 1400);
  std::vector<std::byte> out(2048);
  reader->read_chunk(0, out.data());
  CHECK(out == sample.payload[0]);
  reader->read_slice(1, 0, out.data());
  CHECK(std::memcmp(out.data(), sample.payload[1].data(), 1024) == 0);
  CHECK_THROWS_AS(reader->read_slice(1, 1, out.data()), CorruptSnapshotError);
  CHECK_THROWS_AS(reader->read_chunk(2, out.data()), CorruptSnapshotError);
  CHECK_THROWS_AS(reader->read_summaries(0, 3, out.data()), CorruptSnapshotError);
  CHECK_THROWS_WITH_AS(reader->read_chunk(3, out.data()),
                       doctest::Contains("became shorter after it was opened"),
                       CorruptSnapshotError);
}

TEST_CASE("AFileOverwrittenAfterItWasOpenedGivesAnErrorForWhatChanged") {
  Victim victim;
  const auto reader = SnapshotReader::open(victim.path());
  victim.set(kFrontBytes + 2060, static_cast<char>(~victim.bytes()[kFrontBytes + 2060]));
  std::vector<std::byte> out(2048);
  CHECK_NOTHROW(reader->read_chunk(0, out.data()));
  CHECK_THROWS_AS(reader->read_chunk(1, out.data()), CorruptSnapshotError);
}

TEST_CASE("AHugeSparseFileDoesNotMakeTheReaderAllocate") {
  Victim victim;
  std::string bytes = victim.bytes();
  const uint64_t huge = uint64_t{1} << 40;
  const SectionEntry last = entry_of(bytes, 9);
  put<uint64_t>(&bytes, entry_at(9) + 16, huge - last.offset);
  put<uint64_t>(&bytes, kFileBytesAt, huge);
  reseal_header(&bytes);
  victim.replace(bytes);
  victim.resize(huge);
  largest_allocation = 0;
  const Attempt attempt = open(victim.path());
  CHECK(attempt.outcome == Outcome::kCorrupt);
  CHECK(attempt.message.find("metadata size") != std::string::npos);
  CHECK(largest_allocation < 65536);
}

TEST_CASE("WhatIsNotASnapshotIsRefusedByName") {
  const TemporaryFolder folder;
  CHECK_THROWS_WITH_AS(SnapshotReader::open(folder.file("missing")),
                       doctest::Contains("No such file or directory"), StorageError);
  CHECK_THROWS_WITH_AS(SnapshotReader::open(folder.path()), doctest::Contains("Is a directory"),
                       StorageError);
  CHECK_THROWS_WITH_AS(SnapshotReader::open("/dev/zero"), doctest::Contains("not a regular file"),
                       StorageError);
  write_bytes(folder.file("text"), std::string(10000, 'x'));
  CHECK_THROWS_WITH_AS(SnapshotReader::open(folder.file("text")), doctest::Contains("header.magic"),
                       CorruptSnapshotError);
}

}  // namespace
}  // namespace kvpager::snapshot_test
