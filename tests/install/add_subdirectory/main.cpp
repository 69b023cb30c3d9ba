// Uses a Ladon that was built with this project: two query heads share one KV head, causal.
#include <ladon/ladon.h>

#include <cmath>
#include <cstdio>

int main() {
  // Query 0 sees key 0 alone; query 1 weighs the keys 1/4 and 3/4 (head 0) or 1/2 each (head 1).
  using ladon::DType;
  using ladon::Tensor;
  const Tensor q = Tensor::from_values(DType::kF32, {1, 2, 2, 1}, {1.0, 1.0, 1.0, 0.0});
  const Tensor k = Tensor::from_values(DType::kF32, {1, 2, 1, 1}, {0.0, std::log(3.0)});
  const Tensor v = Tensor::from_values(DType::kF32, {1, 2, 1, 1}, {4.0, 8.0});
  const ladon::Context context;
  const Tensor out = ladon::attention(context, q, k, v, {.scale = 1.0, .causal = true});

  const float expected[] = {4.0F, 4.0F, 7.0F, 6.0F};
  const float* result = out.data_as<float>();
  bool right = true;
  for (int i = 0; i < 4; ++i) {
    std::printf("%g (expected %g)\n", static_cast<double>(result[i]),
                static_cast<double>(expected[i]));
    right = right && std::fabs(result[i] - expected[i]) < 1e-5F;
  }
  return right ? 0 : 1;
}
