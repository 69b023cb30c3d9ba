// The drivers of operations over elements and over rows of caches: ranges, handed out to threads.

#include <algorithm>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/backend.h"
#include "cpu/cache_sizes.h"
#include "cpu/drivers/worker_scratch.h"

namespace ladon::cpu {
namespace {

// Elements of one task: tens of microseconds at memory speed.
constexpr std::int64_t kElementsPerTask = std::int64_t{1} << 14;

// Most tasks of such an operation that a thread takes together. Rows are contiguous over them, and
// threads that take turns every few KiB keep hardware prefetchers from following: tasks one by one
// took 11 ms for the int8 append of the benchmark, 16 together 9.
constexpr std::int64_t kStreamedTasks = 16;

/// Runs a kernel over ranges of [0, count).
template <class Params>
void run_ranges(const Workers& workers, const Params& params, std::int64_t count,
                void (*kernel)(const Params&, const ElementRange&, Scratch)) {
  const int threads = useful_threads(workers, 8 * static_cast<double>(count));
  parallel_for(workers, threads, ceil_div(count, kElementsPerTask), [&](std::int64_t task, int) {
    kernel(params, {task * kElementsPerTask, std::min(count, (task + 1) * kElementsPerTask)}, {});
  });
}

/// The tasks of a copy between rows and slots; each is a part of one run.
struct KvTasks {
  KvTasks(Arena& arena, std::int64_t count) : tasks(arena.take<KvRowsTask>(count)) {}

  KvRowsTask* tasks;
};

using KvRowsKernel = void (*)(const KvRowsParams&, const KvRowsTask&, Scratch);

void run_kv_rows(Host& host, const KvRowsParams& params, KvRowsKernel kernel,
                 std::size_t scratch_bytes) {
  const std::int64_t token_elements =
      params.num_kv_heads * (params.head_dim + (params.v.data == nullptr ? 0 : params.value_dim));
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerTask / token_elements);
  std::int64_t count = 0;
  std::int64_t tokens = 0;
  for (std::int64_t r = 0; r < params.num_runs; ++r) {
    count += ceil_div(params.runs[r].count, grain);
    tokens += params.runs[r].count;
  }
  const InWorkspace<KvTasks> list(host.scratch, count);
  const WorkerScratch scratch(host, scratch_bytes);
  // The result does not fit the caches, at two bytes for an element.
  const bool streams = 2 * tokens * token_elements > cache_sizes().l3;
  KvRowsTask* next = list->tasks;
  for (std::int64_t r = 0; r < params.num_runs; ++r) {
    for (std::int64_t begin = 0; begin < params.runs[r].count; begin += grain) {
      *next++ = {r, begin, std::min(begin + grain, params.runs[r].count), streams};
    }
  }
  const int threads =
      useful_threads(host.workers, 4 * static_cast<double>(tokens * token_elements));
  const std::int64_t together =
      streams ? std::clamp<std::int64_t>(count / (8 * threads), 1, kStreamedTasks) : 1;
  parallel_for(host.workers, threads, ceil_div(count, together), [&](std::int64_t i, int worker) {
    const std::int64_t end = std::min(count, (i + 1) * together);
    for (std::int64_t task = i * together; task < end; ++task) {
      kernel(params, list->tasks[task], scratch.of(worker));
    }
  });
}

}  // namespace

void CpuBackend::write_kv(const KvRowsParams& params) {
  const KernelSet& kernels = kernels_for(params.k.dtype);
  run_kv_rows(host(), params, kernels.write_kv, kernels.write_kv_scratch(params));
}

void CpuBackend::gather_kv(const KvRowsParams& params) {
  const KernelSet& kernels =
      kernels_for(params.k.data != nullptr ? params.k.dtype : params.v.dtype);
  run_kv_rows(host(), params, kernels.gather_kv, kernels.gather_kv_scratch(params));
}

void CpuBackend::sgd_step(const SgdParams& params) {
  run_ranges(workers(), params, params.operands.count, kernels_for(params.operands.dtype).sgd_step);
}

void CpuBackend::adamw_step(const AdamWParams& params) {
  run_ranges(workers(), params, params.operands.count,
             kernels_for(params.operands.dtype).adamw_step);
}

void CpuBackend::accumulate(const AccumulateParams& params) noexcept {
  run_ranges(workers(), params, params.to.count, kernels_for(params.to.dtype).accumulate);
}

}  // namespace ladon::cpu
