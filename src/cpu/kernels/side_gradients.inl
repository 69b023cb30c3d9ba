// Gradients of the score rules' parameters: bias and sinks.
//
// A bias may be shared by batch, heads, queries or keys, and its gradient sums over all that share
// it. Each task owns some elements of the bias and recomputes the score gradients of all that share
// them (two more products), so that no task waits for another, the order of the sum is fixed, and
// the memory is that of the elements alone. Sums are in double because they can be long.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/backward.inl"

namespace ladon::cpu {
namespace {

/// Tokens [token_begin, token_end) of some heads of one KV head.
template <class V>
inline void add_bias_gradient(const AttentionParams& params, const BiasGradientTask& task,
                              std::int64_t sequence_index, std::int64_t first_head,
                              std::int64_t heads_per_token, const BackwardScratch<V>& scratch,
                              ElementBackward<V>& products) {
  using Scalar = typename V::Scalar;
  BackwardTile<Scalar> tile;
  BlockRules<Scalar> block;
  const Sequence& sequence = params.sequences[sequence_index];
  const std::int64_t kv_head = first_head / params.group;
  const std::int64_t row_end = smaller(task.token_end, sequence.query_len) * heads_per_token;
  const std::int64_t key_end = smaller(task.key_end, sequence.kv_len);
  products.load_keys({params, sequence, kv_head, 0, 0});  // block by block
  for (std::int64_t row = task.token_begin * heads_per_token; row < row_end; row += kTileRows<V>) {
    set_rows(tile.rows, params, sequence,
             {.first_head = first_head,
              .heads_per_token = heads_per_token,
              .begin = row,
              .count = smaller(kTileRows<V>, row_end - row)},
             {task.key_begin, key_end});
    if (tile.rows.some_end == 0) continue;
    set_tile(params, sequence_index, task.scales, scratch, tile);
    products.load_rows(params, sequence, tile.rows, tile.width);
    const KeySpan keys{params, sequence, kv_head, task.key_begin, key_end};
    for_each_key_block(keys, tile.rows, [&](const KeySpan& span) {
      products.score(span, {scratch.scores, scratch.dscores, tile.width});
      score_gradients<V, false, true>(span, scratch, tile, block);
      for (std::int64_t r = 0; r < tile.rows.count; ++r) {
        double* sums = task.sums + (tile.rows.token[r] - task.token_begin) * task.token_stride +
                       (span.begin - task.key_begin) * task.key_stride;
        for (std::int64_t i = 0; i < span.count(); ++i) {
          sums[i * task.key_stride] += static_cast<double>(scratch.dscores[i * tile.width + r]);
        }
      }
    });
  }
}

template <class V>
void bias_gradient(const AttentionParams& params, const BiasGradientTask& task, Scratch memory) {
  ScratchArena arena(memory);
  const BackwardScratch<V> scratch(params, arena);
  ElementBackward<V> products(params, arena);
  const std::int64_t first = task.sequence < 0 ? 0 : task.sequence;
  const std::int64_t end = task.sequence < 0 ? params.num_sequences : task.sequence + 1;
  for (std::int64_t s = first; s < end; ++s) {
    if (task.head >= 0) {
      add_bias_gradient<V>(params, task, s, task.head, 1, scratch, products);
      continue;
    }
    for (std::int64_t head = 0; head < params.num_heads; head += params.group) {
      add_bias_gradient<V>(params, task, s, head, params.group, scratch, products);
    }
  }
}

template <class V>
std::size_t bias_gradient_scratch(const AttentionParams& params) {
  return backward_scratch<V>(params);
}

template <class V>
struct SinkScratch {
  using Scalar = typename V::Scalar;
  Scalar* out;   // [value_dim]
  Scalar* dout;  // [value_dim]
  std::size_t bytes;

  SinkScratch(const AttentionParams& params, Scratch memory) {
    ScratchArena arena(memory);
    out = arena.take<Scalar>(params.value_dim);
    dout = arena.take<Scalar>(params.value_dim);
    bytes = arena.used();
  }
};

/// The sink has a weight in each row, exp(sink - shift) * factor, and no value.
template <class V>
void sink_gradient(const AttentionParams& params, const SinkGradientTask& task, Scratch memory) {
  using Scalar = typename V::Scalar;
  const SinkScratch<V> scratch(params, memory);
  const double sink = head_element(params.rules.sinks, task.head);
  double total = 0;
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    const Sequence& sequence = params.sequences[s];
    for (std::int64_t token = 0; token < sequence.query_len; ++token) {
      const std::int64_t row = task.scales.row(params, s, token, task.head);
      const auto shift = static_cast<double>(static_cast<const Scalar*>(task.scales.shift)[row]);
      const auto factor = static_cast<double>(static_cast<const Scalar*>(task.scales.factor)[row]);
      if (shift == __builtin_inf()) continue;
      load_row(
          at(params.out.data, params.out.dtype,
             sequence.out + token * params.out.token_stride + task.head * params.out.head_stride),
          params.out.dtype, params.value_dim, scratch.out);
      load_row(at(params.dout.data, params.dout.dtype,
                  sequence.dout + token * params.dout.token_stride +
                      task.head * params.dout.head_stride),
               params.dout.dtype, params.value_dim, scratch.dout);
      double delta = 0;
      for (std::int64_t i = 0; i < params.value_dim; ++i) {
        delta += static_cast<double>(scratch.out[i]) * static_cast<double>(scratch.dout[i]);
      }
      if (params.dlse.data != nullptr) {
        delta -= load_lse(params.dlse, sequence.dlse + token * params.dlse.token_stride +
                                           task.head * params.dlse.head_stride);
      }
      total -= __builtin_exp(sink - shift) * factor * delta;
    }
  }
  *task.sum = total;
}

template <class V>
std::size_t sink_gradient_scratch(const AttentionParams& params) {
  return SinkScratch<V>(params, {}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
