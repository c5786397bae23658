#include "snapshot/output_stream.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvpager::snapshot {

namespace {

constexpr uint64_t kBufferBytes = uint64_t{4} << 20;
constexpr uint64_t kBufferAlignment = 4096;
// What is at least this large goes to the file straight from the caller's memory.
constexpr uint64_t kDirectBytes = uint64_t{1} << 20;
// Less makes more requests; more leaves the disk idle, all the time in a small file.
constexpr uint64_t kWritebackBytes = uint64_t{2} << 20;

iovec part_of(const void* data, uint64_t bytes) { return {const_cast<void*>(data), bytes}; }

}  // namespace

OutputStream::OutputStream(OutputFile* file, uint64_t front_bytes)
    : file_(file), flushed_(front_bytes), handed_over_(front_bytes) {
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kBufferAlignment, kBufferBytes)));
  if (buffer_ == nullptr) throw std::bad_alloc();
}

void OutputStream::append(const void* data, uint64_t bytes) {
  if (bytes >= kDirectBytes) {
    flush();
    write({part_of(data, bytes)}, bytes);
    return;
  }
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const uint64_t part = std::min(bytes, kBufferBytes - buffered_);
    std::memcpy(buffer_.get() + buffered_, from, part);
    buffered_ += part;
    from += part;
    bytes -= part;
    if (buffered_ == kBufferBytes) flush();
  }
}

void OutputStream::append_all(const std::vector<const std::byte*>& addresses, uint64_t bytes) {
  flush();
  std::vector<iovec> parts;
  parts.reserve(addresses.size());
  for (const std::byte* address : addresses) parts.push_back(part_of(address, bytes));
  write(std::move(parts), addresses.size() * bytes);
}

void OutputStream::write_front(const std::string& front) {
  file_->write_at(0, {part_of(front.data(), front.size())});
}

void OutputStream::flush() {
  const uint64_t bytes = std::exchange(buffered_, 0);
  if (bytes > 0) write({part_of(buffer_.get(), bytes)}, bytes);
}

void OutputStream::write(std::vector<iovec> parts, uint64_t bytes) {
  file_->write_at(flushed_, std::move(parts));
  flushed_ += bytes;
  if (flushed_ - handed_over_ < kWritebackBytes) return;
  file_->start_writeback(handed_over_, flushed_ - handed_over_);
  handed_over_ = flushed_;
}

}  // namespace kvpager::snapshot
