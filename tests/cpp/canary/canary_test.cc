// Compiled as the kernels are, arithmetic means what it says. The same source with loose flags shows
// that these expressions would tell if it did not.
#include "canary.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace kvpager::canary {
namespace {

struct Tier {
  std::string name;
  const Expressions& strict;
  const Expressions& loose;
  bool has_fma;
};

std::vector<Tier> tiers() {
  std::vector<Tier> all = {{"base", kernels_base(), loose_base(), false}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) all.push_back({"v3", kernels_v3(), loose_v3(), true});
  if (__builtin_cpu_supports("x86-64-v4")) all.push_back({"v4", kernels_v4(), loose_v4(), true});
#endif
  return all;
}

constexpr int kCount = 1024;

// Sums that cancel: contracted they keep what rounding the product drops.
struct Cancelling {
  Cancelling() {
    for (int i = 0; i < kCount; ++i) {
      const float x = 1.0f + static_cast<float>(2 * i + 1) * 0x1p-13f;
      volatile float product = x * x;
      a.push_back(x);
      b.push_back(x);
      c.push_back(-product);
    }
  }
  std::vector<float> a, b, c;
};

int wrong_products(const Expressions& expressions) {
  const Cancelling numbers;
  int wrong = 0;
  for (size_t i = 0; i < kCount; ++i) {
    wrong += expressions.product_and_sum(numbers.a[i], numbers.b[i], numbers.c[i]) != 0.0f;
  }
  std::vector<float> c = numbers.c;
  expressions.add_products(numbers.a.data(), numbers.b.data(), c.data(), kCount);
  for (const float x : c) wrong += x != 0.0f;
  const double x = 1.0 + 0x1p-30;
  volatile double product = x * x;
  wrong += expressions.product_and_sum_double(x, x, -product) != 0.0;
  return wrong;
}

// Each 1 is lost beside 2^24 when it is added alone, and kept when it meets another first.
int wrong_sums(const Expressions& expressions) {
  int wrong = 0;
  for (int n = 33; n <= kCount; n += 31) {
    std::vector<float> x(static_cast<size_t>(n), 1.0f);
    x[0] = 0x1p24f;
    wrong += expressions.sum(x.data(), n) != 0x1p24f;
  }
  return wrong;
}

int wrong_quotients(const Expressions& expressions) {
  std::vector<float> a, b, out(kCount);
  for (int i = 0; i < kCount; ++i) {
    a.push_back(1.0f + static_cast<float>(i) * 0x1.01p-10f);
    b.push_back(3.0f + static_cast<float>(i) * 0x1.07p-9f);
  }
  expressions.quotients(a.data(), b.data(), out.data(), kCount);
  int wrong = 0;
  for (size_t i = 0; i < kCount; ++i) {
    // A quotient of floats rounded from binary64 is correctly rounded.
    wrong += out[i] != static_cast<float>(double{a[i]} / double{b[i]});
  }
  return wrong;
}

int wrong_specials(const Expressions& expressions) {
  return std::signbit(expressions.add_zero(-0.0f)) +
         !expressions.is_nan(std::numeric_limits<float>::quiet_NaN());
}

TEST_CASE(
    "with the kernels' flags nothing is contracted, reordered, approximated or assumed away") {
  for (const Tier& tier : tiers()) {
    CAPTURE(tier.name);
    CHECK(wrong_products(tier.strict) == 0);
    CHECK(wrong_sums(tier.strict) == 0);
    CHECK(wrong_quotients(tier.strict) == 0);
    CHECK(wrong_specials(tier.strict) == 0);
  }
}

#ifdef __OPTIMIZE__
TEST_CASE("with loose flags each of these expressions shows what was done to it") {
  for (const Tier& tier : tiers()) {
    CAPTURE(tier.name);
    if (tier.has_fma) CHECK(wrong_products(tier.loose) > kCount);
    CHECK(wrong_sums(tier.loose) > 0);
    CHECK(wrong_quotients(tier.loose) > 0);
    CHECK(wrong_specials(tier.loose) == 2);
  }
}
#endif

}  // namespace
}  // namespace kvpager::canary
