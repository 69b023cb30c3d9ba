// attention(), its backward, caches and rope, on small random problems.
#include <memory>
#include <string>
#include <vector>

#include "compare_tensors.h"
#include "host_cache.h"
#include "ladon/alibi.h"
#include "ladon/attention.h"
#include "ladon/kv_cache.h"
#include "ladon/paged_kv_cache.h"
#include "ladon/random.h"
#include "ladon/rope.h"
#include "self_test.h"

namespace ladon::cli {
namespace {

/// Rounded to dtype, where the Context is; the same numbers for the truth in double, on the host.
struct Pair {
  Tensor value;
  Tensor truth;
};

Pair normal_pair(const Context& context, DType dtype, const Dims& shape, std::uint64_t seed,
                 std::uint64_t stream) {
  Pair pair{Tensor(context, dtype, shape), {}};
  fill_normal(context, pair.value, 0, 1, seed, stream);
  pair.truth = Tensor::copy_of(context, pair.value, DType::kF64).to_host();
  return pair;
}

/// A mix of options. Sizes are odd on purpose: the edges of tiles and vectors are where faults
/// live.
struct Variant {
  std::string name;
  std::int64_t batch = 2;
  std::int64_t query_len = 0;
  std::int64_t kv_len = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  AttentionOptions options{};
  bool bias = false;
  bool sinks = false;
  bool alibi = false;
};

std::vector<Variant> tile_variants() {
  return {
      {"MHA full", 2, 67, 131, 3, 3, 64, 64, {}},
      {"GQA causal", 2, 70, 70, 6, 2, 40, 24, {.causal = true}},
      {"MQA window bias sinks",
       1,
       65,
       200,
       5,
       1,
       17,
       33,
       {.causal = true, .window_left = 31, .softcap = 20},
       true,
       true,
       true},
      {"MHA causal 128", 1, 129, 129, 2, 2, 128, 128, {.causal = true}},
  };
}

std::vector<Variant> decode_variants() {
  return {
      {"MHA one query", 2, 1, 1100, 2, 2, 64, 64, {.causal = true}},
      {"GQA one query", 2, 1, 777, 6, 2, 128, 128, {.causal = true}},
      {"MQA two queries bias sinks", 1, 2, 515, 4, 1, 40, 24, {.causal = true}, true, true, true},
  };
}

/// The tensors of a variant, and what options point to.
class Inputs {
 public:
  Inputs(const Context& context, const Variant& variant, DType dtype, std::uint64_t seed)
      : options_(variant.options),
        q(normal_pair(context, dtype,
                      {variant.batch, variant.query_len, variant.num_heads, variant.head_dim}, seed,
                      1)),
        k(normal_pair(context, dtype,
                      {variant.batch, variant.kv_len, variant.num_kv_heads, variant.head_dim}, seed,
                      2)),
        v(normal_pair(context, dtype,
                      {variant.batch, variant.kv_len, variant.num_kv_heads, variant.value_dim},
                      seed, 3)),
        bias_(normal_pair(context, DType::kF32,
                          {1, variant.num_heads, variant.query_len, variant.kv_len}, seed, 4)),
        sinks_(normal_pair(context, DType::kF32, {variant.num_heads}, seed, 5)),
        truth_options_(variant.options) {
    slopes_.truth =
        Tensor::from_values(DType::kF32, {variant.num_heads}, alibi_slopes(variant.num_heads));
    slopes_.value = slopes_.truth.to(context);
    if (variant.bias) use(&AttentionOptions::bias, bias_);
    if (variant.sinks) use(&AttentionOptions::sinks, sinks_);
    if (variant.alibi) use(&AttentionOptions::alibi_slopes, slopes_);
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  const AttentionOptions& options() const { return options_; }
  /// Of the same call on the host.
  const AttentionOptions& truth_options() const { return truth_options_; }
  const Pair& bias() const { return bias_; }
  const Pair& sinks() const { return sinks_; }

 private:
  void use(ConstTensorView AttentionOptions::*option, const Pair& pair) {
    options_.*option = pair.value;
    truth_options_.*option = pair.truth;
  }

  AttentionOptions options_;

 public:
  Pair q, k, v;

 private:
  Pair bias_, sinks_, slopes_;
  AttentionOptions truth_options_;
};

Dims lse_shape(const Tensor& q) { return {q.size(0), q.size(2), q.size(1)}; }

/// out and lse of a forward call.
struct Result {
  Tensor out;
  Tensor lse;
};

Result run_forward(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v,
                   const AttentionOptions& options) {
  Result result{
      Tensor(context, q.dtype(), {q.size(0), q.size(1), q.size(2), v.size(3)}),
      Tensor(context, q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, lse_shape(q))};
  attention(context, q, k, v, options, result.out, result.lse);
  return result;
}

}  // namespace

void SelfTest::check_forward(DType dtype, int variant) {
  const std::vector<Variant> variants = area_ == "decode" ? decode_variants() : tile_variants();
  const Variant& chosen = variants[static_cast<std::size_t>(variant)];
  const Inputs inputs(context_, chosen, dtype, seed_);
  const Result got =
      run_forward(context_, inputs.q.value, inputs.k.value, inputs.v.value, inputs.options());
  const Result truth = run_forward(reference_, inputs.q.truth, inputs.k.truth, inputs.v.truth,
                                   inputs.truth_options());
  // Some kernels round bf16 weights as well.
  compare(chosen.name + ": out", got.out, truth.out, dtype, dtype == DType::kBF16 ? 2 : 1);
  compare(chosen.name + ": lse", got.lse, truth.lse,
          dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  context_.synchronize();  // the other Context reads what this one has made
  const Result single =
      run_forward(single_, inputs.q.value, inputs.k.value, inputs.v.value, inputs.options());
  promise(std::string(name_of(dtype)) + " " + chosen.name +
              (context_.device().is_cpu() ? ": same bits on one thread" : ": same bits once more"),
          bench::same_bits(got.out.to_host(), single.out.to_host()) &&
              bench::same_bits(got.lse.to_host(), single.lse.to_host()));
}

void SelfTest::forward() {
  for (const DType dtype : kFloatTypes) {
    for (int variant = 0; variant < static_cast<int>(tile_variants().size()); ++variant) {
      check_forward(dtype, variant);
    }
  }
}

void SelfTest::decode() {
  for (const DType dtype : kFloatTypes) {
    for (int variant = 0; variant < static_cast<int>(decode_variants().size()); ++variant) {
      check_forward(dtype, variant);
    }
  }
}

void SelfTest::check_backward(DType dtype, int variant) {
  const std::vector<Variant> variants = tile_variants();
  const Variant& chosen = variants[static_cast<std::size_t>(variant)];
  const Inputs inputs(context_, chosen, dtype, seed_ + 1);
  const Pair dout =
      normal_pair(context_, dtype,
                  {chosen.batch, chosen.query_len, chosen.num_heads, chosen.value_dim}, seed_, 6);

  struct Gradients {
    Tensor dq, dk, dv, dbias, dsinks;
  };
  const auto run = [&](const Context& context, bool truth) {
    const Tensor& q = truth ? inputs.q.truth : inputs.q.value;
    const Tensor& k = truth ? inputs.k.truth : inputs.k.value;
    const Tensor& v = truth ? inputs.v.truth : inputs.v.value;
    const AttentionOptions& options = truth ? inputs.truth_options() : inputs.options();
    const Result saved = run_forward(context, q, k, v, options);
    Gradients gradients{Tensor(context, q.dtype(), q.shape()),
                        Tensor(context, k.dtype(), k.shape()),
                        Tensor(context, v.dtype(), v.shape()),
                        Tensor(context, DType::kF64, inputs.bias().value.shape()),
                        Tensor(context, DType::kF64, inputs.sinks().value.shape())};
    AttentionGradients wanted{.dq = gradients.dq, .dk = gradients.dk, .dv = gradients.dv};
    if (chosen.bias) wanted.dbias = gradients.dbias;
    if (chosen.sinks) wanted.dsinks = gradients.dsinks;
    attention_backward(
        context, q, k, v, options,
        {.out = saved.out, .lse = saved.lse, .dout = truth ? dout.truth : dout.value}, wanted);
    return gradients;
  };
  const Gradients got = run(context_, false);
  const Gradients truth = run(reference_, true);
  // The saved output is rounded as well.
  compare(chosen.name + ": dq", got.dq, truth.dq, dtype, 2);
  compare(chosen.name + ": dk", got.dk, truth.dk, dtype, 2);
  compare(chosen.name + ": dv", got.dv, truth.dv, dtype, 2);
  if (chosen.bias) compare(chosen.name + ": dbias", got.dbias, truth.dbias, dtype, 2);
  if (chosen.sinks) compare(chosen.name + ": dsinks", got.dsinks, truth.dsinks, dtype, 2);
}

void SelfTest::backward() {
  for (const DType dtype : kFloatTypes) {
    for (int variant = 0; variant < static_cast<int>(tile_variants().size()); ++variant) {
      check_backward(dtype, variant);
    }
  }
}

void SelfTest::check_cache(DType query_dtype, DType storage) {
  constexpr std::int64_t kWindow = 40;
  KvCacheOptions options{
      .batch = 2, .num_kv_heads = 2, .head_dim = 40, .value_dim = 24, .format = storage};
  std::vector<KvCache> caches;
  caches.push_back(KvCache::contiguous(context_, options));
  caches.push_back(KvCache::window(context_, options, kWindow));
  caches.push_back(KvCache::paged(std::make_shared<PagePool>(context_, options, 16, 64), 2));
  for (KvCache& cache : caches) {
    // In three parts, the last of which is new to the queries.
    std::uint64_t stream = 10;
    for (const std::int64_t length : {37, 60, 3}) {
      Tensor k(context_, DType::kF32, {2, length, 2, 40});
      Tensor v(context_, DType::kF32, {2, length, 2, 24});
      fill_normal(context_, k, 0, 1, seed_, stream++);
      fill_normal(context_, v, 0, 1, seed_, stream++);
      cache.append(context_, k, v);
    }
    const bench::HostCache host(context_, cache);
    for (const std::int64_t query_len : {1, 3}) {
      // A window's ring holds no more than the newest query needs: older ones are left out.
      if (cache.kind() == "window" && query_len > 1) continue;
      const Pair q = normal_pair(context_, query_dtype, {2, query_len, 6, 40}, seed_, stream++);
      const AttentionOptions attend{.causal = true, .window_left = kWindow};
      Tensor got(context_, query_dtype, {2, query_len, 6, 24});
      Tensor truth(DType::kF64, {2, query_len, 6, 24});
      attention(context_, q.value, cache.view(), attend, got);
      attention(reference_, q.truth, host.view(), attend, truth);
      compare(std::string(cache.kind()) + " " + name_of(storage) + ", " +
                  std::to_string(query_len) + (query_len == 1 ? " query" : " queries"),
              got, truth, query_dtype);
    }
  }
}

void SelfTest::caches() {
  for (const DType storage : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    check_cache(DType::kF32, storage);
    check_cache(DType::kBF16, storage);
  }
  check_cache(DType::kF64, DType::kF64);
}

void SelfTest::rotary() {
  for (const DType dtype : kFloatTypes) {
    for (const RopeLayout layout : {RopeLayout::kHalfSplit, RopeLayout::kInterleaved}) {
      const Pair x = normal_pair(context_, dtype, {2, 33, 3, 40}, seed_, 20);
      Tensor got(context_, dtype, x.value.shape());
      Tensor truth(DType::kF64, x.truth.shape());
      const RopeOptions options{.layout = layout, .rotary_dim = 32};
      const RopePositions positions{.first = 1000};
      rope(context_, x.value, options, positions, got);
      rope(reference_, x.truth, options, positions, truth);
      compare(layout == RopeLayout::kHalfSplit ? "half-split" : "interleaved", got, truth, dtype);
    }
  }
}

}  // namespace ladon::cli
