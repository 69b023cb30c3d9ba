// Uses an installed Ladon: one query over two keys, worked out by hand.
#include <ladon/ladon.h>

#include <cmath>
#include <cstdio>
#include <string_view>

int main() {
  if (std::string_view(ladon::version()) != EXPECTED_VERSION) {
    std::printf("library %s, package %s\n", ladon::version(), EXPECTED_VERSION);
    return 1;
  }

  // Scores 0 and ln 3 give the weights 1/4 and 3/4.
  using ladon::DType;
  using ladon::Tensor;
  const Tensor q = Tensor::from_values(DType::kF32, {1, 1, 1, 1}, {1.0});
  const Tensor k = Tensor::from_values(DType::kF32, {1, 2, 1, 1}, {0.0, std::log(3.0)});
  const Tensor v = Tensor::from_values(DType::kF32, {1, 2, 1, 2}, {4.0, 0.0, 8.0, 1.0});
  Tensor out(DType::kF32, {1, 1, 1, 2});
  Tensor lse(DType::kF32, {1, 1, 1});
  const ladon::Context context;
  ladon::attention(context, q, k, v, {.scale = 1.0}, out, lse);

  const float* result = out.data_as<float>();
  const float denominator = *lse.data_as<float>();
  std::printf("out = %g %g, lse = %g\n", static_cast<double>(result[0]),
              static_cast<double>(result[1]), static_cast<double>(denominator));
  const bool right = std::fabs(result[0] - 7.0F) < 1e-5F && std::fabs(result[1] - 0.75F) < 1e-6F &&
                     std::fabs(denominator - std::log(4.0F)) < 1e-6F;
  return right ? 0 : 1;
}
