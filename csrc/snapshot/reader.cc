#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "kvpager/error.h"
#include "kvpager/fault.h"
#include "kvpager/snapshot.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"
#include "snapshot/format.h"
#include "snapshot/metadata.h"
#include "snapshot/output_file.h"

namespace kvpager {

using namespace snapshot;  // NOLINT(build/namespaces): this room's own names

struct SnapshotReader::Impl {
  std::string path;
  Descriptor file;
  Decoded decoded;
  uint64_t payload_at = 0;
  uint64_t summaries_at = 0;
  mutable std::atomic<int64_t> bytes_read{0};

  [[noreturn]] void fail(int error, const std::string& what) const {
    throw StorageError(str(path, ": cannot ", what, ": ", std::generic_category().message(error)));
  }

  void read_at(std::byte* out, uint64_t bytes, uint64_t offset, const std::string& what) const;
  void verify_slice(int64_t chunk, int layer, const std::byte* slice) const;
  std::string describe(int64_t chunk) const;
  uint64_t open_file();
  void open_metadata(uint64_t file_bytes);
  const Layout& layout() const { return decoded.meta.layout; }
  void check_chunk(int64_t chunk) const;
};

void SnapshotReader::Impl::read_at(std::byte* out, uint64_t bytes, uint64_t offset,
                                   const std::string& what) const {
  while (bytes > 0) {
    const int injected = fault::visit("snapshot.read");
    if (injected != 0) errno = injected;
    const ssize_t n =
        injected != 0 ? -1 : ::pread(file.get(), out, bytes, static_cast<off_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      fail(errno, str("read ", what, " at offset ", offset));
    }
    if (n == 0) {
      corrupt(path, "the end of the file while reading " + what, offset, "at least ",
              offset + bytes, " (the file became shorter after it was opened)");
    }
    out += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
}

uint64_t SnapshotReader::Impl::open_file() {
  // O_NONBLOCK: opening a pipe must not wait for its other end. It means nothing for a regular
  // file.
  int fd;
  do {
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(errno, "open the snapshot");
  file.reset(fd);
  struct stat status;
  if (::fstat(fd, &status) != 0) fail(errno, "look at the snapshot");
  if (S_ISDIR(status.st_mode)) fail(EISDIR, "read a snapshot");
  if (!S_ISREG(status.st_mode)) fail(EINVAL, "read a snapshot from what is not a regular file");
  return static_cast<uint64_t>(status.st_size);
}

void SnapshotReader::Impl::open_metadata(uint64_t file_bytes) {
  if (file_bytes < kFrontBytes) {
    corrupt(path, "file size", file_bytes, "at least ", kFrontBytes, " (header and section table)");
  }
  std::array<std::byte, kFrontBytes> front;
  read_at(front.data(), front.size(), 0, "the header");
  const std::vector<SectionEntry> entries = decode_front(front.data(), file_bytes, path);
  payload_at = entries[kPayload - 1].offset;
  summaries_at = entries[kSummaries - 1].offset;

  const uint64_t metadata_at = entries[kSummaries - 1].end();
  const uint64_t metadata_bytes = file_bytes - metadata_at;
  const std::unique_ptr<std::byte[]> metadata(new std::byte[metadata_bytes]);
  read_at(metadata.get(), metadata_bytes, metadata_at, "the metadata");
  std::vector<Section> sections;
  uint64_t end = metadata_at;
  for (const SectionEntry& entry : entries) {
    Section section{entry, nullptr};
    if (entry.type > kSummaries) {
      section.data = metadata.get() + (entry.offset - metadata_at);
      if (!all_zero(metadata.get() + (end - metadata_at), entry.offset - end)) {
        corrupt(path, "padding before " + section_name(entry.type), "not zero", "zero");
      }
      end = entry.end();
    }
    sections.push_back(section);
  }
  decoded = decode_metadata(sections, path);
}

std::string SnapshotReader::Impl::describe(int64_t chunk) const {
  const int64_t first = chunk * layout().chunk_tokens;
  const int64_t valid = decoded.meta.chunks[static_cast<size_t>(chunk)].valid;
  return str("chunk ", chunk, " (tokens [", first, ", ", first + valid, "))");
}

void SnapshotReader::Impl::check_chunk(int64_t chunk) const {
  const auto count = static_cast<int64_t>(decoded.meta.chunks.size());
  if (chunk < 0 || chunk >= count) {
    throw InvalidArgumentError(str(path, ": chunk is ", chunk, ", expected [0, ", count, ")"));
  }
}

void SnapshotReader::Impl::verify_slice(int64_t chunk, int layer, const std::byte* slice) const {
  const uint64_t expected =
      decoded.meta.chunks[static_cast<size_t>(chunk)].slice_checksum[static_cast<size_t>(layer)];
  const uint64_t computed = slice_checksum(slice, layout().slice_bytes());
  if (computed != expected) {
    corrupt(path, str("the checksum of ", describe(chunk), ", layer ", layer), computed, expected);
  }
}

SnapshotReader::SnapshotReader() : impl_(std::make_unique<Impl>()) {}
SnapshotReader::~SnapshotReader() = default;

std::shared_ptr<SnapshotReader> SnapshotReader::open(const std::string& path) {
  std::shared_ptr<SnapshotReader> reader(new SnapshotReader());
  Impl& r = *reader->impl_;
  r.path = path;
  r.open_metadata(r.open_file());
  return reader;
}

const std::string& SnapshotReader::path() const { return impl_->path; }
const SnapshotMeta& SnapshotReader::meta() const { return impl_->decoded.meta; }
Hash128 SnapshotReader::logical_digest() const { return impl_->decoded.logical_digest; }

void SnapshotReader::read_slice(int64_t chunk, int layer, std::byte* out) const {
  const Impl& r = *impl_;
  r.check_chunk(chunk);
  const Layout& layout = r.layout();
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(
        str(r.path, ": layer is ", layer, ", expected [0, ", layout.layers, ")"));
  }
  const int64_t offset = chunk * layout.chunk_bytes() + layout.slice_offset(layer);
  r.read_at(out, static_cast<uint64_t>(layout.slice_bytes()),
            r.payload_at + static_cast<uint64_t>(offset),
            str(r.describe(chunk), ", layer ", layer));
  r.bytes_read += layout.slice_bytes();
  r.verify_slice(chunk, layer, out);
}

void SnapshotReader::read_chunk(int64_t chunk, std::byte* out) const {
  const Impl& r = *impl_;
  r.check_chunk(chunk);
  const Layout& layout = r.layout();
  r.read_at(out, static_cast<uint64_t>(layout.chunk_bytes()),
            r.payload_at + static_cast<uint64_t>(chunk * layout.chunk_bytes()), r.describe(chunk));
  r.bytes_read += layout.chunk_bytes();
  for (int layer = 0; layer < layout.layers; ++layer) {
    r.verify_slice(chunk, layer, out + layout.slice_offset(layer));
  }
}

void SnapshotReader::read_summaries(std::byte* out) const {
  const Impl& r = *impl_;
  const uint64_t each = r.decoded.summary_bytes_per_chunk;
  const std::vector<uint64_t>& expected = r.decoded.summary_checksum;
  r.read_at(out, each * expected.size(), r.summaries_at, "the summaries");
  r.bytes_read += static_cast<int64_t>(each * expected.size());
  for (size_t c = 0; c < expected.size(); ++c) {
    const uint64_t computed = xxh3_64(out + c * each, each);
    if (computed != expected[c]) {
      corrupt(r.path, str("the checksum of the summary of ", r.describe(static_cast<int64_t>(c))),
              computed, expected[c]);
    }
  }
}

int64_t SnapshotReader::payload_bytes_read() const { return impl_->bytes_read; }

}  // namespace kvpager
