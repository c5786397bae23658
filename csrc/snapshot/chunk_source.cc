#include "snapshot/chunk_source.h"

#include <algorithm>

#include "snapshot/checksum.h"
#include "snapshot/format.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot {

Hash128 ChunkSource::logical_digest() const {
  std::call_once(digest_once_, [&] { digest_ = snapshot::logical_digest(meta, meta.chunks); });
  return digest_;
}

int64_t ChunkSource::neighbours(int64_t first, int64_t count) const {
  int64_t n = 1;
  while (n < count && place(first + n).file == place(first).file &&
         place(first + n).chunk == place(first).chunk + n) {
    ++n;
  }
  return n;
}

std::string ChunkSource::describe(int64_t chunk) const {
  const int64_t first = chunk * layout().chunk_tokens;
  return str("chunk ", chunk, " (tokens [", first, ", ", first + record(chunk).valid, "))");
}

CorruptSnapshotError ChunkSource::damage(const std::string& message, int64_t chunk,
                                         int layer) const {
  return {message, chunk, layer, chunk * layout().chunk_tokens, record(chunk).valid};
}

template <class Describe>
void ChunkSource::fetch(int64_t chunk, int layer, uint64_t bytes, uint64_t offset,
                        const Describe& what, std::byte* out) const {
  const ByteRanges& file = *files[place(chunk).file].file;
  const std::string elsewhere = file.path() == name ? "" : name + ": ";
  try {
    file.read(out, bytes, offset, what);
  } catch (const CorruptSnapshotError& e) {
    throw damage(elsewhere + e.what(), chunk, layer);
  } catch (const StorageError& e) {
    throw StorageError(elsewhere + e.what());
  }
  bytes_read += static_cast<int64_t>(bytes);
}

namespace {

// Bytes of the first slices of chunks that lie behind each other.
int64_t slices_before(const Layout& layout, int64_t slices) {
  return slices / layout.layers * layout.chunk_bytes() +
         layout.slice_offset(static_cast<int>(slices % layout.layers));
}

}  // namespace

void ChunkSource::fetch_slices(int64_t chunk, int layer, int64_t slices, std::byte* out) const {
  const auto begin = static_cast<uint64_t>(slices_before(layout(), layer));
  const auto end = static_cast<uint64_t>(slices_before(layout(), layer + slices));
  const uint64_t chunks = place(chunk).chunk * static_cast<uint64_t>(layout().chunk_bytes());
  const bool one = slices == 1;
  fetch(
      chunk, one ? layer : -1, end - begin, kFrontBytes + chunks + begin,
      [&] { return one ? str(describe(chunk), ", layer ", layer) : describe(chunk); }, out);
}

void ChunkSource::will_need(int64_t chunk) const noexcept {
  const auto each = static_cast<uint64_t>(layout().chunk_bytes());
  files[place(chunk).file].file->will_need(each, kFrontBytes + place(chunk).chunk * each);
}

void ChunkSource::fetch_summaries(int64_t first, int64_t count, std::byte* out) const {
  const auto each = static_cast<uint64_t>(summary_bytes());
  fetch(
      first, -1, static_cast<uint64_t>(count) * each,
      files[place(first).file].summaries_at + place(first).chunk * each,
      [&] { return "the summary of " + describe(first); }, out);
}

std::string ChunkSource::checksum_damage(int64_t chunk, const std::string& what, uint64_t computed,
                                         uint64_t expected) const {
  const ByteRanges& file = *files[place(chunk).file].file;
  const std::string where =
      file.path() == name ? "" : str(" (chunk ", place(chunk).chunk, " of ", file.path(), ")");
  return str(name, ": corrupt snapshot: the checksum of ", what, where, " is ", computed,
             ", expected ", expected);
}

std::string ChunkSource::slice_damage(int64_t chunk, int layer, const std::byte* slice) const {
  const uint64_t expected = record(chunk).slice_checksum[static_cast<size_t>(layer)];
  const uint64_t computed = slice_checksum(slice, layout().slice_bytes(layer));
  if (computed == expected) return {};
  return checksum_damage(chunk, str(describe(chunk), ", layer ", layer), computed, expected);
}

std::string ChunkSource::summary_damage(int64_t chunk, const std::byte* summary) const {
  const uint64_t expected = record(chunk).summary_checksum;
  const uint64_t computed = xxh3_64(summary, static_cast<size_t>(summary_bytes()));
  if (computed == expected) return {};
  return checksum_damage(chunk, "the summary of " + describe(chunk), computed, expected);
}

void ChunkSource::read_slice(int64_t chunk, int layer, std::byte* out) const {
  fetch_slices(chunk, layer, 1, out);
  const std::string found = slice_damage(chunk, layer, out);
  if (!found.empty()) throw damage(found, chunk, layer);
}

void ChunkSource::read_chunk(int64_t chunk, std::byte* out) const {
  fetch_slices(chunk, 0, layout().layers, out);
  for (int layer = 0; layer < layout().layers; ++layer) {
    const std::string found = slice_damage(chunk, layer, out + layout().slice_offset(layer));
    if (!found.empty()) throw damage(found, chunk, layer);
  }
}

void ChunkSource::read_summaries(int64_t first, int64_t count, std::byte* out) const {
  const int64_t each = summary_bytes();
  for (int64_t done = 0; done < count;) {
    const int64_t run = neighbours(first + done, count - done);
    std::byte* to = out + done * each;
    try {
      fetch_summaries(first + done, run, to);
    } catch (const CorruptSnapshotError&) {  // the file has ended: say which is the first one gone
      for (int64_t i = 0; i < run; ++i) fetch_summaries(first + done + i, 1, to + i * each);
      throw;
    }
    for (int64_t i = 0; i < run; ++i) {
      const std::string found = summary_damage(first + done + i, to + i * each);
      if (!found.empty()) throw damage(found, first + done + i, -1);
    }
    done += run;
  }
}

}  // namespace kvpager::snapshot
