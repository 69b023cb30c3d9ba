// 2^x in 12 instructions for kernels whose products run on AMX, where the softmax is what takes time.
//
// x = floor(x) + f: 2^f is a polynomial of degree 5 on [0, 1), a minimax fit with 2^0 = 1 exactly,
// and one instruction multiplies by 2^floor(x). Relative error 1.4e-7, rounding included: two units
// of f32, so that sums and lse stay as accurate as f32 is. (Degree 3 has 9e-5, enough for weights
// that are rounded to bf16 but not for lse; it would save 2 of 12 instructions.) exp2() of
// math.inl has 1.6e-8 and 17 instructions, one of which, rounding, takes two cycles.
#pragma once

#include "cpu/kernels/math.inl"

namespace ladon::cpu {
namespace {

/// 2^x; 0 below 2^-126, as exp2() gives it, NaN for NaN.
inline F32 fast_exp2(F32 x) {
  constexpr float kTerms[] = {0.6931513F, 0.24016444F, 0.055799913F, 0.00901703F, 0.0018671302F};
  const F32 f = fraction(x);
  F32 power = broadcast<F32>(kTerms[4]);
  LADON_UNROLL
  for (int i = 3; i >= 0; --i) power = fma(power, f, broadcast<F32>(kTerms[i]));
  power = fma(power, f, broadcast<F32>(1));
  return times_power_of_two_from(broadcast<F32>(MathConstants<float>::kSmallest), power, x);
}

}  // namespace
}  // namespace ladon::cpu
