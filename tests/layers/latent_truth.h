// DeepSeek's attention in plain double loops, written from the papers (DeepSeek-V2, section 2.1 and
// appendix C; YaRN) and sharing no code with the library but the reading of parameters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/latent_attention.h"
#include "ladon/tensor.h"

namespace ladon::test {

namespace latent_truth_detail {

using Row = std::vector<double>;

/// W x + b; b where the layer has one.
inline Row linear(const LatentAttention& layer, const std::string& name, const Row& x) {
  const ConstTensorView w = layer.parameter(name + ".weight").value;
  Row y(static_cast<std::size_t>(w.size(0)), 0);
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) {
      y[i] += x[j] * load_element(w.data(), w.dtype(), static_cast<std::int64_t>(i * x.size() + j));
    }
    if (layer.has_parameter(name + ".bias")) {
      const ConstTensorView b = layer.parameter(name + ".bias").value;
      y[i] += load_element(b.data(), b.dtype(), static_cast<std::int64_t>(i));
    }
  }
  return y;
}

inline void rms_norm(const LatentAttention& layer, const std::string& name, double epsilon,
                     std::span<double> x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double root = std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
  const ConstTensorView w = layer.parameter(name + ".weight").value;
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = x[i] / root * load_element(w.data(), w.dtype(), static_cast<std::int64_t>(i));
  }
}

/// YaRN's attention temperature.
inline double temperature(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

inline void rotate(const LatentAttentionOptions& options, std::int64_t position,
                   std::span<double> x) {
  const std::size_t pairs = x.size() / 2;
  const RopeScalingOptions& scaling = options.rope.scaling;
  const bool yarn = scaling.kind == RopeScaling::kYarn;
  const double dim = static_cast<double>(x.size());
  for (std::size_t n = 0; n < pairs; ++n) {
    double frequency = std::pow(options.rope.base, -2.0 * static_cast<double>(n) / dim);
    double magnitude = 1;
    if (!options.rope.frequencies.empty()) {
      frequency = options.rope.frequencies[n];
      magnitude = options.rope.magnitude;
    }
    if (yarn) {
      // The pair that rotates `rotations` times over the original context.
      const auto pair_of = [&](double rotations) {
        return dim * std::log(scaling.original_context / (rotations * 2 * std::numbers::pi)) /
               (2 * std::log(options.rope.base));
      };
      const double low = std::max(0.0, std::floor(pair_of(scaling.beta_fast)));
      const double high = std::min(dim - 1, std::ceil(pair_of(scaling.beta_slow)));
      const double ramp =
          std::clamp((static_cast<double>(n) - low) / std::max(high - low, 0.001), 0.0, 1.0);
      frequency = frequency * (1 - ramp) + frequency / scaling.factor * ramp;
      magnitude = temperature(scaling.factor, scaling.mscale) /
                  temperature(scaling.factor, scaling.mscale_all_dim);
    }
    const double angle = static_cast<double>(position) * frequency;
    const bool interleaved = options.rope.layout == RopeLayout::kInterleaved;
    double& a = x[interleaved ? 2 * n : n];
    double& b = x[interleaved ? 2 * n + 1 : n + pairs];
    const double old_a = a;
    a = magnitude * (a * std::cos(angle) - b * std::sin(angle));
    b = magnitude * (old_a * std::sin(angle) + b * std::cos(angle));
  }
}

}  // namespace latent_truth_detail

/// The layer's output for x [batch, seq, embed], all on the host; positions of the tokens where
/// they are not 0, 1, ...
inline Tensor latent_truth(const LatentAttention& layer, const Tensor& x,
                           std::span<const std::int64_t> positions) {
  using namespace latent_truth_detail;
  const LatentAttentionOptions& o = layer.options();
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  double scale = 1 / std::sqrt(static_cast<double>(o.nope_dim + o.rope_dim));
  if (o.rope.scaling.kind == RopeScaling::kYarn) {
    const double mscale = temperature(o.rope.scaling.factor, o.rope.scaling.mscale_all_dim);
    scale *= mscale * mscale;
  }
  if (o.scale.has_value() && o.rope.scaling.kind != RopeScaling::kYarn) scale = *o.scale;
  Tensor out(DType::kF64, x.shape());
  const std::int64_t seq = x.size(1);
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    std::vector<Row> queries, latents, rope_keys;
    for (std::int64_t t = 0; t < seq; ++t) {
      const std::int64_t position = positions.empty() ? t : positions[size(t)];
      Row token;
      for (std::int64_t i = 0; i < o.embed_dim; ++i) {
        token.push_back(load_element(x.data(), x.dtype(), (b * seq + t) * o.embed_dim + i));
      }
      Row query;
      if (o.query_rank == 0) {
        query = linear(layer, "q_proj", token);
      } else {
        Row low = linear(layer, "q_a_proj", token);
        if (o.query_norm) rms_norm(layer, "q_a_layernorm", o.norm_epsilon, low);
        query = linear(layer, "q_b_proj", low);
      }
      for (std::int64_t h = 0; h < o.num_heads; ++h) {
        rotate(o, position,
               std::span(query).subspan(size(h * (o.nope_dim + o.rope_dim) + o.nope_dim),
                                        size(o.rope_dim)));
      }
      queries.push_back(std::move(query));
      const Row both = linear(layer, "kv_a_proj_with_mqa", token);
      Row latent(both.begin(), both.begin() + o.kv_rank);
      if (o.kv_norm) rms_norm(layer, "kv_a_layernorm", o.norm_epsilon, latent);
      Row rope_key(both.begin() + o.kv_rank, both.end());
      rotate(o, position, rope_key);
      latents.push_back(linear(layer, "kv_b_proj", latent));  // expanded: keys and values
      rope_keys.push_back(std::move(rope_key));
    }
    for (std::int64_t t = 0; t < seq; ++t) {
      Row attended;
      for (std::int64_t h = 0; h < o.num_heads; ++h) {
        const double* q = queries[size(t)].data() + h * (o.nope_dim + o.rope_dim);
        const std::int64_t keys = o.causal ? t + 1 : seq;
        Row weights;
        double total = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          const double* k = latents[size(j)].data() + h * (o.nope_dim + o.value_dim);
          double dot = 0;
          for (std::int64_t i = 0; i < o.nope_dim; ++i) dot += q[i] * k[i];
          for (std::int64_t i = 0; i < o.rope_dim; ++i) {
            dot += q[o.nope_dim + i] * rope_keys[size(j)][size(i)];
          }
          weights.push_back(std::exp(scale * dot));
          total += weights.back();
        }
        for (std::int64_t i = 0; i < o.value_dim; ++i) {
          double sum = 0;
          for (std::int64_t j = 0; j < keys; ++j) {
            sum += weights[size(j)] / total *
                   latents[size(j)][size(h * (o.nope_dim + o.value_dim) + o.nope_dim + i)];
          }
          attended.push_back(sum);
        }
      }
      const Row y = linear(layer, "o_proj", attended);
      for (std::int64_t i = 0; i < o.embed_dim; ++i) {
        out.data_as<double>()[(b * seq + t) * o.embed_dim + i] = y[size(i)];
      }
    }
  }
  return out;
}

}  // namespace ladon::test
