// Tiles of the forward pass that a faster kernel has left, with no rules but a window.

#include "cuda/kernels/forward_mma_finish.cuh"

namespace ladon::cuda {
namespace {

template <class Half>
void finish_tiles(Queue& queue, const ForwardParams<float>& params) {
  using enum ForwardRules;
  is_streamed(params) ? finish_tiles<Half, true, kWindow>(queue, params)
                      : finish_tiles<Half, false, kWindow>(queue, params);
}

}  // namespace

void finish_forward_bf16(Queue& queue, const ForwardParams<float>& params) {
  finish_tiles<__nv_bfloat16>(queue, params);
}
void finish_forward_f16(Queue& queue, const ForwardParams<float>& params) {
  finish_tiles<__half>(queue, params);
}

}  // namespace ladon::cuda
