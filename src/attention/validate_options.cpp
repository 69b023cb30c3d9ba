// The options of attention, apart from lengths and offsets.

#include <limits>
#include <string>
#include <utility>

#include "attention/validate.h"
#include "core/fail.h"

namespace ladon {
namespace {

void check_broadcast(const Operation& operation, const NamedView& argument,
                     const AttentionSizes& sizes) {
  check_strided_view(operation, argument, 4);
  const Dims full{sizes.num_sequences, sizes.num_heads, sizes.max_query_len, sizes.max_kv_len};
  for (int dim = 0; dim < 4; ++dim) {
    const std::int64_t size = argument.view.size(dim);
    if (size != full[dim] && size != 1) {
      fail(operation, argument.name,
           got_shape(argument.view) + ", expected " + full.to_string() + " or 1 in any place");
    }
  }
}

}  // namespace

void check_options(const Operation& operation, const AttentionOptions& options,
                   const AttentionSizes& sizes) {
  if (options.scale.has_value()) check_finite(operation, "scale", *options.scale);
  check_finite(operation, "softcap", options.softcap);
  if (options.softcap < 0) {
    fail(operation, "softcap",
         "got " + text_of(options.softcap) + ", expected a positive number, or 0 for none");
  }
  for (const auto& [name, width] : {std::pair{"window_left", options.window_left},
                                    std::pair{"window_right", options.window_right}}) {
    if (width.has_value() && *width < 0) {
      fail(operation, name, "got " + std::to_string(*width) + ", expected 0 or more");
    }
  }
  const double probability = options.dropout.probability;
  if (!(probability >= 0 && probability < 1)) {
    fail(operation, "dropout.probability",
         "got " + text_of(probability) + ", expected a number in [0, 1)");
  }
  const std::int64_t first = options.dropout.first_sequence;
  if (first < 0) {
    fail(operation, "dropout.first_sequence",
         "got " + std::to_string(first) + ", expected 0 or more");
  }
  if (sizes.num_sequences > 0 &&
      first > std::numeric_limits<std::int64_t>::max() - (sizes.num_sequences - 1)) {
    fail(operation, "dropout.first_sequence",
         "got " + std::to_string(first) + ", expected a number that leaves room for " +
             std::to_string(sizes.num_sequences) + " sequences");
  }
  for (const auto& [name, number] : {std::pair{"dropout.first_head", options.dropout.first_head},
                                     std::pair{"dropout.first_query", options.dropout.first_query},
                                     std::pair{"dropout.first_key", options.dropout.first_key}}) {
    if (number < 0 || number >= kMaxLength) {
      fail(operation, name, "got " + std::to_string(number) + ", expected 0 to 2^56");
    }
  }
  if (options.position_offset.has_value()) {
    const std::int64_t offset = *options.position_offset;
    if (offset <= -kMaxLength || offset >= kMaxLength) {
      fail(operation, "position_offset",
           "got " + std::to_string(offset) + ", expected a number between -2^56 and 2^56");
    }
    if (options.alignment != Alignment::kBottomRight) {
      fail(operation, "position_offset",
           "got one together with an alignment of kTopLeft, expected one of them");
    }
  }
  if (options.alignment != Alignment::kBottomRight && options.alignment != Alignment::kTopLeft) {
    fail(operation, "alignment",
         "got " + std::to_string(static_cast<int>(options.alignment)) + ", expected an Alignment");
  }
  check_mask_and_bias(operation, options.mask, options.bias, sizes);
  if (!options.alibi_slopes.absent()) {
    check_strided_floats(operation, {"alibi_slopes", options.alibi_slopes}, {sizes.num_heads});
  }
  if (!options.sinks.absent()) {
    check_strided_floats(operation, {"sinks", options.sinks}, {sizes.num_heads});
  }
}

void check_mask_and_bias(const Operation& operation, const ConstTensorView& mask,
                         const ConstTensorView& bias, const AttentionSizes& sizes) {
  if (!mask.absent()) {
    check_broadcast(operation, {"mask", mask}, sizes);
    check_dtype(operation, {"mask", mask}, DType::kBool);
  }
  if (!bias.absent()) {
    check_broadcast(operation, {"bias", bias}, sizes);
    check_float(operation, {"bias", bias});
  }
}

}  // namespace ladon
