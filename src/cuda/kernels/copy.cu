// Copies elements of any dtype and strides, and sets them to zero.
//
// The two views' dimensions are sorted and merged into loops on the host. The innermost loop is a
// row: 1 to 256 threads of a block of 256 take its units, a few each, and the block's other threads
// the next rows. A unit is as many bytes as alignment allows where the bits are only moved, a chunk
// of 8 floats where contiguous floats are converted, else one element.
//
// No arithmetic to speak of; bytes of both views. The limit is memory. Contiguous copies are
// CUDA's.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cuda/kernels/chunk.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/number.cuh"
#include "cuda/operations.h"
#include "ladon/tensor_view.h"

namespace ladon::cuda {
namespace {

struct CopyLoop {
  std::int64_t count = 1;
  std::int64_t from_stride = 1;
  std::int64_t to_stride = 1;
};

/// The loops of a copy, outermost first. The last one is the row; there is always one.
struct CopyLoops {
  CopyLoop loops[kMaxRank]{};
  int count = 0;

  constexpr const CopyLoop& row() const { return loops[count - 1]; }
  std::int64_t rows() const {
    std::int64_t rows = 1;
    for (int n = 0; n + 1 < count; ++n) rows *= loops[n].count;
    return rows;
  }
  bool rows_are_contiguous() const { return row().from_stride == 1 && row().to_stride == 1; }
};

std::int64_t magnitude_of(std::int64_t stride) { return stride < 0 ? -stride : stride; }

/// In the order of `to`'s memory, so that writes are coalesced; reads have the cache.
void sort_by_target(CopyLoops& plan) {
  for (int n = 1; n < plan.count; ++n) {
    for (int m = n;
         m > 0 && magnitude_of(plan.loops[m - 1].to_stride) < magnitude_of(plan.loops[m].to_stride);
         --m) {
      std::swap(plan.loops[m - 1], plan.loops[m]);
    }
  }
}

/// Loops that both views walk as one become one.
void merge_loops(CopyLoops& plan) {
  int merged = 0;
  for (int n = 0; n < plan.count; ++n) {
    const CopyLoop next = plan.loops[n];
    if (merged != 0) {
      CopyLoop& outer = plan.loops[merged - 1];
      if (outer.from_stride == next.from_stride * next.count &&
          outer.to_stride == next.to_stride * next.count) {
        outer = {outer.count * next.count, next.from_stride, next.to_stride};
        continue;
      }
    }
    plan.loops[merged++] = next;
  }
  plan.count = merged;
}

/// Where nothing is copied, only written, `from` is `to`.
CopyLoops plan_loops(const ConstTensorView& from, const ConstTensorView& to) {
  CopyLoops plan;
  for (int dim = 0; dim < to.rank(); ++dim) {
    if (to.size(dim) == 1) continue;
    plan.loops[plan.count++] = {to.size(dim), from.stride(dim), to.stride(dim)};
  }
  sort_by_target(plan);
  merge_loops(plan);
  if (plan.count == 0) plan.loops[plan.count++] = {};
  return plan;
}

struct CopyParams {
  const void* from = nullptr;
  void* to = nullptr;
  DType from_dtype = DType::kF32;
  DType to_dtype = DType::kF32;
  CopyLoops plan{};
  std::int64_t rows = 1;
  std::int64_t row_units = 1;
  std::int64_t row_parts = 1;  // into which a long row is cut; each is one block's
};

// ---- what is done with a unit -------------------------------------------------------------------

/// Moves bytes. The plan's counts and strides are in units.
template <class Unit>
struct MoveUnit {
  static constexpr int kPerThread = 4;  // loads under way at a time
  using Value = Unit;
  static __device__ Value load(const CopyParams& params, std::int64_t row, std::int64_t unit) {
    return static_cast<const Unit*>(params.from)[row + unit * params.plan.row().from_stride];
  }
  static __device__ void store(const CopyParams& params, std::int64_t row, std::int64_t unit,
                               const Value& value) {
    static_cast<Unit*>(params.to)[row + unit * params.plan.row().to_stride] = value;
  }
};

template <class Unit>
struct ZeroUnit : MoveUnit<Unit> {
  static __device__ Unit load(const CopyParams&, std::int64_t, std::int64_t) { return Unit{}; }
};

/// Converts 8 floats of contiguous rows.
template <class Compute>
struct ConvertChunk {
  static constexpr int kPerThread = 2;
  using Value = Chunk<Compute>;
  static __device__ Value load(const CopyParams& params, std::int64_t row, std::int64_t unit) {
    const std::int64_t i = unit * kChunk;
    return load_chunk<Compute>(params.from, params.from_dtype, row + i,
                               chunk_count(params.plan.row().count, i));
  }
  static __device__ void store(const CopyParams& params, std::int64_t row, std::int64_t unit,
                               const Value& value) {
    const std::int64_t i = unit * kChunk;
    store_chunk(params.to, params.to_dtype, row + i, chunk_count(params.plan.row().count, i),
                value);
  }
};

/// Converts one element between any dtypes.
struct ConvertElement {
  static constexpr int kPerThread = 1;
  using Value = Number;
  static __device__ Value load(const CopyParams& params, std::int64_t row, std::int64_t unit) {
    return load_number(params.from, params.from_dtype, row + unit * params.plan.row().from_stride);
  }
  static __device__ void store(const CopyParams& params, std::int64_t row, std::int64_t unit,
                               const Value& value) {
    store_number(params.to, params.to_dtype, row + unit * params.plan.row().to_stride, value);
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

/// Offsets of a row's first element.
struct RowOffsets {
  std::int64_t from = 0;
  std::int64_t to = 0;
};

__device__ inline RowOffsets offsets_of_row(const CopyLoops& plan, std::int64_t row) {
  RowOffsets offsets;
  for (int n = plan.count - 2; n >= 0; --n) {
    const CopyLoop& loop = plan.loops[n];
    const std::int64_t index = n == 0 ? row : row % loop.count;
    row /= loop.count;
    offsets.from += index * loop.from_stride;
    offsets.to += index * loop.to_stride;
  }
  return offsets;
}

/// Threads are x along a row, and y over rows.
template <class Operation>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ CopyParams params) {
  constexpr int kPerThread = Operation::kPerThread;
  const std::int64_t items = params.rows * params.row_parts;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.y;
  for (std::int64_t item = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y; item < items;
       item += step) {
    const RowOffsets offsets = offsets_of_row(params.plan, item / params.row_parts);
    const std::int64_t first = item % params.row_parts * (blockDim.x * kPerThread) + threadIdx.x;
    typename Operation::Value values[kPerThread];
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const std::int64_t unit = first + n * blockDim.x;
      if (unit < params.row_units) values[n] = Operation::load(params, offsets.from, unit);
    }
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const std::int64_t unit = first + n * blockDim.x;
      if (unit < params.row_units) Operation::store(params, offsets.to, unit, values[n]);
    }
  }
}

template <class Operation>
void launch_copy(Queue& queue, CopyParams params, std::int64_t row_units) {
  unsigned lanes = 1;
  while (lanes < kThreads && lanes < row_units) lanes *= 2;
  params.rows = params.plan.rows();
  params.row_units = row_units;
  params.row_parts = ceil_div(row_units, lanes * Operation::kPerThread);
  const unsigned rows_at_once = kThreads / lanes;
  queue.launch(
      copy_rows<Operation>,
      Grid{blocks_for(params.rows * params.row_parts, rows_at_once), {lanes, rows_at_once}},
      params);
}

// ---- moving bytes -------------------------------------------------------------------------------

/// Whether every row of both views starts and ends at a multiple of `bytes`.
bool divides(const CopyParams& params, std::int64_t bytes) {
  const auto size = static_cast<std::int64_t>(size_of(params.to_dtype));
  if (bytes == size) return true;
  if (!params.plan.rows_are_contiguous() || params.plan.row().count * size % bytes != 0) {
    return false;
  }
  const auto address = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
  if ((address(params.from) | address(params.to)) % static_cast<std::uintptr_t>(bytes) != 0) {
    return false;
  }
  for (int n = 0; n + 1 < params.plan.count; ++n) {
    const CopyLoop& loop = params.plan.loops[n];
    if (loop.from_stride * size % bytes != 0 || loop.to_stride * size % bytes != 0) return false;
  }
  return true;
}

template <class Unit, template <class> class Operation>
bool launch_move_of(Queue& queue, CopyParams params) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Unit));
  const auto size = static_cast<std::int64_t>(size_of(params.to_dtype));
  if (kBytes < size || !divides(params, kBytes)) return false;
  const std::int64_t elements = kBytes / size;
  CopyLoops& plan = params.plan;
  for (int n = 0; n + 1 < plan.count; ++n) {
    plan.loops[n].from_stride /= elements;
    plan.loops[n].to_stride /= elements;
  }
  launch_copy<Operation<Unit>>(queue, params, plan.row().count / elements);
  return true;
}

/// With the widest unit that fits.
template <template <class> class Operation>
void launch_move(Queue& queue, const CopyParams& params) {
  static_cast<void>(launch_move_of<uint4, Operation>(queue, params) ||
                    launch_move_of<std::uint64_t, Operation>(queue, params) ||
                    launch_move_of<std::uint32_t, Operation>(queue, params) ||
                    launch_move_of<std::uint16_t, Operation>(queue, params) ||
                    launch_move_of<std::uint8_t, Operation>(queue, params));
}

bool is_one_block(const CopyLoops& plan) { return plan.count == 1 && plan.rows_are_contiguous(); }

std::size_t bytes_of(const TensorView& view) {
  return static_cast<std::size_t>(view.num_elements()) * size_of(view.dtype());
}

}  // namespace

void copy(Queue& queue, const ConstTensorView& from, const TensorView& to) {
  if (to.num_elements() == 0) return;
  const CopyParams params{.from = from.data(),
                          .to = to.data(),
                          .from_dtype = from.dtype(),
                          .to_dtype = to.dtype(),
                          .plan = plan_loops(from, to)};
  if (from.dtype() == to.dtype()) {
    if (!is_one_block(params.plan)) return launch_move<MoveUnit>(queue, params);
    return queue.copy(to.data(), from.data(), bytes_of(to));
  }
  const std::int64_t row = params.plan.row().count;
  if (!params.plan.rows_are_contiguous() || !is_float(from.dtype()) || !is_float(to.dtype())) {
    return launch_copy<ConvertElement>(queue, params, row);
  }
  const std::int64_t chunks = ceil_div(row, kChunk);
  if (from.dtype() == DType::kF64 || to.dtype() == DType::kF64) {
    return launch_copy<ConvertChunk<double>>(queue, params, chunks);
  }
  return launch_copy<ConvertChunk<float>>(queue, params, chunks);
}

void zero(Queue& queue, const TensorView& view) {
  if (view.num_elements() == 0) return;
  const CopyParams params{.from = view.data(),
                          .to = view.data(),
                          .from_dtype = view.dtype(),
                          .to_dtype = view.dtype(),
                          .plan = plan_loops(view, view)};
  if (!is_one_block(params.plan)) return launch_move<ZeroUnit>(queue, params);
  // Zero is all bits zero, whatever the dtype.
  queue.zero(view.data(), bytes_of(view));
}

}  // namespace ladon::cuda
