#include "cpu/drivers/side_gradients.h"

#include <algorithm>

#include "core/element.h"
#include "core/parallel.h"

namespace ladon::cpu {
namespace {

// Tokens and keys of the bias that one task owns. Their sums are doubles: 128 KiB per thread.
constexpr std::int64_t kTokensPerTask = 64;
constexpr std::int64_t kKeysPerTask = 256;

/// The bias's gradient, divided into boxes of [sequence, head, tokens, keys].
struct BiasBoxes {
  explicit BiasBoxes(const BiasGradient& dbias)
      : sequences(dbias.sizes[0]),
        heads(dbias.sizes[1]),
        tokens(dbias.sizes[2]),
        keys(dbias.sizes[3]),
        token_boxes(ceil_div(tokens, kTokensPerTask)),
        key_boxes(ceil_div(keys, kKeysPerTask)) {}

  std::int64_t count() const { return sequences * heads * token_boxes * key_boxes; }

  std::int64_t sequences, heads, tokens, keys, token_boxes, key_boxes;
};

/// The elements of one box.
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

  void write(const double* sums, const BiasGradient& dbias) const {
    const std::int64_t start = sequence * dbias.strides[0] + head * dbias.strides[1];
    for (std::int64_t token = token_begin; token < token_end; ++token) {
      for (std::int64_t key = key_begin; key < key_end; ++key) {
        store_element(dbias.data, dbias.dtype,
                      start + token * dbias.strides[2] + key * dbias.strides[3],
                      sums[(token - token_begin) * kKeysPerTask + key - key_begin]);
      }
    }
  }

  std::int64_t sequence, head, token_begin, token_end, key_begin, key_end;
};

/// What a task of the bias's gradient has: the sums of its box, and the kernel's scratch.
struct BiasScratch {
  double* sums;
  Scratch kernel;

  BiasScratch(Arena& arena, std::size_t kernel_bytes)
      : sums(arena.take<double>(kTokensPerTask * kKeysPerTask)),
        kernel{arena.take<std::byte>(static_cast<std::int64_t>(kernel_bytes)), kernel_bytes} {}
};

void write_bias_gradient(const Workers& workers, const AttentionParams& params,
                         const KernelSet& kernels, const RowScales& scales,
                         const WorkerScratch& scratch) {
  const BiasBoxes boxes(params.dbias);
  const std::size_t kernel_bytes = kernels.bias_gradient_scratch(params);
  interruptible_for(workers, boxes.count(), [&](std::int64_t index, int worker) {
    Arena arena = scratch.arena_of(worker);
    const BiasScratch memory(arena, kernel_bytes);
    std::fill_n(memory.sums, kTokensPerTask * kKeysPerTask, 0.0);
    const BiasBox box(boxes, index);
    // A dimension of size 1 is shared: the task then sums over all of it.
    BiasGradientTask task;
    task.sequence = boxes.sequences == 1 ? -1 : box.sequence;
    task.head = boxes.heads == 1 ? -1 : box.head;
    task.token_begin = box.token_begin;
    task.token_end = boxes.tokens == 1 ? params.max_query_len : box.token_end;
    task.token_stride = boxes.tokens == 1 ? 0 : kKeysPerTask;
    task.key_begin = box.key_begin;
    task.key_end = boxes.keys == 1 ? params.max_kv_len : box.key_end;
    task.key_stride = boxes.keys == 1 ? 0 : 1;
    task.sums = memory.sums;
    task.scales = scales;
    kernels.bias_gradient(params, task, memory.kernel);
    box.write(memory.sums, params.dbias);
  });
}

void write_sink_gradients(const Workers& workers, const AttentionParams& params,
                          const KernelSet& kernels, const RowScales& scales,
                          const WorkerScratch& scratch) {
  interruptible_for(workers, params.num_heads, [&](std::int64_t head, int worker) {
    double sum = 0;
    kernels.sink_gradient(params, {head, &sum, scales}, scratch.of(worker));
    store_element(params.dsinks.data, params.dsinks.dtype, head * params.dsinks.stride, sum);
  });
}

}  // namespace

std::size_t side_gradient_scratch(const AttentionParams& params, const KernelSet& kernels) {
  std::size_t bytes = 0;
  if (params.dbias.data != nullptr) {
    bytes = layout_bytes<BiasScratch>(DeviceId{}, kernels.bias_gradient_scratch(params));
  }
  if (params.dsinks.data != nullptr) {
    bytes = std::max(bytes, kernels.sink_gradient_scratch(params));
  }
  return bytes;
}

void write_side_gradients(const Workers& workers, const AttentionParams& params,
                          const KernelSet& kernels, const RowScales& scales,
                          const WorkerScratch& scratch) {
  if (params.dbias.data != nullptr) write_bias_gradient(workers, params, kernels, scales, scratch);
  if (params.dsinks.data != nullptr)
    write_sink_gradients(workers, params, kernels, scales, scratch);
}

}  // namespace ladon::cpu
