// Random elements by index: a thread makes an element from Philox's words for its number, so that
// neither shape nor strides nor the grid change it. The words are those of CPUs, the arithmetic is
// the same in double; logarithm and cosine are CUDA's, which may differ in the last bit.
//
// Per element: 20 integer products, for normal numbers also about 100 f64 operations; one store.
// The limit of uniform numbers is memory, that of normal ones f64 arithmetic.

#include <cstdint>
#include <numbers>

#include "core/random_elements.h"
#include "core/random_params.h"
#include "cuda/kernels/element.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

struct FillParams {
  void* data;
  DType dtype;
  RandomFillParams::Kind kind;
  double a;
  double b;
  std::uint64_t seed;
  std::uint64_t stream;
  std::int64_t count;
  int rank;  // 0 where elements are contiguous
  std::int64_t sizes[kMaxRank];
  std::int64_t strides[kMaxRank];
};

__device__ inline double random_element(const FillParams& params, std::int64_t index) {
  const PhiloxBlock block =
      random_block(static_cast<std::uint64_t>(index), params.stream, params.seed);
  const double first = to_unit(block.words[0], block.words[1]);
  // Products are rounded before they are added, as on CPUs.
  if (params.kind == RandomFillParams::Kind::kUniform) {
    return __dadd_rn(params.a, __dmul_rn(params.b - params.a, first));
  }
  const double second = to_unit(block.words[2], block.words[3]);
  const double radius = sqrt(-2 * log(1 - first));  // 1 - first is in (0, 1]
  const double normal = radius * cos(2 * std::numbers::pi * second);
  return __dadd_rn(params.a, __dmul_rn(params.b, normal));
}

__device__ inline std::int64_t offset_of(const FillParams& params, std::int64_t index) {
  if (params.rank == 0) return index;
  std::int64_t offset = 0;
  for (int dim = params.rank - 1; dim >= 0; --dim) {
    offset += index % params.sizes[dim] * params.strides[dim];
    index /= params.sizes[dim];
  }
  return offset;
}

__global__ void __launch_bounds__(kThreads)
    fill_elements(const __grid_constant__ FillParams params) {
  for_each_index(params.count, [&](std::int64_t i) {
    store_element(params.data, params.dtype, offset_of(params, i), random_element(params, i));
  });
}

}  // namespace

void fill_random(Queue& queue, const RandomFillParams& params) {
  const TensorView& view = params.view;
  FillParams fill{.data = view.data(),
                  .dtype = view.dtype(),
                  .kind = params.kind,
                  .a = params.a,
                  .b = params.b,
                  .seed = params.seed,
                  .stream = params.stream,
                  .count = view.num_elements(),
                  .rank = view.is_contiguous() ? 0 : view.rank(),
                  .sizes = {},
                  .strides = {}};
  for (int dim = 0; dim < view.rank(); ++dim) {
    fill.sizes[dim] = view.size(dim);
    fill.strides[dim] = view.stride(dim);
  }
  queue.launch(fill_elements, Grid{blocks_for(fill.count, kThreads), kThreads}, fill);
}

}  // namespace ladon::cuda
