// The rounds of BLAKE2b, over words of one message or vectors of the words of several. Everything here is
// the including file's own, which may be compiled for a wider instruction set than others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager {
namespace {

constexpr uint64_t kIv[8] = {
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
};

constexpr int kRounds = 12;
// Which word of the block each step takes. Rounds 10 and 11 repeat 0 and 1.
constexpr uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

// A file that hashes vectors may overload it.
template <int kRight, class Word>
inline Word rotated(Word word) {
  return word >> kRight | word << (64 - kRight);
}

template <class Word>
inline void mix(Word* v, int a, int b, int c, int d, Word x, Word y) {
  v[a] += v[b] + x;
  v[d] = rotated<32>(v[d] ^ v[a]);
  v[c] += v[d];
  v[b] = rotated<24>(v[b] ^ v[c]);
  v[a] += v[b] + y;
  v[d] = rotated<16>(v[d] ^ v[a]);
  v[c] += v[d];
  v[b] = rotated<63>(v[b] ^ v[c]);
}

// One block, whose words are m[16]. `counted`: bytes of key and message up to its end.
template <class Word>
inline void compress_words(Word* h, const Word* m, uint64_t counted, bool last) {
  Word v[16];
  for (int i = 0; i < 8; ++i) {
    v[i] = h[i];
    v[i + 8] = Word{} + kIv[i];
  }
  v[12] ^= counted;
  if (last) v[14] = ~v[14];
#pragma GCC unroll 12
  for (int round = 0; round < kRounds; ++round) {
    const uint8_t* s = kSigma[round % 10];
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace
}  // namespace kvpager
