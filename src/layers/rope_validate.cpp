// The checks of rope(): all of them before the first write, so that a call that throws has changed
// nothing.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "core/checks.h"
#include "core/fail.h"
#include "core/overlap.h"
#include "layers/rope_internal.h"

namespace ladon::rope_internal {
namespace {

/// Same memory, element for element. Strides of dimensions with one element do not matter.
bool same_view(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.data() != b.data() || a.dtype() != b.dtype() || !(a.shape() == b.shape())) return false;
  for (int dim = 0; dim < a.rank(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

void check_tensors(const Names& names, const NamedView& input, const NamedView& output) {
  check_view(names.operation, input, 4);
  check_float(names.operation, input);
  if (input.view.size(3) == 0) {
    fail(names.operation, input.name, got_shape(input.view) + ", expected a head_dim of 1 or more");
  }
  check_tensor(names.operation, output, input.view.dtype(), input.view.shape());
  check_no_self_overlap(names.operation, output);
  if (!same_view(input.view, output.view) && overlaps(input.view, output.view)) {
    fail(names.operation, output.name,
         "got memory that overlaps " + std::string(input.name) +
             ", expected the same view or separate memory");
  }
}

void check_options(const Names& names, const RopeOptions& options, bool has_table,
                   std::int64_t head_dim) {
  if (options.layout != RopeLayout::kHalfSplit && options.layout != RopeLayout::kInterleaved) {
    fail(names.operation, "layout",
         "got " + std::to_string(static_cast<int>(options.layout)) + ", expected a RopeLayout");
  }
  if (options.rotary_dim == 0) {
    if (head_dim % 2 != 0) {
      fail(names.operation, "rotary_dim",
           "got 0 (all of head_dim) with the odd head_dim " + std::to_string(head_dim) +
               ", expected an even number");
    }
  } else {
    check_rotary_dim(names.operation, "rotary_dim", options.rotary_dim);
    if (options.rotary_dim > head_dim) {
      fail(names.operation, "rotary_dim",
           "got " + std::to_string(options.rotary_dim) + ", expected at most head_dim, which is " +
               std::to_string(head_dim));
    }
  }
  if (!has_table) {
    check_frequencies(names.operation, options,
                      options.rotary_dim == 0 ? head_dim : options.rotary_dim);
    return;
  }
  // What angles come from in addition to a table would silently have no effect.
  if (options.base != RopeOptions{}.base) {
    fail(names.operation, "base", "got a base together with a table, expected the default");
  }
  if (!(options.scaling == RopeScalingOptions{})) {
    fail(names.operation, "scaling", "got a scaling together with a table, expected the default");
  }
  if (!options.frequencies.empty()) {
    fail(names.operation, "frequencies", "got frequencies together with a table, expected none");
  }
  if (options.magnitude != 1) {
    fail(names.operation, "magnitude", "got a magnitude together with a table, expected 1");
  }
}

void check_table_shape(const Names& names, const NamedView& argument, const Sizes& sizes) {
  const ConstTensorView& view = argument.view;
  const std::int64_t pairs = sizes.pairs();
  const bool by_position = view.rank() == 2 && view.size(1) == pairs;
  const bool by_token = view.rank() == 3 && view.size(0) == sizes.batch &&
                        view.size(1) == sizes.seq && view.size(2) == pairs;
  if (by_position || by_token) return;
  fail(names.operation, argument.name,
       got_shape(view) + ", expected [max_position, " + std::to_string(pairs) + "] or " +
           Dims{sizes.batch, sizes.seq, pairs}.to_string());
}

void check_positions_in_table(const Names& names, const RopePositions& positions,
                              std::int64_t max_position, const Sizes& sizes) {
  const auto refuse = [&](std::int64_t position, std::int64_t index) {
    fail(names.operation, "positions",
         "got position " + std::to_string(position) + " at index " + std::to_string(index) +
             ", expected 0 or more and less than the table's " + std::to_string(max_position) +
             " rows");
  };
  const auto& list = positions.explicit_positions;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i] < 0 || list[i] >= max_position) refuse(list[i], static_cast<std::int64_t>(i));
  }
  if (!list.empty() || sizes.seq == 0) return;
  if (positions.first < 0) refuse(positions.first, 0);
  const std::int64_t last = positions.first + sizes.seq - 1;
  if (last >= max_position) refuse(last, sizes.seq - 1);
}

void check_table(const Names& names, const RopeTable& table, const RopePositions& positions,
                 const Sizes& sizes, const NamedView& output) {
  const NamedView cos{"table.cos", table.cos};
  const NamedView sin{"table.sin", table.sin};
  check_present(names.operation, cos);
  check_table_shape(names, cos, sizes);
  check_strided_view(names.operation, cos, cos.view.rank());
  check_float(names.operation, cos);
  check_strided_floats(names.operation, sin, cos.view.shape());
  check_apart(names.operation, output, cos);
  check_apart(names.operation, output, sin);
  if (table.cos.rank() == 2) {
    check_positions_in_table(names, positions, table.cos.size(0), sizes);
  } else if (positions.first != 0 || !positions.explicit_positions.empty()) {
    fail(names.operation, "positions",
         "got positions together with a table with a row for each token, expected the default");
  }
}

}  // namespace

void check_positions(std::string_view operation, std::string_view argument,
                     const RopePositions& positions, std::int64_t batch, std::int64_t seq) {
  const auto refuse = [&](std::string_view field, const std::string& what) {
    fail(operation, std::string(argument).append(field), what);
  };
  const std::size_t count = positions.explicit_positions.size();
  if (count == 0) {
    if (positions.first > std::numeric_limits<std::int64_t>::max() - seq) {
      refuse(".first", "got " + std::to_string(positions.first) + " with " + std::to_string(seq) +
                           " tokens, expected positions that fit 64 bits");
    }
    return;
  }
  if (positions.first != 0) {
    refuse(".first", "got " + std::to_string(positions.first) +
                         " together with an explicit list, expected 0");
  }
  if (count != static_cast<std::size_t>(seq) && count != static_cast<std::size_t>(batch * seq)) {
    refuse(".explicit_positions", "got " + std::to_string(count) + " positions, expected " +
                                      std::to_string(seq) + " (seq) or " +
                                      std::to_string(batch * seq) + " (batch * seq)");
  }
}

void check_position_limit(std::string_view operation, const RopePositions& positions,
                          std::int64_t seq, std::int64_t limit) {
  if (limit == std::numeric_limits<std::int64_t>::max() || seq == 0) return;
  std::int64_t last =
      positions.explicit_positions.empty() ? positions.first + seq - 1 : std::int64_t{0};
  for (const std::int64_t position : positions.explicit_positions) last = std::max(last, position);
  if (last < limit) return;
  fail(operation, "positions",
       "got position " + std::to_string(last) + ", expected less than " + std::to_string(limit) +
           ": dynamic and longrope frequencies are chosen for one length of sequences "
           "(rope.scaling.context; rope_context when a model is loaded)");
}

Sizes check_call(const Names& names, const ConstTensorView& x, const RopeOptions& options,
                 const RopeTable* table, const RopePositions& positions, const TensorView& out) {
  const NamedView output{names.output, out};
  check_tensors(names, {names.input, x}, output);
  check_options(names, options, table != nullptr, x.size(3));
  const Sizes sizes{.batch = x.size(0),
                    .seq = x.size(1),
                    .heads = x.size(2),
                    .head_dim = x.size(3),
                    .rotary_dim = options.rotary_dim == 0 ? x.size(3) : options.rotary_dim};
  check_positions(names.operation, "positions", positions, sizes.batch, sizes.seq);
  if (table != nullptr) {
    check_table(names, *table, positions, sizes, output);
  } else {
    check_position_limit(names.operation, positions, sizes.seq, position_limit(options));
  }
  return sizes;
}

}  // namespace ladon::rope_internal
