#include "ceiling.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>

#include "ceilings/ceilings.h"
#include "ceilings/device_read.h"
#include "core/context_impl.h"
#include "core/parallel.h"
#include "device_work.h"
#include "ladon/random.h"
#include "layers/projection.h"

namespace ladon::bench {
namespace {

using FmaLoop = CeilingLoop (*)(bool is_f64, std::int64_t steps, const double* seeds);
using Loop = std::function<CeilingLoop(std::int64_t steps, const double* seeds)>;

// Many short tasks, handed out as they are finished: like the kernels, a ceiling does not wait for
// a thread that the machine took away for a while. 10 to 100 ms in all on today's machines.
constexpr std::int64_t kTasksPerThread = 64;
constexpr double kFlopsPerTask = 2e7;

constexpr std::int64_t kReadBytes = std::int64_t{256} << 20;
constexpr std::int64_t kReadTaskBytes = std::int64_t{1} << 20;
constexpr std::int64_t kCopyBytes = std::int64_t{512} << 20;  // many times a GPU's cache

// What is computed must be used.
std::atomic<double> sink{0};

FmaLoop fma_loop_of(Isa isa) {
  switch (isa) {
    case Isa::kBaseline: return fma_loop_baseline;
    case Isa::kAvx2: return fma_loop_avx2;
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
    case Isa::kAmx: return fma_loop_avx512;
    case Isa::kReference: break;
  }
  throw std::logic_error("no ceiling for this instruction set");
}

std::array<double, kCeilingSeeds> make_seeds() {
  std::array<double, kCeilingSeeds> seeds{};
  Random random(7);
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    const double sign = random.below(2) == 0 ? 1 : -1;
    seeds[i] = sign * (i < seeds.size() / 2 ? random.uniform(0.5, 0.95) : random.uniform(0.5, 2));
  }
  return seeds;
}

/// Sum of 64-bit words, four chains: adds are far cheaper than the reads.
std::uint64_t sum_words(const std::uint64_t* words, std::int64_t count) {
  std::uint64_t sums[4] = {};
  for (std::int64_t i = 0; i < count; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] += words[i + j];
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

Work on_all_threads(const Context& context, const Loop& loop) {
  const std::array<double, kCeilingSeeds> seeds = make_seeds();
  const double flops_per_step = loop(1, seeds.data()).flops;
  const std::int64_t steps = static_cast<std::int64_t>(kFlopsPerTask / flops_per_step);
  const std::int64_t tasks = kTasksPerThread * context.num_threads();

  Work work;
  work.amount = flops_per_step * static_cast<double>(steps * tasks);
  work.run = [&context, loop, seeds, steps, tasks] {
    parallel_for(context.impl().workers(), tasks, [&](std::int64_t, int) {
      sink.store(loop(steps, seeds.data()).checksum, std::memory_order_relaxed);
    });
  };
  return work;
}

Work fma_ceiling(const Context& context, DType dtype) {
  const FmaLoop loop = fma_loop_of(context.isa());
  const bool is_f64 = dtype == DType::kF64;
  return on_all_threads(context, [loop, is_f64](std::int64_t steps, const double* seeds) {
    return loop(is_f64, steps, seeds);
  });
}

/// y = x w^T of large square matrices: of 16-bit floats in some ms on today's GPUs.
Work product_ceiling(const Context& context, DType dtype) {
  const std::int64_t size = size_of(dtype) == 2 ? 8192 : 4096;
  const auto make = [&](std::uint64_t seed) {
    auto matrix = std::make_shared<Tensor>(context, dtype, Dims{size, size});
    fill_normal(context, *matrix, 0, 1, seed);
    return matrix;
  };
  const auto x = make(1);
  const auto w = make(2);
  const auto y = make(3);
  const auto edge = static_cast<double>(size);
  return work_on(
      context, [&context, x, w, y] { project(context, *x, *w, {}, *y); }, 2 * edge * edge * edge);
}

}  // namespace

const char* name_of(Limit limit) {
  switch (limit) {
    case Limit::kFma: return "FMA";
    case Limit::kBf16: return "BF16";
    case Limit::kAmx: return "AMX";
    case Limit::kProduct: return "product";
    case Limit::kMemory: return "memory";
    case Limit::kRead: return "read";
  }
  return "";
}

Limit limit_here(const Context& context, Limit wanted) {
  if (!context.device().is_cpu()) return counts_bytes(wanted) ? wanted : Limit::kProduct;
  if (wanted == Limit::kRead) return Limit::kMemory;
  if (wanted != Limit::kAmx || context.isa() == Isa::kAmx) return wanted;
  return context.isa() == Isa::kAvx512Bf16 ? Limit::kBf16 : Limit::kFma;
}

Work compute_ceiling(const Context& context, Limit limit, DType dtype) {
  switch (limit) {
    case Limit::kFma: return fma_ceiling(context, dtype);
    case Limit::kBf16: return on_all_threads(context, pair_loop_avx512_bf16);
    case Limit::kAmx: {
      Work work = on_all_threads(context, tile_loop_amx);
      // Tiles take their time to come up to speed when they are first used.
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(1)) work.run();
      return work;
    }
    case Limit::kProduct: return product_ceiling(context, dtype);
    case Limit::kMemory:
    case Limit::kRead: break;
  }
  throw std::logic_error("memory is not a limit of arithmetic");
}

ReadBuffer::ReadBuffer(const Context& context) {
  if (!context.device().is_cpu()) {
    memory_ = Tensor(context, DType::kU8, {kCopyBytes});
    copy_ = Tensor(context, DType::kU8, {kCopyBytes});
    return;
  }
  memory_ = Tensor::uninitialized(DType::kF32, {kReadBytes / 4});
  // Written, because untouched pages are all the same page of zeros.
  std::uint32_t* words = static_cast<std::uint32_t*>(memory_.data());
  for (std::int64_t i = 0; i < kReadBytes / 4; ++i) {
    words[i] = static_cast<std::uint32_t>(i) * 2654435761U;
  }
}

Work ReadBuffer::memory_ceiling(const Context& context) const {
  if (context.device().is_cpu()) return read_ceiling(context);
  const auto copy_all = [this, &context] {
    backend_of(context).memory()->copy(copy_.data(), memory_.data(), kCopyBytes);
  };
  return work_on(context, copy_all, 2.0 * static_cast<double>(kCopyBytes));
}

Work ReadBuffer::read_ceiling(const Context& context) const {
#ifdef LADON_WITH_CUDA
  if (!context.device().is_cpu()) {
    const auto read_all = [this, &context] {
      read_device_memory(context, memory_.data(), kCopyBytes);
    };
    return work_on(context, read_all, static_cast<double>(kCopyBytes));
  }
#endif
  const std::uint64_t* words = static_cast<const std::uint64_t*>(memory_.data());
  Work work;
  work.amount = static_cast<double>(kReadBytes);
  work.run = [&context, words] {
    constexpr std::int64_t kTaskWords = kReadTaskBytes / 8;
    parallel_for(context.impl().workers(), kReadBytes / kReadTaskBytes,
                 [&](std::int64_t task, int) {
                   const std::uint64_t sum = sum_words(words + task * kTaskWords, kTaskWords);
                   sink.store(static_cast<double>(sum), std::memory_order_relaxed);
                 });
  };
  return work;
}

}  // namespace ladon::bench
