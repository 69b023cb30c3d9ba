// The backward driver: checks, cuts the keys into tasks, sums the parts of dq in a fixed order.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>

#include "attention/problem.h"
#include "attention/side_gradients.h"
#include "attention/validate.h"
#include "core/context_impl.h"
#include "core/element.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "cpu/kernel_table.h"
#include "ladon/attention.h"
#include "reference/attention_reference.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "attention_backward";

// Tasks that share a KV head's keys; each has a partial dq of its own. More would feed more threads
// from one head at the price of memory; the count depends on the key length alone.
constexpr std::int64_t kMaxParts = 4;
// Heads whose partial dq are held at once: at least enough for all threads, and as many as fit
// here.
constexpr std::size_t kPartialBytes = std::size_t{4} << 20;

void zero_keys(const Operand& operand, std::int64_t start, std::int64_t first, std::int64_t end,
               std::int64_t heads, std::int64_t dim) {
  if (operand.data == nullptr) return;
  const std::size_t bytes = static_cast<std::size_t>(dim) * size_of(operand.dtype);
  for (std::int64_t key = first; key < end; ++key) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t at = start + key * operand.token_stride + head * operand.head_stride;
      std::memset(element_at(operand.data, operand.dtype, at), 0, bytes);
    }
  }
}

/// Keys past a sequence's length exist in dk and dv but were never seen.
void zero_padding(const Problem& problem) {
  const AttentionSizes& sizes = problem.sizes();
  if (sizes.packed) return;
  const AttentionParams& params = problem.params();
  for (std::int64_t s = 0; s < sizes.num_sequences; ++s) {
    const Sequence& sequence = params.sequences[s];
    zero_keys(params.dk, sequence.dk, sequence.kv_len, sizes.kv_len, sizes.num_kv_heads,
              sizes.head_dim);
    zero_keys(params.dv, sequence.dv, sequence.kv_len, sizes.kv_len, sizes.num_kv_heads,
              sizes.value_dim);
  }
}

/// dq, dk and dv. Takes all its memory when it is made, so that a failure finds nothing written.
class BackwardRun {
 public:
  /// `scratch` holds `scratch_stride` bytes for each thread.
  BackwardRun(const Context& context, const AttentionParams& params, const cpu::KernelSet& kernels,
              std::byte* scratch, std::size_t scratch_stride)
      : context_(context),
        params_(params),
        kernels_(kernels),
        scratch_(scratch),
        scratch_stride_(scratch_stride),
        heads_(params.num_sequences * params.num_kv_heads),
        sizes_(lay_out()),
        partials_(context.impl().workspaces(),
                  saturating_product(static_cast<std::size_t>(sizes_.wave * sizes_.parts),
                                     sizes_.part_bytes)) {}

  void run() const {
    for (std::int64_t first = 0; first < heads_; first += sizes_.wave) {
      const std::int64_t count = std::min(sizes_.wave, heads_ - first);
      parallel_for(context_, count * sizes_.parts, [&](std::int64_t task, int worker) {
        const std::int64_t slot = task / sizes_.parts;
        run_part(first + slot, slot, task % sizes_.parts, worker);
      });
      if (params_.dq.data == nullptr) continue;
      parallel_for(context_, count * sizes_.tiles, [&](std::int64_t task, int worker) {
        const std::int64_t slot = task / sizes_.tiles;
        combine(first + slot, slot, task % sizes_.tiles, worker);
      });
    }
  }

 private:
  /// The most that any sequence needs.
  struct LayOut {
    std::int64_t parts = 0;
    std::int64_t tiles = 0;
    std::size_t part_elements = 0;  // of one partial dq
    std::size_t part_bytes = 0;
    std::int64_t wave = 1;  // heads worked on at once
  };

  LayOut lay_out() const {
    LayOut out;
    for (std::int64_t s = 0; s < params_.num_sequences; ++s) {
      const Sequence& sequence = params_.sequences[s];
      out.tiles =
          std::max(out.tiles, ceil_div(sequence.query_len * params_.group, kernels_.tile_rows));
      out.parts = std::max(out.parts, parts_of(sequence));
    }
    out.part_elements = saturating_product(
        static_cast<std::size_t>(out.tiles),
        static_cast<std::size_t>(kernels_.tile_rows) * static_cast<std::size_t>(params_.head_dim));
    out.part_bytes = saturating_product(out.part_elements, kernels_.compute_bytes);
    // Any number of heads at once gives the same bits: each head's sums are its own.
    const std::size_t head_bytes = saturating_product(
        out.part_bytes, static_cast<std::size_t>(std::max<std::int64_t>(1, out.parts)));
    const auto that_fit =
        static_cast<std::int64_t>(kPartialBytes / std::max<std::size_t>(1, head_bytes));
    const std::int64_t for_all_threads =
        ceil_div(2 * context_.num_threads(), std::max<std::int64_t>(1, out.parts));
    out.wave = std::clamp<std::int64_t>(std::max(for_all_threads, that_fit), 1,
                                        std::max<std::int64_t>(1, heads_));
    return out;
  }

  static std::int64_t parts_of(const Sequence& sequence) {
    return std::min(kMaxParts, ceil_div(sequence.kv_len, cpu::kBackwardKeys));
  }
  std::byte* partial(std::int64_t slot, std::int64_t part) const {
    return partials_.data() +
           static_cast<std::size_t>(slot * sizes_.parts + part) * sizes_.part_bytes;
  }
  std::byte* scratch(int worker) const {
    return scratch_ + static_cast<std::size_t>(worker) * scratch_stride_;
  }

  void run_part(std::int64_t head, std::int64_t slot, std::int64_t part, int worker) const {
    cpu::BackwardTask task;
    task.sequence = head / params_.num_kv_heads;
    task.kv_head = head % params_.num_kv_heads;
    const Sequence& sequence = params_.sequences[task.sequence];
    const std::int64_t parts = parts_of(sequence);
    if (part >= parts) return;
    task.dq_partial = partial(slot, part);
    std::fill_n(static_cast<std::byte*>(task.dq_partial), sizes_.part_bytes, std::byte{0});
    const std::int64_t blocks = ceil_div(sequence.kv_len, cpu::kBackwardKeys);
    for (std::int64_t turn = 0; turn * parts < blocks; ++turn) {
      // To and fro, so that under a causal mask, where early keys have more rows, parts are even.
      const std::int64_t block = turn * parts + (turn % 2 == 0 ? part : parts - 1 - part);
      if (block >= blocks) continue;
      task.key_begin = block * cpu::kBackwardKeys;
      task.key_end = std::min(task.key_begin + cpu::kBackwardKeys, sequence.kv_len);
      kernels_.backward(params_, task, scratch(worker));
    }
  }

  void combine(std::int64_t head, std::int64_t slot, std::int64_t tile, int worker) const {
    cpu::CombineDqTask task;
    task.sequence = head / params_.num_kv_heads;
    task.kv_head = head % params_.num_kv_heads;
    task.tile = tile;
    const Sequence& sequence = params_.sequences[task.sequence];
    if (tile * kernels_.tile_rows >= sequence.query_len * params_.group) return;
    task.partials = partial(slot, 0);
    task.partial_stride = static_cast<std::int64_t>(sizes_.part_elements);
    task.partial_count = parts_of(sequence);
    kernels_.combine_dq(params_, task, scratch(worker));
  }

  const Context& context_;
  const AttentionParams& params_;
  const cpu::KernelSet& kernels_;
  std::byte* scratch_;
  std::size_t scratch_stride_;
  std::int64_t heads_;  // KV heads of all sequences
  LayOut sizes_;
  Workspace partials_;
};

void check_like(const NamedView& argument, const ConstTensorView& input) {
  if (argument.view.absent()) return;
  check_tensor(kOperation, argument, input.dtype(), input.shape());
}

}  // namespace

void attention_backward(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                        const ConstTensorView& v, const AttentionOptions& options,
                        const AttentionSaved& saved, const AttentionGradients& gradients) {
  check_present(kOperation, {"v", v});
  Problem problem(context, kOperation, q, k, v, options);
  const AttentionSizes& sizes = problem.sizes();
  const Dims out_shape{sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim};
  for (const NamedView& argument : {NamedView{"out", saved.out}, NamedView{"dout", saved.dout}}) {
    check_tensor(kOperation, argument, q.dtype(), out_shape);
  }
  check_lse(kOperation, {"lse", saved.lse}, sizes, q.dtype());
  if (!saved.dlse.absent()) check_lse(kOperation, {"dlse", saved.dlse}, sizes, q.dtype());
  check_like({"dq", gradients.dq}, q);
  check_like({"dk", gradients.dk}, k);
  check_like({"dv", gradients.dv}, v);
  check_side_gradients(kOperation, options, gradients);
  const NamedView outputs[] = {{"dq", gradients.dq},
                               {"dk", gradients.dk},
                               {"dv", gradients.dv},
                               {"dbias", gradients.dbias},
                               {"dsinks", gradients.dsinks}};
  const NamedView inputs[] = {{"q", q},
                              {"k", k},
                              {"v", v},
                              {"out", saved.out},
                              {"lse", saved.lse},
                              {"dout", saved.dout},
                              {"dlse", saved.dlse},
                              {"mask", options.mask},
                              {"bias", options.bias},
                              {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(kOperation, outputs, inputs);
  problem.set_out(saved.out);
  problem.set_lse(saved.lse);
  problem.set_dout(saved.dout);
  if (!saved.dlse.absent()) problem.set_dlse(saved.dlse);
  if (!gradients.dq.absent()) problem.set_dq(gradients.dq);
  if (!gradients.dk.absent()) problem.set_dk(gradients.dk);
  if (!gradients.dv.absent()) problem.set_dv(gradients.dv);

  const AttentionParams& params = problem.params();
  const cpu::KernelTable* table = context.impl().kernels();
  if (table == nullptr) {
    zero_padding(problem);
    parallel_for(context, params.num_sequences * params.num_kv_heads, [&](std::int64_t task, int) {
      reference::backward(params, params.sequences[task / params.num_kv_heads],
                          task % params.num_kv_heads);
    });
    write_side_gradients_by_reference(context, problem, gradients);
    return;
  }
  const cpu::KernelSet& kernels = cpu::kernels_of(*table, problem.params());
  const std::size_t stride =
      round_up(std::max({kernels.backward_scratch(params), kernels.combine_dq_scratch(params),
                         side_gradient_scratch(params, kernels, gradients)}),
               cpu::kScratchAlignment);
  const Workspace scratch(
      context.impl().workspaces(),
      saturating_product(static_cast<std::size_t>(context.num_threads()), stride));
  std::optional<BackwardRun> main;  // not for those who want dbias or dsinks alone
  if (!gradients.dq.absent() || !gradients.dk.absent() || !gradients.dv.absent()) {
    main.emplace(context, params, kernels, scratch.data(), stride);
  }
  zero_padding(problem);
  if (main.has_value()) main->run();
  write_side_gradients(context, problem, kernels, gradients, scratch.data(), stride);
}

}  // namespace ladon
