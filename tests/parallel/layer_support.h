// What the tests of tensor-parallel layers share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ladon/random.h"
#include "ladon/tensor_parallel.h"
#include "support/host_context.h"
#include "support/run_case.h"

namespace ladon::test {

inline Tensor normal(DType dtype, const Dims& shape, std::uint64_t seed) {
  Tensor tensor(dtype, shape);
  fill_normal(host_context(), tensor, 0, 1, seed);
  return tensor;
}

/// A whole layer's biases, norms and sinks become random too.
inline void randomise_vectors(AttentionLayer& layer) {
  std::uint64_t seed = 100;
  for (const Parameter& parameter : layer.named_parameters()) {
    if (parameter.value.rank() == 1 || parameter.name.ends_with("_norm.weight")) {
      layer.set_parameter(host_context(), parameter.name,
                          normal(DType::kF32, parameter.value.shape(), seed++));
    }
  }
}

/// Elements within `tolerance` of what a sum of their size allows.
inline void expect_near(const ConstTensorView& got, const ConstTensorView& expected,
                        double tolerance, const std::string& what) {
  const Tensor a = Tensor::copy_of(host_context(), got, DType::kF64);
  const Tensor b = Tensor::copy_of(host_context(), expected, DType::kF64);
  ASSERT_EQ(a.num_elements(), b.num_elements()) << what;
  double largest = 1;
  for (std::int64_t i = 0; i < b.num_elements(); ++i) {
    largest = std::max(largest, std::abs(b.data_as<double>()[i]));
  }
  for (std::int64_t i = 0; i < a.num_elements(); ++i) {
    ASSERT_NEAR(a.data_as<double>()[i], b.data_as<double>()[i], tolerance * largest)
        << what << " at " << i;
  }
}

/// All gradients of a rank's parameters, against the rows of the whole layer's.
inline void expect_gradients_near(const TensorParallelLayer& layer, const AttentionLayer& whole,
                                  double tolerance, const std::string& what) {
  for (const Parameter& parameter : layer.named_parameters()) {
    const TensorParallelLayer::Slice slice =
        layer.slice_of(parameter.name, layer.communicator().rank());
    const ConstTensorView of_whole = whole.parameter(parameter.name).gradient;
    expect_near(parameter.gradient, of_whole.slice(0, slice.first, slice.first + slice.rows),
                tolerance, parameter.name + ", " + what);
  }
}

/// A tensor that every rank has must have the same bits on each.
inline void expect_same_on_all(Communicator& communicator, const Tensor& own,
                               const std::string& what) {
  std::vector<std::int64_t> shape{communicator.size()};
  shape.insert(shape.end(), own.shape().begin(), own.shape().end());
  Tensor all(own.dtype(), Dims(shape));
  all_gather(host_context(), communicator, own, all);
  EXPECT_TRUE(same_bits(all.view().select(0, 0), own)) << what;
}

/// What a rank sends for one sum of f32 elements over all ranks.
inline std::int64_t all_reduce_bytes(std::int64_t count, std::int64_t rank, std::int64_t ranks) {
  const std::int64_t share = count * (rank + 1) / ranks - count * rank / ranks;
  return 4 * (count - share + (ranks - 1) * share);
}

}  // namespace ladon::test
