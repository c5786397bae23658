// Micro benchmark behind ADR 14: dot products of bfloat16 queries and keys with the processor's
// bfloat16 dot-product instruction (vdpbf16ps), beside the chain of fused operations the kernels use.
// Says how fast each is, in how many outputs they differ, how far each is from binary64, and what
// becomes of denormals. Needs AVX512_BF16; prints one JSON object per line.
//
//   g++ -std=c++17 -O3 -ffp-contract=off -march=x86-64-v4 -mavx512bf16 bench/micro/bf16_dot_bench.cc
//       -o bf16_dot_bench
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr int kTokens = 64;
constexpr int kDim = 128;

float widen(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Keys as the pager keeps them, [dim][tokens], and with two dimensions side by side,
// [dim / 2][tokens][2], as the instruction wants them.
struct Tile {
  std::vector<uint16_t> rows = std::vector<uint16_t>(kDim * kTokens);
  std::vector<uint16_t> pairs = std::vector<uint16_t>(kDim * kTokens);

  void set(int d, int t, uint16_t bits) {
    rows[static_cast<size_t>(d * kTokens + t)] = bits;
    pairs[static_cast<size_t>((d / 2 * kTokens + t) * 2 + d % 2)] = bits;
  }
};

template <int kQueries>
void fused(const Tile& tile, const uint16_t* q, float* out) {
  for (int t = 0; t < kTokens; t += 32) {
    __m512 sum[kQueries][2];
    for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
    for (int d = 0; d < kDim; ++d) {
      const uint16_t* keys = tile.rows.data() + d * kTokens + t;
      __m512 wide[2];
      for (int i = 0; i < 2; ++i) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + 16 * i));
        wide[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      }
      for (int n = 0; n < kQueries; ++n) {
        const __m512 broadcast = _mm512_set1_ps(widen(q[n * kDim + d]));
        for (int i = 0; i < 2; ++i) sum[n][i] = _mm512_fmadd_ps(broadcast, wide[i], sum[n][i]);
      }
    }
    for (int n = 0; n < kQueries; ++n) {
      for (int i = 0; i < 2; ++i) _mm512_storeu_ps(out + n * kTokens + t + 16 * i, sum[n][i]);
    }
  }
}

template <int kQueries>
void dotted(const Tile& tile, const uint16_t* q, float* out) {
  for (int t = 0; t < kTokens; t += 32) {
    __m512 sum[kQueries][2];
    for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
    for (int d = 0; d < kDim; d += 2) {
      const uint16_t* keys = tile.pairs.data() + (d / 2 * kTokens + t) * 2;
      __m512bh wide[2];
      for (int i = 0; i < 2; ++i) {
        const __m512i both = _mm512_loadu_si512(keys + 32 * i);
        std::memcpy(&wide[i], &both, sizeof both);
      }
      for (int n = 0; n < kQueries; ++n) {
        uint32_t two;
        std::memcpy(&two, q + n * kDim + d, sizeof two);
        const __m512i repeated = _mm512_set1_epi32(static_cast<int>(two));
        __m512bh broadcast;
        std::memcpy(&broadcast, &repeated, sizeof repeated);
        for (int i = 0; i < 2; ++i) sum[n][i] = _mm512_dpbf16_ps(sum[n][i], broadcast, wide[i]);
      }
    }
    for (int n = 0; n < kQueries; ++n) {
      for (int i = 0; i < 2; ++i) _mm512_storeu_ps(out + n * kTokens + t + 16 * i, sum[n][i]);
    }
  }
}

template <class Function>
double nanoseconds(Function run) {
  constexpr int kRuns = 2000;
  double best = 1e30;
  for (int round = 0; round < 30; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRuns; ++i) run();
    const double spent =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
    best = std::min(best, spent / kRuns);
  }
  return best;
}

template <int kQueries>
void compare() {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  Tile tile;
  std::vector<uint16_t> q(kQueries * kDim);
  std::vector<float> a(kQueries * kTokens);
  std::vector<float> b(kQueries * kTokens);
  int64_t outputs = 0;
  int64_t differing = 0;
  double error_fused = 0;
  double error_dotted = 0;
  for (int trial = 0; trial < 2000 / kQueries; ++trial) {
    for (uint16_t& x : q) x = narrow(normal(random));
    for (int d = 0; d < kDim; ++d) {
      for (int t = 0; t < kTokens; ++t) tile.set(d, t, narrow(normal(random)));
    }
    fused<kQueries>(tile, q.data(), a.data());
    dotted<kQueries>(tile, q.data(), b.data());
    for (int n = 0; n < kQueries; ++n) {
      for (int t = 0; t < kTokens; ++t) {
        const size_t at = static_cast<size_t>(n * kTokens + t);
        double exact = 0;
        for (int d = 0; d < kDim; ++d) {
          exact += double{widen(q[static_cast<size_t>(n * kDim + d)])} *
                   double{widen(tile.rows[static_cast<size_t>(d * kTokens + t)])};
        }
        differing += std::memcmp(&a[at], &b[at], sizeof(float)) != 0;
        error_fused += std::fabs(double{a[at]} - exact);
        error_dotted += std::fabs(double{b[at]} - exact);
        ++outputs;
      }
    }
  }
  const double fused_ns = nanoseconds([&] { fused<kQueries>(tile, q.data(), a.data()); });
  const double dotted_ns = nanoseconds([&] { dotted<kQueries>(tile, q.data(), b.data()); });
  std::printf(
      "{\"bench\": \"bf16_dot\", \"queries\": %d, \"fused_ns\": %.0f, \"dotted_ns\": %.0f, "
      "\"outputs\": %lld, \"differing_share\": %.3f, \"mean_error_fused\": %.2e, "
      "\"mean_error_dotted\": %.2e}\n",
      kQueries, fused_ns, dotted_ns, static_cast<long long>(outputs),
      static_cast<double>(differing) / static_cast<double>(outputs),
      error_fused / static_cast<double>(outputs), error_dotted / static_cast<double>(outputs));
}

void denormals() {
  Tile tile;
  std::vector<uint16_t> q(kDim, narrow(1.0f));
  for (int d = 0; d < kDim; ++d) {
    for (int t = 0; t < kTokens; ++t) tile.set(d, t, 0x0040);  // 2^-127
  }
  std::vector<float> a(kTokens);
  std::vector<float> b(kTokens);
  fused<1>(tile, q.data(), a.data());
  dotted<1>(tile, q.data(), b.data());
  std::printf("{\"bench\": \"bf16_denormal_keys\", \"fused\": %.3e, \"dotted\": %.3e}\n",
              double{a[0]}, double{b[0]});
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx512bf16")) {
    std::fprintf(stderr, "bf16_dot_bench: this processor has no AVX512_BF16\n");
    return 1;
  }
  compare<1>();
  compare<6>();
  denormals();
  return 0;
}
