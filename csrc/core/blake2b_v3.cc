// BLAKE2b once more, four messages side by side. Compiled for x86-64-v3; nothing of it is shared.
#include <immintrin.h>

#include <cstring>

#include "core/blake2b_lanes.h"

namespace kvpager {
namespace {

using Lanes = uint64_t __attribute__((vector_size(8 * kBlake2bLanes)));
using Bytes = uint8_t __attribute__((vector_size(8 * kBlake2bLanes)));

// Whole bytes change places in one instruction.
template <int kRight>
inline Lanes rotated(Lanes words) {
  if constexpr (kRight % 8 != 0) return words >> kRight | words << (64 - kRight);
  Bytes from{};
  for (size_t i = 0; i < sizeof(Bytes); ++i) {
    from[i] = static_cast<uint8_t>(i / 8 * 8 + (i + kRight / 8) % 8);
  }
  return reinterpret_cast<Lanes>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(words), reinterpret_cast<__m256i>(from)));
}

}  // namespace
}  // namespace kvpager

#include "core/blake2b_rounds.h"
#include "kvpager/require.h"

namespace kvpager {
namespace {

constexpr size_t kBlockBytes = 128;

uint64_t word_at(const unsigned char* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

}  // namespace

void blake2b_lanes_v3(const uint64_t* start, uint64_t counted, const void* const* messages,
                      size_t bytes, uint64_t* out) {
  KVPAGER_REQUIRE(bytes > 0 && __builtin_cpu_supports("x86-64-v3"));
  Lanes h[8];
  for (int i = 0; i < 8; ++i) h[i] = Lanes{} + start[i];
  const unsigned char* from[kBlake2bLanes];
  for (size_t lane = 0; lane < kBlake2bLanes; ++lane) {
    from[lane] = static_cast<const unsigned char*>(messages[lane]);
  }
  unsigned char ends[kBlake2bLanes][kBlockBytes] = {};
  for (;;) {
    const bool last = bytes <= kBlockBytes;
    if (last) {
      for (size_t lane = 0; lane < kBlake2bLanes; ++lane) {
        std::memcpy(ends[lane], from[lane], bytes);
        from[lane] = ends[lane];
      }
    }
    counted += last ? bytes : kBlockBytes;
    Lanes m[16];
    for (int i = 0; i < 16; ++i) {
      m[i] = Lanes{word_at(from[0] + 8 * i), word_at(from[1] + 8 * i), word_at(from[2] + 8 * i),
                   word_at(from[3] + 8 * i)};
    }
    compress_words(h, m, counted, last);
    if (last) break;
    bytes -= kBlockBytes;
    for (const unsigned char*& at : from) at += kBlockBytes;
  }
  for (size_t lane = 0; lane < kBlake2bLanes; ++lane) {
    for (size_t i = 0; i < 8; ++i) out[8 * lane + i] = h[i][lane];
  }
}

}  // namespace kvpager
