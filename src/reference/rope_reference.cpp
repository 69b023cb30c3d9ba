// Pair (a, b) of a head, turned by the angle t and stretched by the magnitude m:
//
//   forward    a' = m (a cos t - b sin t)      b' = m (a sin t + b cos t)
//   backward   a' = m (a cos t + b sin t)      b' = m (b cos t - a sin t)      (the transpose)
//
// One element at a time, everything in double, nothing clever.
#include "reference/rope_reference.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/element.h"

namespace ladon {
namespace {

struct Turn {
  double cos;
  double sin;
};

std::int64_t position_of(const RopePositions& positions, std::int64_t batch, std::int64_t seq,
                         std::int64_t sequence, std::int64_t token) {
  const auto& list = positions.explicit_positions;
  if (list.empty()) return positions.first + token;
  const bool one_list_for_all = static_cast<std::int64_t>(list.size()) != batch * seq;
  return list[static_cast<std::size_t>(one_list_for_all ? token : sequence * seq + token)];
}

/// turn_of(sequence, token, pair) gives the cosine and sine, magnitude included.
template <class TurnOf>
void turn_all(const ConstTensorView& x, const RopeOptions& options, const TensorView& out,
              bool backward, const TurnOf& turn_of) {
  const std::int64_t head_dim = x.size(3);
  const std::int64_t rotary_dim = options.rotary_dim == 0 ? head_dim : options.rotary_dim;
  const std::int64_t pairs = rotary_dim / 2;
  const bool interleaved = options.layout == RopeLayout::kInterleaved;

  for (std::int64_t sequence = 0; sequence < x.size(0); ++sequence) {
    for (std::int64_t token = 0; token < x.size(1); ++token) {
      for (std::int64_t head = 0; head < x.size(2); ++head) {
        const auto load = [&](std::int64_t d) {
          return load_element(x.data(), x.dtype(), offset_of(x, {sequence, token, head, d}));
        };
        const auto store = [&](std::int64_t d, double value) {
          store_element(out.data(), out.dtype(), offset_of(out, {sequence, token, head, d}), value);
        };
        for (std::int64_t n = 0; n < pairs; ++n) {
          const std::int64_t first = interleaved ? 2 * n : n;
          const std::int64_t second = interleaved ? 2 * n + 1 : n + pairs;
          const double a = load(first);
          const double b = load(second);
          const Turn turn = turn_of(sequence, token, n);
          if (backward) {
            store(first, a * turn.cos + b * turn.sin);
            store(second, b * turn.cos - a * turn.sin);
          } else {
            store(first, a * turn.cos - b * turn.sin);
            store(second, a * turn.sin + b * turn.cos);
          }
        }
        for (std::int64_t d = rotary_dim; d < head_dim; ++d) store(d, load(d));
      }
    }
  }
}

void turn_by_options(const ConstTensorView& x, const RopeOptions& options,
                     const RopePositions& positions, const TensorView& out, bool backward) {
  const std::int64_t rotary_dim = options.rotary_dim == 0 ? x.size(3) : options.rotary_dim;
  const std::vector<double> frequencies =
      rope_frequencies(rotary_dim, options.base, options.scaling);
  const double magnitude = rope_magnitude(options.scaling);
  turn_all(
      x, options, out, backward, [&](std::int64_t sequence, std::int64_t token, std::int64_t n) {
        const std::int64_t position = position_of(positions, x.size(0), x.size(1), sequence, token);
        const double angle =
            static_cast<double>(position) * frequencies[static_cast<std::size_t>(n)];
        return Turn{magnitude * std::cos(angle), magnitude * std::sin(angle)};
      });
}

void turn_by_table(const ConstTensorView& x, const RopeOptions& options, const RopeTable& table,
                   const RopePositions& positions, const TensorView& out, bool backward) {
  turn_all(
      x, options, out, backward, [&](std::int64_t sequence, std::int64_t token, std::int64_t n) {
        const auto look_up = [&](const ConstTensorView& view) {
          const std::int64_t index =
              view.rank() == 3
                  ? offset_of(view, {sequence, token, n})
                  : offset_of(view,
                              {position_of(positions, x.size(0), x.size(1), sequence, token), n});
          return load_element(view.data(), view.dtype(), index);
        };
        return Turn{look_up(table.cos), look_up(table.sin)};
      });
}

}  // namespace

void rope_reference(const ConstTensorView& x, const RopeOptions& options,
                    const RopePositions& positions, const TensorView& out) {
  turn_by_options(x, options, positions, out, false);
}

void rope_backward_reference(const ConstTensorView& dout, const RopeOptions& options,
                             const RopePositions& positions, const TensorView& dx) {
  turn_by_options(dout, options, positions, dx, true);
}

void rope_reference(const ConstTensorView& x, const RopeOptions& options, const RopeTable& table,
                    const RopePositions& positions, const TensorView& out) {
  turn_by_table(x, options, table, positions, out, false);
}

void rope_backward_reference(const ConstTensorView& dout, const RopeOptions& options,
                             const RopeTable& table, const RopePositions& positions,
                             const TensorView& dx) {
  turn_by_table(dout, options, table, positions, dx, true);
}

}  // namespace ladon
