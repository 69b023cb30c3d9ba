// Rows of keys and values into and out of a cache's slots, with conversion.
//
// The runs' tokens are numbered through; a thread finds its token's run by bisection. grid.y is
// keys and values. Bits that are only moved, and floats that are converted, travel a chunk (16
// bytes, or 8 elements) a thread; where the heads of a token are contiguous on both sides they are
// one row. Quantising takes a warp for each head of a token: the largest magnitude first, then the
// rounding, in double as on CPUs, so that a cache has the same bytes.
//
// No arithmetic to speak of, but for a division per quantised element; each row is read once and
// written once. The limit is memory.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "cuda/kernels/chunk.cuh"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/kernel_list.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

/// Keys or values, inside and outside the cache.
struct KvPart {
  KvSlots slots{};
  Operand rows{};
  bool is_values = false;
  std::int64_t heads = 0;
  std::int64_t dim = 0;  // of a head
};

/// A run by the number of its first token.
struct NumberedRun {
  std::int64_t first = 0;
  KvRun run{};
};

// Runs that need no upload: a token each of 64 sequences.
constexpr int kShortList = 64;

struct KvKernelParams {
  KvPart parts[2];
  DType stored;
  bool writes;  // else gathers
  std::int64_t num_tokens;
  std::int64_t num_runs;
  KernelList<NumberedRun, kShortList> runs;
};

/// One head of one token: its first element inside and outside the cache.
struct KvRow {
  std::int64_t inside;
  std::int64_t outside;
  float* scale;
};

__device__ inline KvRow row_of(const KvKernelParams& params, const KvPart& part, std::int64_t token,
                               std::int64_t head) {
  std::int64_t low = 0;
  std::int64_t high = params.num_runs;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (params.runs[middle].first <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const NumberedRun numbered = params.runs[low];
  const std::int64_t index = token - numbered.first;
  const std::int64_t slot = numbered.run.slot + index;
  const KvSlots& slots = part.slots;
  const std::int64_t first = part.is_values ? numbered.run.v : numbered.run.k;
  return {slot * slots.slot_stride + head * slots.head_stride,
          first + index * part.rows.token_stride + head * part.rows.head_stride,
          slots.scales == nullptr
              ? nullptr
              : slots.scales + slot * slots.scale_slot_stride + head * slots.scale_head_stride};
}

/// Calls function(row, i, count) for every chunk of `width` elements of a part's rows, one thread
/// each.
template <class Function>
__device__ inline void for_each_row_chunk(const KvKernelParams& params, const KvPart& part,
                                          int width, const Function& function) {
  const std::int64_t chunks = (part.dim + width - 1) / width;
  for_each_index(params.num_tokens * part.heads * chunks, [&](std::int64_t index) {
    const std::int64_t i = index % chunks * width;
    const std::int64_t head = index / chunks % part.heads;
    const std::int64_t token = index / chunks / part.heads;
    const std::int64_t left = part.dim - i;
    function(row_of(params, part, token, head), i, left < width ? static_cast<int>(left) : width);
  });
}

/// The same dtype on both sides: bits are moved.
template <class Bits>
__global__ void __launch_bounds__(kThreads)
    move_rows(const __grid_constant__ KvKernelParams params) {
  take_over();
  constexpr int kWidth = sizeof(uint4) / sizeof(Bits);
  const KvPart& part = params.parts[blockIdx.y];
  for_each_row_chunk(params, part, kWidth, [&](const KvRow& row, std::int64_t i, int count) {
    Bits* const inside = static_cast<Bits*>(part.slots.data) + row.inside + i;
    Bits* const outside = static_cast<Bits*>(part.rows.data) + row.outside + i;
    params.writes ? move_elements(inside, outside, count) : move_elements(outside, inside, count);
  });
}

template <class Compute>
__global__ void __launch_bounds__(kThreads)
    convert_rows(const __grid_constant__ KvKernelParams params) {
  take_over();
  const KvPart& part = params.parts[blockIdx.y];
  for_each_row_chunk(params, part, kChunk, [&](const KvRow& row, std::int64_t i, int count) {
    if (params.writes) {
      store_chunk(part.slots.data, params.stored, row.inside + i, count,
                  load_chunk<Compute>(part.rows.data, part.rows.dtype, row.outside + i, count));
    } else {
      store_chunk(part.rows.data, part.rows.dtype, row.outside + i, count,
                  load_chunk<Compute>(part.slots.data, params.stored, row.inside + i, count));
    }
  });
}

// ---- int8 and fp8 -------------------------------------------------------------------------------

/// A quantised element's code, and what it stands for before it is scaled.
template <DType kStored>
__device__ inline unsigned char code_of(double units) {
  if constexpr (kStored == DType::kF8E4M3) {
    return detail::float_to_float8_bits(detail::round_to_odd(units));
  } else {
    return static_cast<unsigned char>(static_cast<signed char>(rint(units)));
  }
}
template <DType kStored>
__device__ inline double units_of(unsigned char code) {
  if constexpr (kStored == DType::kF8E4M3) {
    return detail::float8_bits_to_float(code);
  } else {
    return static_cast<signed char>(code);
  }
}

/// One row by one warp: the largest magnitude becomes the largest number, 127 or 448. A row with a
/// NaN, an infinity or a number whose scale no float can be gets a scale of NaN, so that it reads
/// back as NaN.
__device__ inline void quantise_row(const KvPart& part, const KvRow& row, DType stored) {
  constexpr double kSmallestScale = 0x1p-126;  // below, floats are subnormal and lose precision
  const double number = largest_quantised(stored);
  const double most = number * static_cast<double>(std::numeric_limits<float>::max());
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto element = [&](std::int64_t i) {
    return load_element<double>(part.rows.data, part.rows.dtype, row.outside + i);
  };
  auto* const to = static_cast<unsigned char*>(part.slots.data) + row.inside;
  double largest = 0;
  bool finite = true;
  for (std::int64_t i = lane; i < part.dim; i += kWarp) {
    const double magnitude = fabs(element(i));
    finite = finite && magnitude <= most;
    largest = fmax(largest, magnitude);
  }
  largest = largest_of_threads(largest, kWarp);
  finite = __all_sync(kAllLanes, finite);
  // Rounded to float before it is used, because readers multiply by the float.
  const double step = largest / number;
  const float scale = step < kSmallestScale ? 0.0F : static_cast<float>(step);
  if (lane == 0) *row.scale = finite ? scale : __uint_as_float(0x7fc00000U);
  for (std::int64_t i = lane; i < part.dim; i += kWarp) {
    double units = 0;
    if (!finite) {
      units = 1;
    } else if (scale != 0) {
      units = fmin(fmax(element(i) / static_cast<double>(scale), -number), number);
    }
    with_quantised_type(stored, [&](auto type) { to[i] = code_of<type.kDType>(units); });
  }
}

__global__ void __launch_bounds__(kThreads)
    quantise_rows(const __grid_constant__ KvKernelParams params) {
  take_over();
  const KvPart& part = params.parts[blockIdx.y];
  const std::int64_t rows = params.num_tokens * part.heads;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / kWarp);
  for (std::int64_t index = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
       index < rows; index += warps) {
    quantise_row(part, row_of(params, part, index / part.heads, index % part.heads), params.stored);
  }
}

__global__ void __launch_bounds__(kThreads)
    dequantise_rows(const __grid_constant__ KvKernelParams params) {
  take_over();
  const KvPart& part = params.parts[blockIdx.y];
  for_each_row_chunk(params, part, kChunk, [&](const KvRow& row, std::int64_t i, int count) {
    const auto* const from = static_cast<const unsigned char*>(part.slots.data) + row.inside + i;
    const double scale = *row.scale;
    Chunk<double> chunk{};
    with_quantised_type(params.stored, [&](auto type) {
#pragma unroll
      for (int n = 0; n < kChunk; ++n) {
        if (n < count) chunk.values[n] = units_of<type.kDType>(from[n]) * scale;
      }
    });
    store_chunk(part.rows.data, part.rows.dtype, row.outside + i, count, chunk);
  });
}

// ---- launches -----------------------------------------------------------------------------------

/// All heads of a token as one, where they are contiguous on both sides and have no scales.
KvPart merge_heads(KvPart part) {
  if (part.slots.head_stride == part.dim && part.rows.head_stride == part.dim &&
      part.slots.scales == nullptr) {
    part.dim *= part.heads;
    part.heads = 1;
  }
  return part;
}

/// Keys, values or both.
struct KvParts {
  KvPart parts[2];
  std::size_t count = 0;

  explicit KvParts(const KvRowsParams& params) {
    if (params.k.data != nullptr) {
      parts[count++] = merge_heads({.slots = params.k_slots,
                                    .rows = params.k,
                                    .is_values = false,
                                    .heads = params.num_kv_heads,
                                    .dim = params.head_dim});
    }
    if (params.v.data != nullptr) {
      parts[count++] = merge_heads({.slots = params.v_slots,
                                    .rows = params.v,
                                    .is_values = true,
                                    .heads = params.num_kv_heads,
                                    .dim = params.value_dim});
    }
  }
};

/// Empty runs do no harm: the run after one starts with the same token, and is found.
void number_runs(const KvRowsParams& params, NumberedRun* numbered) {
  std::int64_t first = 0;
  for (std::int64_t n = 0; n < params.num_runs; ++n) {
    numbered[n] = {first, params.runs[n]};
    first += params.runs[n].count;
  }
}

std::int64_t count_tokens(const KvRowsParams& params) {
  std::int64_t tokens = 0;
  for (std::int64_t n = 0; n < params.num_runs; ++n) tokens += params.runs[n].count;
  return tokens;
}

struct KvLaunch {
  void (*kernel)(KvKernelParams);
  int width;  // elements of a thread; 0 where a warp has a row
};

KvLaunch launch_for_move(DType dtype) {
  switch (size_of(dtype)) {
    case 8: return {move_rows<std::uint64_t>, 2};
    case 4: return {move_rows<std::uint32_t>, 4};
    default: return {move_rows<std::uint16_t>, 8};
  }
}

KvLaunch launch_for(const KvFormat& format, DType dtype, bool writes) {
  if (format.scaled && writes) return {quantise_rows, 0};
  if (format.scaled) return {dequantise_rows, kChunk};
  if (dtype == format.dtype) return launch_for_move(dtype);
  const bool wide = dtype == DType::kF64 || format.dtype == DType::kF64;
  return {wide ? convert_rows<double> : convert_rows<float>, kChunk};
}

/// Parts of one dtype.
void launch_parts(Queue& queue, KvKernelParams params, std::span<const KvPart> parts,
                  const KvLaunch& launch) {
  std::copy(parts.begin(), parts.end(), params.parts);
  std::int64_t threads = 0;
  for (const KvPart& part : parts) {
    const std::int64_t per_row = launch.width == 0 ? kWarp : ceil_div(part.dim, launch.width);
    threads = std::max(threads, params.num_tokens * part.heads * per_row);
  }
  queue.launch(launch.kernel,
               Grid{.blocks = {blocks_for(threads, kThreads), static_cast<unsigned>(parts.size())},
                    .threads = kThreads,
                    .starts_early = true},
               params);
}

void run_rows(Queue& queue, const KvRowsParams& params, bool writes) {
  const KvParts parts(params);
  const ListForKernel<NumberedRun, kShortList> runs(
      queue, params.num_runs, [&](NumberedRun* numbered) { number_runs(params, numbered); });
  const KvKernelParams kernel_params{.parts = {},
                                     .stored = params.format.dtype,
                                     .writes = writes,
                                     .num_tokens = count_tokens(params),
                                     .num_runs = params.num_runs,
                                     .runs = runs.list()};
  std::span<const KvPart> left(parts.parts, parts.count);
  while (!left.empty()) {
    const DType dtype = left[0].rows.dtype;
    const std::size_t together = left.back().rows.dtype == dtype ? left.size() : 1;
    launch_parts(queue, kernel_params, left.first(together),
                 launch_for(params.format, dtype, writes));
    left = left.subspan(together);
  }
}

}  // namespace

void write_kv(Queue& queue, const KvRowsParams& params) { run_rows(queue, params, true); }

void gather_kv(Queue& queue, const KvRowsParams& params) { run_rows(queue, params, false); }

}  // namespace ladon::cuda
