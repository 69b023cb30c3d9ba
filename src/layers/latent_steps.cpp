#include "layers/latent_steps.h"

#include "core/context_impl.h"
#include "core/element.h"
#include "layers/norm.h"
#include "layers/projection.h"

namespace ladon {

LatentAttention::Plan::Plan(const LatentAttentionOptions& options,
                            std::span<const Parameter> parameters)
    : query(linear_index_of(parameters, options.query_rank == 0 ? "q_proj" : "q_b_proj")),
      query_low(linear_index_of(parameters, "q_a_proj")),
      latents(linear_index_of(parameters, "kv_a_proj_with_mqa")),
      out(linear_index_of(parameters, "o_proj")),
      query_norm(index_of(parameters, "q_a_layernorm.weight")),
      latent_norm(index_of(parameters, "kv_a_layernorm.weight")),
      kv_b(index_of(parameters, "kv_b_proj.weight")) {
  if (options.rope_dim != 0) rope = {options.rope, options.rope_dim};
}

namespace latent {
namespace {

/// Columns [begin, end) of rows.
template <class View>
View columns(const View& rows, std::int64_t begin, std::int64_t end) {
  return rows.slice(1, begin, end);
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
          {length * step, step, dim, 1},
          rows.device()};
}
template TensorView head_columns(const TensorView&, std::int64_t, std::int64_t, std::int64_t,
                                 std::int64_t);
template ConstTensorView head_columns(const ConstTensorView&, std::int64_t, std::int64_t,
                                      std::int64_t, std::int64_t);

ConstTensorView one_head(const Tensor& latents) {
  return latents.view().reshape({latents.size(0), latents.size(1), 1, latents.size(2)});
}

AttentionOptions Steps::attention_options(std::optional<bool> causal) const {
  AttentionOptions attention;
  attention.scale = options_.scale;
  attention.causal = causal.value_or(options_.causal);
  attention.dropout.first_head = heads_.first_head;
  return attention;
}

void Steps::project_low(const ConstTensorView& x, const TensorView& low) const {
  project(context_, x, weight(plan_.query_low.weight), weight(plan_.query_low.bias), low);
}

void Steps::norm_low(const ConstTensorView& from, const TensorView& to) const {
  if (options_.query_norm) {
    rms_norm(context_, from, weight(plan_.query_norm), options_.norm_epsilon, to);
  } else if (from.data() != to.data()) {
    copy(context_, from, to);
  }
}

void Steps::project_queries(const ConstTensorView& input, const TensorView& queries) const {
  project(context_, input, weight(plan_.query.weight), weight(plan_.query.bias), queries);
}

void Steps::rotate_queries(const TensorView& queries, std::int64_t seq,
                           const RopePositions& positions, bool backward) const {
  if (options_.rope_dim == 0) return;
  rope_internal::rotate_in_place(
      context_,
      head_columns(queries, seq, options_.num_heads, options_.nope_dim, heads_.head_dim()),
      plan_.rope, positions, backward);
}

void Steps::rotate_latents(const TensorView& latents, std::int64_t seq,
                           const RopePositions& positions, bool backward) const {
  if (options_.rope_dim == 0) return;
  rope_internal::rotate_in_place(
      context_, head_columns(latents, seq, 1, options_.kv_rank, heads_.latent_dim()), plan_.rope,
      positions, backward);
}

void Steps::project_latents(const ConstTensorView& x, const TensorView& latents) const {
  project(context_, x, weight(plan_.latents.weight), weight(plan_.latents.bias), latents);
}

void Steps::norm_latents(const ConstTensorView& from, const TensorView& to) const {
  const ConstTensorView input = columns(from, 0, options_.kv_rank);
  const TensorView output = columns(to, 0, options_.kv_rank);
  if (options_.kv_norm) {
    rms_norm(context_, input, weight(plan_.latent_norm), options_.norm_epsilon, output);
  } else if (from.data() != to.data()) {
    copy(context_, input, output);
  }
}

TensorView Steps::key_rows(const TensorView& kv_b, std::int64_t head) const {
  const std::int64_t begin = head * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, begin, begin + options_.nope_dim);
}
ConstTensorView Steps::key_rows(const ConstTensorView& kv_b, std::int64_t head) const {
  const std::int64_t begin = head * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, begin, begin + options_.nope_dim);
}
TensorView Steps::value_rows(const TensorView& kv_b, std::int64_t head) const {
  const std::int64_t end = (head + 1) * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, end - options_.value_dim, end);
}
ConstTensorView Steps::value_rows(const ConstTensorView& kv_b, std::int64_t head) const {
  const std::int64_t end = (head + 1) * (options_.nope_dim + options_.value_dim);
  return kv_b.slice(0, end - options_.value_dim, end);
}

void Steps::expand_keys(const ConstTensorView& latents, std::int64_t first_head, std::int64_t heads,
                        const TensorView& keys) const {
  const std::int64_t head_dim = heads_.head_dim();
  if (options_.nope_dim != 0) {
    project(context_, columns(latents, 0, options_.kv_rank),
            key_rows(weight(plan_.kv_b), first_head), {}, columns(keys, 0, options_.nope_dim),
            {.heads = heads, .w = kv_b_step(), .y = head_dim});
  }
  if (options_.rope_dim == 0) return;
  // Every head gets the same rope key.
  const ConstTensorView rope_key = columns(latents, options_.kv_rank, heads_.latent_dim());
  const ConstTensorView spread(rope_key.data(), rope_key.dtype(),
                               {1, rope_key.size(0), heads, options_.rope_dim},
                               {0, rope_key.stride(0), 0, 1}, rope_key.device());
  copy(context_, spread, head_columns(keys, 0, heads, options_.nope_dim, head_dim));
}

void Steps::expand_values(const ConstTensorView& latents, std::int64_t first_head,
                          std::int64_t heads, const TensorView& values) const {
  project(context_, columns(latents, 0, options_.kv_rank),
          value_rows(weight(plan_.kv_b), first_head), {}, columns(values, 0, options_.value_dim),
          {.heads = heads, .w = kv_b_step(), .y = options_.value_dim});
}

void Steps::absorb_queries(const ConstTensorView& queries, const TensorView& absorbed) const {
  const std::int64_t head_dim = heads_.head_dim();
  const std::int64_t latent_dim = heads_.latent_dim();
  backend_of(context_).zero(absorbed);
  // q W_uk: the product that an input's gradient takes, dy W.
  if (options_.nope_dim != 0) {
    add_input_gradient(
        context_, columns(queries, 0, options_.nope_dim), key_rows(weight(plan_.kv_b), 0),
        columns(absorbed, 0, options_.kv_rank),
        {.heads = options_.num_heads, .x = latent_dim, .w = kv_b_step(), .y = head_dim});
  }
  if (options_.rope_dim == 0) return;
  copy(context_, head_columns(queries, 0, options_.num_heads, options_.nope_dim, head_dim),
       head_columns(absorbed, 0, options_.num_heads, options_.kv_rank, latent_dim));
}

void Steps::apply_values(const ConstTensorView& sums, const TensorView& attended) const {
  project(context_, columns(sums, 0, options_.kv_rank), value_rows(weight(plan_.kv_b), 0), {},
          columns(attended, 0, options_.value_dim),
          {.heads = options_.num_heads,
           .x = options_.kv_rank,
           .w = kv_b_step(),
           .y = options_.value_dim});
}

void Steps::project_out(const ConstTensorView& attended, const TensorView& out) const {
  project(context_, attended, weight(plan_.out.weight), weight(plan_.out.bias), out);
}

}  // namespace latent
}  // namespace ladon
