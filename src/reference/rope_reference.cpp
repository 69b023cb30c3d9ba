// Pair (a, b) of a head, rotated by the angle t and stretched by the magnitude m:
//
//   forward    a' = m (a cos t - b sin t)      b' = m (a sin t + b cos t)
//   backward   a' = m (a cos t + b sin t)      b' = m (b cos t - a sin t)      (the transpose)
//
// One element at a time, everything in double.

#include <cmath>

#include "core/element.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

struct Rotation {
  double cos;
  double sin;
};

double look_up(const RopeParams& params, const RopeTableOperand& table, std::int64_t sequence,
               std::int64_t token, std::int64_t pair) {
  const std::int64_t row = params.table_by_position ? params.position_of(sequence, token) : token;
  return load_element(
      table.data, table.dtype,
      sequence * table.batch_stride + row * table.row_stride + pair * table.pair_stride);
}

Rotation rotation_of(const RopeParams& params, std::int64_t sequence, std::int64_t token,
                     std::int64_t pair) {
  if (params.cos.data != nullptr) {
    return {look_up(params, params.cos, sequence, token, pair),
            look_up(params, params.sin, sequence, token, pair)};
  }
  const double angle =
      static_cast<double>(params.position_of(sequence, token)) * params.frequencies[pair];
  return {params.magnitude * std::cos(angle), params.magnitude * std::sin(angle)};
}

void rotate_head(const RopeParams& params, std::int64_t sequence, std::int64_t token,
                 std::int64_t head) {
  const auto offset = [&](const RopeOperand& operand) {
    return sequence * operand.batch_stride + token * operand.token_stride +
           head * operand.head_stride;
  };
  const auto load = [&](std::int64_t i) {
    return load_element(params.x.data, params.dtype, offset(params.x) + i);
  };
  const auto store = [&](std::int64_t i, double value) {
    store_element(params.out.data, params.dtype, offset(params.out) + i, value);
  };
  for (std::int64_t n = 0; n < params.pairs(); ++n) {
    const std::int64_t first = params.interleaved ? 2 * n : n;
    const std::int64_t second = params.interleaved ? 2 * n + 1 : n + params.pairs();
    const double a = load(first);
    const double b = load(second);
    const Rotation rotation = rotation_of(params, sequence, token, n);
    if (params.backward) {
      store(first, a * rotation.cos + b * rotation.sin);
      store(second, b * rotation.cos - a * rotation.sin);
    } else {
      store(first, a * rotation.cos - b * rotation.sin);
      store(second, a * rotation.sin + b * rotation.cos);
    }
  }
  for (std::int64_t i = params.rotary_dim; i < params.head_dim; ++i) store(i, load(i));
}

}  // namespace

void ReferenceBackend::rotate(const RopeParams& params) {
  for (std::int64_t sequence = 0; sequence < params.batch; ++sequence) {
    for (std::int64_t token = 0; token < params.seq; ++token) {
      for (std::int64_t head = 0; head < params.heads; ++head) {
        rotate_head(params, sequence, token, head);
      }
    }
  }
}

void ReferenceBackend::fill_rope_table(std::span<const double> frequencies, double magnitude,
                                       const TensorView& cos, const TensorView& sin) {
  for (std::int64_t position = 0; position < cos.size(0); ++position) {
    for (std::int64_t n = 0; n < cos.size(1); ++n) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(n)];
      store_element(cos.data(), cos.dtype(), offset_of(cos, {position, n}),
                    magnitude * std::cos(angle));
      store_element(sin.data(), sin.dtype(), offset_of(sin, {position, n}),
                    magnitude * std::sin(angle));
    }
  }
}

}  // namespace ladon::reference
