#include "attention/side_gradients.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "attention/validate.h"
#include "core/context_impl.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "reference/attention_reference.h"

namespace ladon {
namespace {

// Elements of the bias that one task owns. Their sums are doubles: 128 KiB a thread.
constexpr std::int64_t kTokensPerTask = 64;
constexpr std::int64_t kKeysPerTask = 256;

/// The bias's gradient cut into boxes of [sequence, head, tokens, keys].
struct BiasBoxes {
  explicit BiasBoxes(const TensorView& dbias)
      : sequences(dbias.size(0)),
        heads(dbias.size(1)),
        tokens(dbias.size(2)),
        keys(dbias.size(3)),
        token_boxes(ceil_div(tokens, kTokensPerTask)),
        key_boxes(ceil_div(keys, kKeysPerTask)) {}

  std::int64_t count() const { return sequences * heads * token_boxes * key_boxes; }

  std::int64_t sequences, heads, tokens, keys, token_boxes, key_boxes;
};

/// One box: which elements it owns.
struct BiasBox {
  BiasBox(const BiasBoxes& boxes, std::int64_t index) {
    const std::int64_t key_box = index % boxes.key_boxes;
    index /= boxes.key_boxes;
    const std::int64_t token_box = index % boxes.token_boxes;
    index /= boxes.token_boxes;
    head = index % boxes.heads;
    sequence = index / boxes.heads;
    token_begin = token_box * kTokensPerTask;
    token_end = std::min(token_begin + kTokensPerTask, boxes.tokens);
    key_begin = key_box * kKeysPerTask;
    key_end = std::min(key_begin + kKeysPerTask, boxes.keys);
  }

  void write(const double* sums, const TensorView& dbias) const {
    for (std::int64_t token = token_begin; token < token_end; ++token) {
      for (std::int64_t key = key_begin; key < key_end; ++key) {
        store_element(dbias.data(), dbias.dtype(), offset_of(dbias, {sequence, head, token, key}),
                      sums[(token - token_begin) * kKeysPerTask + key - key_begin]);
      }
    }
  }

  std::int64_t sequence, head, token_begin, token_end, key_begin, key_end;
};

constexpr std::size_t kSumBytes = kTokensPerTask * kKeysPerTask * sizeof(double);

void write_bias_gradient(const Context& context, const Problem& problem,
                         const cpu::KernelSet& kernels, const TensorView& dbias, std::byte* scratch,
                         std::size_t scratch_stride) {
  const AttentionParams& params = problem.params();
  const AttentionSizes& sizes = problem.sizes();
  const BiasBoxes boxes(dbias);
  parallel_for(context, boxes.count(), [&](std::int64_t index, int worker) {
    std::byte* memory = scratch + static_cast<std::size_t>(worker) * scratch_stride;
    auto* sums = reinterpret_cast<double*>(memory);
    std::fill_n(sums, kTokensPerTask * kKeysPerTask, 0.0);
    const BiasBox box(boxes, index);
    // A dimension of size 1 is shared: the task then sums over all of it.
    cpu::BiasGradientTask task;
    task.sequence = boxes.sequences == 1 ? -1 : box.sequence;
    task.head = boxes.heads == 1 ? -1 : box.head;
    task.token_begin = box.token_begin;
    task.token_end = boxes.tokens == 1 ? sizes.max_query_len : box.token_end;
    task.token_stride = boxes.tokens == 1 ? 0 : kKeysPerTask;
    task.key_begin = box.key_begin;
    task.key_end = boxes.keys == 1 ? sizes.max_kv_len : box.key_end;
    task.key_stride = boxes.keys == 1 ? 0 : 1;
    task.sums = sums;
    kernels.bias_gradient(params, task, memory + kSumBytes);
    box.write(sums, dbias);
  });
}

void write_sink_gradients(const Context& context, const AttentionParams& params,
                          const cpu::KernelSet& kernels, const TensorView& dsinks,
                          std::byte* scratch, std::size_t scratch_stride) {
  parallel_for(context, params.num_heads, [&](std::int64_t head, int worker) {
    double sum = 0;
    kernels.sink_gradient(params, {head, &sum},
                          scratch + static_cast<std::size_t>(worker) * scratch_stride);
    store_element(dsinks.data(), dsinks.dtype(), head * dsinks.stride(0), sum);
  });
}

}  // namespace

void check_side_gradients(std::string_view operation, const AttentionOptions& options,
                          const AttentionGradients& gradients) {
  const auto check = [&](const NamedView& gradient, const NamedView& input) {
    if (gradient.view.absent()) return;
    if (input.view.absent()) {
      fail(operation, gradient.name,
           "got a tensor, expected none because options have no " + std::string(input.name));
    }
    check_strided_floats(operation, gradient, input.view.shape());
  };
  check({"dbias", gradients.dbias}, {"bias", options.bias});
  check({"dsinks", gradients.dsinks}, {"sinks", options.sinks});
}

std::size_t side_gradient_scratch(const AttentionParams& params, const cpu::KernelSet& kernels,
                                  const AttentionGradients& gradients) {
  std::size_t bytes = 0;
  if (!gradients.dbias.absent()) bytes = kSumBytes + kernels.bias_gradient_scratch(params);
  if (!gradients.dsinks.absent()) bytes = std::max(bytes, kernels.sink_gradient_scratch(params));
  return bytes;
}

void write_side_gradients(const Context& context, const Problem& problem,
                          const cpu::KernelSet& kernels, const AttentionGradients& gradients,
                          std::byte* scratch, std::size_t scratch_stride) {
  if (!gradients.dbias.absent()) {
    write_bias_gradient(context, problem, kernels, gradients.dbias, scratch, scratch_stride);
  }
  if (!gradients.dsinks.absent()) {
    write_sink_gradients(context, problem.params(), kernels, gradients.dsinks, scratch,
                         scratch_stride);
  }
}

void write_side_gradients_by_reference(const Context& context, const Problem& problem,
                                       const AttentionGradients& gradients) {
  const AttentionParams& params = problem.params();
  if (!gradients.dsinks.absent()) {
    parallel_for(context, params.num_heads, [&](std::int64_t head, int) {
      store_element(gradients.dsinks.data(), gradients.dsinks.dtype(),
                    head * gradients.dsinks.stride(0), reference::sink_gradient(params, head));
    });
  }
  const TensorView& dbias = gradients.dbias;
  if (dbias.absent()) return;
  // Plain and whole: the reference may hold the gradient once more in double.
  std::vector<double> sums(static_cast<std::size_t>(dbias.num_elements()));
  const Dims strides = row_major_strides(dbias.shape());
  const auto place = [&](int dim, std::int64_t index) {
    return dbias.size(dim) == 1 ? 0 : index * strides[dim];
  };
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    const Sequence& sequence = params.sequences[s];
    for (std::int64_t head = 0; head < params.num_heads; ++head) {
      for (std::int64_t token = 0; token < sequence.query_len; ++token) {
        const std::vector<double> row =
            reference::score_gradient_row(params, sequence, head, token);
        const std::int64_t start = place(0, s) + place(1, head) + place(2, token);
        for (std::int64_t key = 0; key < sequence.kv_len; ++key) {
          sums[static_cast<std::size_t>(start + place(3, key))] +=
              row[static_cast<std::size_t>(key)];
        }
      }
    }
  }
  if (sums.empty()) return;
  copy(ConstTensorView(sums.data(), DType::kF64, dbias.shape()), dbias);
}

}  // namespace ladon
