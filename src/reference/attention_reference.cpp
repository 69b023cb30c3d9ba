#include "reference/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/element.h"
#include "core/philox.h"

namespace ladon::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double element(const Operand& operand, std::int64_t offset, std::int64_t token, std::int64_t head,
               std::int64_t i) {
  return load_element(operand.data, operand.dtype,
                      offset + token * operand.token_stride + head * operand.head_stride + i);
}

/// One element of K or V, wherever a cache stores it.
double kv_element(const AttentionParams& params, const Sequence& sequence, bool of_key,
                  std::int64_t key, std::int64_t head, std::int64_t i) {
  const KvLayout& layout = params.kv_layout;
  std::int64_t slot = sequence.first_slot + key;
  if (layout.page_size != 0) {
    slot = sequence.pages[key / layout.page_size] * layout.page_size + key % layout.page_size;
  } else if (layout.ring_slots != 0) {
    slot = sequence.first_slot + (sequence.ring_start + key) % layout.ring_slots;
  }
  const double stored = of_key ? element(params.k, sequence.k, slot, head, i)
                               : element(params.v, sequence.v, slot, head, i);
  const float* scales = of_key ? layout.k_scales : layout.v_scales;
  if (scales == nullptr) return stored;
  return stored * static_cast<double>(
                      scales[slot * layout.scale_slot_stride + head * layout.scale_head_stride]);
}

void set_element(const Operand& operand, std::int64_t offset, std::int64_t token, std::int64_t head,
                 std::int64_t i, double value) {
  if (operand.data == nullptr) return;
  store_element(operand.data, operand.dtype,
                offset + token * operand.token_stride + head * operand.head_stride + i, value);
}

double element(const BroadcastOperand& operand, const Sequence& sequence, std::int64_t head,
               std::int64_t query, std::int64_t key) {
  return load_element(operand.data, operand.dtype,
                      sequence.index * operand.sequence_stride + head * operand.head_stride +
                          query * operand.query_stride + key * operand.key_stride);
}

double element(const LseOperand& lse, std::int64_t offset, std::int64_t token, std::int64_t head) {
  return load_element(lse.data, lse.is_f64 ? DType::kF64 : DType::kF32,
                      offset + token * lse.token_stride + head * lse.head_stride);
}

/// May query `token` of `head` look at `key`?
bool is_visible(const ScoreRules& rules, const Sequence& sequence, std::int64_t head,
                std::int64_t token, std::int64_t key) {
  const std::int64_t distance = key - (token + sequence.position_offset);
  if (-distance > rules.window_left || distance > rules.window_right) return false;
  if (rules.mask.data != nullptr && element(rules.mask, sequence, head, token, key) == 0) {
    return false;
  }
  return rules.bias.data == nullptr ||
         element(rules.bias, sequence, head, token, key) != -kInfinity;
}

/// rowsum(dout * out), less the gradient that came back through lse.
double row_delta(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                 std::int64_t token) {
  double delta = 0;
  for (std::int64_t i = 0; i < params.value_dim; ++i) {
    delta += element(params.out, sequence.out, token, head, i) *
             element(params.dout, sequence.dout, token, head, i);
  }
  if (params.dlse.data != nullptr) delta -= element(params.dlse, sequence.dlse, token, head);
  return delta;
}

/// The weights of one row by the saved lse, as a shift and a factor: exp(score - shift) * factor.
/// In a steep row the scores are so large that an lse stored in its dtype, or one that another
/// kernel's rounding made, says little: the row's own maximum and sum replace it.
struct RowScale {
  double shift = 0;
  double factor = 1;

  double weight(double score) const { return std::exp(score - shift) * factor; }
};

RowScale scale_of(const AttentionParams& params, const ScoreRow& row, double lse) {
  const double epsilon = epsilon_of(params.lse.is_f64 ? DType::kF64 : DType::kF32);
  const double size = std::max(std::abs(lse), row.size);
  if (!std::isfinite(lse) || !std::isfinite(row.lse) || size <= 0x1p-9 / epsilon) return {lse, 1};
  // An lse that is larger than rounding explains counts keys that are not here.
  const double elsewhere = lse - row.lse;
  const double share = elsewhere > 32 * epsilon * (1 + size) ? std::exp(-elsewhere) : 1;
  return {row.maximum, share / row.denominator};
}

/// Weights and score gradients of one row, from the saved lse.
struct GradientRow {
  std::vector<double> weight;  // dropout applied; 0 where masked
  std::vector<double> biased;  // gradient after bias: dS
  std::vector<double> scaled;  // gradient before softcap
  std::vector<bool> visible;
};

GradientRow gradient_row(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                         std::int64_t token) {
  const ScoreRow row = score_row(params, sequence, head, token);
  const double lse = element(params.lse, sequence.lse, token, head);
  const RowScale row_scale = scale_of(params, row, lse);
  const double delta = row_delta(params, sequence, head, token);
  const auto keys = static_cast<std::size_t>(sequence.kv_len);
  GradientRow gradient{std::vector<double>(keys), std::vector<double>(keys),
                       std::vector<double>(keys), std::vector<bool>(keys)};
  for (std::size_t j = 0; j < keys; ++j) {
    gradient.visible[j] = row.masked[j] != -kInfinity && lse != -kInfinity;
    if (!gradient.visible[j]) continue;
    const double probability = row_scale.weight(row.masked[j]);
    double dprobability = 0;
    for (std::int64_t i = 0; i < params.value_dim; ++i) {
      dprobability +=
          element(params.dout, sequence.dout, token, head, i) *
          element(params.v, sequence.v, static_cast<std::int64_t>(j), head / params.group, i);
    }
    gradient.weight[j] = probability * row.keep[j];
    gradient.biased[j] = probability * (dprobability * row.keep[j] - delta);
    gradient.scaled[j] = gradient.biased[j];
    if (params.rules.softcap != 0) {
      const double secant = 1 / std::cosh(row.scaled[j] / params.rules.softcap);
      gradient.scaled[j] *= secant * secant;
    }
  }
  return gradient;
}

}  // namespace

ScoreRow score_row(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                   std::int64_t token) {
  const ScoreRules& rules = params.rules;
  const auto keys = static_cast<std::size_t>(sequence.kv_len);
  ScoreRow row;
  row.scaled.resize(keys);
  row.softcapped.resize(keys);
  row.masked.resize(keys);
  row.probability.resize(keys);
  row.keep.assign(keys, 1.0);

  bool sees_something = false;
  double maximum = std::numeric_limits<double>::lowest();
  for (std::size_t j = 0; j < keys; ++j) {
    const auto key = static_cast<std::int64_t>(j);
    double dot = 0;
    double size = 0;
    for (std::int64_t i = 0; i < params.head_dim; ++i) {
      const double product = element(params.q, sequence.q, token, head, i) *
                             kv_element(params, sequence, true, key, head / params.group, i);
      dot += product;
      size += std::abs(product);
    }
    size *= std::abs(rules.scale);
    double score = rules.scale * dot;
    row.scaled[j] = score;
    if (rules.softcap != 0) score = rules.softcap * std::tanh(score / rules.softcap);
    row.softcapped[j] = score;
    if (rules.alibi_slopes.data != nullptr) {
      const std::int64_t position = token + sequence.position_offset;
      const double distance = std::abs(static_cast<double>(position - key));
      const double slope = head_element(rules.alibi_slopes, head);
      score -= slope * distance;
      size += std::abs(slope) * distance;
    }
    if (rules.bias.data != nullptr) score += element(rules.bias, sequence, head, token, key);
    row.masked[j] = is_visible(rules, sequence, head, token, key) ? score : -kInfinity;
    if (row.masked[j] != -kInfinity) {
      sees_something = true;
      row.size = std::max(row.size, size);
    }
    if (row.masked[j] > maximum) maximum = row.masked[j];
  }

  double denominator = 0;
  if (rules.sinks.data != nullptr && sees_something) {
    const double sink = head_element(rules.sinks, head);
    if (sink > maximum) maximum = sink;
    denominator = std::exp(sink - maximum);
  }
  for (std::size_t j = 0; j < keys; ++j) {
    if (row.masked[j] == -kInfinity) continue;
    row.probability[j] = std::exp(row.masked[j] - maximum);
    denominator += row.probability[j];
  }
  if (!sees_something) {
    row.lse = -kInfinity;
    return row;
  }
  for (double& probability : row.probability) probability /= denominator;
  row.maximum = maximum;
  row.denominator = denominator;
  row.lse = maximum + std::log(denominator);

  if (rules.dropout) {
    for (std::size_t j = 0; j < keys; ++j) {
      const std::int64_t key = rules.dropout_key + static_cast<std::int64_t>(j);
      const PhiloxBlock block =
          dropout_block(rules.dropout_seed, sequence.dropout_index, rules.dropout_head + head,
                        rules.dropout_query + token, key);
      row.keep[j] = block.words[key % 4] < rules.dropout_threshold ? 0 : rules.dropout_scale;
    }
  }
  return row;
}

void forward_row(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                 std::int64_t token) {
  const ScoreRow row = score_row(params, sequence, head, token);
  for (std::int64_t i = 0; i < params.value_dim; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < row.masked.size(); ++j) {
      if (row.masked[j] == -kInfinity) continue;
      sum +=
          row.probability[j] * row.keep[j] *
          kv_element(params, sequence, false, static_cast<std::int64_t>(j), head / params.group, i);
    }
    set_element(params.out, sequence.out, token, head, i, sum);
  }
  if (params.lse.data == nullptr) return;
  store_element(params.lse.data, params.lse.is_f64 ? DType::kF64 : DType::kF32,
                sequence.lse + token * params.lse.token_stride + head * params.lse.head_stride,
                row.lse);
}

void backward(const AttentionParams& params, const Sequence& sequence, std::int64_t kv_head,
              InterruptCheck& interrupt) {
  const double scale = params.rules.scale;
  const auto keys = static_cast<std::size_t>(sequence.kv_len);
  const auto head_dim = static_cast<std::size_t>(params.head_dim);
  const auto value_dim = static_cast<std::size_t>(params.value_dim);
  std::vector<double> dk(keys * head_dim);
  std::vector<double> dv(keys * value_dim);
  for (std::int64_t head = kv_head * params.group; head < (kv_head + 1) * params.group; ++head) {
    for (std::int64_t token = 0; token < sequence.query_len; ++token) {
      if (interrupt.stops()) return;
      const GradientRow row = gradient_row(params, sequence, head, token);
      for (std::size_t i = 0; i < head_dim; ++i) {
        const auto dim = static_cast<std::int64_t>(i);
        const double q = element(params.q, sequence.q, token, head, dim);
        double dq = 0;
        for (std::size_t j = 0; j < keys; ++j) {
          if (!row.visible[j]) continue;
          const auto key = static_cast<std::int64_t>(j);
          dq += scale * row.scaled[j] * element(params.k, sequence.k, key, kv_head, dim);
          dk[j * head_dim + i] += scale * row.scaled[j] * q;
        }
        set_element(params.dq, sequence.dq, token, head, dim, dq);
      }
      for (std::size_t i = 0; i < value_dim; ++i) {
        const double dout =
            element(params.dout, sequence.dout, token, head, static_cast<std::int64_t>(i));
        for (std::size_t j = 0; j < keys; ++j) {
          if (row.visible[j]) dv[j * value_dim + i] += row.weight[j] * dout;
        }
      }
    }
  }
  for (std::size_t j = 0; j < keys; ++j) {
    const auto key = static_cast<std::int64_t>(j);
    for (std::size_t i = 0; i < head_dim; ++i) {
      set_element(params.dk, sequence.dk, key, kv_head, static_cast<std::int64_t>(i),
                  dk[j * head_dim + i]);
    }
    for (std::size_t i = 0; i < value_dim; ++i) {
      set_element(params.dv, sequence.dv, key, kv_head, static_cast<std::int64_t>(i),
                  dv[j * value_dim + i]);
    }
  }
}

std::vector<double> score_gradient_row(const AttentionParams& params, const Sequence& sequence,
                                       std::int64_t head, std::int64_t token) {
  return gradient_row(params, sequence, head, token).biased;
}

double sink_gradient(const AttentionParams& params, std::int64_t head, InterruptCheck& interrupt) {
  double sum = 0;
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    const Sequence& sequence = params.sequences[s];
    for (std::int64_t token = 0; token < sequence.query_len; ++token) {
      if (interrupt.stops()) return sum;
      const double lse = element(params.lse, sequence.lse, token, head);
      if (lse == -kInfinity) continue;
      const RowScale row_scale = scale_of(params, score_row(params, sequence, head, token), lse);
      sum -= row_scale.weight(head_element(params.rules.sinks, head)) *
             row_delta(params, sequence, head, token);
    }
  }
  return sum;
}

}  // namespace ladon::reference
