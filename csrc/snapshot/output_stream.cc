#include "snapshot/output_stream.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "kvpager/error.h"
#include "snapshot/sections.h"

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

OutputStream::OutputStream(OutputFile* file, uint64_t front_bytes, FileCipher* cipher)
    : file_(file),
      cipher_(cipher),
      front_bytes_(front_bytes),
      flushed_(front_bytes),
      handed_over_(front_bytes) {
  if (cipher != nullptr) {
    const uint64_t block = cipher->block_bytes();
    if (block == 0 || kBufferBytes % block != 0) {
      refuse({"block_bytes", str(block), str("a power of two up to ", kBufferBytes)});
    }
  }
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kBufferAlignment, kBufferBytes)));
  if (buffer_ == nullptr) throw std::bad_alloc();
}

void OutputStream::append(const void* data, uint64_t bytes) {
  if (bytes >= kDirectBytes && cipher_ == nullptr) {
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
  if (cipher_ != nullptr) {
    for (const std::byte* address : addresses) append(address, bytes);
    return;
  }
  flush();
  std::vector<iovec> parts;
  parts.reserve(addresses.size());
  for (const std::byte* address : addresses) parts.push_back(part_of(address, bytes));
  write(std::move(parts), addresses.size() * bytes);
}

void OutputStream::write_front(const std::string& front) {
  if (cipher_ == nullptr) return file_->write_at(0, {part_of(front.data(), front.size())});
  const std::string header = cipher_->header(size());
  const auto* plain = reinterpret_cast<const std::byte*>(front.data());
  const std::vector<std::byte>& text = encrypted(0, plain, front.size(), 1);
  file_->write_at(0, {part_of(header.data(), header.size()), part_of(text.data(), text.size())});
}

uint64_t OutputStream::file_bytes(uint64_t plain_bytes) const {
  if (cipher_ == nullptr) return plain_bytes;
  const uint64_t rest = plain_bytes - std::min(plain_bytes, front_bytes_);
  const uint64_t blocks = (rest + cipher_->block_bytes() - 1) / cipher_->block_bytes();
  return cipher_->header_bytes() + plain_bytes + (1 + blocks) * cipher_->tag_bytes();
}

const std::vector<std::byte>& OutputStream::encrypted(uint64_t first, const std::byte* plain,
                                                      uint64_t bytes, uint64_t blocks) {
  text_.resize(bytes + blocks * cipher_->tag_bytes());
  cipher_->encrypt(first, plain, bytes, text_.data());
  return text_;
}

// REQUIRES: all bytes before are whole blocks.
void OutputStream::write_blocks(const std::byte* plain, uint64_t bytes) {
  const uint64_t each = cipher_->block_bytes();
  const uint64_t first = 1 + (flushed_ - front_bytes_) / each;
  const std::vector<std::byte>& text = encrypted(first, plain, bytes, (bytes + each - 1) / each);
  const uint64_t offset = file_bytes(flushed_);
  file_->write_at(offset, {part_of(text.data(), text.size())});
  file_->start_writeback(offset, text.size());
}

void OutputStream::flush() {
  const uint64_t bytes = std::exchange(buffered_, 0);
  if (bytes == 0) return;
  if (cipher_ == nullptr) return write({part_of(buffer_.get(), bytes)}, bytes);
  write_blocks(buffer_.get(), bytes);
  flushed_ += bytes;
}

void OutputStream::write(std::vector<iovec> parts, uint64_t bytes) {
  file_->write_at(flushed_, std::move(parts));
  flushed_ += bytes;
  if (flushed_ - handed_over_ < kWritebackBytes) return;
  file_->start_writeback(handed_over_, flushed_ - handed_over_);
  handed_over_ = flushed_;
}

}  // namespace kvpager::snapshot
