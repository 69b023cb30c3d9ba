// rope() and its backward against the plain loops in double, over random options: layouts, partial
// rotary_dim, odd sizes, strided views, in place, every kind of positions, tables and scaling.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/random.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "support/contexts.h"
#include "support/host_context.h"
#include "support/rope_support.h"

namespace ladon {
namespace {

using test::elements_of;
using test::host_context;

class RopeReferenceTest : public test::ContextTest {};
LADON_FOR_EACH_CONTEXT(RopeReferenceTest);

/// A tensor inside a larger one, on a Context's device: gaps along every dimension, and for half of
/// the seeds in [batch, heads, seq, head_dim] order.
struct Strided {
  Tensor whole;
  TensorView view;

  Strided(const Context& context, DType dtype, const Dims& shape, double gap_value,
          Random& random) {
    const bool heads_first = random.below(2) == 1;
    const Dims inner = heads_first ? Dims{shape[0], shape[2], shape[1], shape[3]} : shape;
    Dims outer = inner;
    for (int dim = 0; dim < 4; ++dim) outer[dim] += 2 + random.below(3);
    const auto count = static_cast<std::size_t>(outer[0] * outer[1] * outer[2] * outer[3]);
    whole = Tensor::from_values(dtype, outer, std::vector<double>(count, gap_value)).to(context);
    view = whole;
    for (int dim = 0; dim < 4; ++dim) view = view.slice(dim, 1, 1 + inner[dim]);
    if (heads_first) view = view.transpose(1, 2);
  }
};

struct RandomCase {
  DType dtype = DType::kF32;
  Dims shape;
  RopeOptions options;
  RopePositions positions;
  std::vector<std::int64_t> position_list;
  bool in_place = false;
  bool backward = false;
  int table_rank = 0;  // 0: no table
  DType table_dtype = DType::kF32;
  static constexpr std::int64_t kTableRows = 40;

  RandomCase(const RandomCase&) = delete;  // positions point into the list
  RandomCase& operator=(const RandomCase&) = delete;

  explicit RandomCase(Random& random) {
    const auto pick = [&](std::int64_t bound) { return random.below(bound); };
    dtype = kFloatTypes[pick(4)];
    const std::int64_t pairs = 1 + pick(pick(4) == 0 ? 70 : 12);
    const std::int64_t passed = pick(2) == 0 ? 0 : 1 + pick(9);
    shape = {1 + pick(3), 1 + pick(7), 1 + pick(5), 2 * pairs + passed};
    options.layout = kLayouts[pick(2)];
    options.rotary_dim = passed == 0 && pick(2) == 0 ? 0 : 2 * pairs;
    in_place = pick(2) == 1;
    backward = pick(2) == 1;
    table_rank = pick(2) == 0 ? 0 : static_cast<int>(2 + pick(2));
    table_dtype = kFloatTypes[pick(4)];
    if (table_rank == 0) {
      options.base = random.uniform(2, 500000);
      options.scaling = {.kind = static_cast<RopeScaling>(pick(4)),
                         .factor = random.uniform(1, 40),
                         .original_context = random.uniform(10, 5000),
                         .truncate = pick(2) == 0,
                         .mscale = random.uniform(0, 1),
                         .mscale_all_dim = pick(2) == 0 ? 0 : random.uniform(0, 1)};
    }
    if (table_rank == 3) return;
    const std::int64_t lowest = table_rank == 2 ? 0 : -2000;
    const std::int64_t range = table_rank == 2 ? kTableRows : 4000;
    const std::int64_t kind = pick(3);
    if (kind == 0) {
      positions.first = lowest + pick(range - shape[1] + 1);
    } else {
      const std::int64_t count = kind == 1 ? shape[1] : shape[0] * shape[1];
      for (std::int64_t i = 0; i < count; ++i) position_list.push_back(lowest + pick(range));
      positions.explicit_positions = position_list;
    }
  }

  std::int64_t rotary_dim() const {
    return options.rotary_dim == 0 ? shape[3] : options.rotary_dim;
  }

  std::string describe() const {
    std::ostringstream text;
    text << name_of(dtype) << " " << shape.to_string() << " rotary_dim " << options.rotary_dim
         << " layout " << static_cast<int>(options.layout) << " scaling "
         << static_cast<int>(options.scaling.kind) << " table rank " << table_rank << " first "
         << positions.first << " list " << position_list.size() << (in_place ? " in place" : "")
         << (backward ? " backward" : "");
    return text.str();
  }
};

/// What an element's error is measured against: |a| + |b| of its pair, or 0 where it is passed on.
double size_of_pair(const RandomCase& test, const std::vector<double>& x, std::int64_t index) {
  const std::int64_t d = index % test.shape[3];
  const std::int64_t pairs = test.rotary_dim() / 2;
  if (d >= test.rotary_dim()) return 0;
  const std::int64_t other = test.options.layout == RopeLayout::kInterleaved ? (d ^ 1)
                             : d < pairs                                     ? d + pairs
                                                                             : d - pairs;
  return std::abs(x[static_cast<std::size_t>(index)]) +
         std::abs(x[static_cast<std::size_t>(index - d + other)]);
}

/// |error| <= c * eps * m * (|a| + |b|), where no cosine or sine exceeds m. In float: one rounding
/// of the cosine, one of the product, one of the sum, each eps / 2, so c = 2 covers it; in double,
/// the reference errs as much itself. To 16 bits: the last rounding is eps / 2 and the rest is
/// dust. Below the normal numbers of f16 a rounding is 2^-25.
void expect_close(const RandomCase& test, const std::vector<double>& x,
                  const std::vector<double>& got, const std::vector<double>& truth,
                  double magnitude) {
  const bool narrow = size_of(test.dtype) == 2;
  const double relative = (narrow ? 0.75 : 2) * epsilon_of(test.dtype) * magnitude;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double size = size_of_pair(test, x, static_cast<std::int64_t>(i));
    const double bound = size == 0 ? 0 : relative * size + (narrow ? 0x1p-25 : 0);
    ASSERT_LE(std::abs(got[i] - truth[i]), bound) << "element " << i << " of " << test.describe();
  }
}

const Context& reference() {
  static const Context context(ContextOptions{.num_threads = 1, .isa = Isa::kReference});
  return context;
}

void run_random_case(const Context& context, std::uint64_t seed) {
  Random random(seed);
  const RandomCase test(random);
  // NaN in the gaps of the input, so that a stray read shows; 77 in those of the output, so that
  // a stray write does.
  Strided x(context, test.dtype, test.shape, kNaN, random);
  const Tensor dense = normal_tensor(test.dtype, test.shape, seed);
  copy(context, dense, x.view);
  Strided separate_out(context, test.dtype, test.shape, 77, random);
  const Tensor x_before = x.whole.to_host();
  const TensorView out = test.in_place ? x.view : separate_out.view;
  const Tensor x_wide = Tensor::copy_of(host_context(), dense, DType::kF64);
  Tensor truth(DType::kF64, test.shape);
  double magnitude = 1;

  if (test.table_rank == 0) {
    magnitude = rope_magnitude(test.options.scaling);
    if (test.backward) {
      rope_backward(reference(), x_wide, test.options, test.positions, truth);
      rope_backward(context, x.view, test.options, test.positions, out);
    } else {
      rope(reference(), x_wide, test.options, test.positions, truth);
      rope(context, x.view, test.options, test.positions, out);
    }
  } else {
    const std::int64_t pairs = test.rotary_dim() / 2;
    const Dims shape = test.table_rank == 2 ? Dims{RandomCase::kTableRows, pairs}
                                            : Dims{test.shape[0], test.shape[1], pairs};
    Tensor cos(test.table_dtype, shape);
    Tensor sin(DType::kF64, shape);
    fill_uniform(host_context(), cos, -1.5, 1.5, seed, 1);
    fill_uniform(host_context(), sin, -1.5, 1.5, seed, 2);
    const Tensor cos_there = cos.to(context), sin_there = sin.to(context);
    const RopeTable host_table{cos, sin};
    const RopeTable table{cos_there, sin_there};
    magnitude = 1.5;
    if (test.backward) {
      rope_backward(reference(), x_wide, test.options, host_table, test.positions, truth);
      rope_backward(context, x.view, test.options, table, test.positions, out);
    } else {
      rope(reference(), x_wide, test.options, host_table, test.positions, truth);
      rope(context, x.view, test.options, table, test.positions, out);
    }
  }

  expect_close(test, elements_of(x_wide), elements_of(context, out), elements_of(truth), magnitude);
  // Put back what the call may write: all else must be as it was.
  if (test.in_place) {
    copy(context, x_wide, x.view);
  } else {
    fill_uniform(context, separate_out.view, 77, 77, 0);
    for (const double value : elements_of(separate_out.whole)) ASSERT_EQ(value, 77);
  }
  ASSERT_TRUE(same_bits(x.whole.to_host(), x_before)) << test.describe();
}

TEST_P(RopeReferenceTest, RandomCasesAgreeWithTheReference) {
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    ASSERT_NO_FATAL_FAILURE(run_random_case(context_, seed)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ladon
