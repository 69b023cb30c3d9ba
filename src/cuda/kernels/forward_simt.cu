#include "cuda/kernels/forward_simt.cuh"

#include "cuda/kernels/forward_launch.h"

namespace ladon::cuda {
namespace {

template <class Compute, int kRows>
void launch(Queue& queue, std::int64_t tasks, const ForwardParams<Compute>& params) {
  queue.launch(forward_simt<Compute, kRows>,
               {dim3(static_cast<unsigned>(tasks)), dim3(kSimtThreads),
                sizeof(typename SimtForwardTile<Compute, kRows>::Memory)},
               params);
}

}  // namespace

void launch_forward_f32(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  kind.few_rows ? launch<float, simt_rows(true, false)>(queue, tasks, params)
                : launch<float, simt_rows(false, false)>(queue, tasks, params);
}

void launch_forward_f64(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<double>& params) {
  kind.few_rows ? launch<double, simt_rows(true, true)>(queue, tasks, params)
                : launch<double, simt_rows(false, true)>(queue, tasks, params);
}

}  // namespace ladon::cuda
