#include "memory_workload.h"

#include <utility>
#include <vector>

#include "cache/gather.h"
#include "compare_tensors.h"
#include "ladon/kv_cache.h"
#include "ladon/optim.h"
#include "ladon/paged_kv_cache.h"
#include "random_inputs.h"
#include "shape.h"

namespace ladon::bench {
namespace {

constexpr std::int64_t kTokens = 32768;
constexpr std::int64_t kKvHeads = 8;
constexpr std::int64_t kHeadDim = 128;
constexpr std::int64_t kWeights = 40'000'000;

/// A sequence's keys and values, as rows and in a cache.
class CacheRows : public Workload {
 public:
  CacheRows(const Context& context, DType storage)
      : storage_(storage),
        k_rows_(context, DType::kBF16, {1, kTokens, kKvHeads, kHeadDim}),
        v_rows_(context, DType::kBF16, {1, kTokens, kKvHeads, kHeadDim}),
        k_(context, DType::kBF16, {kTokens, kKvHeads * kHeadDim}),
        v_(context, DType::kBF16, {kTokens, kKvHeads * kHeadDim}),
        cache_(KvCache::paged(std::make_shared<PagePool>(
            context,
            KvCacheOptions{.num_kv_heads = kKvHeads, .head_dim = kHeadDim, .format = storage},
            kPageSize, kTokens / kPageSize))) {
    fill_with_normal(context, k_rows_, /*seed=*/6);
    fill_with_normal(context, v_rows_, /*seed=*/9);
    append(context);
  }

  /// What was appended must come out again, but for the rounding of the storage.
  std::string check(const Context& context) override {
    append(context);
    gather(context);
    const double allowed = storage_ == DType::kI8       ? 1.0 / 254 + epsilon_of(DType::kBF16)
                           : storage_ == DType::kF8E4M3 ? epsilon_of(storage_) / 2
                                                        : 0;
    const auto is_same = [allowed](const Tensor& gathered, const Tensor& appended) {
      const Tensor expected = appended.to_host();
      return largest_error(gathered.to_host(), expected.view().reshape(gathered.shape())) <=
             allowed;
    };
    return is_same(k_, k_rows_) && is_same(v_, v_rows_)
               ? ""
               : "what is gathered is not what was appended";
  }

  double flops() const override { return 0; }
  /// Keys and values of all tokens: as rows, and as they are stored.
  double bytes() const override {
    const double rows = 2.0 * kTokens * kKvHeads * kHeadDim * 2;
    return rows + static_cast<double>(cache_.bytes_used());
  }

 protected:
  void append(const Context& context) {
    cache_.reset();
    cache_.append(context, k_rows_, v_rows_);
  }
  void gather(const Context& context) { gather_sequence(context, cache_.view(), 0, k_, v_); }

 private:
  DType storage_;
  Tensor k_rows_, v_rows_;
  Tensor k_, v_;
  KvCache cache_;
};

class Append final : public CacheRows {
 public:
  using CacheRows::CacheRows;
  void run(const Context& context) override { append(context); }
};

class Gather final : public CacheRows {
 public:
  using CacheRows::CacheRows;
  void run(const Context& context) override { gather(context); }
};

class AdamWStep final : public Workload {
 public:
  explicit AdamWStep(const Context& context)
      : weights_(make(context, kWeights)), optimiser_(context, {&weights_}, {}) {}

  /// The bits of a step do not depend on the kernels.
  std::string check(const Context& context) override {
    constexpr std::int64_t kChecked = 1001;
    std::vector<Tensor> values;
    const Context reference = reference_for(context);
    for (const Context* where : {&context, &reference}) {
      Parameter part = make(*where, kChecked);
      AdamW(*where, {&part}, {}).step(*where);
      values.push_back(part.value.to_host());
    }
    return same_bits(values[0], values[1]) ? "" : "a step has other bits than the reference's";
  }

  void run(const Context& context) override { optimiser_.step(context); }
  double flops() const override { return 0; }
  /// Weight, two moments and master copy are read and written, the gradient is read.
  double bytes() const override { return kWeights * (2 * (2 + 4 + 4 + 4) + 4); }

 private:
  /// Filled on the host: the same numbers everywhere.
  static Parameter make(const Context& context, std::int64_t count) {
    const Context host(ContextOptions{.num_threads = context.num_threads()});
    Parameter parameter = Parameter::zeros("w", DType::kBF16, {count});
    fill_with_normal(host, parameter.value, /*seed=*/7);
    fill_with_normal(host, parameter.gradient, /*seed=*/8);
    return context.device().is_cpu() ? std::move(parameter) : parameter.to(context);
  }

  Parameter weights_;
  AdamW optimiser_;
};

}  // namespace

std::vector<MemoryShape> memory_shapes() {
  using Kind = MemoryShape::Kind;
  return {{.kind = Kind::kAppend},
          {.kind = Kind::kAppend, .storage = DType::kI8},
          {.kind = Kind::kAppend, .storage = DType::kF8E4M3},
          {.kind = Kind::kGather},
          {.kind = Kind::kAdamW}};
}

std::string MemoryShape::name() const {
  const std::string sizes = " S" + std::to_string(kTokens) + " H" + std::to_string(kKvHeads) +
                            " D" + std::to_string(kHeadDim) + ", paged " + ladon::name_of(storage);
  switch (kind) {
    case Kind::kAppend: return "bf16 append" + sizes;
    case Kind::kGather: return "bf16 gather" + sizes;
    case Kind::kAdamW: return "bf16 AdamW step, 40M weights";
  }
  return {};
}

std::unique_ptr<Workload> make_memory_workload(const Context& context, const MemoryShape& shape) {
  switch (shape.kind) {
    case MemoryShape::Kind::kAppend: return std::make_unique<Append>(context, shape.storage);
    case MemoryShape::Kind::kGather: return std::make_unique<Gather>(context, shape.storage);
    case MemoryShape::Kind::kAdamW: return std::make_unique<AdamWStep>(context);
  }
  return nullptr;
}

}  // namespace ladon::bench
