// What the lanes of a warp do together, and asynchronous copies.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/half.h"
#include "shim/fibers.h"
#include "shim/races.h"

namespace kvpager::shim {
namespace {

typedef float Four __attribute__((vector_size(16)));
typedef uint32_t FourWords __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

// What the checks of a sanitizer would find here, check_shared and the types have ruled out.
#define KVP_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

// The low and the high halves of four words as numbers.
struct Wide {
  Four low, high;
};

KVP_UNCHECKED inline Four widen_float16(FourWords bits) {
  // Shifted into place a half lacks 112 of the exponent, which the product puts right, also of a
  // denormal; infinities and NaN still lack the rest of theirs.
  const FourWords magnitude = (bits & 0x7FFFu) << 13;
  const FourWords special = magnitude >= 0x0F800000u;
  const Four scaled = reinterpret_cast<Four>(magnitude) * 0x1p112f;
  return reinterpret_cast<Four>(reinterpret_cast<FourWords>(scaled) | (special & 0x7F800000u) |
                                (bits & 0x8000u) << 16);
}

template <bool kBFloat16>
KVP_UNCHECKED Wide widen(FourWords in) {
  if (kBFloat16) {
    return {reinterpret_cast<Four>(in << 16), reinterpret_cast<Four>(in & 0xFFFF0000u)};
  }
  return {widen_float16(in), widen_float16(in >> 16)};
}

template <class T>
using Sums = T[16][8];

template <class T>
KVP_UNCHECKED void gather(const Warp& warp, Sums<T>& d) {
  for (int lane = 0; lane < kWarp; ++lane) {
    const T* in = static_cast<const T*>(warp.product[lane].d);
    for (int i = 0; i < 4; ++i) d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = in[i];
  }
}

template <class T>
KVP_UNCHECKED void scatter(const Warp& warp, const Sums<T>& d) {
  for (int lane = 0; lane < kWarp; ++lane) {
    T* out = static_cast<T*>(warp.product[lane].d);
    for (int i = 0; i < 4; ++i) out[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

// Where element (row, k) of a is: at row_at(row) + k_at(k).
struct Halves {  // [lane][half][word]
  static constexpr int kDepth = 16;
  static constexpr int row_at(int row) { return row % 8 * 32 + row / 8; }
  static constexpr int k_at(int k) { return k % 8 / 2 * 8 + k % 2 * 4 + k / 8 * 2; }
};
struct Bytes {  // [lane][byte][word]
  static constexpr int kDepth = 32;
  static constexpr int row_at(int row) { return row % 8 * 64 + row / 8; }
  static constexpr int k_at(int k) { return k % 16 / 4 * 16 + k % 4 * 4 + k / 16 * 2; }
};

// d += a b with k ascending, four rows at a time: that many sums are on their way while one waits for
// its predecessor.
template <class At>
KVP_UNCHECKED void multiply_rows(const float* a, const Four (&b)[At::kDepth][2], Sums<float>& d) {
  for (int row = 0; row < 16; row += 4) {
    Four sums[4][2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&sums[i][0], d[row + i], sizeof(Four));
      std::memcpy(&sums[i][1], d[row + i] + 4, sizeof(Four));
    }
#pragma GCC unroll 32
    for (int k = 0; k < At::kDepth; ++k) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const float x = a[At::row_at(row + i) + At::k_at(k)];
        sums[i][0] += x * b[k][0];
        sums[i][1] += x * b[k][1];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      std::memcpy(d[row + i], &sums[i][0], sizeof(Four));
      std::memcpy(d[row + i] + 4, &sums[i][1], sizeof(Four));
    }
  }
}

// KVPAGER_SHIM_MMA=aligned: sums as published measurements describe those of sm_90, sm_80: of sm_80
// (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021; Khattak and
// Mikaitis, "Accurate models of NVIDIA tensor cores", 2025). The products of a step and d are cut off so
// many bits below the largest exponent among them, added exactly and cut off to float32.
// What kernels promise of bits has to hold in these arithmetics too.
struct Alignment {
  int products = 0;  // of one step; 0: no alignment
  int bits = 0;
};

Alignment alignment() {
  static const Alignment asked = [] {
    const char* const text = std::getenv("KVPAGER_SHIM_MMA");
    if (text == nullptr || *text == 0) return Alignment{};
    if (std::strcmp(text, "aligned") == 0) return Alignment{16, 25};
    if (std::strcmp(text, "sm_80") == 0) return Alignment{8, 24};
    std::fprintf(stderr, "shim: KVPAGER_SHIM_MMA=%s, expected aligned or sm_80\n", text);
    std::abort();
  }();
  return asked;
}

template <bool kBFloat16>
float aligned_sum(const float* a, const float* b, float d, Alignment step) {
  constexpr int kLeastExponent = kBFloat16 ? -126 : -14;
  double terms[17];
  const int count = step.products;
  int largest = std::numeric_limits<int>::min();
  for (int k = 0; k <= count; ++k) {
    terms[k] = k < count ? double{a[k]} * b[k] : d;
    if (!std::isfinite(terms[k])) {
      double sum = d;
      for (int i = 0; i < count; ++i) sum += double{a[i]} * b[i];
      return static_cast<float>(sum);
    }
    if (terms[k] == 0) continue;
    const int exponent = k < count ? std::max(std::ilogb(a[k]), kLeastExponent) +
                                         std::max(std::ilogb(b[k]), kLeastExponent)
                                   : std::max(std::ilogb(d), -126);
    largest = std::max(largest, exponent);
  }
  if (largest == std::numeric_limits<int>::min()) return 0.0f;
  double sum = 0;
  for (int k = 0; k <= count; ++k) sum += std::trunc(std::ldexp(terms[k], step.bits - largest));
  sum = std::ldexp(sum, largest - step.bits);
  const float rounded = static_cast<float>(sum);
  const bool outwards = std::fabs(double{rounded}) > std::fabs(sum);
  return outwards ? std::nextafter(rounded, 0.0f) : rounded;
}

template <bool kBFloat16>
void multiply_aligned(const float* a, const Four (&b)[16][2], Sums<float>& d, Alignment step) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float line[16], across[16];
      for (int k = 0; k < 16; ++k) {
        line[k] = a[Halves::row_at(row) + Halves::k_at(k)];
        across[k] = b[k][column / 4][column % 4];
      }
      float& sum = d[row][column];
      for (int k = 0; k < 16; k += step.products) {
        sum = aligned_sum<kBFloat16>(line + k, across + k, sum, step);
      }
    }
  }
}

// Products of 16-bit elements are exact in float32 (but for bfloat16 products below 2^-126 or above
// the largest float), so a fused multiply-add would give the same bits.
template <bool kBFloat16>
KVP_UNCHECKED void multiply_halves(Warp& warp) {
  float a[kWarp * 8];
  Four b[16][2];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& in = warp.product[lane];
    const int g = lane / 4;
    const int k = lane % 4 * 2;
    FourWords words;
    std::memcpy(&words, in.a, sizeof words);
    const Wide wide = widen<kBFloat16>(words);
    std::memcpy(a + lane * 8, &wide, sizeof wide);
    const Wide column = widen<kBFloat16>(FourWords{in.b[0], in.b[1], 0, 0});
    b[k][g / 4][g % 4] = column.low[0];
    b[k + 1][g / 4][g % 4] = column.high[0];
    b[k + 8][g / 4][g % 4] = column.low[1];
    b[k + 9][g / 4][g % 4] = column.high[1];
  }
  Sums<float> d;
  gather(warp, d);
  if (const Alignment step = alignment(); step.products != 0) {
    multiply_aligned<kBFloat16>(a, b, d, step);
  } else {
    multiply_rows<Halves>(a, b, d);
  }
  scatter(warp, d);
}

KVP_UNCHECKED void multiply_bytes(Warp& warp) {
  float a[kWarp * 16];
  Four b[32][2];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& in = warp.product[lane];
    const int g = lane / 4;
    const int k = lane % 4 * 4;
    FourWords words;
    std::memcpy(&words, in.a, sizeof words);
    for (int i = 0; i < 4; ++i) {
      const Four codes =
          __builtin_convertvector(reinterpret_cast<FourInts>(words >> (8 * i) & 0xFFu), Four);
      std::memcpy(a + lane * 16 + i * 4, &codes, sizeof codes);
      b[k + i][g / 4][g % 4] = static_cast<int8_t>(in.b[0] >> (8 * i) & 0xFFu);
      b[k + i + 16][g / 4][g % 4] = static_cast<int8_t>(in.b[1] >> (8 * i) & 0xFFu);
    }
  }
  Sums<float> products = {};  // of 32 numbers below 2^15: exact
  multiply_rows<Bytes>(a, b, products);
  Sums<uint32_t> d;
  gather(warp, d);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      d[row][column] += static_cast<uint32_t>(static_cast<int32_t>(products[row][column]));
    }
  }
  scatter(warp, d);
}

KVP_UNCHECKED uint16_t element(const void* row, int index) {
  uint16_t out;
  std::memcpy(&out, static_cast<const unsigned char*>(row) + 2 * index, sizeof out);
  return out;
}

KVP_UNCHECKED void load_all(Warp& warp, bool transposed) {
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int j = 0; j < 4; ++j) {
      const auto* rows = warp.matrix + 8 * j;
      const uint32_t low = transposed ? element(rows[2 * t].row, g) : element(rows[g].row, 2 * t);
      const uint32_t high =
          transposed ? element(rows[2 * t + 1].row, g) : element(rows[g].row, 2 * t + 1);
      warp.matrix[lane].out[j] = low | high << 16;
    }
  }
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace

void perform(Warp& warp) {
  switch (warp.kind) {
    case Collective::kShuffle:
      for (int lane = 0; lane < kWarp; ++lane) {
        warp.results[lane] = warp.values[warp.sources[lane]];
      }
      break;
    case Collective::kBallot: {
      uint64_t votes = 0;
      for (int lane = 0; lane < kWarp; ++lane) votes |= warp.values[lane] << lane;
      for (uint64_t& result : warp.results) result = votes;
      break;
    }
    case Collective::kLoadMatrix:
      load_all(warp, false);
      break;
    case Collective::kLoadMatrixTransposed:
      load_all(warp, true);
      break;
    case Collective::kMmaBFloat16:
      multiply_halves<true>(warp);
      break;
    case Collective::kMmaFloat16:
      multiply_halves<false>(warp);
      break;
    case Collective::kMmaUint8:
      multiply_bytes(warp);
      break;
    case Collective::kSyncWarp:
      if (kFindsRaces) note_warp_barrier(warp);
      break;
    case Collective::kNone:
    case Collective::kSyncBlock:
      break;
  }
}

uint64_t exchange(uint64_t value, int source, Place place) {
  Lane& self = *current;
  self.warp->values[self.lane] = value;
  self.warp->sources[self.lane] = static_cast<uint8_t>(source);
  collect(Collective::kShuffle, place);
  return self.warp->results[self.lane];
}

uint32_t vote(bool yes, Place place) {
  Lane& self = *current;
  self.warp->values[self.lane] = yes ? 1 : 0;
  collect(Collective::kBallot, place);
  return static_cast<uint32_t>(self.warp->results[self.lane]);
}

void load_matrix(uint32_t* out, const void* row, bool transposed, Place place) {
  Lane& self = *current;
  check_shared(self, row, place, "load_matrix");
  if (kFindsRaces) note_access(row, 16, Access::kRead, __builtin_return_address(0));
  self.warp->matrix[self.lane] = {out, row};
  collect(transposed ? Collective::kLoadMatrixTransposed : Collective::kLoadMatrix, place);
}

void multiply(void* d, const uint32_t* a, uint32_t b0, uint32_t b1, Collective kind, Place place) {
  Lane& self = *current;
  self.warp->product[self.lane] = {d, a, {b0, b1}};
  collect(kind, place);
}

void copy_async(void* shared, const void* global, bool valid, Place place) {
  Lane& self = *current;
  check_shared(self, shared, place, "copy_async16");
  if (!is_aligned(global)) {
    fail(*self.warp, "lane %d copies from misaligned %p (%s:%d)", self.lane, global, place.file,
         place.line);
  }
  if (kFindsRaces) note_copy(shared, __builtin_return_address(0));
  std::memset(shared, 0xFF, 16);
  self.copies.push_back({static_cast<unsigned char*>(shared),
                         static_cast<const unsigned char*>(global), valid, self.copy_groups});
}

void commit_copies() { ++current->copy_groups; }

void wait_copies(uint32_t pending) {
  Lane& self = *current;
  while (self.copies_done < self.copies.size()) {
    const AsyncCopy& copy = self.copies[self.copies_done];
    // Uncommitted copies have the number of the next group and are waited for by none.
    if (copy.group + pending >= self.copy_groups) break;
    if (kFindsRaces) note_copied(copy.to, __builtin_return_address(0));
    if (copy.valid) {
      std::memcpy(copy.to, copy.from, 16);
    } else {
      std::memset(copy.to, 0, 16);
    }
    ++self.copies_done;
  }
  if (self.copies_done == self.copies.size() || self.copies_done >= 64) {
    self.copies.erase(self.copies.begin(),
                      self.copies.begin() + static_cast<std::ptrdiff_t>(self.copies_done));
    self.copies_done = 0;
  }
}

void check_shared(const Lane& lane, const void* address, Place place, const char* what) {
  const unsigned char* const at = static_cast<const unsigned char*>(address);
  if (!is_aligned(address) || at < lane.shared || at + 16 > lane.shared + lane.shared_bytes) {
    fail(*lane.warp, "lane %d: %s of 16 bytes at offset %lld of %lld of shared memory (%s:%d)",
         lane.lane, what, static_cast<long long>(at - lane.shared),
         static_cast<long long>(lane.shared_bytes), place.file, place.line);
  }
}

}  // namespace kvpager::shim
