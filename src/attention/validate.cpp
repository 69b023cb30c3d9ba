#include "attention/validate.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "core/fail.h"
#include "core/overlap.h"

namespace ladon {
namespace {

std::string got_shape(const ConstTensorView& view) { return "got " + view.shape().to_string(); }

/// Bytes from the lowest to the highest element must fit a signed 64-bit number.
bool extent_overflows(const ConstTensorView& view) {
  std::int64_t extent = 1;
  std::int64_t elements = 1;
  for (int dim = 0; dim < view.rank(); ++dim) {
    const std::int64_t size = view.size(dim);
    if (size == 0) return false;
    std::int64_t stride = view.stride(dim);
    if (stride == std::numeric_limits<std::int64_t>::min()) return true;
    stride = stride < 0 ? -stride : stride;
    std::int64_t span = 0;
    if (__builtin_mul_overflow(size - 1, stride, &span) ||
        __builtin_add_overflow(extent, span, &extent) ||
        __builtin_mul_overflow(elements, size, &elements)) {
      return true;
    }
  }
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype()));
  return __builtin_mul_overflow(extent, bytes, &extent) ||
         __builtin_mul_overflow(elements, bytes, &elements);
}

void check_finite(std::string_view operation, std::string_view argument, double value) {
  if (!std::isfinite(value)) {
    fail(operation, argument, "got " + std::to_string(value) + ", expected a finite number");
  }
}

void check_offsets(std::string_view operation, std::string_view argument,
                   std::span<const std::int64_t> offsets, std::int64_t total,
                   std::int64_t& longest) {
  if (offsets.front() != 0) {
    fail(operation, argument,
         "got a first offset of " + std::to_string(offsets.front()) + ", expected 0");
  }
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      fail(operation, argument,
           "got " + std::to_string(offsets[i]) + " after " + std::to_string(offsets[i - 1]) +
               " at index " + std::to_string(i) + ", expected offsets that do not fall");
    }
    longest = std::max(longest, offsets[i] - offsets[i - 1]);
  }
  if (offsets.back() != total) {
    fail(operation, argument,
         "got a last offset of " + std::to_string(offsets.back()) + ", expected the total of " +
             std::to_string(total) + " tokens");
  }
}

void check_lengths(std::string_view operation, const AttentionOptions& options,
                   AttentionSizes& sizes) {
  sizes.num_sequences = sizes.batch;
  sizes.max_query_len = sizes.query_len;
  sizes.max_kv_len = sizes.kv_len;
  if (!options.kv_lengths.empty()) {
    if (!options.query_offsets.empty() || !options.kv_offsets.empty()) {
      fail(operation, "kv_lengths",
           "got both kv_lengths and offsets, expected a padded or a packed batch, not both");
    }
    if (static_cast<std::int64_t>(options.kv_lengths.size()) != sizes.batch) {
      fail(operation, "kv_lengths",
           "got " + std::to_string(options.kv_lengths.size()) +
               " lengths, expected batch = " + std::to_string(sizes.batch));
    }
    for (std::size_t b = 0; b < options.kv_lengths.size(); ++b) {
      const std::int64_t length = options.kv_lengths[b];
      if (length < 0 || length > sizes.kv_len) {
        fail(operation, "kv_lengths",
             "got " + std::to_string(length) + " at index " + std::to_string(b) +
                 ", expected 0 to kv_len = " + std::to_string(sizes.kv_len));
      }
    }
  }
  if (options.query_offsets.empty() && options.kv_offsets.empty()) return;
  if (options.query_offsets.empty() || options.kv_offsets.empty()) {
    fail(operation, options.query_offsets.empty() ? "query_offsets" : "kv_offsets",
         "got none, expected offsets for both queries and keys of a packed batch");
  }
  if (options.query_offsets.size() != options.kv_offsets.size()) {
    fail(operation, "kv_offsets",
         "got " + std::to_string(options.kv_offsets.size()) + " offsets, expected " +
             std::to_string(options.query_offsets.size()) + " as in query_offsets");
  }
  if (sizes.batch != 1) {
    fail(operation, "q",
         "got a batch of " + std::to_string(sizes.batch) + ", expected 1 in a packed batch");
  }
  sizes.packed = true;
  sizes.num_sequences = static_cast<std::int64_t>(options.query_offsets.size()) - 1;
  sizes.max_query_len = 0;
  sizes.max_kv_len = 0;
  check_offsets(operation, "query_offsets", options.query_offsets, sizes.query_len,
                sizes.max_query_len);
  check_offsets(operation, "kv_offsets", options.kv_offsets, sizes.kv_len, sizes.max_kv_len);
}

void check_broadcast(std::string_view operation, const NamedView& argument,
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

void check_per_head(std::string_view operation, const NamedView& argument,
                    const AttentionSizes& sizes) {
  check_strided_view(operation, argument, 1);
  check_float(operation, argument);
  check_shape(operation, argument, {sizes.num_heads});
}

void check_options(std::string_view operation, const AttentionOptions& options,
                   const AttentionSizes& sizes) {
  if (options.scale.has_value()) check_finite(operation, "scale", *options.scale);
  check_finite(operation, "softcap", options.softcap);
  if (options.softcap < 0) {
    fail(operation, "softcap",
         "got " + std::to_string(options.softcap) + ", expected a positive number, or 0 for none");
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
         "got " + std::to_string(probability) + ", expected a number in [0, 1)");
  }
  if (options.dropout.first_sequence < 0) {
    fail(operation, "dropout.first_sequence",
         "got " + std::to_string(options.dropout.first_sequence) + ", expected 0 or more");
  }
  if (!options.mask.absent()) {
    check_broadcast(operation, {"mask", options.mask}, sizes);
    check_dtype(operation, {"mask", options.mask}, DType::kBool);
  }
  if (!options.bias.absent()) {
    check_broadcast(operation, {"bias", options.bias}, sizes);
    check_float(operation, {"bias", options.bias});
  }
  if (!options.alibi_slopes.absent()) {
    check_per_head(operation, {"alibi_slopes", options.alibi_slopes}, sizes);
  }
  if (!options.sinks.absent()) check_per_head(operation, {"sinks", options.sinks}, sizes);
}

}  // namespace

void check_strided_view(std::string_view operation, const NamedView& argument, int rank) {
  const auto& [name, view] = argument;
  if (view.absent()) fail(operation, name, "got none, expected a tensor");
  if (view.rank() != rank) {
    fail(operation, name, got_shape(view) + ", expected " + std::to_string(rank) + " dimensions");
  }
  if (view.device() != Device::kCpu) {
    fail(ErrorCode::kUnsupported, operation, name, "got a CUDA tensor, expected CPU memory");
  }
  for (const std::int64_t size : view.shape()) {
    if (size < 0) fail(operation, name, got_shape(view) + ", expected no negative size");
  }
  if (extent_overflows(view)) {
    fail(operation, name,
         got_shape(view) + " with strides " + view.strides().to_string() +
             ", expected a size that fits 64 bits");
  }
  if (view.num_elements() == 0) return;
  if (view.data() == nullptr) fail(operation, name, "got a null pointer, expected data");
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    fail(operation, name,
         "got data that is not aligned, expected a multiple of " +
             std::to_string(size_of(view.dtype())) + " bytes");
  }
}

void check_view(std::string_view operation, const NamedView& argument, int rank) {
  check_strided_view(operation, argument, rank);
  const ConstTensorView& view = argument.view;
  if (view.size(rank - 1) > 1 && view.stride(rank - 1) != 1) {
    fail(operation, argument.name,
         "got a last stride of " + std::to_string(view.stride(rank - 1)) + ", expected 1");
  }
}

void check_float(std::string_view operation, const NamedView& argument) {
  if (!is_float(argument.view.dtype())) {
    fail(operation, argument.name, "got dtype bool, expected f64, f32, f16 or bf16");
  }
}

void check_dtype(std::string_view operation, const NamedView& argument, DType wanted) {
  if (argument.view.dtype() != wanted) {
    fail(operation, argument.name,
         std::string("got dtype ") + name_of(argument.view.dtype()) + ", expected " +
             name_of(wanted));
  }
}

void check_shape(std::string_view operation, const NamedView& argument, const Dims& wanted) {
  if (!(argument.view.shape() == wanted)) {
    fail(operation, argument.name, got_shape(argument.view) + ", expected " + wanted.to_string());
  }
}

void check_no_overlap(std::string_view operation, std::span<const NamedView> outputs,
                      std::span<const NamedView> inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const NamedView& output = outputs[i];
    if (output.view.absent()) continue;
    if (overlaps_itself(output.view)) {
      fail(operation, output.name,
           "got strides " + output.view.strides().to_string() +
               " that reach one element twice, expected an output without overlap");
    }
    const auto refuse_if_shared = [&](const NamedView& other) {
      if (!other.view.absent() && overlaps(output.view, other.view)) {
        fail(
            operation, output.name,
            "got memory that overlaps " + std::string(other.name) + ", expected memory of its own");
      }
    };
    for (const NamedView& input : inputs) refuse_if_shared(input);
    for (std::size_t j = i + 1; j < outputs.size(); ++j) refuse_if_shared(outputs[j]);
  }
}

AttentionSizes check_inputs(std::string_view operation, const ConstTensorView& q,
                            const ConstTensorView& k, const ConstTensorView& v,
                            const AttentionOptions& options) {
  const bool with_values = !v.absent();
  check_view(operation, {"q", q}, 4);
  check_view(operation, {"k", k}, 4);
  check_float(operation, {"q", q});
  check_float(operation, {"k", k});
  AttentionSizes sizes;
  sizes.batch = q.size(0);
  sizes.query_len = q.size(1);
  sizes.num_heads = q.size(2);
  sizes.head_dim = q.size(3);
  sizes.kv_len = k.size(1);
  sizes.num_kv_heads = k.size(2);
  if (sizes.head_dim == 0)
    fail(operation, "q", got_shape(q) + ", expected a head_dim of 1 or more");
  if (sizes.num_heads == 0) fail(operation, "q", got_shape(q) + ", expected 1 head or more");
  if (sizes.num_kv_heads == 0) fail(operation, "k", got_shape(k) + ", expected 1 head or more");
  if (sizes.num_heads % sizes.num_kv_heads != 0) {
    fail(operation, "k",
         "got " + std::to_string(sizes.num_kv_heads) + " KV heads, expected a divisor of q's " +
             std::to_string(sizes.num_heads) + " heads");
  }
  check_shape(operation, {"k", k}, {sizes.batch, sizes.kv_len, sizes.num_kv_heads, sizes.head_dim});
  if (k.dtype() != q.dtype() && size_of(k.dtype()) >= size_of(q.dtype())) {
    fail(operation, "k",
         std::string("got dtype ") + name_of(k.dtype()) + ", expected q's " + name_of(q.dtype()) +
             " or a narrower one");
  }
  if (with_values) {
    check_view(operation, {"v", v}, 4);
    check_dtype(operation, {"v", v}, k.dtype());
    sizes.value_dim = v.size(3);
    if (sizes.value_dim == 0) {
      fail(operation, "v", got_shape(v) + ", expected a value_dim of 1 or more");
    }
    check_shape(operation, {"v", v},
                {sizes.batch, sizes.kv_len, sizes.num_kv_heads, sizes.value_dim});
  }
  check_lengths(operation, options, sizes);
  check_options(operation, options, sizes);
  return sizes;
}

void check_lse(std::string_view operation, const NamedView& argument, const AttentionSizes& sizes,
               DType q_dtype) {
  check_strided_view(operation, argument, 3);
  check_dtype(operation, argument, q_dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  check_shape(operation, argument, {sizes.batch, sizes.num_heads, sizes.query_len});
}

}  // namespace ladon
