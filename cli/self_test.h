// The self-test behind `ladon check`: small random problems on one instruction set or on a GPU,
// each compared with the reference in double precision on the CPU.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/tensor.h"

namespace ladon::cli {

/// One tensor that was compared.
struct Finding {
  std::string area;  // as in self_test_areas()
  std::string what;  // "bf16 GQA causal: dq"
  double error = 0;  // largest_error(), or 1 for a broken promise that has no size
  double allowed = 0;
  bool good() const { return error <= allowed; }
};

class SelfTest {
 public:
  /// `slack` is a factor of the allowed errors.
  SelfTest(const ContextOptions& options, std::uint64_t seed, double slack);

  void run_area(std::string_view area);
  const std::vector<Finding>& findings() const { return findings_; }

 private:
  void forward();
  void decode();
  void backward();
  void caches();
  void rotary();
  void layers();
  void optimisers();

  void check_forward(DType dtype, int variant);
  void check_backward(DType dtype, int variant);
  void check_cache(DType query_dtype, DType storage);

  /// `roundings`: how often numbers of 16 bits are rounded on the way to the result.
  /// Of tensors wherever they are.
  void compare(const std::string& what, const Tensor& got, const Tensor& truth, DType dtype,
               int roundings = 1);
  void promise(const std::string& what, bool kept);

  Context context_;
  Context single_;     // the same kernels on one thread, or in a separate stream
  Context reference_;  // the truth
  std::uint64_t seed_;
  double slack_;
  std::string area_;
  std::vector<Finding> findings_;
};

struct SelfTestArea {
  std::string_view name;
  std::string_view kernels;  // those that it runs, with blanks between
};

/// In the order in which they are run.
const std::vector<SelfTestArea>& self_test_areas();

inline constexpr std::array<DType, 4> kFloatTypes{DType::kF64, DType::kF32, DType::kF16,
                                                  DType::kBF16};

}  // namespace ladon::cli
