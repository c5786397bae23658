#include "core/blake2b.h"

#include <algorithm>
#include <cstring>

#include "base/processor.h"
#include "core/blake2b_lanes.h"
#include "core/blake2b_rounds.h"
#include "kvpager/require.h"

namespace kvpager {

void Blake2b::compress(State* state, const unsigned char* block, uint64_t counted, bool last) {
  uint64_t m[16];
  std::memcpy(m, block, sizeof m);
  compress_words(state->data(), m, counted, last);
}

Blake2b::Blake2b(size_t digest_bytes, const void* key, size_t key_bytes, const Person& person)
    : counted_(0) {
  KVPAGER_REQUIRE(digest_bytes >= 1 && digest_bytes <= sizeof(Digest));
  KVPAGER_REQUIRE(key_bytes <= kMostKeyBytes);
  std::copy(kIv, kIv + 8, start_.begin());
  start_[0] ^= 0x01010000 ^ (uint64_t{key_bytes} << 8) ^ digest_bytes;
  uint64_t words[2];
  std::memcpy(words, person.data(), sizeof words);
  start_[6] ^= words[0];
  start_[7] ^= words[1];
  keyed_ = start_;
  if (key_bytes == 0) return;
  std::memcpy(key_block_.data(), key, key_bytes);
  counted_ = kBlockBytes;
  compress(&keyed_, key_block_.data(), counted_, /*last=*/false);
}

Blake2b::Digest Blake2b::operator()(const void* message, size_t bytes) const {
  const auto* from = static_cast<const unsigned char*>(message);
  State state = keyed_;
  uint64_t counted = counted_;
  for (; bytes > kBlockBytes; from += kBlockBytes, bytes -= kBlockBytes) {
    counted += kBlockBytes;
    compress(&state, from, counted, /*last=*/false);
  }
  if (bytes > 0 || counted_ == 0) {
    unsigned char block[kBlockBytes] = {};
    if (bytes > 0) std::memcpy(block, from, bytes);
    compress(&state, block, counted + bytes, /*last=*/true);
  } else {  // the key is all there is
    state = start_;
    compress(&state, key_block_.data(), counted_, /*last=*/true);
  }
  return state;
}

void Blake2b::each(const void* const* messages, size_t bytes, size_t count, Digest* out) const {
  size_t done = 0;
#ifdef KVPAGER_CORE_V3
  if (processor().level >= 3 && bytes > 0) {
    for (; done + kBlake2bLanes <= count; done += kBlake2bLanes) {
      blake2b_lanes_v3(keyed_.data(), counted_, messages + done, bytes, out[done].data());
    }
  }
#endif
  for (; done < count; ++done) out[done] = (*this)(messages[done], bytes);
}

}  // namespace kvpager
