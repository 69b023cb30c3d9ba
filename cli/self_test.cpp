#include "self_test.h"

#include "compare_tensors.h"
#include "failure.h"

namespace ladon::cli {

const std::vector<SelfTestArea>& self_test_areas() {
  static const std::vector<SelfTestArea> areas{
      {"forward", "forward_tile"},
      {"decode", "forward_decode"},
      {"backward", "row_scales backward combine_dq bias_gradient sink_gradient"},
      {"caches", "forward_tile forward_decode write_kv"},
      {"rope", ""},
      {"layers",
       "project project_input_gradient project_weight_gradient rms_norm rms_norm_backward "
       "sum_heads accumulate write_kv gather_kv"},
      {"optimisers", "sgd_step adamw_step"}};
  return areas;
}

SelfTest::SelfTest(const ContextOptions& options, std::uint64_t seed, double slack)
    : context_(options),
      single_([&] {
        ContextOptions single = options;
        single.num_threads = 1;
        return single;
      }()),
      reference_([&] {
        return ContextOptions{.num_threads = options.num_threads, .isa = Isa::kReference};
      }()),
      seed_(seed),
      slack_(slack) {}

void SelfTest::run_area(std::string_view area) {
  area_ = area;
  if (area == "forward") return forward();
  if (area == "decode") return decode();
  if (area == "backward") return backward();
  if (area == "caches") return caches();
  if (area == "rope") return rotary();
  if (area == "layers") return layers();
  if (area == "optimisers") return optimisers();
  throw Failure("check: no area " + area_);
}

void SelfTest::compare(const std::string& what, const Tensor& got, const Tensor& truth, DType dtype,
                       int roundings) {
  // Sums are made in f32 or f64; with these sizes and unit-normal data their errors stay well below
  // 64 units of the largest number (docs/numerics.md has the bound that always holds). Results of
  // 16 bits add half a unit for each rounding on the way.
  const double unit = epsilon_of(dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  const double rounding = dtype == DType::kF64 || dtype == DType::kF32 ? 0 : epsilon_of(dtype);
  findings_.push_back({.area = area_,
                       .what = std::string(name_of(dtype)) + " " + what,
                       .error = bench::largest_error(got.to_host(), truth.to_host()),
                       .allowed = slack_ * (64 * unit + 0.75 * roundings * rounding)});
}

void SelfTest::promise(const std::string& what, bool kept) {
  findings_.push_back({.area = area_, .what = what, .error = kept ? 0.0 : 1.0, .allowed = 0});
}

}  // namespace ladon::cli
