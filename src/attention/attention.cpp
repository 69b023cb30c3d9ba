// The forward driver: checks, cuts the work into tasks, runs kernels, merges key splits.

#include "ladon/attention.h"

#include <algorithm>
#include <cstddef>

#include "attention/forward_plan.h"
#include "attention/merge.h"
#include "attention/problem.h"
#include "attention/validate.h"
#include "core/context_impl.h"
#include "core/element.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "cpu/kernel_table.h"
#include "reference/attention_reference.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "attention";

std::size_t aligned(std::size_t bytes) { return round_up(bytes, cpu::kScratchAlignment); }

DType dtype_of_lse(const LseOperand& lse) { return lse.is_f64 ? DType::kF64 : DType::kF32; }

void run_reference(const Context& context, const AttentionParams& params) {
  parallel_for(context, params.num_sequences * params.num_heads, [&](std::int64_t task, int) {
    reference::forward(params, params.sequences[task / params.num_heads], task % params.num_heads);
  });
}

/// Runs the kernels of one compute type. Memory: scratch for each thread, and for sequences whose
/// keys are split one partial row per split.
class ForwardRun {
 public:
  ForwardRun(const Context& context, const AttentionParams& params, const cpu::KernelSet& kernels)
      : context_(context),
        params_(params),
        kernels_(kernels),
        compute_dtype_(kernels.compute_bytes == 8 ? DType::kF64 : DType::kF32),
        scratch_bytes_(aligned(
            std::max(kernels.forward_tile_scratch(params), kernels.forward_few_scratch(params)))),
        row_bytes_(static_cast<std::size_t>(params.value_dim) * kernels.compute_bytes),
        layout_(lay_out()),
        workspace_(context.impl().workspaces(), layout_.total) {}

  void run() {
    fill_starts();
    const std::int64_t last = params_.num_sequences;
    parallel_for(context_, starts()[last], [&](std::int64_t task, int worker) {
      const std::int64_t* start = std::upper_bound(starts(), starts() + last + 1, task) - 1;
      run_unit(start - starts(), task - *start, worker);
    });
    if (layout_.partial_rows == 0) return;
    parallel_for(context_, last * params_.num_kv_heads, [&](std::int64_t task, int worker) {
      merge(task / params_.num_kv_heads, task % params_.num_kv_heads, worker);
    });
  }

 private:
  struct LayOut {
    std::int64_t partial_rows = 0;  // over all sequences
    std::int64_t most_splits = 0;
    std::int64_t least_cuts = 1;   // of the KV heads, so that every thread finds work
    std::int64_t strip_tiles = 1;  // of one task
    std::size_t starts = 0;        // byte offsets in the workspace
    std::size_t partial_starts = 0;
    std::size_t groups = 0;
    std::size_t scratch = 0;
    std::size_t merge = 0;
    std::size_t partial_lse = 0;
    std::size_t partial_out = 0;
    std::size_t total = 0;
  };

  std::int64_t partial_rows_of(const SequencePlan& plan) const {
    return plan.splits > 1 ? plan.splits * params_.num_kv_heads * plan.rows : 0;
  }

  std::size_t merge_bytes(std::int64_t most_splits) const {
    return aligned(static_cast<std::size_t>(most_splits) * sizeof(PartialRow)) +
           aligned(static_cast<std::size_t>(params_.value_dim) * sizeof(double));
  }

  LayOut lay_out() const {
    LayOut out;
    std::int64_t units = 0;
    std::int64_t tiles = 0;  // that may be taken together
    for (std::int64_t s = 0; s < params_.num_sequences; ++s) {
      const SequencePlan plan = plan_sequence(params_, params_.sequences[s], kernels_);
      out.partial_rows += partial_rows_of(plan);
      out.most_splits = std::max(out.most_splits, plan.splits);
      units += plan.units;
      if (plan.tiles > 1) tiles += plan.tiles;
    }
    // Several tasks a thread, so that the last one to end is not long alone.
    constexpr std::int64_t kTasksPerThread = 4;
    const std::int64_t enough = kTasksPerThread * context_.num_threads();
    out.least_cuts = ceil_div(enough, std::max<std::int64_t>(units, 1));
    out.strip_tiles = std::clamp<std::int64_t>(
        tiles * params_.num_kv_heads / (2 * enough), 1,
        cpu::tiles_at_once(params_, kernels_.tile_rows,
                           static_cast<std::int64_t>(kernels_.compute_bytes)));
    const std::size_t threads = static_cast<std::size_t>(context_.num_threads());
    const std::size_t index_bytes =
        aligned(static_cast<std::size_t>(params_.num_sequences + 1) * sizeof(std::int64_t));
    const auto rows = static_cast<std::size_t>(out.partial_rows);
    out.partial_starts = index_bytes;
    out.groups = 2 * index_bytes;
    out.scratch =
        out.groups + aligned(static_cast<std::size_t>(params_.num_sequences) * sizeof(PrefixGroup));
    out.merge = out.scratch + threads * scratch_bytes_;
    out.partial_lse = out.merge + (rows == 0 ? 0 : threads * merge_bytes(out.most_splits));
    out.partial_out = out.partial_lse + aligned(rows * sizeof(double));
    out.total = out.partial_out + saturating_product(rows, row_bytes_);
    return out;
  }

  std::int64_t* starts() const {  // first task of each sequence
    return reinterpret_cast<std::int64_t*>(workspace_.data() + layout_.starts);
  }
  std::int64_t* partial_starts() const {  // first partial row of each sequence
    return reinterpret_cast<std::int64_t*>(workspace_.data() + layout_.partial_starts);
  }
  /// For the first sequence of a group, the group; for the others, 0 sequences and the splits that
  /// the first runs for them.
  PrefixGroup* groups() const {
    return reinterpret_cast<PrefixGroup*>(workspace_.data() + layout_.groups);
  }
  double* partial_lse(std::int64_t row) const {
    return reinterpret_cast<double*>(workspace_.data() + layout_.partial_lse) + row;
  }
  std::byte* partial_out(std::int64_t row) const {
    return workspace_.data() + layout_.partial_out + static_cast<std::size_t>(row) * row_bytes_;
  }

  /// KV heads of one task.
  std::int64_t heads_at_once(const SequencePlan& plan) const {
    const std::int64_t heads = ceil_div(params_.num_kv_heads, layout_.least_cuts);
    return std::min(heads, most_heads_at_once(params_, plan, kernels_));
  }

  /// Tasks of one KV head.
  std::int64_t units_of(const SequencePlan& plan) const {
    return plan.tiles > 1 ? ceil_div(plan.tiles, layout_.strip_tiles) : plan.units;
  }

  void fill_starts() const {
    starts()[0] = 0;
    partial_starts()[0] = 0;
    for (std::int64_t s = 0; s < params_.num_sequences;) {
      const PrefixGroup group = prefix_group(params_, s, kernels_);
      groups()[s++] = group;
      for (std::int64_t i = 1; i < group.sequences; ++i) groups()[s++] = {0, group.splits};
    }
    for (std::int64_t s = 0; s < params_.num_sequences; ++s) {
      const SequencePlan plan = plan_sequence(params_, params_.sequences[s], kernels_);
      const std::int64_t others = groups()[s].sequences == 0 ? groups()[s].splits : 0;
      const std::int64_t cuts = ceil_div(params_.num_kv_heads, heads_at_once(plan));
      starts()[s + 1] = starts()[s] + (units_of(plan) - others) * cuts;
      partial_starts()[s + 1] = partial_starts()[s] + partial_rows_of(plan);
    }
  }

  /// The caller's out and lse, at token 0 and the group's first head.
  cpu::ForwardOutput final_output(const Sequence& sequence, std::int64_t kv_head) const {
    const std::int64_t head = kv_head * params_.group;
    cpu::ForwardOutput output;
    output.dtype = params_.out.dtype;
    output.token_stride = params_.out.token_stride;
    output.head_stride = params_.out.head_stride;
    output.kv_head_stride = params_.group * params_.out.head_stride;
    output.data = element_at(params_.out.data, params_.out.dtype,
                             sequence.out + head * params_.out.head_stride);
    output.lse = params_.lse;
    output.lse_kv_head_stride = params_.group * params_.lse.head_stride;
    if (params_.lse.data != nullptr) {
      output.lse.data = element_at(params_.lse.data, dtype_of_lse(params_.lse),
                                   sequence.lse + head * params_.lse.head_stride);
    }
    return output;
  }

  /// Rows of one split, one after the other. lse is kept in double: an f32 lse of 1e4 would cost
  /// the merge its accuracy.
  cpu::ForwardOutput partial_output(const SequencePlan& plan, std::int64_t first_row) const {
    cpu::ForwardOutput output;
    output.dtype = compute_dtype_;
    output.data = partial_out(first_row);
    output.token_stride = params_.group * params_.value_dim;
    output.head_stride = params_.value_dim;
    output.kv_head_stride = plan.splits * plan.rows * params_.value_dim;
    output.lse = {partial_lse(first_row), true, params_.group, 1};
    output.lse_kv_head_stride = plan.splits * plan.rows;
    output.add_sinks = false;
    return output;
  }

  std::int64_t first_partial_row(std::int64_t s, const SequencePlan& plan, std::int64_t kv_head,
                                 std::int64_t split) const {
    return partial_starts()[s] + (kv_head * plan.splits + split) * plan.rows;
  }

  void run_unit(std::int64_t s, std::int64_t unit, int worker) const {
    const PrefixGroup& group = groups()[s];
    const SequencePlan plan = plan_sequence(params_, params_.sequences[s], kernels_);
    const std::int64_t heads = heads_at_once(plan);
    const std::int64_t cuts = ceil_div(params_.num_kv_heads, heads);
    const std::int64_t first = unit % cuts * heads;
    const std::int64_t count = std::min(heads, params_.num_kv_heads - first);
    const std::int64_t index = unit / cuts;
    if (group.sequences == 0) return run_task(s, first, count, group.splits + index, worker);
    if (index >= group.splits) return run_task(s, first, count, index, worker);
    // One head at a time, so that it is still in the cache when the next sequence comes.
    for (std::int64_t head = first; head < first + count; ++head) {
      for (std::int64_t i = 0; i < group.sequences; ++i) run_task(s + i, head, 1, index, worker);
    }
  }

  /// Strip or split number `index` of one KV head, or of several where rows are few.
  void run_task(std::int64_t s, std::int64_t kv_head, std::int64_t kv_head_count,
                std::int64_t index, int worker) const {
    const Sequence& sequence = params_.sequences[s];
    const SequencePlan plan = plan_sequence(params_, sequence, kernels_);
    cpu::ForwardTask task;
    task.sequence = s;
    task.kv_head = kv_head;
    task.kv_head_count = kv_head_count;
    task.row_count = plan.rows;
    task.key_end = sequence.kv_len;
    if (plan.splits > 1) {
      task.key_begin = (plan.first_split + index) * kSplitKeys;
      task.key_end = std::min(task.key_begin + kSplitKeys, sequence.kv_len);
      task.output = partial_output(plan, first_partial_row(s, plan, task.kv_head, index));
    } else {
      // Last rows first: under a causal mask they have the most keys, and heavy tasks go first.
      const std::int64_t strip_rows = layout_.strip_tiles * kernels_.tile_rows;
      task.row_begin = (units_of(plan) - 1 - index) * strip_rows;
      task.row_count = std::min(strip_rows, plan.rows - task.row_begin);
      task.output = final_output(sequence, task.kv_head);
    }
    std::byte* scratch =
        workspace_.data() + layout_.scratch + static_cast<std::size_t>(worker) * scratch_bytes_;
    (plan.few ? kernels_.forward_few : kernels_.forward_tile)(params_, task, scratch);
  }

  void merge(std::int64_t s, std::int64_t kv_head, int worker) const {
    const Sequence& sequence = params_.sequences[s];
    const SequencePlan plan = plan_sequence(params_, sequence, kernels_);
    if (plan.splits <= 1) return;
    std::byte* room = workspace_.data() + layout_.merge +
                      static_cast<std::size_t>(worker) * merge_bytes(layout_.most_splits);
    auto* parts = reinterpret_cast<PartialRow*>(room);
    auto* sums = reinterpret_cast<double*>(
        room + aligned(static_cast<std::size_t>(layout_.most_splits) * sizeof(PartialRow)));
    const cpu::ForwardOutput output = final_output(sequence, kv_head);
    for (std::int64_t row = 0; row < plan.rows; ++row) {
      for (std::int64_t split = 0; split < plan.splits; ++split) {
        const std::int64_t from = first_partial_row(s, plan, kv_head, split) + row;
        parts[split] = {partial_out(from), compute_dtype_, *partial_lse(from)};
      }
      const std::int64_t token = row / params_.group;
      const std::int64_t head = row % params_.group;
      const double* sink = params_.rules.sinks == nullptr
                               ? nullptr
                               : params_.rules.sinks + kv_head * params_.group + head;
      const double lse =
          merge_rows({parts, static_cast<std::size_t>(plan.splits)}, params_.value_dim, sink, sums,
                     element_at(output.data, output.dtype,
                                token * output.token_stride + head * output.head_stride),
                     output.dtype);
      if (output.lse.data == nullptr) continue;
      store_element(output.lse.data, dtype_of_lse(output.lse),
                    token * output.lse.token_stride + head * output.lse.head_stride, lse);
    }
  }

  const Context& context_;
  const AttentionParams& params_;
  const cpu::KernelSet& kernels_;
  DType compute_dtype_;
  std::size_t scratch_bytes_;  // of one thread
  std::size_t row_bytes_;      // of one partial row
  LayOut layout_;
  Workspace workspace_;
};

/// Checks the outputs, and that they share memory with none of the inputs.
void set_outputs(Problem& problem, const ConstTensorView& q, const ConstTensorView& k,
                 const ConstTensorView& v, const AttentionOptions& options, const TensorView& out,
                 const TensorView& lse) {
  const AttentionSizes& sizes = problem.sizes();
  check_tensor(kOperation, {"out", out}, q.dtype(),
               {sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim});
  if (!lse.absent()) check_lse(kOperation, {"lse", lse}, sizes, q.dtype());
  const NamedView outputs[] = {{"out", out}, {"lse", lse}};
  const NamedView inputs[] = {{"q", q},
                              {"k", k},
                              {"v", v},
                              {"mask", options.mask},
                              {"bias", options.bias},
                              {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(kOperation, outputs, inputs);
  problem.set_out(out);
  if (!lse.absent()) problem.set_lse(lse);
}

void run(const Context& context, const Problem& problem) {
  const AttentionParams& params = problem.params();
  const cpu::KernelTable* table = context.impl().kernels();
  if (table == nullptr) return run_reference(context, params);
  ForwardRun(context, params, cpu::kernels_of(*table, params)).run();
}

}  // namespace

void attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
               const ConstTensorView& v, const AttentionOptions& options, const TensorView& out,
               const TensorView& lse) {
  check_present(kOperation, {"v", v});
  Problem problem(context, kOperation, q, k, v, options);
  set_outputs(problem, q, k, v, options, out, lse);
  if (out.num_elements() == 0) return;  // however many heads or sequences have no queries
  run(context, problem);
}

void attention(const Context& context, const ConstTensorView& q, const KvCacheView& cache,
               const AttentionOptions& options, const TensorView& out, const TensorView& lse) {
  Problem problem(context, kOperation, q, cache, options);
  set_outputs(problem, q, cache_keys(cache), cache_values(cache), options, out, lse);
  if (out.num_elements() == 0) return;
  run(context, problem);
}

Tensor attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                 const ConstTensorView& v, const AttentionOptions& options) {
  check_present(kOperation, {"v", v});
  const AttentionSizes sizes = check_inputs(kOperation, q, k, v, options);
  Tensor out = Tensor::uninitialized(
      q.dtype(), {sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim});
  attention(context, q, k, v, options, out.view());
  return out;
}

}  // namespace ladon
