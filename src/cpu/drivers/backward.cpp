// The backward driver: divides the keys into tasks and sums the partial dq in a fixed order.

#include <algorithm>
#include <cstddef>
#include <optional>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/backend.h"
#include "cpu/drivers/side_gradients.h"
#include "cpu/drivers/worker_scratch.h"
#include "reference/attention_reference.h"

namespace ladon::cpu {
namespace {

// Most tasks that share a KV head's keys; each has its own partial dq. More would occupy more
// threads with one head at the price of memory. The count depends on the key length alone.
constexpr std::int64_t kMaxParts = 4;
// Memory for the partial dq of the heads that are processed at once: as many heads as fit, and at
// least enough for all threads.
constexpr std::size_t kPartialBytes = std::size_t{4} << 20;

/// Bytes of one number for each row of a call.
std::int64_t bytes_of_rows(const AttentionParams& params, const KernelSet& kernels) {
  std::int64_t tokens = 0;
  for (std::int64_t s = 0; s < params.num_sequences; ++s) tokens += params.sequences[s].query_len;
  const std::size_t rows = saturating_product(static_cast<std::size_t>(tokens),
                                              static_cast<std::size_t>(params.num_heads));
  return static_cast<std::int64_t>(saturating_product(rows, kernels.compute_bytes));
}

struct ScaleArrays {
  ScaleArrays(Arena& arena, std::int64_t sequences, std::int64_t bytes)
      : first_token(arena.take<std::int64_t>(sequences)),
        shift(arena.take<std::byte>(bytes)),
        factor(arena.take<std::byte>(bytes)) {}

  std::int64_t* first_token;
  std::byte* shift;
  std::byte* factor;
};

/// The scales of all rows of a call.
class CallScales {
 public:
  CallScales(Host& host, const AttentionParams& params, const KernelSet& kernels)
      : workers_(host.workers),
        params_(params),
        arrays_(host.scratch, params.num_sequences, bytes_of_rows(params, kernels)),
        scales_{arrays_->shift, arrays_->factor, arrays_->first_token} {
    std::int64_t tokens = 0;
    for (std::int64_t s = 0; s < params.num_sequences; ++s) {
      arrays_->first_token[s] = tokens;
      tokens += params.sequences[s].query_len;
    }
  }

  /// Computes them for the scores of these kernels.
  const RowScales& run(const KernelSet& kernels, const WorkerScratch& scratch) const {
    const std::int64_t heads = params_.num_sequences * params_.num_kv_heads;
    double elements = 0;  // of q and k, whose norms are taken
    for (std::int64_t s = 0; s < params_.num_sequences; ++s) {
      const Sequence& sequence = params_.sequences[s];
      elements += static_cast<double>(sequence.query_len * params_.num_heads +
                                      sequence.kv_len * params_.num_kv_heads) *
                  static_cast<double>(params_.head_dim);
    }
    interruptible_for(workers_, useful_threads(workers_, elements), heads,
                      [&](std::int64_t head, int worker) {
                        kernels.row_scales(params_,
                                           {.sequence = head / params_.num_kv_heads,
                                            .kv_head = head % params_.num_kv_heads,
                                            .scales = scales_},
                                           scratch.of(worker));
                      });
    return scales_;
  }

 private:
  const Workers& workers_;
  const AttentionParams& params_;
  InWorkspace<ScaleArrays> arrays_;
  RowScales scales_;
};

/// Partial sums of dq, each of `bytes`.
struct PartialSums {
  PartialSums(Arena& arena, std::int64_t count, std::size_t bytes)
      : data(arena.take<std::byte>(static_cast<std::int64_t>(
            saturating_product(static_cast<std::size_t>(count), bytes)))) {}

  std::byte* data;
};

/// Computes dq, dk and dv. The constructor allocates all memory, so that a failure leaves the
/// outputs untouched.
class BackwardRun {
 public:
  BackwardRun(Host& host, const AttentionParams& params, const KernelSet& kernels,
              const WorkerScratch& scratch)
      : workers_(host.workers),
        params_(params),
        kernels_(kernels),
        scratch_(scratch),
        heads_(params.num_sequences * params.num_kv_heads),
        sizes_(plan_sizes()),
        partials_(host.scratch, sizes_.wave * sizes_.parts, sizes_.part_bytes) {}

  void run(const RowScales& scales) const {
    InterruptCheck interrupt(workers_);
    for (std::int64_t first = 0; first < heads_; first += sizes_.wave) {
      const std::int64_t count = std::min(sizes_.wave, heads_ - first);
      interruptible_for(workers_, count * sizes_.parts, [&](std::int64_t task, int worker) {
        const std::int64_t slot = task / sizes_.parts;
        run_part(first + slot, slot, task % sizes_.parts, scales, worker, interrupt);
      });
      if (params_.dq.data == nullptr) continue;
      interruptible_for(workers_, count * sizes_.tiles, [&](std::int64_t task, int worker) {
        const std::int64_t slot = task / sizes_.tiles;
        combine(first + slot, slot, task % sizes_.tiles, worker);
      });
    }
  }

 private:
  /// Sizes for the largest sequence.
  struct Sizes {
    std::int64_t parts = 0;
    std::int64_t tiles = 0;
    std::size_t part_elements = 0;  // of one partial dq
    std::size_t part_bytes = 0;
    std::int64_t wave = 1;  // heads processed at once
  };

  Sizes plan_sizes() const {
    Sizes out;
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
    // Any number of heads at once gives the same bits: sums are per head.
    const std::size_t head_bytes = saturating_product(
        out.part_bytes, static_cast<std::size_t>(std::max<std::int64_t>(1, out.parts)));
    const auto that_fit =
        static_cast<std::int64_t>(kPartialBytes / std::max<std::size_t>(1, head_bytes));
    const std::int64_t for_all_threads =
        ceil_div(2 * workers_.num_threads(), std::max<std::int64_t>(1, out.parts));
    out.wave = std::clamp<std::int64_t>(std::max(for_all_threads, that_fit), 1,
                                        std::max<std::int64_t>(1, heads_));
    return out;
  }

  static std::int64_t parts_of(const Sequence& sequence) {
    return std::min(kMaxParts, ceil_div(sequence.kv_len, kBackwardKeys));
  }
  std::byte* partial(std::int64_t slot, std::int64_t part) const {
    return partials_->data +
           static_cast<std::size_t>(slot * sizes_.parts + part) * sizes_.part_bytes;
  }

  void run_part(std::int64_t head, std::int64_t slot, std::int64_t part, const RowScales& scales,
                int worker, InterruptCheck& interrupt) const {
    BackwardTask task;
    task.scales = scales;
    task.sequence = head / params_.num_kv_heads;
    task.kv_head = head % params_.num_kv_heads;
    const Sequence& sequence = params_.sequences[task.sequence];
    const std::int64_t parts = parts_of(sequence);
    if (part >= parts) return;
    task.dq_partial = partial(slot, part);
    std::fill_n(static_cast<std::byte*>(task.dq_partial), sizes_.part_bytes, std::byte{0});
    const std::int64_t blocks = ceil_div(sequence.kv_len, kBackwardKeys);
    for (std::int64_t round = 0; round * parts < blocks; ++round) {
      // Alternates direction, so that parts are even under a causal mask, where early keys have
      // more rows.
      const std::int64_t block = round * parts + (round % 2 == 0 ? part : parts - 1 - part);
      if (block >= blocks) continue;
      if (round != 0 && interrupt.stops()) return;
      task.key_begin = block * kBackwardKeys;
      task.key_end = std::min(task.key_begin + kBackwardKeys, sequence.kv_len);
      kernels_.backward(params_, task, scratch_.of(worker));
    }
  }

  void combine(std::int64_t head, std::int64_t slot, std::int64_t tile, int worker) const {
    CombineDqTask task;
    task.sequence = head / params_.num_kv_heads;
    task.kv_head = head % params_.num_kv_heads;
    task.tile = tile;
    const Sequence& sequence = params_.sequences[task.sequence];
    if (tile * kernels_.tile_rows >= sequence.query_len * params_.group) return;
    task.partials = partial(slot, 0);
    task.partial_stride = static_cast<std::int64_t>(sizes_.part_elements);
    task.partial_count = parts_of(sequence);
    kernels_.combine_dq(params_, task, scratch_.of(worker));
  }

  const Workers& workers_;
  const AttentionParams& params_;
  const KernelSet& kernels_;
  const WorkerScratch& scratch_;
  std::int64_t heads_;  // KV heads of all sequences
  Sizes sizes_;
  InWorkspace<PartialSums> partials_;
};

}  // namespace

void CpuBackend::attend_backward(const AttentionParams& params) {
  const KernelSet& kernels = kernels_of(kernels_, params);
  // Bias gradients are computed from products of single elements, in every dtype.
  const KernelSet& elements = params.q.dtype == DType::kF64 ? kernels_.f64 : kernels_.f32;
  const WorkerScratch scratch(
      host(), std::max({kernels.row_scales_scratch(params), elements.row_scales_scratch(params),
                        kernels.backward_scratch(params), kernels.combine_dq_scratch(params),
                        side_gradient_scratch(params, kernels)}));
  const CallScales scales(host(), params, kernels);
  std::optional<BackwardRun> main;  // not needed for dbias or dsinks alone
  if (params.dq.data != nullptr || params.dk.data != nullptr || params.dv.data != nullptr) {
    main.emplace(host(), params, kernels, scratch);
  }
  reference::zero_padding(params);
  const RowScales& rows = scales.run(kernels, scratch);
  if (main.has_value()) main->run(rows);
  if (params.dbias.data != nullptr && elements.row_scales != kernels.row_scales) {
    scales.run(elements, scratch);
  }
  write_side_gradients(workers(), params, kernels, rows, scratch);
}

}  // namespace ladon::cpu
