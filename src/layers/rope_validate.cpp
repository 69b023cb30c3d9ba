// The checks of rope(): all of them before the first write, so that a call that throws has changed
// nothing.
#include <cstdint>
#include <limits>
#include <string>

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

void check_innermost_stride(const Names& names, std::string_view argument,
                            const ConstTensorView& view) {
  if (view.size(3) <= 1 || view.stride(3) == 1) return;
  fail(names.operation, argument,
       "innermost stride " + std::to_string(view.stride(3)) + " came, expected 1");
}

void check_tensors(const Names& names, const ConstTensorView& x, const ConstTensorView& out) {
  if (x.rank() != 4) {
    fail(names.operation, names.input,
         "shape " + x.shape().to_string() + " came, expected [batch, seq, heads, head_dim]");
  }
  check_view(names.operation, names.input, x);
  if (x.size(3) < 1) {
    fail(names.operation, names.input,
         "shape " + x.shape().to_string() + " came, expected a head_dim of at least 1");
  }
  check_innermost_stride(names, names.input, x);
  if (!(out.shape() == x.shape())) {
    fail(names.operation, names.output,
         "shape " + out.shape().to_string() + " came, expected " + x.shape().to_string() + " as " +
             std::string(names.input));
  }
  check_view(names.operation, names.output, out);
  if (out.dtype() != x.dtype()) {
    fail(names.operation, names.output,
         std::string("dtype ") + name_of(out.dtype()) + " came, expected " + name_of(x.dtype()) +
             " as " + std::string(names.input));
  }
  check_innermost_stride(names, names.output, out);
  if (overlaps_itself(out)) {
    fail(names.operation, names.output,
         "strides " + out.strides().to_string() +
             " reach one element by two indices, expected a "
             "place for each");
  }
  if (!same_view(x, out) && overlaps(x, out)) {
    fail(names.operation, names.output,
         "overlaps " + std::string(names.input) + ", expected the same view or separate memory");
  }
}

void check_options(const Names& names, const RopeOptions& options, bool has_table,
                   std::int64_t head_dim) {
  if (options.layout != RopeLayout::kHalfSplit && options.layout != RopeLayout::kInterleaved) {
    fail(names.operation, "layout",
         std::to_string(static_cast<int>(options.layout)) + " came, expected a RopeLayout");
  }
  if (options.rotary_dim == 0) {
    if (head_dim % 2 != 0) {
      fail(names.operation, "rotary_dim",
           "0 (all of head_dim) with the odd head_dim " + std::to_string(head_dim) +
               " came, expected an even number");
    }
  } else {
    check_rotary_dim(names.operation, "rotary_dim", options.rotary_dim);
    if (options.rotary_dim > head_dim) {
      fail(names.operation, "rotary_dim",
           std::to_string(options.rotary_dim) + " came, expected at most head_dim, which is " +
               std::to_string(head_dim));
    }
  }
  if (!has_table) {
    check_scaling(names.operation, options.base, options.scaling);
    return;
  }
  // A base or a scaling beside a table would be silently without effect.
  if (options.base != RopeOptions{}.base) {
    fail(names.operation, "base", "is set beside a table, expected the default");
  }
  if (!(options.scaling == RopeScalingOptions{})) {
    fail(names.operation, "scaling", "is set beside a table, expected the default");
  }
}

void check_positions(const Names& names, const RopePositions& positions, const Sizes& sizes) {
  const std::size_t count = positions.explicit_positions.size();
  if (count == 0) {
    if (positions.first > std::numeric_limits<std::int64_t>::max() - sizes.seq) {
      fail(names.operation, "positions.first",
           std::to_string(positions.first) + " with " + std::to_string(sizes.seq) +
               " tokens came, expected positions that fit 64 bits");
    }
    return;
  }
  if (positions.first != 0) {
    fail(names.operation, "positions.first",
         std::to_string(positions.first) + " beside an explicit list came, expected 0");
  }
  const auto seq = static_cast<std::size_t>(sizes.seq);
  const auto tokens = static_cast<std::size_t>(sizes.batch * sizes.seq);
  if (count != seq && count != tokens) {
    fail(names.operation, "positions.explicit_positions",
         std::to_string(count) + " positions came, expected " + std::to_string(seq) + " (seq) or " +
             std::to_string(tokens) + " (batch * seq)");
  }
}

void check_table_shape(const Names& names, std::string_view argument, const ConstTensorView& view,
                       const Sizes& sizes) {
  const std::int64_t pairs = sizes.pairs();
  const bool by_position = view.rank() == 2 && view.size(1) == pairs;
  const bool by_token = view.rank() == 3 && view.size(0) == sizes.batch &&
                        view.size(1) == sizes.seq && view.size(2) == pairs;
  if (by_position || by_token) return;
  fail(names.operation, argument,
       "shape " + view.shape().to_string() + " came, expected [max_position, " +
           std::to_string(pairs) + "] or " + Dims{sizes.batch, sizes.seq, pairs}.to_string());
}

void check_positions_in_table(const Names& names, const RopePositions& positions,
                              std::int64_t max_position, const Sizes& sizes) {
  const auto refuse = [&](std::int64_t position, std::int64_t index) {
    fail(names.operation, "positions",
         "position " + std::to_string(position) + " at index " + std::to_string(index) +
             " came, expected 0 or more and less than the table's " + std::to_string(max_position) +
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
                 const Sizes& sizes, const ConstTensorView& out) {
  check_table_shape(names, "table.cos", table.cos, sizes);
  check_view(names.operation, "table.cos", table.cos);
  if (!(table.sin.shape() == table.cos.shape())) {
    fail(names.operation, "table.sin",
         "shape " + table.sin.shape().to_string() + " came, expected " +
             table.cos.shape().to_string() + " as table.cos");
  }
  check_view(names.operation, "table.sin", table.sin);
  if (overlaps(table.cos, out)) {
    fail(names.operation, names.output, "overlaps table.cos, expected separate memory");
  }
  if (overlaps(table.sin, out)) {
    fail(names.operation, names.output, "overlaps table.sin, expected separate memory");
  }
  if (table.cos.rank() == 2) {
    check_positions_in_table(names, positions, table.cos.size(0), sizes);
  } else if (positions.first != 0 || !positions.explicit_positions.empty()) {
    fail(names.operation, "positions",
         "are set beside a table with a row for each token, expected the default");
  }
}

}  // namespace

void check_view(std::string_view operation, std::string_view argument,
                const ConstTensorView& view) {
  if (view.device() != Device::kCpu) {
    fail(ErrorCode::kUnsupported, operation, argument, "is on a CUDA device, expected the CPU");
  }
  if (!is_float(view.dtype())) {
    fail(operation, argument,
         std::string("dtype ") + name_of(view.dtype()) + " came, expected f64, f32, f16 or bf16");
  }
  if (view.num_elements() == 0) return;
  if (view.data() == nullptr) {
    fail(operation, argument,
         "data is null with shape " + view.shape().to_string() + ", expected memory");
  }
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    fail(operation, argument,
         "data is not aligned to " + std::to_string(size_of(view.dtype())) + " bytes, expected so");
  }
}

Sizes check_call(const Names& names, const ConstTensorView& x, const RopeOptions& options,
                 const RopeTable* table, const RopePositions& positions, const TensorView& out) {
  check_tensors(names, x, out);
  check_options(names, options, table != nullptr, x.size(3));
  const Sizes sizes{.batch = x.size(0),
                    .seq = x.size(1),
                    .heads = x.size(2),
                    .head_dim = x.size(3),
                    .rotary_dim = options.rotary_dim == 0 ? x.size(3) : options.rotary_dim};
  check_positions(names, positions, sizes);
  if (table != nullptr) check_table(names, *table, positions, sizes, out);
  return sizes;
}

}  // namespace ladon::rope_internal
