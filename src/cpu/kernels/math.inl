// Vector arithmetic shared by the kernels: operators, 2^x and tanh.
//
// 2^x splits x into the nearest whole n and f in [-1/2, 1/2], evaluates 2^f - 1 = f * poly(f), and
// scales by 2^n. 2^0 is exactly 1, so a softmax over one key gives exactly that key's value. Below
// 2^kSmallest the result is 0: a subnormal weight would cost a microcode assist per FMA and adds
// nothing.
#pragma once

#include <cstdint>

// Unrolls a loop of a few iterations, so that the arrays it indexes stay in registers.
#if defined(__clang__)
#define LADON_UNROLL _Pragma("unroll")
#else
#define LADON_UNROLL _Pragma("GCC unroll 16")
#endif

namespace ladon::cpu {
namespace {

template <class V>
inline V operator+(V a, V b) {
  return {a.v + b.v};
}
template <class V>
inline V operator-(V a, V b) {
  return {a.v - b.v};
}
template <class V>
inline V operator*(V a, V b) {
  return {a.v * b.v};
}
template <class V>
inline V operator/(V a, V b) {
  return {a.v / b.v};
}

template <class V>
inline V load(const typename V::Scalar* p) {
  return load(static_cast<V*>(nullptr), p);
}
template <class V>
inline V broadcast(typename V::Scalar x) {
  return broadcast(static_cast<V*>(nullptr), x);
}
template <class V>
inline V zero() {
  return broadcast<V>(0);
}
template <class V>
inline bool any(typename V::Mask mask) {
  return any(static_cast<V*>(nullptr), mask);
}

/// Four horizontal sums; instruction sets that can take four at once overload this.
template <class V>
inline void store_sums(typename V::Scalar* to, V a, V b, V c, V d) {
  to[0] = sum(a);
  to[1] = sum(b);
  to[2] = sum(c);
  to[3] = sum(d);
}

template <class Scalar>
struct MathConstants;

template <>
struct MathConstants<float> {
  static constexpr float kLog2e = 1.44269504F;
  static constexpr float kLowest = -3.402823466e38F;
  static constexpr float kInfinity = __builtin_inff();
  static constexpr float kSmallest = -126.0F;
  // Minimax fit of (2^f - 1) / f on [-1/2, 1/2]; the error of 2^f is 1.6e-8.
  static constexpr int kTerms = 6;
  static constexpr float kExp2[kTerms] = {0.69314718F,    0.240226477F,   0.0555033237F,
                                          0.00961843692F, 0.00133988750F, 0.000153533605F};
  // exp(2|x|) is limited to 2^kTanhLimit: tanh rounds to 1 long before, and its derivative squares
  // the power, which must not overflow.
  static constexpr float kTanhLimit = 60.0F;
  // A softcap below kSmallestCap has the effect of 0, one above kLargestCap has no effect.
  static constexpr double kSmallestCap = 1e-30;
  static constexpr double kLargestCap = 1e30;
};

template <>
struct MathConstants<double> {
  static constexpr double kLog2e = 1.4426950408889634;
  static constexpr double kLowest = -1.7976931348623157e308;
  static constexpr double kInfinity = __builtin_inf();
  static constexpr double kSmallest = -1022.0;
  // The Taylor series, ln(2)^n / n!; the terms left out are below 4e-18.
  static constexpr int kTerms = 13;
  static constexpr double kExp2[kTerms] = {
      0.6931471805599453,     0.24022650695910072,    0.05550410866482158,
      0.009618129107628477,   0.0013333558146428443,  0.00015403530393381608,
      1.5252733804059841e-05, 1.3215486790144307e-06, 1.0178086009239699e-07,
      7.0549116208011234e-09, 4.4455382718708108e-10, 2.5678435993488202e-11,
      1.3691488853904130e-12};
  static constexpr double kTanhLimit = 500.0;
  static constexpr double kSmallestCap = 1e-300;
  static constexpr double kLargestCap = 1e300;
};

/// 2^f - 1 for f in [-1/2, 1/2], with a small relative error also near 0.
template <class V>
inline V exp2_minus_one_reduced(V f) {
  using C = MathConstants<typename V::Scalar>;
  V poly = broadcast<V>(C::kExp2[C::kTerms - 1]);
  for (int i = C::kTerms - 2; i >= 0; --i) poly = fma(poly, f, broadcast<V>(C::kExp2[i]));
  return f * poly;
}

/// 2^x for x up to a little above 0. -inf gives 0, NaN gives NaN.
template <class V>
inline V exp2(V x) {
  using C = MathConstants<typename V::Scalar>;
  const V n = round_to_integer(x);
  const V reduced = exp2_minus_one_reduced(x - n) + broadcast<V>(1);
  return select(less(x, broadcast<V>(C::kSmallest)), zero<V>(), times_power_of_two(reduced, n));
}

template <class V>
struct Tanh {
  V value;
  V derivative;
};

/// tanh(|x|) = e / (e + 2) with e = exp(2 |x|) - 1, which is accurate for small x; the sign is put
/// back at the end. The derivative is 4 (e + 1) / (e + 2)^2: 1 - tanh^2 would cancel where tanh is
/// near 1.
template <class V>
inline Tanh<V> tanh(V x) {
  using C = MathConstants<typename V::Scalar>;
  // min() keeps its second operand where that is NaN.
  const V power = min(broadcast<V>(C::kTanhLimit), abs(x) * broadcast<V>(2 * C::kLog2e));
  const V n = round_to_integer(power);
  const V scale = times_power_of_two(broadcast<V>(1), n);
  const V e = fma(exp2_minus_one_reduced(power - n), scale, scale - broadcast<V>(1));
  const V inverse = broadcast<V>(1) / (e + broadcast<V>(2));
  const V magnitude = e * inverse;
  return {select(less(x, zero<V>()), zero<V>() - magnitude, magnitude),
          broadcast<V>(4) * (e + broadcast<V>(1)) * inverse * inverse};
}

/// Converts a double to the compute type. Finite values that are too large become the largest
/// finite value, so that a bias of -1e300 is a low score and not a mask.
template <class Scalar>
inline Scalar narrow(double x) {
  constexpr double kLimit = -static_cast<double>(MathConstants<Scalar>::kLowest);
  const bool finite = x - x == 0;
  if (finite && x > kLimit) return -MathConstants<Scalar>::kLowest;
  if (finite && x < -kLimit) return MathConstants<Scalar>::kLowest;
  return static_cast<Scalar>(x);
}

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

/// Whether n elements are all finite. Compares with the largest finite value instead of calling
/// isfinite(), which compilers assume to be true under some flags.
template <class Scalar>
inline bool all_finite(const Scalar* p, std::int64_t n) {
  const Scalar limit = -MathConstants<Scalar>::kLowest;
  int finite = 1;
  for (std::int64_t i = 0; i < n; ++i) finite &= static_cast<int>(p[i] <= limit && p[i] >= -limit);
  return finite != 0;
}

}  // namespace
}  // namespace ladon::cpu
