// GELU with a hyperbolic tangent (Hendrycks and Gimpel 2016), in the steps that torch's vectors take: the
// tangent is SLEEF's with an error of 1 ulp (Shibata and Petrogalli, IEEE TPDS 31, 2020), which computes
// with pairs of floats (Dekker, Numerische Mathematik 18, 1971).
#pragma once

#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// A number as the sum of two floats, the second of which is less than the first one's last place.
struct Pair {
  Vec high, low;
};

// The error of a sum is a float, whatever the sizes of a and b are.
KVPAGER_INLINE Pair sum_of(const Vec& a, const Vec& b) {
  const Vec sum = add(a, b);
  const Vec of_b = sub(sum, a);
  return {sum, add(sub(a, sub(sum, of_b)), sub(b, of_b))};
}

KVPAGER_INLINE Pair add(const Pair& a, const Vec& b) {
  const Pair sum = sum_of(a.high, b);
  return {sum.high, add(sum.low, a.low)};
}

KVPAGER_INLINE Pair add(const Pair& a, const Pair& b) {
  const Pair sum = sum_of(a.high, b.high);
  return {sum.high, add(sum.low, add(a.low, b.low))};
}

// Of a number that is at least as large as the second one.
KVPAGER_INLINE Pair add_less(const Pair& a, const Pair& b) {
  const Vec sum = add(a.high, b.high);
  return {sum, add(add(add(sub(a.high, sum), b.high), a.low), b.low)};
}

KVPAGER_INLINE Pair subtract_less(const Pair& a, const Pair& b) {
  const Vec difference = sub(a.high, b.high);
  return {difference, sub(add(sub(sub(a.high, difference), b.high), a.low), b.low)};
}

KVPAGER_INLINE Pair multiply(const Pair& a, const Vec& b) {
  const Vec product = mul(a.high, b);
  return {product, fma(a.low, b, fma(a.high, b, negative(product)))};
}

KVPAGER_INLINE Pair multiply(const Pair& a, const Pair& b) {
  const Vec product = mul(a.high, b.high);
  const Vec rest = fma(a.high, b.high, negative(product));
  return {product, fma(a.high, b.low, fma(a.low, b.high, rest))};
}

KVPAGER_INLINE Pair square(const Pair& a) {
  const Vec product = mul(a.high, a.high);
  return {product, fma(add(a.high, a.high), a.low, fma(a.high, a.high, negative(product)))};
}

// What a * b lacks to be 1.
KVPAGER_INLINE Vec short_of_one(const Pair& a, const Vec& b) {
  return fma(negative(a.low), b, fma(negative(a.high), b, splat(1.0f)));
}

KVPAGER_INLINE Pair reciprocal(const Pair& a) {
  const Vec inverse = div(splat(1.0f), a.high);
  return {inverse, mul(inverse, short_of_one(a, inverse))};
}

KVPAGER_INLINE Pair divide(const Pair& a, const Pair& b) {
  const Vec inverse = div(splat(1.0f), b.high);
  const Vec quotient = mul(a.high, inverse);
  const Vec rest = fma(inverse, a.high, negative(quotient));
  return {quotient, fma(quotient, short_of_one(b, inverse), fma(a.low, inverse, rest))};
}

// e^x of numbers from 0 to 9.
KVPAGER_INLINE Pair exp_pair(const Vec& x) {
  const Vec magic = splat(12582912.0f);
  const Vec rounded = add(mul(x, splat(1.44269504f)), magic);
  const Vec n = sub(rounded, magic);
  Pair r = add(Pair{x, splat(0.0f)}, mul(n, splat(-0.693145751953125f)));
  r = add(r, mul(n, splat(-1.428606765330187045e-06f)));
  Vec p = splat(0.1980960224e-3f);
  p = fma(p, r.high, splat(0.1394256484e-2f));
  p = fma(p, r.high, splat(0.8333456703e-2f));
  p = fma(p, r.high, splat(0.4166637361e-1f));
  Pair t = add(multiply(r, p), splat(0.166666659414234244790680580464f));
  t = add(multiply(r, t), splat(0.5f));
  t = add(r, multiply(square(r), t));
  t = add_less(Pair{splat(1.0f), splat(0.0f)}, t);
  const Vec power = power_of_two(rounded);
  return {mul(t.high, power), mul(t.low, power)};
}

KVPAGER_INLINE Vec tanh_1ulp(const Vec& x) {
  const Vec size = xor_bits(x, sign_bits(x));
  const Pair e = exp_pair(negative(max(negative(size), splat(-9.0f))));
  const Pair inverse = reciprocal(e);
  const Pair quotient = divide(subtract_less(e, inverse), add_less(e, inverse));
  // Beyond 8.664339742 it is 1, to which the quotient does not always round.
  const Vec one = zero_below(size, 0x1.154248p+3f, splat(1.0f));
  return xor_bits(max(add(quotient.high, quotient.low), one), sign_bits(x));
}

KVPAGER_INLINE Vec gelu_tanh(const Vec& x) {
  const Vec cube = mul(mul(x, x), x);
  const Vec inner = mul(splat(0.797884561f), fma(splat(0.044715f), cube, x));
  return mul(mul(splat(0.5f), x), add(splat(1.0f), tanh_1ulp(inner)));
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
