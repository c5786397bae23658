// Expressions whose values tell how a compiler read them. canary.cc is compiled once per instruction
// set with the kernels' own flags, and once more with flags the kernels must never get.
#pragma once

namespace kvpager::canary {

struct Expressions {
  float (*product_and_sum)(float a, float b, float c);                    // a * b + c
  double (*product_and_sum_double)(double a, double b, double c);         // a * b + c
  void (*add_products)(const float* a, const float* b, float* c, int n);  // c[i] += a[i] * b[i]
  float (*sum)(const float* x, int n);                                    // in ascending order
  void (*quotients)(const float* a, const float* b, float* out, int n);   // a[i] / b[i]
  float (*add_zero)(float x);                                             // x + 0: -0 becomes +0
  bool (*is_nan)(float x);                                                // x != x
};

const Expressions& kernels_base();
const Expressions& kernels_v3();
const Expressions& kernels_v4();
const Expressions& loose_base();
const Expressions& loose_v3();
const Expressions& loose_v4();

}  // namespace kvpager::canary
