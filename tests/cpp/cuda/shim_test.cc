// What the shim makes of the functions of cuda/portable.h, against what the PTX manual says they do.
#include <doctest/doctest.h>

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../kernels/float_mode.h"
#include "cuda/portable.h"

namespace kvpager::gpu {
namespace {

struct Out {
  uint32_t* words = nullptr;
  uint64_t* longs = nullptr;
};

KVP_KERNEL count_threads(const Out p) {
  const int64_t at = block_index() * block_threads() + thread_index();
  p.words[at] += 1;
  if (lane_index() != thread_index() % 32 || warp_index() != thread_index() / 32) p.words[at] = 99;
  if (grid_blocks() != 7 || block_threads() != 96) p.words[at] = 98;
}

TEST_CASE("every thread of every block runs once") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    shim::set_seed(seed);
    std::vector<uint32_t> runs(7 * 96);
    REQUIRE(launch(count_threads, {7, 96, 0, nullptr}, Out{runs.data(), nullptr}) == 0);
    CHECK(runs == std::vector<uint32_t>(7 * 96, 1));
  }
}

TEST_CASE("a grid that a GPU would refuse is refused") {
  const Out none;
  CHECK(launch(count_threads, {0, 96, 0, nullptr}, none) == 0);  // nothing to do
  CHECK(launch(count_threads, {-1, 96, 0, nullptr}, none) != 0);
  CHECK(launch(count_threads, {int64_t{1} << 31, 96, 0, nullptr}, none) != 0);
  CHECK(launch(count_threads, {7, 0, 0, nullptr}, none) != 0);
  CHECK(launch(count_threads, {7, 100, 0, nullptr}, none) != 0);
  CHECK(launch(count_threads, {7, 1056, 0, nullptr}, none) != 0);
  CHECK(launch(count_threads, {7, 96, 227 * 1024 + 1, nullptr}, none) != 0);
}

KVP_KERNEL shuffles(const Out p) {
  const int lane = lane_index();
  uint32_t* const words = p.words + 8 * thread_index();
  words[0] = shuffle(static_cast<uint32_t>(lane) * 3, (lane * 5 + 1) % 32);
  words[1] = static_cast<uint32_t>(shuffle_xor(-lane, 6));
  words[2] = float_to_bits(shuffle_xor(static_cast<float>(lane) + 0.5f, 31));
  words[3] = ballot(lane % 3 == 0);
  words[4] = static_cast<uint32_t>(shuffle(lane, 32 + 7));  // lanes count modulo 32
  p.longs[thread_index()] = shuffle((uint64_t{1} << 40) + static_cast<uint64_t>(lane), 9);
}

TEST_CASE("shuffles and ballots of each warp see its own 32 lanes") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    shim::set_seed(seed);
    std::vector<uint32_t> words(8 * 128);
    std::vector<uint64_t> longs(128);
    REQUIRE(launch(shuffles, {1, 128, 0, nullptr}, Out{words.data(), longs.data()}) == 0);
    for (uint32_t thread = 0; thread < 128; ++thread) {
      const uint32_t lane = thread % 32;
      const uint32_t* got = &words[8 * thread];
      CHECK(got[0] == (lane * 5 + 1) % 32 * 3);
      CHECK(got[1] == static_cast<uint32_t>(-static_cast<int>(lane ^ 6)));
      CHECK(bits_float(got[2]) == static_cast<float>(31 - lane) + 0.5f);
      CHECK(got[3] == 0x49249249u);
      CHECK(got[4] == 7);
      CHECK(longs[thread] == (uint64_t{1} << 40) + 9);
    }
  }
}

KVP_KERNEL load_matrices(const Out p) {
  // Row r of matrix m holds 100 m + 10 r + column, at places that are out of order.
  uint16_t* const tile = reinterpret_cast<uint16_t*>(shared_memory());
  const int lane = lane_index();
  const int place = (lane * 7 + 3) % 32;
  for (int i = 0; i < 8; ++i) {
    tile[8 * place + i] = static_cast<uint16_t>(100 * (lane / 8) + 10 * (lane % 8) + i);
  }
  sync_warp();
  uint32_t straight[4], turned[4];
  load_matrix_x4(straight, tile + 8 * place);
  load_matrix_x4_trans(turned, tile + 8 * place);
  for (int i = 0; i < 4; ++i) {
    p.words[8 * lane + i] = straight[i];
    p.words[8 * lane + 4 + i] = turned[i];
  }
}

TEST_CASE("load_matrix gives each thread the elements the manual names") {
  std::vector<uint32_t> words(8 * 32);
  REQUIRE(launch(load_matrices, {1, 32, 512, nullptr}, Out{words.data(), nullptr}) == 0);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t m = 0; m < 4; ++m) {
      const uint32_t row = lane / 4, column = lane % 4 * 2;
      CHECK((words[8 * lane + m] & 0xFFFF) == 100 * m + 10 * row + column);
      CHECK((words[8 * lane + m] >> 16) == 100 * m + 10 * row + column + 1);
      CHECK((words[8 * lane + 4 + m] & 0xFFFF) == 100 * m + 10 * column + row);
      CHECK((words[8 * lane + 4 + m] >> 16) == 100 * m + 10 * (column + 1) + row);
    }
  }
}

// A product of whole matrices through fragments. Which element of a fragment is which is written as in
// the manual: "row = groupID for a_i where 0 <= i < 2 || 4 <= i < 6, groupID + 8 otherwise", ...
struct Product {
  enum class Kind { kBFloat16, kFloat16, kUint8 } kind = Kind::kBFloat16;
  const uint16_t* a = nullptr;  // [16][k]: bits of the elements
  const uint16_t* b = nullptr;  // [k][8]
  float* d = nullptr;           // [16][8]; int32 of kUint8
};

KVP_KERNEL multiply(const Product p) {
  const int group = lane_index() / 4, in_group = lane_index() % 4;
  uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  const bool bytes = p.kind == Product::Kind::kUint8;
  const int each = bytes ? 4 : 2;  // elements in a register
  const int k = bytes ? 32 : 16;
  for (int i = 0; i < 4 * each; ++i) {
    const bool upper = (i >= each && i < 2 * each) || i >= 3 * each;
    const int column = in_group * each + i % each + (i >= 2 * each ? k / 2 : 0);
    const uint32_t bits = p.a[(group + (upper ? 8 : 0)) * k + column];
    a[i / each] |= bits << (i % each * (32 / each));
  }
  for (int i = 0; i < 2 * each; ++i) {
    const int row = in_group * each + i % each + (i >= each ? k / 2 : 0);
    b[i / each] |= static_cast<uint32_t>(p.b[row * 8 + group]) << (i % each * (32 / each));
  }
  float d[4];
  int32_t sums[4];
  for (int i = 0; i < 4; ++i) {
    d[i] = p.d[(group + (i >= 2 ? 8 : 0)) * 8 + in_group * 2 + i % 2];
    std::memcpy(&sums[i], &d[i], sizeof d[i]);
  }
  if (p.kind == Product::Kind::kBFloat16) mma_bfloat16(d, a, b[0], b[1]);
  if (p.kind == Product::Kind::kFloat16) mma_float16(d, a, b[0], b[1]);
  if (bytes) {
    mma_uint8(sums, a, b[0], b[1]);
    std::memcpy(d, sums, sizeof d);
  }
  for (int i = 0; i < 4; ++i) {
    p.d[(group + (i >= 2 ? 8 : 0)) * 8 + in_group * 2 + i % 2] = d[i];
  }
}

std::vector<float> product(Product::Kind kind, const std::vector<uint16_t>& a,
                           const std::vector<uint16_t>& b, std::vector<float> d) {
  REQUIRE(launch(multiply, {1, 32, 0, nullptr}, Product{kind, a.data(), b.data(), d.data()}) == 0);
  return d;
}

TEST_CASE("mma multiplies the matrices whose fragments it is given") {
  std::mt19937 random(3);
  for (const auto kind : {Product::Kind::kBFloat16, Product::Kind::kFloat16}) {
    const auto narrow = kind == Product::Kind::kBFloat16 ? float_to_bfloat16 : float_to_float16;
    const auto widen = kind == Product::Kind::kBFloat16 ? bfloat16_to_float : float16_to_float;
    for (int round = 0; round < 20; ++round) {
      std::vector<uint16_t> a(16 * 16), b(16 * 8);
      std::vector<float> d(16 * 8);
      // Even rounds: small integers, of which every sum is exact in any order.
      const auto draw = [&] {
        return round % 2 == 0 ? static_cast<float>(random() % 17) - 8
                              : (static_cast<float>(random() % 100000) - 50000) / 30000;
      };
      for (uint16_t& x : a) x = narrow(draw());
      for (uint16_t& x : b) x = narrow(draw());
      for (float& x : d) x = draw();
      const std::vector<float> got = product(kind, a, b, d);
      for (size_t row = 0; row < 16; ++row) {
        for (size_t column = 0; column < 8; ++column) {
          double exact = d[row * 8 + column];
          double size = std::fabs(exact);
          for (size_t k = 0; k < 16; ++k) {
            const double term = double{widen(a[row * 16 + k])} * widen(b[k * 8 + column]);
            exact += term;
            size += std::fabs(term);
          }
          const double error = std::fabs(got[row * 8 + column] - exact);
          CHECK(error <= (round % 2 == 0 ? 0.0 : 16 * size * FLT_EPSILON));
        }
      }
    }
  }
}

TEST_CASE("mma takes every 16-bit pattern for the number it is") {
  for (const auto kind : {Product::Kind::kBFloat16, Product::Kind::kFloat16}) {
    const auto widen = kind == Product::Kind::kBFloat16 ? bfloat16_to_float : float16_to_float;
    const uint16_t one = kind == Product::Kind::kBFloat16 ? 0x3F80 : 0x3C00;
    int64_t wrong = 0;
    for (uint32_t first = 0; first < 65536; first += 16) {
      // One element of each row of a against a row of ones; the next time round, of b.
      const bool of_a = first % 32 == 0;
      const size_t k = first / 32 % 16;
      std::vector<uint16_t> a(16 * 16), b(16 * 8);
      for (size_t i = 0; i < 16; ++i) a[i * 16 + k] = of_a ? static_cast<uint16_t>(first + i) : one;
      for (size_t i = 0; i < 8; ++i) b[k * 8 + i] = of_a ? one : static_cast<uint16_t>(first + i);
      const std::vector<float> got = product(kind, a, b, std::vector<float>(16 * 8));
      for (size_t i = 0; i < got.size(); ++i) {
        const float x = widen(static_cast<uint16_t>(first + (of_a ? i / 8 : i % 8)));
        wrong += std::isnan(x) ? !std::isnan(got[i]) : got[i] != x;
      }
    }
    CHECK(wrong == 0);
  }
}

// 1 and `count` products of the given size, `distance` of k apart.
float one_and(int count, float size, size_t distance) {
  std::vector<uint16_t> a(16 * 16), b(16 * 8, float_to_float16(0.5f));
  for (size_t row = 0; row < 16; ++row) {
    for (int i = 0; i < count; ++i) {
      a[row * 16 + static_cast<size_t>(i) * distance] = float_to_float16(size * 2);
    }
  }
  const std::vector<float> d =
      product(Product::Kind::kFloat16, a, b, std::vector<float>(16 * 8, 1.0f));
  CHECK(d == std::vector<float>(16 * 8, d[0]));
  return d[0];
}

TEST_CASE(
    "mma adds one product after the other, or as the environment asks, all or eight at once") {
  const char* const asked = std::getenv("KVPAGER_SHIM_MMA");
  const std::string mode = asked == nullptr ? "" : asked;
  const float one = 1.0f, next = 1.0f + 0x1p-23f;
  // Each alone is half a step, and goes to the even neighbour; together they are a step.
  CHECK(one_and(2, 0x1p-24f, 9) == (mode == "aligned" ? next : one));
  CHECK(one_and(2, 0x1p-24f, 1) == (mode.empty() ? one : next));
  // A quarter of a step: the 25th bit.
  CHECK(one_and(4, 0x1p-25f, 1) == (mode == "aligned" ? next : one));
}

TEST_CASE("mma of bytes is exact, and its sums wrap") {
  std::mt19937 random(4);
  std::vector<uint16_t> a(16 * 32), b(32 * 8);
  std::vector<uint32_t> start(16 * 8);
  for (uint16_t& x : a) x = static_cast<uint16_t>(random() & 0xFF);
  for (uint16_t& x : b) x = static_cast<uint16_t>(random() & 0xFF);
  for (uint32_t& x : start) x = random();
  start[5] = 0x7FFFFFFF;
  std::vector<float> d(16 * 8);
  std::memcpy(d.data(), start.data(), 4 * d.size());
  const std::vector<float> got = product(Product::Kind::kUint8, a, b, d);
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      int64_t sum = static_cast<int32_t>(start[row * 8 + column]);
      for (size_t k = 0; k < 32; ++k) {
        sum += int64_t{a[row * 32 + k]} * static_cast<int8_t>(b[k * 8 + column]);
      }
      CHECK(float_bits(got[row * 8 + column]) == static_cast<uint32_t>(sum));
    }
  }
}

TEST_CASE("a row of an mma depends on its own row of a and d alone") {
  std::mt19937 random(5);
  std::vector<uint16_t> a(16 * 16), b(16 * 8);
  std::vector<float> d(16 * 8);
  for (uint16_t& x : a) x = float_to_bfloat16(static_cast<float>(random()) / 1e9f - 2.0f);
  for (uint16_t& x : b) x = float_to_bfloat16(static_cast<float>(random()) / 1e9f - 2.0f);
  for (float& x : d) x = static_cast<float>(random()) / 1e9f;
  const std::vector<float> together = product(Product::Kind::kBFloat16, a, b, d);
  for (size_t row = 0; row < 16; ++row) {
    std::vector<uint16_t> others(16 * 16, 0x7FC0);  // NaN
    std::copy_n(&a[row * 16], 16, &others[row * 16]);
    const std::vector<float> alone = product(Product::Kind::kBFloat16, others, b, d);
    CHECK(std::memcmp(&alone[row * 8], &together[row * 8], 8 * sizeof(float)) == 0);
  }
}

struct Copies {
  const unsigned char* from = nullptr;  // 4 times 16 bytes
  unsigned char* seen = nullptr;        // what shared memory held, 64 bytes at a time
};

KVP_KERNEL copies(const Copies p) {
  unsigned char* const shared = shared_memory();
  if (thread_index() != 0) return;
  unsigned char* seen = p.seen;
  const auto look = [&] {
    std::memcpy(seen, shared, 64);
    seen += 64;
  };
  std::memset(shared, 7, 64);
  copy_async16(shared, p.from, true);
  copy_async_commit();
  copy_async16(shared + 16, p.from + 16, true);
  copy_async16(shared + 32, nullptr, false);
  copy_async_commit();
  copy_async16(shared + 48, p.from + 48, true);
  copy_async_wait<0>();  // of committed groups
  look();
  copy_async_commit();
  copy_async16(shared, p.from + 32, true);
  copy_async_commit();
  copy_async_wait<1>();
  look();
  copy_async_wait<0>();
  look();
}

TEST_CASE("an asynchronous copy happens when its group is waited for, not before") {
  alignas(16) unsigned char from[64];
  for (int i = 0; i < 64; ++i) from[i] = static_cast<unsigned char>(100 + i);
  std::vector<unsigned char> seen(4 * 64);
  REQUIRE(launch(copies, {1, 32, 64, nullptr}, Copies{from, seen.data()}) == 0);
  const std::vector<unsigned char> never(16, 0xFF), zeros(16, 0);
  const auto unit = [&](int moment, int index) {
    const auto at = seen.begin() + 64 * moment + 16 * index;
    return std::vector<unsigned char>(at, at + 16);
  };
  const auto source = [&](int index) {
    return std::vector<unsigned char>(from + 16 * index, from + 16 * index + 16);
  };
  CHECK(unit(0, 0) == source(0));
  CHECK(unit(0, 1) == source(1));
  CHECK(unit(0, 2) == zeros);
  CHECK(unit(0, 3) == never);  // not committed
  CHECK(unit(1, 0) == never);  // overwritten by the group that is pending
  CHECK(unit(1, 3) == source(3));
  CHECK(unit(2, 0) == source(2));
}

struct Sums {
  uint64_t* least;
  uint64_t* total;
  int32_t* count;
  uint32_t* bits;
};

KVP_KERNEL reduce(const Sums p) {
  const int64_t at = block_index() * block_threads() + thread_index();
  atomic_min(p.least, static_cast<uint64_t>(1000 - at));
  atomic_add(p.total, static_cast<uint64_t>(at));
  const int32_t before = atomic_add(p.count, 2);
  if (before % 2 != 0) atomic_add(p.count, 1000);
  atomic_or(p.bits, 1u << (at % 31));
}

TEST_CASE("atomic operations of all threads arrive") {
  uint64_t least = ~uint64_t{0}, total = 0;
  int32_t count = 0;
  uint32_t bits = 0;
  REQUIRE(launch(reduce, {3, 256, 0, nullptr}, Sums{&least, &total, &count, &bits}) == 0);
  CHECK(least == 1000 - 767);
  CHECK(total == 768 * 767 / 2);
  CHECK(count == 2 * 768);
  CHECK(bits == 0x7FFFFFFFu);
}

TEST_CASE("bytes are permuted and multiplied as the manual says") {
  CHECK(permute_bytes(0x33221100u, 0x77665544u, 0x7410u) == 0x77441100u);
  CHECK(permute_bytes(0x00800000u, 0x7F0000FFu, 0xFCA8u) == 0x00FFFF00u);
  std::mt19937 random(6);
  for (int i = 0; i < 1000; ++i) {
    const uint32_t codes = random();
    const int32_t weights = static_cast<int32_t>(random());
    int64_t sum = 5;
    for (int j = 0; j < 4; ++j) {
      sum += static_cast<int64_t>(codes >> (8 * j) & 0xFF) *
             static_cast<int8_t>(static_cast<uint32_t>(weights) >> (8 * j) & 0xFF);
    }
    CHECK(dot4(codes, weights, 5) == sum);
  }
  CHECK(dot4(0x01010101u, 0x01010101, std::numeric_limits<int32_t>::max()) ==
        std::numeric_limits<int32_t>::min() + 3);
}

TEST_CASE("exp2 flushes denormal results and is exact at whole numbers") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(exp2_approximate(0.0f) == 1.0f);
  CHECK(exp2_approximate(-0.0f) == 1.0f);
  CHECK(exp2_approximate(-126.0f) == 0x1p-126f);
  CHECK(float_to_bits(exp2_approximate(-126.5f)) == 0);
  CHECK(float_to_bits(exp2_approximate(-infinity)) == 0);
  CHECK(exp2_approximate(infinity) == infinity);
  CHECK(std::isnan(exp2_approximate(std::numeric_limits<float>::quiet_NaN())));
  for (int i = 0; i < 10000; ++i) {
    const float x = -static_cast<float>(i) / 80;
    const double exact = std::exp2(double{x});
    CHECK(std::fabs(exp2_approximate(x) - exact) <= 2 * exact * FLT_EPSILON);
  }
}

struct Floats {
  float x;
  float* out;
};

KVP_KERNEL third(const Floats p) {
  sync_warp();  // arithmetic also after a switch
  p.out[thread_index()] = div_rn(p.x, 3.0f);
}

TEST_CASE("kernels round to nearest and keep denormals whatever the caller does") {
  const float x = 0x1.8p-127f;
  volatile float exact = x / 3.0f;
  for (const testing::NamedMode& mode : testing::kModes) {
    std::vector<float> out(32, -1.0f);
    int code = -1;
    {
      const testing::FloatMode set(mode.bits);
      code = launch(third, {1, 32, 0, nullptr}, Floats{x, out.data()});
    }
    CAPTURE(mode.name);
    CHECK(code == 0);
    for (const float y : out) CHECK(float_bits(y) == float_bits(exact));
  }
}

}  // namespace
}  // namespace kvpager::gpu
