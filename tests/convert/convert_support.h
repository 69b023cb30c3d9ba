// Layers with known structure for the tests of conversions, all in f64 on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "ladon/convert.h"
#include "ladon/random.h"
#include "support/host_context.h"

namespace ladon::test {

/// Numbers for tests: the same everywhere.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : values_(DType::kF64, {4096}) {
    fill_normal(host_context(), values_, 0, 1, seed);
  }
  double normal() { return values_.data_as<double>()[next_++ % 4096]; }

 private:
  Tensor values_;
  std::int64_t next_ = 0;
};

inline Tensor random_tensor(const Dims& shape, std::uint64_t seed, DType dtype = DType::kF64) {
  Tensor x(dtype, shape);
  fill_normal(host_context(), x, 0, 1, seed);
  return x;
}

/// Every parameter drawn anew, so that biases and sinks are not 0.
template <class Layer>
Layer random_layer(const Layer& like, std::uint64_t seed) {
  Layer layer = like;
  for (Parameter& parameter : layer.named_parameters()) {
    const auto inputs = static_cast<double>(parameter.value.rank() == 2 ? parameter.value.size(1)
                                                                        : std::int64_t{4});
    fill_normal(host_context(), parameter.value, 0, 1 / std::sqrt(inputs), seed++);
  }
  return layer;
}

/// |before - after| / |before| over the outputs for x.
inline double difference(const AttentionLayer& before, const AttentionLayer& after,
                         const Tensor& x) {
  return compare_layers(host_context(), before, after, x).output_error;
}

/// A parameter's elements as rows.
struct Rows {
  Rows(AttentionLayer& layer, const std::string& name)
      : data(layer.parameter(name).value.data_as<double>()),
        columns(layer.parameter(name).value.rank() == 2 ? layer.parameter(name).value.size(1) : 1) {
  }
  double& operator()(std::int64_t row, std::int64_t column) { return data[row * columns + column]; }

  double* data;
  std::int64_t columns;
};

/// Runs change(rows) over the weight and, where there is one, the bias of a projection.
template <class Change>
void change_rows(AttentionLayer& layer, const std::string& name, Change&& change) {
  for (const std::string& parameter : {name + ".weight", name + ".bias"}) {
    if (!layer.has_parameter(parameter)) continue;
    Rows rows(layer, parameter);
    change(rows);
  }
}

/// Row a and row b as one complex number times factor * e^(i phase).
inline void multiply_rows(Rows& rows, std::int64_t a, std::int64_t b, double phase, double factor) {
  const double c = factor * std::cos(phase);
  const double s = factor * std::sin(phase);
  for (std::int64_t n = 0; n < rows.columns; ++n) {
    const double real = rows(a, n);
    const double imaginary = rows(b, n);
    rows(a, n) = c * real - s * imaginary;
    rows(b, n) = s * real + c * imaginary;
  }
}

/// Changes the weights of an MHA layer without changing its function: a phase and a scale for each
/// rope pair of each head, a reflection and scales for its values.
inline void apply_gauge(MultiHeadAttention& layer, Numbers& numbers) {
  const std::int64_t dim = layer.head_dim();
  const auto& rope = layer.options().rope;
  const std::int64_t pairs = rope ? (rope->rotary_dim == 0 ? dim : rope->rotary_dim) / 2 : 0;
  const bool interleaved = rope && rope->layout == RopeLayout::kInterleaved;
  for (std::int64_t h = 0; h < layer.num_heads(); ++h) {
    for (std::int64_t l = 0; l < pairs; ++l) {
      const std::int64_t a = h * dim + (interleaved ? 2 * l : l);
      const std::int64_t b = h * dim + (interleaved ? 2 * l + 1 : l + pairs);
      const double phase = 2 * numbers.normal();
      const double scale = std::exp(0.5 * numbers.normal());
      change_rows(layer, "k_proj", [&](Rows& r) { multiply_rows(r, a, b, phase, scale); });
      change_rows(layer, "q_proj", [&](Rows& r) { multiply_rows(r, a, b, phase, 1 / scale); });
    }
    for (std::int64_t n = 2 * pairs; n < dim; ++n) {  // without rope: a scale
      const double scale = std::exp(0.5 * numbers.normal());
      change_rows(layer, "k_proj", [&](Rows& r) {
        for (std::int64_t c = 0; c < r.columns; ++c) r(h * dim + n, c) *= scale;
      });
      change_rows(layer, "q_proj", [&](Rows& r) {
        for (std::int64_t c = 0; c < r.columns; ++c) r(h * dim + n, c) /= scale;
      });
    }
    // V <- (I - 2 v v^T) S V, W_o <- W_o S^-1 (I - 2 v v^T).
    std::vector<double> v(static_cast<std::size_t>(dim));
    std::vector<double> s(static_cast<std::size_t>(dim));
    double norm = 0;
    for (double& element : v) {
      element = numbers.normal();
      norm += element * element;
    }
    for (double& element : v) element /= std::sqrt(norm);
    for (double& element : s) element = std::exp(0.5 * numbers.normal());
    const auto reflect = [&](auto&& at) {
      double dot = 0;
      for (std::int64_t n = 0; n < dim; ++n) dot += v[static_cast<std::size_t>(n)] * at(n);
      for (std::int64_t n = 0; n < dim; ++n) at(n) -= 2 * dot * v[static_cast<std::size_t>(n)];
    };
    change_rows(layer, "v_proj", [&](Rows& r) {
      for (std::int64_t c = 0; c < r.columns; ++c) {
        const auto at = [&](std::int64_t n) -> double& { return r(h * dim + n, c); };
        for (std::int64_t n = 0; n < dim; ++n) at(n) *= s[static_cast<std::size_t>(n)];
        reflect(at);
      }
    });
    Rows out(layer, "out_proj.weight");
    for (std::int64_t row = 0; row < layer.embed_dim(); ++row) {
      const auto at = [&](std::int64_t n) -> double& { return out(row, h * dim + n); };
      for (std::int64_t n = 0; n < dim; ++n) at(n) /= s[static_cast<std::size_t>(n)];
      reflect(at);
    }
  }
}

/// The same MHA layer with its heads in another order: head n is the old order[n].
inline MultiHeadAttention with_order(const MultiHeadAttention& layer,
                                     const std::vector<std::int64_t>& order) {
  MultiHeadAttentionOptions options = layer.options();
  MultiHeadAttention source = layer;
  for (std::size_t n = 0; n < order.size() && !options.alibi_slopes.empty(); ++n) {
    options.alibi_slopes[n] = layer.options().alibi_slopes[static_cast<std::size_t>(order[n])];
  }
  MultiHeadAttention result = MultiHeadAttention::zeros(options);
  const std::int64_t dim = layer.head_dim();
  for (Parameter& parameter : result.named_parameters()) {
    Rows from(source, parameter.name);
    Rows to(result, parameter.name);
    const bool columns = parameter.name == "out_proj.weight";
    const bool shared = parameter.name == "out_proj.bias";
    const std::int64_t rows = parameter.value.size(0);
    const std::int64_t block = parameter.name == "sinks" ? 1 : dim;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < to.columns; ++c) {
        const auto moved = [&](std::int64_t at) {
          return order[static_cast<std::size_t>(at / block)] * block + at % block;
        };
        to(r, c) = shared ? from(r, c) : columns ? from(r, moved(c)) : from(moved(r), c);
      }
    }
  }
  return result;
}

}  // namespace ladon::test
