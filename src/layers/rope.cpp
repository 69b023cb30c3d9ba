// rope(): out = the pairs of x, turned. See ladon/rope.h for the formula.
//
// One pass over memory. A token's cosines and sines are made once, in double, and serve all its
// heads: a call for one token with one head of 128 f32 numbers takes 1.8 us, each further head 0.06
// us (g++ 12, -O3, one thread). Tokens are dealt to threads in blocks; no token looks at another,
// so neither the blocks nor the threads can change a bit.
#include "ladon/rope.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "layers/rope_internal.h"
#include "reference/rope_reference.h"

namespace ladon {
namespace {

using rope_internal::Sizes;

/// Elements that one task turns at least: some tens of microseconds, so that handing out a task and
/// waking a thread (a few microseconds) stay small beside it, and one decoded token of any model
/// stays on the caller's thread.
constexpr std::int64_t kElementsPerTask = 32768;

/// Pairs that are turned at once. They pass through arrays of their own, which tells the compiler
/// that x and out being the same memory is no obstacle to vector code.
constexpr std::int64_t kChunk = 16;

constexpr std::size_t kCacheLine = 64;

/// Where the cosines and sines of a call come from: a table, or frequencies where that is null.
struct TurnSource {
  const RopeTable* table = nullptr;
  const double* frequencies = nullptr;
  double magnitude = 1;
  bool backward = false;
};

/// The arguments of a checked call.
struct Call {
  const ConstTensorView& x;
  const RopeOptions& options;
  const RopePositions& positions;
  const TensorView& out;
  Sizes sizes;
};

std::int64_t position_of(const Call& call, std::int64_t sequence, std::int64_t token) {
  const std::span<const std::int64_t> list = call.positions.explicit_positions;
  if (list.empty()) return call.positions.first + token;
  const bool per_sequence =
      static_cast<std::int64_t>(list.size()) == call.sizes.batch * call.sizes.seq;
  return list[static_cast<std::size_t>(per_sequence ? sequence * call.sizes.seq + token : token)];
}

/// Writes one token's cosines and sines. The turn back is the turn by the negative angle.
template <class Compute>
void fill_turns(const Call& call, const TurnSource& source, std::int64_t sequence,
                std::int64_t token, Compute* cos, Compute* sin) {
  const std::int64_t pairs = call.sizes.pairs();
  const double sign = source.backward ? -1 : 1;
  if (source.table == nullptr) {
    const auto position = static_cast<double>(position_of(call, sequence, token));
    for (std::int64_t n = 0; n < pairs; ++n) {
      const double angle = position * source.frequencies[n];
      cos[n] = static_cast<Compute>(source.magnitude * std::cos(angle));
      sin[n] = static_cast<Compute>(sign * source.magnitude * std::sin(angle));
    }
    return;
  }
  const auto fill_row = [&](const ConstTensorView& view, double factor, Compute* row) {
    const std::int64_t start = view.rank() == 3
                                   ? offset_of(view, {sequence, token})
                                   : offset_of(view, {position_of(call, sequence, token)});
    const std::int64_t step = view.stride(view.rank() - 1);
    for (std::int64_t n = 0; n < pairs; ++n) {
      row[n] =
          static_cast<Compute>(factor * load_element(view.data(), view.dtype(), start + n * step));
    }
  };
  fill_row(source.table->cos, 1, cos);
  fill_row(source.table->sin, sign, sin);
}

/// Turns the pairs (first[n * step], second[n * step]) of one head. x and out are the same memory
/// or do not overlap.
template <std::int64_t step, class Element, class Compute>
void turn_pairs(const Element* x_first, const Element* x_second, Element* out_first,
                Element* out_second, std::int64_t pairs, const Compute* cos, const Compute* sin) {
  for (std::int64_t begin = 0; begin < pairs; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, pairs - begin);
    Compute a[kChunk];
    Compute b[kChunk];
    for (std::int64_t i = 0; i < count; ++i) {
      const Compute first = static_cast<Compute>(x_first[(begin + i) * step]);
      const Compute second = static_cast<Compute>(x_second[(begin + i) * step]);
      a[i] = first * cos[begin + i] - second * sin[begin + i];
      b[i] = first * sin[begin + i] + second * cos[begin + i];
    }
    for (std::int64_t i = 0; i < count; ++i) {
      out_first[(begin + i) * step] = static_cast<Element>(a[i]);
      out_second[(begin + i) * step] = static_cast<Element>(b[i]);
    }
  }
}

template <class Element, class Compute>
void turn_token(const Call& call, std::int64_t sequence, std::int64_t token, const Compute* cos,
                const Compute* sin) {
  const std::int64_t pairs = call.sizes.pairs();
  const ConstTensorView& x = call.x;
  const TensorView& out = call.out;
  for (std::int64_t head = 0; head < call.sizes.heads; ++head) {
    const Element* from =
        static_cast<const Element*>(x.data()) + offset_of(x, {sequence, token, head});
    Element* to = static_cast<Element*>(out.data()) + offset_of(out, {sequence, token, head});
    if (call.options.layout == RopeLayout::kInterleaved) {
      turn_pairs<2>(from, from + 1, to, to + 1, pairs, cos, sin);
    } else {
      turn_pairs<1>(from, from + pairs, to, to + pairs, pairs, cos, sin);
    }
    if (from != to) {
      std::copy(from + call.sizes.rotary_dim, from + call.sizes.head_dim,
                to + call.sizes.rotary_dim);
    }
  }
}

template <class Element>
void turn_tokens(const Context& context, const Call& call, const TurnSource& source,
                 std::byte* scratch, std::size_t scratch_per_thread) {
  using Compute = std::conditional_t<std::is_same_v<Element, double>, double, float>;
  const Sizes& sizes = call.sizes;
  const std::int64_t tokens = sizes.batch * sizes.seq;
  const std::int64_t block =
      std::max<std::int64_t>(1, kElementsPerTask / (sizes.heads * sizes.head_dim));
  const std::int64_t tasks = ceil_div(tokens, block);
  parallel_for(context, tasks, [&](std::int64_t task, int worker) {
    std::byte* own = scratch + static_cast<std::size_t>(worker) * scratch_per_thread;
    Compute* cos = reinterpret_cast<Compute*>(own);
    Compute* sin = cos + sizes.pairs();
    const std::int64_t end = std::min(tokens, (task + 1) * block);
    for (std::int64_t i = task * block; i < end; ++i) {
      const std::int64_t sequence = i / sizes.seq;
      const std::int64_t token = i % sizes.seq;
      fill_turns(call, source, sequence, token, cos, sin);
      turn_token<Element>(call, sequence, token, cos, sin);
    }
  });
}

void run_fast(const Context& context, const Call& call, TurnSource source) {
  if (call.sizes.empty()) return;
  // Scratch: the frequencies, then a row of cosines and a row of sines for each thread. Doubles
  // are room enough for either type.
  const auto pairs = static_cast<std::size_t>(call.sizes.pairs());
  const std::size_t head = round_up(pairs * sizeof(double), kCacheLine);
  const std::size_t per_thread = round_up(2 * pairs * sizeof(double), kCacheLine);
  const Workspace workspace(context.impl().workspaces(),
                            head + per_thread * static_cast<std::size_t>(context.num_threads()));
  if (source.table == nullptr) {
    double* frequencies = reinterpret_cast<double*>(workspace.data());
    rope_internal::fill_frequencies(call.options.base, call.options.scaling, {frequencies, pairs});
    source.frequencies = frequencies;
    source.magnitude = rope_magnitude(call.options.scaling);
  }
  std::byte* scratch = workspace.data() + head;
  switch (call.x.dtype()) {
    case DType::kF64: turn_tokens<double>(context, call, source, scratch, per_thread); return;
    case DType::kF32: turn_tokens<float>(context, call, source, scratch, per_thread); return;
    case DType::kF16: turn_tokens<float16>(context, call, source, scratch, per_thread); return;
    case DType::kBF16: turn_tokens<bfloat16>(context, call, source, scratch, per_thread); return;
    default: return;  // refused by the checks
  }
}

void run(const Context& context, const ConstTensorView& x, const RopeOptions& options,
         const RopeTable* table, const RopePositions& positions, const TensorView& out,
         bool backward) {
  const rope_internal::Names& names =
      backward ? rope_internal::kBackwardNames : rope_internal::kForwardNames;
  const Sizes sizes = rope_internal::check_call(names, x, options, table, positions, out);
  if (context.isa() != Isa::kReference) {
    const Call call{x, options, positions, out, sizes};
    run_fast(context, call, {.table = table, .backward = backward});
  } else if (table == nullptr) {
    if (backward) return rope_backward_reference(x, options, positions, out);
    rope_reference(x, options, positions, out);
  } else {
    if (backward) return rope_backward_reference(x, options, *table, positions, out);
    rope_reference(x, options, *table, positions, out);
  }
}

}  // namespace

void rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
          const RopePositions& positions, const TensorView& out) {
  run(context, x, options, nullptr, positions, out, false);
}

void rope_backward(const Context& context, const ConstTensorView& dout, const RopeOptions& options,
                   const RopePositions& positions, const TensorView& dx) {
  run(context, dout, options, nullptr, positions, dx, true);
}

void rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
          const RopeTable& table, const RopePositions& positions, const TensorView& out) {
  run(context, x, options, &table, positions, out, false);
}

void rope_backward(const Context& context, const ConstTensorView& dout, const RopeOptions& options,
                   const RopeTable& table, const RopePositions& positions, const TensorView& dx) {
  run(context, dout, options, &table, positions, dx, true);
}

void make_rope_table(const RopeOptions& options, std::int64_t rotary_dim, const TensorView& cos,
                     const TensorView& sin) {
  constexpr std::string_view kOperation = "make_rope_table";
  rope_internal::check_rotary_dim(kOperation, "rotary_dim", rotary_dim);
  if (options.rotary_dim != 0 && options.rotary_dim != rotary_dim) {
    fail(kOperation, "options.rotary_dim",
         "got " + std::to_string(options.rotary_dim) + ", expected 0 or rotary_dim, which is " +
             std::to_string(rotary_dim));
  }
  rope_internal::check_scaling(kOperation, options.base, options.scaling);
  const NamedView outputs[] = {{"cos", cos}, {"sin", sin}};
  check_strided_view(kOperation, outputs[0], 2);
  check_float(kOperation, outputs[0]);
  check_shape(kOperation, outputs[0], {cos.size(0), rotary_dim / 2});
  check_strided_floats(kOperation, outputs[1], cos.shape());
  check_no_overlap(kOperation, outputs, {});

  const std::vector<double> frequencies =
      rope_frequencies(rotary_dim, options.base, options.scaling);
  const double magnitude = rope_magnitude(options.scaling);
  for (std::int64_t position = 0; position < cos.size(0); ++position) {
    for (std::int64_t n = 0; n < rotary_dim / 2; ++n) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(n)];
      store_element(cos.data(), cos.dtype(), offset_of(cos, {position, n}),
                    magnitude * std::cos(angle));
      store_element(sin.data(), sin.dtype(), offset_of(sin, {position, n}),
                    magnitude * std::sin(angle));
    }
  }
}

}  // namespace ladon
