// Attacks on manifests, packs and gathered chunks, by the numbers of docs/snapshot_attacks.md. Those
// on a single file are in corruption_test.cc.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "parts.h"
#include "store_fixture.h"

namespace kvpager::snapshot_test {
namespace {

using namespace snapshot;  // NOLINT(build/namespaces)

// "" if it opens; any exception that is not typed fails the test.
std::string refusal(const std::string& path) {
  try {
    SnapshotReader::open(path);
    return "";
  } catch (const CorruptSnapshotError& e) {
    return e.what();
  } catch (const UnsupportedVersionError& e) {
    return e.what();
  } catch (const StorageError& e) {
    return e.what();
  }
}

std::set<std::pair<int64_t, int>> damage(const SnapshotReader& reader) {
  std::set<std::pair<int64_t, int>> out;
  for (const SnapshotDamage& d : reader.verify(2, {})) out.insert({d.chunk, d.layer});
  return out;
}

size_t metadata_at(const std::string& bytes) { return entry_of(bytes, kSummaries - 1).end(); }

// attacks 1, 2, 3, 4
TEST_CASE("EveryFlippedBitOfAManifestOrAPackOutsideItsPayloadIsRefusedByName") {
  const StoreFixture store;
  for (const std::string& path : {store.manifest(), store.victim_pack()}) {
    const std::string sound = read_bytes(path);
    std::string bytes = sound;
    size_t flipped = 0;
    for (size_t at = 0; at < sound.size(); ++at) {
      if (at >= kFrontBytes && at < metadata_at(sound)) continue;
      // The zeros behind the table, once a byte.
      const bool zeros = at >= entry_at(get<uint32_t>(sound, kSectionCountAt)) && at < kFrontBytes;
      for (int bit = zeros ? 7 : 0; bit < 8; ++bit) {
        bytes[at] = static_cast<char>(sound[at] ^ (1 << bit));
        store.replace(path, bytes);
        const std::string message = refusal(path);
        if (message.find(path) == std::string::npos) {
          FAIL("byte ", at, " bit ", bit, " of ", path, ": ", message);
        }
        ++flipped;
      }
      bytes[at] = sound[at];
    }
    CHECK(flipped > 8000);
    store.replace(path, sound);
    CHECK(refusal(path).empty());
  }
}

// attacks 5, 6
TEST_CASE("DamageInAPackIsThatOfTheChunksTheManifestHasThere") {
  const StoreFixture store;
  store.write_two_packs(store.victim());
  const Sample& sample = store.sample();
  const auto slice = static_cast<size_t>(sample.meta.layout.slice_bytes(0));
  const std::string sound = read_bytes(store.pack_a());
  const size_t summaries = entry_of(sound, kSummaries - 1).offset;
  const auto each = static_cast<size_t>(sample.meta.summary_bytes_per_chunk());
  const int64_t held[] = {1, 3, 5};
  for (size_t n = 0; n < 3; ++n) {
    for (int layer = -1; layer < 2; ++layer) {
      CAPTURE(n);
      CAPTURE(layer);
      std::string bytes = sound;
      const size_t at = layer < 0 ? summaries + n * each
                                  : kFrontBytes + (2 * n + static_cast<size_t>(layer)) * slice;
      bytes[at + 11] = static_cast<char>(bytes[at + 11] ^ 4);
      store.replace(store.pack_a(), bytes);
      const auto reader = SnapshotReader::open(store.victim());
      CHECK(damage(*reader) == std::set<std::pair<int64_t, int>>{{held[n], layer}});
      std::vector<std::byte> out(2 * slice);
      for (int64_t c = 0; c < 8; ++c) {
        if (c == held[n] && layer >= 0) {
          CHECK_THROWS_AS(reader->read_chunk(c, out.data()), CorruptSnapshotError);
        } else {
          reader->read_chunk(c, out.data());
          CHECK(out == sample.payload[static_cast<size_t>(c)]);
        }
      }
    }
  }
}

// attacks 5, 6
TEST_CASE("GatheredChunksFailWhereTheirFileIsDamagedAndOnlyThere") {
  const StoreFixture store;
  const Sample& sample = store.sample();
  std::string bytes = read_bytes(store.pack_b());
  bytes[kFrontBytes + 5] = static_cast<char>(~bytes[kFrontBytes + 5]);  // chunk 0, layer 0
  store.replace(store.victim(), bytes);
  const auto damaged = SnapshotReader::open(store.victim());
  const auto sound = SnapshotReader::open(store.victim_pack());
  const auto gathered =
      SnapshotReader::gather({{sound, 0}, {damaged, 0}, {sound, 2}, {damaged, 1}}, "gathered");
  CHECK(damage(*gathered) == std::set<std::pair<int64_t, int>>{{1, 0}});
  std::vector<std::byte> out(static_cast<size_t>(sample.meta.layout.chunk_bytes()));
  gathered->read_chunk(3, out.data());
  CHECK(out == sample.payload[2]);
  CHECK_THROWS_AS(SnapshotReader::gather({{sound, 7}}, "g"), InvalidArgumentError);
  CHECK_THROWS_AS(SnapshotReader::gather({{sound, -1}}, "g"), InvalidArgumentError);
  CHECK_THROWS_AS(SnapshotReader::gather({{nullptr, 0}}, "g"), InvalidArgumentError);
}

// attacks 26, 27, 28, 34, 36, 37
TEST_CASE("EverySectionOfAManifestDroppedDoubledSwappedOrResizedIsATypedError") {
  const StoreFixture store;
  const std::string sound = read_bytes(store.manifest());
  const Parts parts = *take_apart(sound);
  CHECK(put_together(parts) == sound);
  const auto refused = [&](const Parts& forged, const std::string& what) {
    store.replace(store.victim(), put_together(forged));
    CHECK_MESSAGE(!refusal(store.victim()).empty(), what);
  };
  for (size_t i = 0; i < parts.parts.size(); ++i) {
    const std::string name = section_name(parts.parts[i].type);
    Parts forged = parts;
    forged.parts.erase(forged.parts.begin() + static_cast<std::ptrdiff_t>(i));
    if (parts.parts[i].type != kHints) refused(forged, name + " dropped");
    forged = parts;
    forged.parts.insert(forged.parts.begin() + static_cast<std::ptrdiff_t>(i), parts.parts[i]);
    refused(forged, name + " twice");
    for (size_t j = 0; j < i; ++j) {
      forged = parts;
      std::swap(forged.parts[i], forged.parts[j]);
      refused(forged, name + " swapped");
      forged = parts;
      std::swap(forged.parts[i].bytes, forged.parts[j].bytes);
      const bool texts = parts.parts[j].type == kFingerprint && parts.parts[i].type == kSession;
      if (!texts) refused(forged, name + " with the bytes of another");
    }
    const bool text = parts.parts[i].type == kFingerprint || parts.parts[i].type == kSession;
    const size_t size = parts.parts[i].bytes.size();
    for (const size_t resized : {size_t{0}, size / 2, size + 4, size + 8, size + 4096}) {
      if (resized == size || text) continue;
      forged = parts;
      forged.parts[i].bytes.resize(resized, '\0');
      refused(forged, name + " resized");
    }
  }
}

// attack 56
TEST_CASE("TextThatIsNotUtf8IsRefusedByReaderAndWriter") {
  const char* const good[] = {"",
                              "{}",
                              "\x7F",
                              "\xC2\x80",
                              "\xDF\xBF",
                              "\xE0\xA0\x80",
                              "\xED\x9F\xBF",
                              "\xEE\x80\x80",
                              "\xF0\x90\x80\x80",
                              "\xF4\x8F\xBF\xBF"};
  const char* const bad[] = {"\x80",
                             "\xC1\xBF",
                             "\xC2",
                             "a\xC2z",
                             "\xE0\x9F\xBF",
                             "\xED\xA0\x80",
                             "\xEF\xBF",
                             "\xF0\x8F\xBF\xBF",
                             "\xF4\x90\x80\x80",
                             "\xF8\x88\x80\x80\x80",
                             "\xFF"};
  const TemporaryFolder folder;
  const std::string path = folder.file("s");
  std::string SnapshotMeta::* const fields[] = {&SnapshotMeta::scorer, &SnapshotMeta::fingerprint,
                                                &SnapshotMeta::session};
  for (const auto field : fields) {
    for (const char* text : good) {
      Sample sample = small_sample();
      sample.meta.*field = text;
      write_sample(path, sample);
      CHECK(SnapshotReader::open(path)->meta().*field == text);
    }
    for (const char* text : bad) {
      Sample sample = small_sample();
      sample.meta.*field = text;
      CHECK_THROWS_WITH_AS(write_sample(path + "2", sample), doctest::Contains("UTF-8"),
                           InvalidArgumentError);
    }
  }
  CHECK(folder.names() == std::vector<std::string>{"s"});
  write_sample(path, small_sample());
  const Parts parts = *take_apart(read_bytes(path));
  for (const char* text : bad) {
    for (const SectionType type : {kFingerprint, kSession, kLayout}) {
      Parts forged = parts;
      std::string& bytes = forged.find(type)->bytes;
      if (type == kLayout) {
        put(&bytes, 22, static_cast<uint16_t>(std::strlen(text)));
        bytes = bytes.substr(0, 32) + text;
      } else {
        bytes = text;
      }
      write_bytes(path, put_together(forged));
      CHECK_THROWS_WITH_AS(SnapshotReader::open(path), doctest::Contains("not UTF-8"),
                           CorruptSnapshotError);
    }
  }
}

}  // namespace
}  // namespace kvpager::snapshot_test
