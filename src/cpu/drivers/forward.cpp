// The forward driver: divides the work into tasks, runs kernels, merges key splits. A task is a row
// strip (a few tiles of query rows that share each key block) or a key split.

#include <algorithm>
#include <cstddef>
#include <new>

#include "core/arena.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/parallel.h"
#include "cpu/backend.h"
#include "cpu/drivers/forward_plan.h"
#include "cpu/drivers/worker_scratch.h"
#include "reference/merge.h"

namespace ladon::cpu {
namespace {

using reference::merge_rows;
using reference::PartialRow;

DType dtype_of_lse(const LseOperand& lse) { return lse.is_f64 ? DType::kF64 : DType::kF32; }

/// The plans of all sequences, made once per call.
class ForwardPlan {
 public:
  ForwardPlan(Arena& arena, const AttentionParams& params)
      : plans_(arena.take<SequencePlan>(params.num_sequences)),
        groups_(arena.take<PrefixGroup>(params.num_sequences)),
        first_tasks_(arena.take<std::int64_t>(params.num_sequences + 1)),
        first_partials_(arena.take<std::int64_t>(params.num_sequences + 1)) {}

  /// `num_threads` decides the size of a task, which changes no bit.
  void make(const AttentionParams& params, const KernelSet& kernels, int num_threads,
            bool chunk_invariant) {
    std::int64_t units = 0;
    std::int64_t tiles = 0;  // that may be combined to strips
    for (std::int64_t s = 0; s < params.num_sequences; ++s) {
      const SequencePlan& plan = *new (plans_ + s) SequencePlan(
          plan_sequence(params, params.sequences[s], kernels, chunk_invariant));
      most_splits = std::max(most_splits, plan.splits);
      units += plan.units;
      if (plan.tiles > 1) tiles += plan.tiles;
    }
    // Several tasks per thread, so that threads finish at about the same time.
    constexpr std::int64_t kTasksPerThread = 4;
    const std::int64_t enough = num_threads == 1 ? 1 : std::int64_t{kTasksPerThread} * num_threads;
    least_cuts_ = ceil_div(enough, std::max<std::int64_t>(units, 1));
    strip_tiles = std::clamp<std::int64_t>(
        tiles * params.num_kv_heads / (2 * enough), 1,
        tiles_at_once(params, kernels.tile_rows, static_cast<std::int64_t>(kernels.compute_bytes)));
    for (std::int64_t s = 0; s < params.num_sequences;) {
      const PrefixGroup group = prefix_group(params, plans_, s);
      new (groups_ + s++) PrefixGroup(group);
      for (std::int64_t i = 1; i < group.sequences; ++i) {
        new (groups_ + s++) PrefixGroup{0, group.splits};
      }
    }
    first_tasks_[0] = 0;
    first_partials_[0] = 0;
    for (std::int64_t s = 0; s < params.num_sequences; ++s) {
      const SequencePlan& plan = plans_[s];
      const std::int64_t others = groups_[s].sequences == 0 ? groups_[s].splits : 0;
      const std::int64_t cuts = ceil_div(params.num_kv_heads, heads_at_once(params, kernels, s));
      first_tasks_[s + 1] = first_tasks_[s] + (units_of(s) - others) * cuts;
      first_partials_[s + 1] =
          first_partials_[s] +
          (plan.splits > 1 ? plan.splits * params.num_kv_heads * plan.rows : 0);
    }
    num_tasks = first_tasks_[params.num_sequences];
    partial_rows = first_partials_[params.num_sequences];
  }

  const SequencePlan& of(std::int64_t s) const { return plans_[s]; }
  /// For the first sequence of a group, the group; for the others, 0 sequences and the number of
  /// splits that the first one's tasks run for them.
  const PrefixGroup& group(std::int64_t s) const { return groups_[s]; }
  std::int64_t first_task(std::int64_t s) const { return first_tasks_[s]; }
  std::int64_t first_partial(std::int64_t s) const { return first_partials_[s]; }

  /// The sequence of a task.
  std::int64_t sequence_of(std::int64_t task, std::int64_t num_sequences) const {
    return std::upper_bound(first_tasks_, first_tasks_ + num_sequences + 1, task) - 1 -
           first_tasks_;
  }
  /// KV heads of one task.
  std::int64_t heads_at_once(const AttentionParams& params, const KernelSet& kernels,
                             std::int64_t s) const {
    const std::int64_t heads = ceil_div(params.num_kv_heads, least_cuts_);
    return std::min(heads, most_heads_at_once(params, plans_[s], kernels));
  }
  /// Tasks of one KV head.
  std::int64_t units_of(std::int64_t s) const {
    return plans_[s].tiles > 1 ? ceil_div(plans_[s].tiles, strip_tiles) : plans_[s].units;
  }

  std::int64_t num_tasks = 0;
  std::int64_t partial_rows = 0;  // of all sequences
  std::int64_t most_splits = 0;
  std::int64_t strip_tiles = 1;  // of one task

 private:
  std::int64_t least_cuts_ = 1;  // parts of the KV heads, so that every thread has work
  SequencePlan* plans_;
  PrefixGroup* groups_;
  std::int64_t* first_tasks_;
  std::int64_t* first_partials_;
};

/// Partial results of key splits, and each worker's buffers for merging them.
struct PartialResults {
  PartialResults(Arena& arena, const ForwardPlan& plan, const AttentionParams& params,
                 std::size_t compute_bytes, std::int64_t num_threads)
      : row_bytes(static_cast<std::size_t>(params.value_dim) * compute_bytes),
        most_splits(plan.most_splits),
        value_dim(params.value_dim) {
    if (plan.partial_rows == 0) return;
    lse = arena.take<double>(plan.partial_rows);
    out = arena.take<std::byte>(static_cast<std::int64_t>(
        saturating_product(static_cast<std::size_t>(plan.partial_rows), row_bytes)));
    rows = arena.take<PartialRow>(num_threads * most_splits);
    sums = arena.take<double>(num_threads * value_dim);
  }

  std::byte* out_row(std::int64_t row) const {
    return out + static_cast<std::size_t>(row) * row_bytes;
  }
  PartialRow* rows_of(int worker) const { return rows + worker * most_splits; }
  double* sums_of(int worker) const { return sums + worker * value_dim; }

  std::size_t row_bytes;
  std::int64_t most_splits;
  std::int64_t value_dim;
  double* lse = nullptr;
  std::byte* out = nullptr;  // [row][value_dim], compute type
  PartialRow* rows = nullptr;
  double* sums = nullptr;
};

/// Runs the kernels of one compute type. Memory: scratch per thread, and for sequences whose keys
/// are split one partial row per row and split.
class ForwardRun {
 public:
  ForwardRun(Host& host, const AttentionParams& params, const KernelSet& kernels,
             bool chunk_invariant)
      : workers_(host.workers),
        num_threads_(useful_threads(workers_, work_of(params))),
        params_(params),
        kernels_(kernels),
        chunk_invariant_(chunk_invariant),
        compute_dtype_(kernels.compute_bytes == 8 ? DType::kF64 : DType::kF32),
        plan_(host.scratch, params),
        scratch_(host, std::max(kernels.forward_tile_scratch(params),
                                kernels.forward_decode_scratch(params))),
        partials_(host.scratch, made(*plan_), params, kernels.compute_bytes,
                  std::int64_t{workers_.num_threads()}) {}

  void run() {
    interruptible_for(workers_, num_threads_, plan_->num_tasks, [&](std::int64_t task, int worker) {
      const std::int64_t s = plan_->sequence_of(task, params_.num_sequences);
      run_unit(s, task - plan_->first_task(s), worker);
    });
    if (plan_->partial_rows == 0) return;
    parallel_for(workers_, num_threads_, params_.num_sequences * params_.num_kv_heads,
                 [&](std::int64_t task, int worker) {
                   merge(task / params_.num_kv_heads, task % params_.num_kv_heads, worker);
                 });
  }

 private:
  const ForwardPlan& made(ForwardPlan& plan) const {
    plan.make(params_, kernels_, num_threads_, chunk_invariant_);
    return plan;
  }

  /// The number of multiplications, of all rows with all keys.
  static double work_of(const AttentionParams& params) {
    double pairs = 0;
    for (std::int64_t s = 0; s < params.num_sequences; ++s) {
      pairs += static_cast<double>(params.sequences[s].query_len) *
               static_cast<double>(params.sequences[s].kv_len);
    }
    return pairs * static_cast<double>(params.num_heads * (params.head_dim + params.value_dim));
  }

  /// The caller's out and lse, at token 0 and the group's first head.
  ForwardOutput final_output(const Sequence& sequence, std::int64_t kv_head) const {
    const std::int64_t head = kv_head * params_.group;
    ForwardOutput output;
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

  /// Partial results of one split, contiguous by row. lse is in double: the merge would lose its
  /// accuracy with an f32 lse of 1e4.
  ForwardOutput partial_output(const SequencePlan& plan, std::int64_t first_row) const {
    ForwardOutput output;
    output.dtype = compute_dtype_;
    output.data = partials_->out_row(first_row);
    output.token_stride = params_.group * params_.value_dim;
    output.head_stride = params_.value_dim;
    output.kv_head_stride = plan.splits * plan.rows * params_.value_dim;
    output.lse = {partials_->lse + first_row, true, params_.group, 1};
    output.lse_kv_head_stride = plan.splits * plan.rows;
    output.add_sinks = false;
    return output;
  }

  std::int64_t first_partial_row(std::int64_t s, std::int64_t kv_head, std::int64_t split) const {
    const SequencePlan& plan = plan_->of(s);
    return plan_->first_partial(s) + (kv_head * plan.splits + split) * plan.rows;
  }

  void run_unit(std::int64_t s, std::int64_t unit, int worker) const {
    const PrefixGroup& group = plan_->group(s);
    const std::int64_t heads = plan_->heads_at_once(params_, kernels_, s);
    const std::int64_t cuts = ceil_div(params_.num_kv_heads, heads);
    const std::int64_t first = unit % cuts * heads;
    const std::int64_t count = std::min(heads, params_.num_kv_heads - first);
    const std::int64_t index = unit / cuts;
    if (group.sequences == 0) return run_task(s, first, count, group.splits + index, worker);
    if (index >= group.splits) return run_task(s, first, count, index, worker);
    // One head at a time, so that its keys are still in the cache for the next sequence.
    for (std::int64_t head = first; head < first + count; ++head) {
      for (std::int64_t i = 0; i < group.sequences; ++i) run_task(s + i, head, 1, index, worker);
    }
  }

  /// Strip or split `index` of one KV head; of several in decoding.
  void run_task(std::int64_t s, std::int64_t kv_head, std::int64_t kv_head_count,
                std::int64_t index, int worker) const {
    const Sequence& sequence = params_.sequences[s];
    const SequencePlan& plan = plan_->of(s);
    ForwardTask task;
    task.sequence = s;
    task.kv_head = kv_head;
    task.kv_head_count = kv_head_count;
    task.row_count = plan.rows;
    task.key_end = sequence.kv_len;
    if (plan.splits > 1) {
      task.key_begin = (plan.first_split + index) * kSplitKeys;
      task.key_end = std::min(task.key_begin + kSplitKeys, sequence.kv_len);
      task.output = partial_output(plan, first_partial_row(s, task.kv_head, index));
    } else {
      // Last rows first: under a causal mask they have the most keys, and long tasks start first.
      const std::int64_t strip_rows = plan_->strip_tiles * kernels_.tile_rows;
      task.row_begin = (plan_->units_of(s) - 1 - index) * strip_rows;
      task.row_count = std::min(strip_rows, plan.rows - task.row_begin);
      task.output = final_output(sequence, task.kv_head);
    }
    (plan.decodes ? kernels_.forward_decode : kernels_.forward_tile)(params_, task,
                                                                     scratch_.of(worker));
  }

  void merge(std::int64_t s, std::int64_t kv_head, int worker) const {
    const Sequence& sequence = params_.sequences[s];
    const SequencePlan& plan = plan_->of(s);
    if (plan.splits <= 1) return;
    PartialRow* const rows = partials_->rows_of(worker);
    const ForwardOutput output = final_output(sequence, kv_head);
    for (std::int64_t row = 0; row < plan.rows; ++row) {
      for (std::int64_t split = 0; split < plan.splits; ++split) {
        const std::int64_t from = first_partial_row(s, kv_head, split) + row;
        rows[split] = {partials_->out_row(from), compute_dtype_, partials_->lse[from]};
      }
      const std::int64_t token = row / params_.group;
      const std::int64_t head = row % params_.group;
      const bool has_sink = params_.rules.sinks.data != nullptr;
      const double sink =
          has_sink ? head_element(params_.rules.sinks, kv_head * params_.group + head) : 0;
      const double lse =
          merge_rows({rows, static_cast<std::size_t>(plan.splits)}, params_.value_dim,
                     has_sink ? &sink : nullptr, partials_->sums_of(worker),
                     element_at(output.data, output.dtype,
                                token * output.token_stride + head * output.head_stride),
                     output.dtype);
      if (output.lse.data == nullptr) continue;
      store_element(output.lse.data, dtype_of_lse(output.lse),
                    token * output.lse.token_stride + head * output.lse.head_stride, lse);
    }
  }

  const Workers& workers_;
  const int num_threads_;
  const AttentionParams& params_;
  const KernelSet& kernels_;
  const bool chunk_invariant_;
  const DType compute_dtype_;
  InWorkspace<ForwardPlan> plan_;
  WorkerScratch scratch_;
  InWorkspace<PartialResults> partials_;
};

}  // namespace

void CpuBackend::attend(const AttentionParams& params) {
  // Blocks of keys begin at fixed positions; a window cache has dropped the keys before its first.
  for (std::int64_t s = 0; chunk_invariant_ && s < params.num_sequences; ++s) {
    if (params.kv_layout.ring_slots == 0 && params.sequences[s].key_origin == 0) continue;
    fail(ErrorCode::kUnsupported, "attention", "kv",
         "got a window cache, expected tensors, a contiguous or a paged cache: this Context is "
         "chunk_invariant");
  }
  ForwardRun(host(), params, kernels_of(kernels_, params), chunk_invariant_).run();
}

}  // namespace ladon::cpu
