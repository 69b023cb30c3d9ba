// A layer full of known numbers, to show that a refused call changed none of them.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "support/host_context.h"

namespace ladon::test {

/// Its gradients hold sentinels, its training flag is not the default.
class SentinelLayer {
 public:
  explicit SentinelLayer(const MultiHeadAttentionOptions& options) : layer_(options, 5) {
    std::uint64_t stream = 100;
    for (Parameter& parameter : layer_.named_parameters()) {
      parameter.make_gradient(host_context());
      fill_normal(host_context(), parameter.gradient, 10, 1, 6, ++stream);
    }
    layer_.eval();
    before_ = bytes();
  }

  MultiHeadAttention& layer() { return layer_; }

  void expect_unchanged() const {
    EXPECT_EQ(bytes(), before_) << "weights or gradients changed";
    EXPECT_FALSE(layer_.is_training());
  }

 private:
  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> all;
    for (const Parameter& parameter : layer_.named_parameters()) {
      for (const Tensor* tensor : {&parameter.value, &parameter.gradient}) {
        const auto* begin = static_cast<const unsigned char*>(tensor->data());
        const auto count =
            static_cast<std::size_t>(tensor->num_elements()) * size_of(tensor->dtype());
        all.insert(all.end(), begin, begin + count);
      }
    }
    return all;
  }

  MultiHeadAttention layer_;
  std::vector<unsigned char> before_;
};

}  // namespace ladon::test
