// rope(): checks, then the backend.
#include "ladon/rope.h"

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/arena.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "layers/rope_internal.h"

namespace ladon {

using namespace rope_internal;

namespace {

RopeOperand operand_of(const ConstTensorView& view) {
  // One struct serves inputs and outputs.
  return {const_cast<void*>(view.data()), view.stride(0), view.stride(1), view.stride(2)};
}

RopeTableOperand table_operand(const ConstTensorView& table) {
  const bool by_position = table.rank() == 2;
  return {.data = table.data(),
          .dtype = table.dtype(),
          .batch_stride = by_position ? 0 : table.stride(0),
          .row_stride = table.stride(table.rank() - 2),
          .pair_stride = table.stride(table.rank() - 1)};
}

/// All but the angles.
RopeParams params_of(const ConstTensorView& x, const TensorView& out, RopeLayout layout,
                     std::int64_t rotary_dim, const RopePositions& positions) {
  RopeParams params{.batch = x.size(0),
                    .seq = x.size(1),
                    .heads = x.size(2),
                    .head_dim = x.size(3),
                    .rotary_dim = rotary_dim,
                    .interleaved = layout == RopeLayout::kInterleaved,
                    .dtype = x.dtype(),
                    .x = operand_of(x),
                    .out = operand_of(out)};
  params.first_position = positions.first;
  if (!positions.explicit_positions.empty()) {
    params.positions = positions.explicit_positions.data();
    params.positions_per_sequence =
        static_cast<std::int64_t>(positions.explicit_positions.size()) == params.batch * params.seq;
  }
  return params;
}

struct Frequencies {
  Frequencies(Arena& arena, std::int64_t pairs) : values(arena.take<double>(pairs)) {}
  double* values;
};

struct RopeCall {
  const ConstTensorView& x;
  const RopeOptions& options;
  const RopeTable* table;  // null: angles by frequencies
  const RopePositions& positions;
  const TensorView& out;
};

void run(const Context& context, const Names& names, const RopeCall& call, bool backward) {
  const Sizes sizes = check_call(names, call.x, call.options, call.table, call.positions, call.out);
  RopeParams params =
      params_of(call.x, call.out, call.options.layout, sizes.rotary_dim, call.positions);
  params.backward = backward;
  if (call.table != nullptr) {
    params.cos = table_operand(call.table->cos);
    params.sin = table_operand(call.table->sin);
    params.table_by_position = call.table->cos.rank() == 2;
    return backend_of(context).rotate(params);
  }
  params.magnitude = rope_magnitude(call.options);
  if (!call.options.frequencies.empty()) {
    params.frequencies = call.options.frequencies.data();
    return backend_of(context).rotate(params);
  }
  const InWorkspace<Frequencies> frequencies(context.impl().host_scratch(), sizes.pairs());
  fill_frequencies(call.options.base, call.options.scaling,
                   {frequencies->values, static_cast<std::size_t>(sizes.pairs())});
  params.frequencies = frequencies->values;
  backend_of(context).rotate(params);
}

Names forward_names(const Context& context) { return {{"rope", context}, "x", "out"}; }
Names backward_names(const Context& context) { return {{"rope_backward", context}, "dout", "dx"}; }

}  // namespace

RopePlan::RopePlan(const RopeOptions& options, std::int64_t head_dim)
    : layout(options.layout),
      frequencies(rope_frequencies(options, head_dim)),
      magnitude(rope_magnitude(options)),
      position_limit(rope_internal::position_limit(options)) {}

namespace {

RopeParams planned_params(const TensorView& x, const RopePlan& plan,
                          const RopePositions& positions) {
  check_position_limit("rope", positions, x.size(1), plan.position_limit);
  const auto rotary_dim = 2 * static_cast<std::int64_t>(plan.frequencies.size());
  RopeParams params = params_of(x, x, plan.layout, rotary_dim, positions);
  params.frequencies = plan.frequencies.data();
  params.magnitude = plan.magnitude;
  return params;
}

}  // namespace

void rope_internal::rotate_in_place(const Context& context, const TensorView& x,
                                    const RopePlan& plan, const RopePositions& positions,
                                    bool backward) {
  RopeParams params = planned_params(x, plan, positions);
  params.backward = backward;
  backend_of(context).rotate(params);
}

void rope_internal::rotate_in_place(const Context& context, const PositionedHeads& queries,
                                    const PositionedHeads& keys, const RopePlan& plan,
                                    bool backward) {
  std::array<RopeParams, 2> rotations = rotations_of(queries, keys, plan);
  for (RopeParams& rotation : rotations) rotation.backward = backward;
  backend_of(context).rotate_all(rotations);
}

std::array<RopeParams, 2> rope_internal::rotations_of(const PositionedHeads& queries,
                                                      const PositionedHeads& keys,
                                                      const RopePlan& plan) {
  return {planned_params(queries.x, plan, queries.positions),
          planned_params(keys.x, plan, keys.positions)};
}

void rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
          const RopePositions& positions, const TensorView& out) {
  run(context, forward_names(context), {x, options, nullptr, positions, out}, false);
}

void rope_backward(const Context& context, const ConstTensorView& dout, const RopeOptions& options,
                   const RopePositions& positions, const TensorView& dx) {
  run(context, backward_names(context), {dout, options, nullptr, positions, dx}, true);
}

void rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
          const RopeTable& table, const RopePositions& positions, const TensorView& out) {
  run(context, forward_names(context), {x, options, &table, positions, out}, false);
}

void rope_backward(const Context& context, const ConstTensorView& dout, const RopeOptions& options,
                   const RopeTable& table, const RopePositions& positions, const TensorView& dx) {
  run(context, backward_names(context), {dout, options, &table, positions, dx}, true);
}

void make_rope_table(const Context& context, const RopeOptions& options, std::int64_t rotary_dim,
                     const TensorView& cos, const TensorView& sin) {
  const Operation operation("make_rope_table", context);
  check_rotary_dim(operation, "rotary_dim", rotary_dim);
  if (options.rotary_dim != 0 && options.rotary_dim != rotary_dim) {
    fail(operation, "options.rotary_dim",
         "got " + std::to_string(options.rotary_dim) + ", expected 0 or rotary_dim, which is " +
             std::to_string(rotary_dim));
  }
  check_frequencies(operation, options, rotary_dim);
  const NamedView outputs[] = {{"cos", cos}, {"sin", sin}};
  check_strided_view(operation, outputs[0], 2);
  check_float(operation, outputs[0]);
  check_shape(operation, outputs[0], {cos.size(0), rotary_dim / 2});
  check_strided_floats(operation, outputs[1], cos.shape());
  check_no_overlap(operation, outputs, {});
  check_position_limit(operation, {}, cos.size(0), position_limit(options));
  backend_of(context).fill_rope_table(rope_frequencies(options, rotary_dim),
                                      rope_magnitude(options), cos, sin);
}

}  // namespace ladon
