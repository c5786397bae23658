// The kernels' own exp, tanh, merge and division, held in every tier against scalars that follow the
// order of operations in attention.h.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attend_problem.h"
#include "kernels/kernel_table.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_CASE("exp has the documented bits over the whole range, near those of binary64 above -87") {
  std::vector<float> x = {0.0f,
                          -0.0f,
                          -kInfinity,
                          -87.0f,
                          std::nextafter(-87.0f, 0.0f),
                          std::nextafter(-87.0f, -100.0f)};
  for (uint32_t bits = 0x80000000u; bits < 0xFF800000u; bits += 8191) x.push_back(bits_float(bits));
  for (int n = 0; n <= 126; ++n) {  // where the reduced argument changes sides
    float edge = static_cast<float>(-(n + 0.5) * 0.69314718055994531);
    for (int i = 0; i < 20; ++i) edge = std::nextafter(edge, 0.0f);
    for (int i = 0; i < 40; ++i) x.push_back(edge = std::nextafter(edge, -kInfinity));
  }
  in_every_tier([&](const KernelTable& table) {
    std::vector<float> y(x.size());
    table.exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
    int64_t wrong = 0;
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      wrong += float_bits(y[i]) != float_bits(scalar_exp(x[i]));
      const double exact = std::exp(double{x[i]});
      if (x[i] >= -87.0f) worst = std::max(worst, std::fabs(double{y[i]} - exact) / exact);
    }
    CHECK(wrong == 0);
    CHECK(worst < 2.5e-7);
    CHECK(float_bits(y[0]) == float_bits(1.0f));
    CHECK(float_bits(y[1]) == float_bits(1.0f));
    CHECK(float_bits(y[2]) == 0);
  });
}

// Softcapped scores through a tile of one visible key: query i has x[i] as its only product.
std::vector<float> capped(const KernelTable& table, const std::vector<float>& x, float softcap) {
  std::vector<float> k(16 * 16);
  std::vector<float> v(16 * 16);
  k[0] = 1.0f;
  const int64_t count = static_cast<int64_t>(x.size());
  std::vector<float> q(x.size() * 16);
  std::vector<float> states(x.size() * static_cast<size_t>(state_stride(16)));
  std::vector<TileQuery> queries(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    q[i * 16] = x[i];
    float* state = states.data() + i * static_cast<size_t>(state_stride(16));
    state[16] = -kInfinity;
    queries[i] = {q.data() + i * 16, state, 0, 1};
  }
  TileParams params;
  params.k = k.data();
  params.v = v.data();
  params.tokens = params.k_dim = params.v_dim = 16;
  params.softcap = softcap;
  params.queries = queries.data();
  params.count = count;
  std::vector<float> scratch(static_cast<size_t>(tile_scratch_floats(params)),
                             std::numeric_limits<float>::quiet_NaN());
  params.scratch = scratch.data();
  table.attend_tile(params);
  std::vector<float> scores;
  for (const TileQuery& query : queries) scores.push_back(query.state[16]);
  return scores;
}

TEST_CASE("soft caps have the documented bits for scores and caps of every size") {
  std::vector<float> x = {0.0f};
  for (const float sign : {1.0f, -1.0f}) {
    for (uint32_t bits = 1; bits < 0x7F800000u; bits += 1999993) {
      x.push_back(sign * bits_float(bits));
    }
    for (int i = 0; i < 400; ++i) x.push_back(sign * 0.05f * static_cast<float>(i));
    x.push_back(sign * std::numeric_limits<float>::max());
    x.push_back(sign * std::numeric_limits<float>::denorm_min());
  }
  for (const float softcap : {50.0f, 1.0f, 0.1f, 1e-30f, std::numeric_limits<float>::denorm_min(),
                              1e30f, std::numeric_limits<float>::max()}) {
    CAPTURE(softcap);
    in_every_tier([&](const KernelTable& table) {
      const std::vector<float> scores = capped(table, x, softcap);
      int64_t wrong = 0;
      int64_t beyond = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        // A dot product that begins at +0 has no other zero.
        const float dot = std::fmaf(x[i], 1.0f, 0.0f);
        const float expected = scalar_tanh(dot / softcap) * softcap;
        wrong += float_bits(scores[i]) != float_bits(expected);
        beyond += !(std::fabs(scores[i]) <= softcap);
      }
      CHECK(wrong == 0);
      CHECK(beyond == 0);
    });
  }
}

ScalarState random_state(std::mt19937& random, int v_dim) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const auto pick = [&](std::initializer_list<float> values) {
    return *(values.begin() + random() % values.size());
  };
  ScalarState state;
  state.m = pick({0.0f, -0.0f, uniform(random), 100 * uniform(random), 1e4f * uniform(random),
                  3e38f, -3e38f, 1e-42f, -1e-42f});
  state.l = pick({1.0f, 1.0f + uniform(random), 1e3f, 1e-30f, 1.5f});
  for (int j = 0; j < v_dim; ++j) {
    state.acc.push_back(pick({0.0f, -0.0f, uniform(random), 1e-42f * uniform(random),
                              1e-38f * uniform(random), 1e30f * uniform(random)}));
  }
  return state;
}

std::vector<float> packed(const ScalarState& state) {
  std::vector<float> out = state.acc;
  out.resize(out.size() + kLanes, 0.0f);
  out[state.acc.size()] = state.m;
  out[state.acc.size() + 1] = state.l;
  return out;
}

TEST_CASE("states merge and finish in the documented order, zeros, denormals and extremes too") {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    const int v_dim = 16 * static_cast<int>(1 + random() % 17);
    ScalarState total = random_state(random, v_dim);
    const ScalarState part = random_state(random, v_dim);
    if (round % 5 == 0) {  // nothing was seen before
      total = ScalarState();
      total.acc.assign(static_cast<size_t>(v_dim), 0.0f);
    }
    ScalarState expected = total;
    scalar_merge(part, &expected);
    in_every_tier([&](const KernelTable& table) {
      std::vector<float> merged = packed(total);
      const std::vector<float> other = packed(part);
      table.merge_state(merged.data(), other.data(), v_dim);
      const std::vector<float> wanted = packed(expected);
      REQUIRE(differing_bits(merged, wanted) == 0);
      std::vector<float> out(static_cast<size_t>(v_dim));
      table.finish_state(merged.data(), v_dim, out.data());
      int64_t wrong = 0;
      for (size_t j = 0; j < out.size(); ++j) {
        wrong += float_bits(out[j]) != float_bits(expected.acc[j] / expected.l);
      }
      REQUIRE(wrong == 0);
    });
  }
}

}  // namespace
}  // namespace kvpager::testing
