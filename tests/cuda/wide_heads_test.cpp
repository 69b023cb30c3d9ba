// The backward pass of heads above 128 on tensor cores: within the bound of the double reference
// for every option, and with NaN in the rows that see it alone.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/element.h"
#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

class CudaWideHeads : public CudaTest {};

struct Dims2 {
  std::int64_t head;
  std::int64_t value;
};
constexpr Dims2 kWideHeads[] = {{192, 128}, {136, 72}, {129, 128}, {160, 160},
                                {256, 256}, {64, 250}, {256, 33}};

/// A problem whose lengths are not multiples of tiles.
Case wide_case(const Dims2& dims, DType dtype, std::uint64_t seed) {
  Case c;
  c.batch = 1;
  c.query_len = 90;
  c.kv_len = 150;
  c.num_heads = 2;
  c.num_kv_heads = 1;
  c.head_dim = dims.head;
  c.value_dim = dims.value;
  c.dtype = c.kv_dtype = dtype;
  c.causal = true;
  c.seed = seed;
  return c;
}

TEST_F(CudaWideHeads, WithinTheBound) {
  for (const Dims2& dims : kWideHeads) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const Case plain = wide_case(dims, dtype, 1);
      Case window = wide_case(dims, dtype, 2);
      window.window_left = 70;
      window.memory = Memory::kHeadsFirst;
      Case rules = wide_case(dims, dtype, 3);
      rules.softcap = 20;
      rules.alibi = true;
      rules.sinks = true;
      for (const Case& problem : {plain, window, rules}) {
        const CaseData data(problem);
        EXPECT_EQ(check_case(context(), data, truth_of(data)), "") << data.problem().describe();
      }
    }
  }
}

/// dq of one head and causal attention.
std::vector<double> dq_of(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& dout) {
  Tensor out(context, q.dtype(), dout.shape());
  Tensor lse(context, DType::kF32, {q.size(0), q.size(2), q.size(1)});
  Tensor dq(context, q.dtype(), q.shape());
  Tensor dk(context, k.dtype(), k.shape());
  Tensor dv(context, v.dtype(), v.shape());
  const AttentionOptions options{.causal = true};
  attention(context, q, k, v, options, out, lse);
  attention_backward(context, q, k, v, options, {.out = out, .lse = lse, .dout = dout},
                     {.dq = dq, .dk = dk, .dv = dv});
  const Tensor host = dq.to_host();
  std::vector<double> elements;
  for (std::int64_t i = 0; i < host.num_elements(); ++i) {
    elements.push_back(load_element(host.data(), host.dtype(), i));
  }
  return elements;
}

TEST_F(CudaWideHeads, NanReachesTheRowsThatSeeIt) {
  constexpr std::int64_t kLength = 200;
  constexpr std::int64_t kToken = 140;
  for (const Dims2& dims : kWideHeads) {
    const Tensor q = normal(DType::kBF16, {1, kLength, 1, dims.head}, 1);
    const Tensor k = normal(DType::kBF16, {1, kLength, 1, dims.head}, 2);
    const Tensor v = normal(DType::kBF16, {1, kLength, 1, dims.value}, 3);
    const Tensor dout = normal(DType::kBF16, {1, kLength, 1, dims.value}, 4);
    Tensor changed = k.to_host();
    const Context host;
    Tensor spot(DType::kF32, {1, 1, 1, 1});
    *spot.data_as<float>() = std::numeric_limits<float>::quiet_NaN();
    copy(host, spot, changed.view().slice(1, kToken, kToken + 1).slice(3, 5, 6));
    const Tensor keys = changed.to(context());
    context().synchronize();
    const std::vector<double> clean = dq_of(context(), q, k, v, dout);
    const std::vector<double> got = dq_of(context(), q, keys, v, dout);
    for (std::int64_t row = 0; row < kLength; ++row) {
      for (std::int64_t i = 0; i < dims.head; ++i) {
        const auto element = static_cast<std::size_t>(row * dims.head + i);
        if (row < kToken) {
          ASSERT_EQ(got[element], clean[element]) << dims.head << " row " << row;
        } else {
          ASSERT_TRUE(std::isnan(got[element])) << dims.head << " row " << row;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
