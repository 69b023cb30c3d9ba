#include "layers/latent_pass.h"

#include <cstddef>
#include <cstring>

#include "core/element.h"
#include "layers/norm.h"
#include "layers/projection.h"

namespace ladon::latent {
namespace {

/// Columns [begin, end) of rows.
template <class View>
View columns(const View& rows, std::int64_t begin, std::int64_t end) {
  return rows.slice(1, begin, end);
}

void fill_zero(const TensorView& rows) {
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    std::memset(element_at(rows.data(), rows.dtype(), row * rows.stride(0)), 0,
                static_cast<std::size_t>(rows.size(1)) * size_of(rows.dtype()));
  }
}

}  // namespace

template <class View>
View head_columns(const View& rows, std::int64_t seq, std::int64_t heads, std::int64_t begin,
                  std::int64_t end) {
  const std::int64_t dim = rows.size(1) / heads;
  const std::int64_t step = rows.stride(0);
  const std::int64_t length = seq == 0 ? rows.size(0) : seq;
  const std::int64_t batch = seq == 0 ? 1 : rows.size(0) / seq;
  return {element_at(rows.data(), rows.dtype(), begin),
          rows.dtype(),
          {batch, length, heads, end - begin},
          {length * step, step, dim, 1}};
}
template TensorView head_columns(const TensorView&, std::int64_t, std::int64_t, std::int64_t,
                                 std::int64_t);
template ConstTensorView head_columns(const ConstTensorView&, std::int64_t, std::int64_t,
                                      std::int64_t, std::int64_t);

ConstTensorView one_head(const Tensor& latents) {
  return latents.view().reshape({latents.size(0), latents.size(1), 1, latents.size(2)});
}

ConstTensorView Pass::weight(std::string_view name) const {
  return layer_.has_parameter(name) ? ConstTensorView(layer_.parameter(name).value)
                                    : ConstTensorView();
}

AttentionOptions Pass::attention_options(std::optional<bool> causal) const {
  AttentionOptions attention;
  attention.scale = options_.scale;
  attention.causal = causal.value_or(options_.causal);
  return attention;
}

void Pass::project_low(const ConstTensorView& x, const TensorView& low) const {
  project(context_, x, weight("q_a_proj.weight"), weight("q_a_proj.bias"), low);
}

void Pass::norm_low(const ConstTensorView& from, const TensorView& to) const {
  if (options_.query_norm) {
    rms_norm(context_, from, weight("q_a_layernorm.weight"), options_.norm_epsilon, to);
  } else if (from.data() != to.data()) {
    copy(from, to);
  }
}

void Pass::project_queries(const ConstTensorView& input, const TensorView& queries) const {
  if (low_rank()) return project(context_, input, weight("q_b_proj.weight"), {}, queries);
  project(context_, input, weight("q_proj.weight"), weight("q_proj.bias"), queries);
}

void Pass::turn_queries(const TensorView& queries, std::int64_t seq,
                        const RopePositions& positions) const {
  if (options_.rope_dim == 0) return;
  const TensorView turned =
      head_columns(queries, seq, options_.num_heads, options_.nope_dim, layer_.head_dim());
  rope(context_, turned, options_.rope, positions, turned);
}

void Pass::turn_latents(const TensorView& latents, std::int64_t seq,
                        const RopePositions& positions) const {
  if (options_.rope_dim == 0) return;
  const TensorView turned = head_columns(latents, seq, 1, options_.kv_rank, layer_.latent_dim());
  rope(context_, turned, options_.rope, positions, turned);
}

void Pass::project_latents(const ConstTensorView& x, const TensorView& latents) const {
  project(context_, x, weight("kv_a_proj_with_mqa.weight"), weight("kv_a_proj_with_mqa.bias"),
          latents);
}

void Pass::norm_latents(const ConstTensorView& from, const TensorView& to) const {
  const ConstTensorView input = columns(from, 0, options_.kv_rank);
  const TensorView output = columns(to, 0, options_.kv_rank);
  if (options_.kv_norm) {
    rms_norm(context_, input, weight("kv_a_layernorm.weight"), options_.norm_epsilon, output);
  } else if (from.data() != to.data()) {
    copy(input, output);
  }
}

TensorView Pass::key_rows(const TensorView& kv_b, std::int64_t head) const {
  const std::int64_t begin = head * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, begin, begin + options_.nope_dim);
}
ConstTensorView Pass::key_rows(const ConstTensorView& kv_b, std::int64_t head) const {
  const std::int64_t begin = head * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, begin, begin + options_.nope_dim);
}
TensorView Pass::value_rows(const TensorView& kv_b, std::int64_t head) const {
  const std::int64_t end = (head + 1) * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, end - options_.value_dim, end);
}
ConstTensorView Pass::value_rows(const ConstTensorView& kv_b, std::int64_t head) const {
  const std::int64_t end = (head + 1) * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, end - options_.value_dim, end);
}

void Pass::expand_keys(const ConstTensorView& latents, const TensorView& keys) const {
  const std::int64_t head_dim = layer_.head_dim();
  project(context_, columns(latents, 0, options_.kv_rank), key_rows(weight("kv_b_proj.weight"), 0),
          {}, columns(keys, 0, options_.nope_dim),
          {.heads = options_.num_heads, .w = kv_b_step(), .y = head_dim});
  if (options_.rope_dim == 0) return;
  // Every head gets the same rope key.
  const ConstTensorView rope_key = columns(latents, options_.kv_rank, layer_.latent_dim());
  const ConstTensorView spread(rope_key.data(), rope_key.dtype(),
                               {1, rope_key.size(0), options_.num_heads, options_.rope_dim},
                               {0, rope_key.stride(0), 0, 1});
  copy(spread, head_columns(keys, 0, options_.num_heads, options_.nope_dim, head_dim));
}

void Pass::expand_values(const ConstTensorView& latents, const TensorView& values) const {
  project(context_, columns(latents, 0, options_.kv_rank),
          value_rows(weight("kv_b_proj.weight"), 0), {}, columns(values, 0, options_.value_dim),
          {.heads = options_.num_heads, .w = kv_b_step(), .y = options_.value_dim});
}

void Pass::absorb_queries(const ConstTensorView& queries, const TensorView& absorbed) const {
  const std::int64_t head_dim = layer_.head_dim();
  const std::int64_t latent_dim = layer_.latent_dim();
  fill_zero(absorbed);
  // q W_uk: the product that an input's gradient takes, dy W.
  add_input_gradient(
      context_, columns(queries, 0, options_.nope_dim), key_rows(weight("kv_b_proj.weight"), 0),
      columns(absorbed, 0, options_.kv_rank),
      {.heads = options_.num_heads, .x = latent_dim, .w = kv_b_step(), .y = head_dim});
  if (options_.rope_dim == 0) return;
  copy(head_columns(queries, 0, options_.num_heads, options_.nope_dim, head_dim),
       head_columns(absorbed, 0, options_.num_heads, options_.kv_rank, latent_dim));
}

void Pass::apply_values(const ConstTensorView& sums, const TensorView& attended) const {
  project(context_, columns(sums, 0, options_.kv_rank), value_rows(weight("kv_b_proj.weight"), 0),
          {}, columns(attended, 0, options_.value_dim),
          {.heads = options_.num_heads,
           .x = options_.kv_rank,
           .w = kv_b_step(),
           .y = options_.value_dim});
}

void Pass::project_out(const ConstTensorView& attended, const TensorView& out) const {
  project(context_, attended, weight("o_proj.weight"), weight("o_proj.bias"), out);
}

}  // namespace ladon::latent
