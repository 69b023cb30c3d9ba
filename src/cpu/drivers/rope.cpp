// The rope driver. See ladon/rope.h for the formula.
//
// One pass over memory. A token's cosines and sines are computed once, in double, and serve all its
// heads: a call for one token with one head of 128 f32 elements takes 1.8 us, each further head
// 0.06 us (g++ 12, -O3, one thread). Tokens are handed out to threads in blocks; they are
// independent, so that the blocks and the threads cannot change a bit.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/element.h"
#include "core/float_type.h"
#include "core/parallel.h"
#include "cpu/backend.h"
#include "cpu/drivers/worker_scratch.h"

namespace ladon::cpu {
namespace {

/// Fewest elements of a task: some tens of microseconds, so that handing out a task and waking a
/// thread (a few microseconds) are small compared with it, and one decoded token of any model stays
/// on the caller's thread.
constexpr std::int64_t kElementsPerTask = 32768;

/// Pairs that are rotated at once. They pass through local arrays, so that the compiler can
/// vectorise although x and out may be the same memory.
constexpr std::int64_t kChunk = 16;

/// Writes one token's cosines and sines. Backward rotates by the negative angle.
template <class Compute>
void fill_rotations(const RopeParams& params, std::int64_t sequence, std::int64_t token,
                    Compute* cos, Compute* sin) {
  const double sign = params.backward ? -1 : 1;
  if (params.cos.data == nullptr) {
    const auto position = static_cast<double>(params.position_of(sequence, token));
    for (std::int64_t n = 0; n < params.pairs(); ++n) {
      const double angle = position * params.frequencies[n];
      cos[n] = static_cast<Compute>(params.magnitude * std::cos(angle));
      sin[n] = static_cast<Compute>(sign * params.magnitude * std::sin(angle));
    }
    return;
  }
  const std::int64_t row = params.table_by_position ? params.position_of(sequence, token) : token;
  const auto fill_row = [&](const RopeTableOperand& table, double factor, Compute* to) {
    const std::int64_t start = sequence * table.batch_stride + row * table.row_stride;
    for (std::int64_t n = 0; n < params.pairs(); ++n) {
      to[n] = static_cast<Compute>(
          factor * load_element(table.data, table.dtype, start + n * table.pair_stride));
    }
  };
  fill_row(params.cos, 1, cos);
  fill_row(params.sin, sign, sin);
}

/// The first and second elements of a head's pairs.
template <class Element>
struct Pairs {
  Element* first;
  Element* second;
};

/// Rotates the pairs (first[n * step], second[n * step]) of one head. x and out are the same memory
/// or do not overlap.
template <std::int64_t step, class Element, class Compute>
void rotate_pairs(const Pairs<const Element>& x, const Pairs<Element>& out, std::int64_t pairs,
                  const Compute* cos, const Compute* sin) {
  for (std::int64_t begin = 0; begin < pairs; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, pairs - begin);
    Compute a[kChunk];
    Compute b[kChunk];
    for (std::int64_t i = 0; i < count; ++i) {
      const Compute first = static_cast<Compute>(x.first[(begin + i) * step]);
      const Compute second = static_cast<Compute>(x.second[(begin + i) * step]);
      a[i] = first * cos[begin + i] - second * sin[begin + i];
      b[i] = first * sin[begin + i] + second * cos[begin + i];
    }
    for (std::int64_t i = 0; i < count; ++i) {
      out.first[(begin + i) * step] = static_cast<Element>(a[i]);
      out.second[(begin + i) * step] = static_cast<Element>(b[i]);
    }
  }
}

template <class Element, class Compute>
void rotate_token(const RopeParams& params, std::int64_t sequence, std::int64_t token,
                  const Compute* cos, const Compute* sin) {
  const std::int64_t pairs = params.pairs();
  for (std::int64_t head = 0; head < params.heads; ++head) {
    const auto offset = [&](const RopeOperand& operand) {
      return sequence * operand.batch_stride + token * operand.token_stride +
             head * operand.head_stride;
    };
    const Element* from = static_cast<const Element*>(params.x.data) + offset(params.x);
    Element* to = static_cast<Element*>(params.out.data) + offset(params.out);
    if (params.interleaved) {
      rotate_pairs<2, Element>({from, from + 1}, {to, to + 1}, pairs, cos, sin);
    } else {
      rotate_pairs<1, Element>({from, from + pairs}, {to, to + pairs}, pairs, cos, sin);
    }
    if (from != to) {
      std::copy(from + params.rotary_dim, from + params.head_dim, to + params.rotary_dim);
    }
  }
}

/// Of one token.
template <class Compute>
struct Rotations {
  Compute* cos;
  Compute* sin;

  Rotations(Arena& arena, std::int64_t pairs)
      : cos(arena.take<Compute>(pairs)), sin(arena.take<Compute>(pairs)) {}
};

template <class Element>
void rotate_tokens(Host& host, const RopeParams& params) {
  using Row = Rotations<ComputeOf<Element>>;
  const WorkerScratch scratch(host, layout_bytes<Row>(DeviceId{}, params.pairs()));
  const std::int64_t grain =
      std::max<std::int64_t>(1, kElementsPerTask / (params.heads * params.head_dim));
  parallel_ranges(host.workers, params.batch * params.seq, grain,
                  [&](std::int64_t begin, std::int64_t end, int worker) {
                    Arena arena = scratch.arena_of(worker);
                    const Row row(arena, params.pairs());
                    for (std::int64_t i = begin; i < end; ++i) {
                      const std::int64_t sequence = i / params.seq, token = i % params.seq;
                      fill_rotations(params, sequence, token, row.cos, row.sin);
                      rotate_token<Element>(params, sequence, token, row.cos, row.sin);
                    }
                  });
}

}  // namespace

void CpuBackend::rotate(const RopeParams& params) {
  if (params.batch == 0 || params.seq == 0 || params.heads == 0) return;
  with_float_type(params.dtype, [&]<class Element>() { rotate_tokens<Element>(host(), params); });
}

}  // namespace ladon::cpu
