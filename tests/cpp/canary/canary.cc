#include "canary.h"

namespace kvpager::canary {
namespace {

float product_and_sum(float a, float b, float c) { return a * b + c; }

double product_and_sum_double(double a, double b, double c) { return a * b + c; }

void add_products(const float* a, const float* b, float* c, int n) {
  for (int i = 0; i < n; ++i) c[i] += a[i] * b[i];
}

float sum(const float* x, int n) {
  float total = 0.0f;
  for (int i = 0; i < n; ++i) total += x[i];
  return total;
}

void quotients(const float* a, const float* b, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = a[i] / b[i];
}

float add_zero(float x) { return x + 0.0f; }

bool is_nan(float x) { return x != x; }

}  // namespace

const Expressions& KVPAGER_CANARY() {
  static constexpr Expressions kExpressions = {
      product_and_sum, product_and_sum_double, add_products, sum, quotients, add_zero, is_nan};
  return kExpressions;
}

}  // namespace kvpager::canary
