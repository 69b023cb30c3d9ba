#include "support/truth.h"
#include "support/host_context.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/element.h"

namespace ladon::test {
namespace {

// The stated constants of the bounds (docs/numerics.md).
constexpr double kComputeFactor = 4;  // times epsilon of the compute type and the sensitivity
// Times epsilon of a 16-bit dtype and the magnitude. In half units in the last place: the result's
// rounding, for gradients that of the saved output, and in bf16 that of the weights.
constexpr double storage_factor(DType dtype) { return dtype == DType::kBF16 ? 1.5 : 1; }

// Weights below the smallest normal number of the compute type count as 0.
constexpr double kFloor[] = {0x1p-110, 0x1p-1000};

// All tensors here are dense f64: no checks, because these run for every term of every sum.
double& at(Tensor& tensor, std::int64_t a, std::int64_t b = 0, std::int64_t c = 0,
           std::int64_t d = 0) {
  const Dims& shape = tensor.shape();
  std::int64_t index = a;
  if (shape.rank() > 1) index = index * shape[1] + b;
  if (shape.rank() > 2) index = index * shape[2] + c;
  if (shape.rank() > 3) index = index * shape[3] + d;
  return static_cast<double*>(tensor.data())[index];
}

double at(const Tensor& tensor, std::int64_t a, std::int64_t b = 0, std::int64_t c = 0,
          std::int64_t d = 0) {
  return at(const_cast<Tensor&>(tensor), a, b, c, d);
}

Bounded bounded(const Dims& shape) {
  return {Tensor(DType::kF64, shape), Tensor(DType::kF64, shape), Tensor(DType::kF64, shape)};
}

void add(Bounded& to, double value, double magnitude, double sensitivity, std::int64_t a,
         std::int64_t b = 0, std::int64_t c = 0, std::int64_t d = 0) {
  at(to.value, a, b, c, d) += value;
  at(to.magnitude, a, b, c, d) += magnitude;
  at(to.sensitivity, a, b, c, d) += magnitude * (1 + sensitivity);
}

/// One sequence of the case, alone and in double.
struct Alone {
  Alone(const CaseData& data, std::size_t index);

  AttentionOptions options;
  Tensor q, k, v, dout, dlse, mask, bias, slopes, sinks;
  Tensor out, lse, dq, dk, dv, dbias, dsinks;
  Tensor scaled, probability, dropped;  // [1, heads, query_len, kv_len]

 private:
  void run();
};

Tensor cut_tokens(const ConstTensorView& view, bool packed, std::size_t index, std::int64_t begin,
                  std::int64_t length) {
  const std::int64_t batch = packed ? 0 : static_cast<std::int64_t>(index);
  return Tensor::copy_of(
      host_context(),
      ConstTensorView(view.slice(0, batch, batch + 1).slice(1, begin, begin + length)),
      DType::kF64);
}

Tensor cut_scores(const ConstTensorView& view, std::size_t index, const SequencePart& part,
                  DType dtype) {
  const auto i = static_cast<std::int64_t>(index);
  ConstTensorView piece = view.size(0) == 1 ? view : ConstTensorView(view.slice(0, i, i + 1));
  piece = view.size(2) == 1 ? piece : ConstTensorView(piece.slice(2, 0, part.query_len));
  piece = view.size(3) == 1 ? piece : ConstTensorView(piece.slice(3, 0, part.kv_len));
  return Tensor::copy_of(host_context(), piece, dtype);
}

Alone::Alone(const CaseData& data, std::size_t index) {
  const Case& problem = data.problem();
  const SequencePart& part = data.sequences()[index];
  const bool packed = problem.lengths == Lengths::kPacked;
  q = cut_tokens(data.q(), packed, index, part.query_begin, part.query_len);
  k = cut_tokens(data.k(), packed, index, part.kv_begin, part.kv_len);
  v = cut_tokens(data.v(), packed, index, part.kv_begin, part.kv_len);
  dout = cut_tokens(data.dout(), packed, index, part.query_begin, part.query_len);
  options = data.options();
  options.kv_lengths = {};
  options.query_offsets = {};
  options.kv_offsets = {};
  options.dropout.first_sequence = static_cast<std::int64_t>(index);
  if (problem.dlse) {
    const ConstTensorView all = data.dlse();
    const std::int64_t batch = packed ? 0 : static_cast<std::int64_t>(index);
    dlse = Tensor::copy_of(
        host_context(),
        ConstTensorView(all.slice(0, batch, batch + 1)
                            .slice(2, part.query_begin, part.query_begin + part.query_len)),
        DType::kF64);
  }
  if (problem.mask.present) {
    mask = cut_scores(data.mask(), index, part, DType::kBool);
    options.mask = mask;
  }
  if (problem.bias.present) {
    bias = cut_scores(data.bias(), index, part, DType::kF64);
    options.bias = bias;
  }
  run();
}

void Alone::run() {
  const Context reference(ContextOptions{.num_threads = 1, .isa = Isa::kReference});
  const Dims out_shape{1, q.size(1), q.size(2), v.size(3)};
  const Dims lse_shape{1, q.size(2), q.size(1)};
  const Dims score_shape{1, q.size(2), q.size(1), k.size(1)};
  out = Tensor(DType::kF64, out_shape);
  lse = Tensor(DType::kF64, lse_shape);
  attention(reference, q, k, v, options, out, lse);
  scaled = Tensor(DType::kF64, score_shape);
  attention_weights(reference, q, k, options, scaled, ScoreStage::kScaled);
  probability = Tensor(DType::kF64, score_shape);
  dropped = Tensor(DType::kF64, score_shape);
  attention_weights(reference, q, k, options, probability, ScoreStage::kProbability);
  attention_weights(reference, q, k, options, dropped, ScoreStage::kDropped);
  dq = Tensor(DType::kF64, q.shape());
  dk = Tensor(DType::kF64, k.shape());
  dv = Tensor(DType::kF64, v.shape());
  AttentionGradients gradients{.dq = dq, .dk = dk, .dv = dv};
  if (!options.bias.absent()) {
    dbias = Tensor(DType::kF64, options.bias.shape());
    gradients.dbias = dbias;
  }
  if (!options.sinks.absent()) {
    dsinks = Tensor(DType::kF64, options.sinks.shape());
    gradients.dsinks = dsinks;
  }
  AttentionSaved saved{.out = out, .lse = lse, .dout = dout};
  if (dlse.rank() != 0) saved.dlse = dlse;
  attention_backward(reference, q, k, v, options, saved, gradients);
}

/// Adds one sequence's results and bounds to the whole.
class Collector {
 public:
  Collector(const CaseData& data, Truth& truth) : data_(data), truth_(truth) {}

  void add_sequence(std::size_t index) {
    const Alone alone(data_, index);
    const SequencePart& part = data_.sequences()[index];
    const bool packed = data_.problem().lengths == Lengths::kPacked;
    sequence_ = static_cast<std::int64_t>(index);
    batch_ = packed ? 0 : sequence_;
    group_ = data_.problem().num_heads / data_.problem().num_kv_heads;
    for (std::int64_t head = 0; head < data_.problem().num_heads; ++head) {
      for (std::int64_t token = 0; token < part.query_len; ++token) {
        add_row(alone, part, head, token);
      }
    }
    for (std::int64_t key = 0; key < part.kv_len; ++key) {
      for (std::int64_t head = 0; head < data_.problem().num_kv_heads; ++head) {
        for (std::int64_t i = 0; i < alone.k.size(3); ++i) {
          add(truth_.dk, at(alone.dk, 0, key, head, i), 0, 0, batch_, part.kv_begin + key, head, i);
        }
        for (std::int64_t i = 0; i < alone.v.size(3); ++i) {
          add(truth_.dv, at(alone.dv, 0, key, head, i), 0, 0, batch_, part.kv_begin + key, head, i);
        }
      }
    }
    add_side_gradients(alone);
  }

 private:
  /// Below this, the saved output's rounding is as coarse as at it.
  double problem_floor() const { return data_.problem().dtype == DType::kF16 ? 0x1p-14 : 0; }

  /// Absolute terms of one query row, for everything it takes part in.
  void add_row(const Alone& alone, const SequencePart& part, std::int64_t head,
               std::int64_t token) {
    const std::int64_t kv_head = head / group_;
    const std::int64_t row = part.query_begin + token;
    const double scale =
        std::abs(alone.options.scale.value_or(1 / std::sqrt(static_cast<double>(alone.q.size(3)))));
    // How large the numbers behind the scores are: their rounding moves each weight by this many
    // epsilons, relative to itself.
    const double lse = at(alone.lse, 0, head, token);
    double score_size = std::isinf(lse) ? 0 : std::abs(lse);
    for (std::int64_t key = 0; key < part.kv_len; ++key) {
      if (!data_.visible(sequence_, head, token, key)) continue;
      double size = 0;
      for (std::int64_t i = 0; i < alone.q.size(3); ++i) {
        size += std::abs(at(alone.q, 0, token, head, i) * at(alone.k, 0, key, kv_head, i));
      }
      size *= scale;
      if (data_.problem().alibi) {
        size += 0.5 * static_cast<double>(part.kv_len + part.query_len +
                                          std::abs(data_.problem().position_offset.value_or(0)));
      }
      if (data_.problem().bias.present) size += 5;
      score_size = std::max(score_size, size);
    }
    double delta = alone.dlse.rank() == 0 ? 0 : std::abs(at(alone.dlse, 0, head, token));
    for (std::int64_t i = 0; i < alone.v.size(3); ++i) {
      double magnitude = 0;
      for (std::int64_t key = 0; key < part.kv_len; ++key) {
        const double weight = at(alone.dropped, 0, head, token, key);
        if (weight != 0) magnitude += weight * std::abs(at(alone.v, 0, key, kv_head, i));
      }
      add(truth_.out, at(alone.out, 0, token, head, i), magnitude, score_size, batch_, row, head,
          i);
      // Backward starts from the saved output, which in f16 may have rounded to a subnormal.
      const double saved = std::max(magnitude, problem_floor());
      delta += saved * std::abs(at(alone.dout, 0, token, head, i));
    }
    add(truth_.lse, lse, std::isinf(lse) ? 0 : 1 + std::abs(lse), score_size, batch_, head, row);
    for (std::int64_t i = 0; i < alone.q.size(3); ++i) {
      add(truth_.dq, at(alone.dq, 0, token, head, i), 0, 0, batch_, row, head, i);
    }
    for (std::int64_t key = 0; key < part.kv_len; ++key) {
      add_pair(alone, part, head, token, key, delta, score_size, scale);
    }
    if (!std::isinf(lse) && data_.problem().sinks) {
      const double sink =
          load_element(alone.options.sinks.data(), alone.options.sinks.dtype(), head);
      add(truth_.dsinks, 0, std::exp(sink - lse) * delta, score_size, head);
    }
  }

  void add_pair(const Alone& alone, const SequencePart& part, std::int64_t head, std::int64_t token,
                std::int64_t key, double delta, double score_size, double scale) {
    const double probability = at(alone.probability, 0, head, token, key);
    if (probability == 0) return;
    const std::int64_t kv_head = head / group_;
    const double dropped = at(alone.dropped, 0, head, token, key);
    double dweight = 0;
    for (std::int64_t i = 0; i < alone.v.size(3); ++i) {
      const double dout = std::abs(at(alone.dout, 0, token, head, i));
      dweight += dout * std::abs(at(alone.v, 0, key, kv_head, i));
      add(truth_.dv, 0, dropped * dout, score_size, batch_, part.kv_begin + key, kv_head, i);
    }
    const double dscore = probability * delta + dropped * dweight;
    // Back through the softcap, whose slope itself moves with the score.
    double slope = 1;
    double sensitivity = score_size;
    if (data_.problem().softcap != 0) {
      const double secant =
          1 / std::cosh(at(alone.scaled, 0, head, token, key) / data_.problem().softcap);
      slope = secant * secant;
      sensitivity *= 1 + 2 / data_.problem().softcap;
    }
    for (std::int64_t i = 0; i < alone.q.size(3); ++i) {
      add(truth_.dq, 0, slope * scale * dscore * std::abs(at(alone.k, 0, key, kv_head, i)),
          sensitivity, batch_, part.query_begin + token, head, i);
      add(truth_.dk, 0, slope * scale * dscore * std::abs(at(alone.q, 0, token, head, i)),
          sensitivity, batch_, part.kv_begin + key, kv_head, i);
    }
    if (data_.problem().bias.present) {
      const Dims& shape = truth_.dbias.value.shape();
      add(truth_.dbias, 0, dscore, score_size, shape[0] == 1 ? 0 : sequence_,
          shape[1] == 1 ? 0 : head, shape[2] == 1 ? 0 : token, shape[3] == 1 ? 0 : key);
    }
  }

  void add_side_gradients(const Alone& alone) {
    if (data_.problem().sinks) {
      for (std::int64_t head = 0; head < data_.problem().num_heads; ++head) {
        add(truth_.dsinks, at(alone.dsinks, head), 0, 0, head);
      }
    }
    if (!data_.problem().bias.present) return;
    const std::int64_t to = truth_.dbias.value.size(0) == 1 ? 0 : sequence_;
    for (std::int64_t head = 0; head < alone.dbias.size(1); ++head) {
      for (std::int64_t token = 0; token < alone.dbias.size(2); ++token) {
        for (std::int64_t key = 0; key < alone.dbias.size(3); ++key) {
          add(truth_.dbias, at(alone.dbias, 0, head, token, key), 0, 0, to, head, token, key);
        }
      }
    }
  }

  const CaseData& data_;
  Truth& truth_;
  std::int64_t sequence_ = 0;
  std::int64_t batch_ = 0;
  std::int64_t group_ = 1;
};

}  // namespace

Truth truth_of(const CaseData& data) {
  Truth truth;
  truth.out = bounded(data.out_shape());
  truth.lse = bounded(data.lse_shape());
  truth.dq = bounded(data.q().shape());
  truth.dk = bounded(data.k().shape());
  truth.dv = bounded(data.v().shape());
  if (data.problem().bias.present) truth.dbias = bounded(data.bias().shape());
  if (data.problem().sinks) truth.dsinks = bounded({data.problem().num_heads});
  Collector collector(data, truth);
  for (std::size_t s = 0; s < data.sequences().size(); ++s) collector.add_sequence(s);
  return truth;
}

double worst_ratio(const ConstTensorView& got, const Bounded& expected, DType dtype) {
  const Tensor wide = Tensor::copy_of(host_context(), got, DType::kF64);
  const DType compute = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  double worst = 0;
  for (std::int64_t i = 0; i < wide.num_elements(); ++i) {
    const double value = wide.data_as<double>()[i];
    const double truth = expected.value.data_as<double>()[i];
    if (value == truth) continue;
    // Where double itself runs out of digits, the reference is not better.
    if (std::abs(truth) < 1e-290 && std::abs(value) < 1e-290) continue;
    double bound = kComputeFactor * epsilon_of(compute) * expected.sensitivity.data_as<double>()[i];
    if (size_of(dtype) == 2) {
      bound += storage_factor(dtype) * epsilon_of(dtype) * expected.magnitude.data_as<double>()[i];
    }
    if (expected.magnitude.data_as<double>()[i] > 0) {
      bound += kFloor[dtype == DType::kF64 ? 1 : 0];
      // Below its smallest normal number f16 rounds to a fixed step.
      if (got.dtype() == DType::kF16) bound += 0x1p-25;
    }
    const double error = std::abs(value - truth);
    const double ratio = error / bound;  // 0 / 0 cannot happen: equal values were passed over
    worst = std::isnan(ratio) ? std::numeric_limits<double>::infinity() : std::max(worst, ratio);
    if (std::isinf(worst)) break;
  }
  return worst;
}

}  // namespace ladon::test
