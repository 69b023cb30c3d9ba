// Bits of the plain functions: attention and its gradients, caches, rope, merging, optimisers.

#include <memory>
#include <vector>

#include "bits/bit_cases.h"
#include "cache/cache_support.h"
#include "ladon/attention.h"
#include "ladon/head_ops.h"
#include "ladon/optim.h"
#include "ladon/rope.h"
#include "support/host_context.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

void add_results(const CaseResults& results, BitHashes& hashes) {
  hashes.add("out", results.out.view());
  hashes.add("lse", results.lse.view());
  hashes.add("dq", results.dq.view());
  hashes.add("dk", results.dk.view());
  hashes.add("dv", results.dv.view());
  hashes.add("dbias", results.dbias.view());
  hashes.add("dsinks", results.dsinks.view());
}

Tensor random_like(Random& random, DType dtype, const Dims& shape, double deviation = 1) {
  Tensor tensor(dtype, shape);
  fill_normal(host_context(), tensor, 0, deviation, random.next_u64());
  return tensor;
}

RopeOptions random_rope(Random& random, std::int64_t head_dim) {
  RopeOptions options;
  options.layout = pick(random, {RopeLayout::kHalfSplit, RopeLayout::kInterleaved});
  if (chance(random, 0.4)) options.rotary_dim = 2 * (1 + random.below(head_dim / 2));
  if (chance(random, 0.5)) {
    options.scaling.kind =
        pick(random, {RopeScaling::kLinear, RopeScaling::kLlama3, RopeScaling::kYarn});
    options.scaling.factor = 4;
    options.scaling.original_context = 64;
  }
  return options;
}

void run_rope(const Context& context, Random& random, BitHashes& hashes) {
  const DType dtype = pick_float(random);
  const std::int64_t head_dim = 2 * (1 + random.below(70));
  const std::int64_t batch = 1 + random.below(3);
  const std::int64_t seq = 1 + random.below(40);
  const Tensor x = random_like(random, dtype, {batch, seq, 1 + random.below(5), head_dim});
  const RopeOptions options = random_rope(random, head_dim);
  std::vector<std::int64_t> list;
  for (std::int64_t i = 0; i < batch * seq && chance(random, 0.99); ++i) {
    list.push_back(random.below(5000));
  }
  RopePositions positions{.first = random.below(1000)};
  if (static_cast<std::int64_t>(list.size()) == batch * seq) {
    positions = {.explicit_positions = list};
  }
  Tensor out(dtype, x.shape());
  rope(context, x, options, positions, out);
  hashes.add("rope", out.view());
  rope_backward(context, x, options, positions, out);
  hashes.add("rope_backward", out.view());
}

void run_merge(const Context& context, Random& random, BitHashes& hashes) {
  const std::int64_t heads = 1 + random.below(6);
  const std::int64_t tokens = 1 + random.below(9);
  const Dims shape{2, tokens, heads, 1 + random.below(80)};
  std::vector<Tensor> outs;
  std::vector<Tensor> lses;
  std::vector<ConstTensorView> out_views;
  std::vector<ConstTensorView> lse_views;
  for (int i = 0; i < 3; ++i) {
    outs.push_back(random_like(random, pick_float(random), shape));
    lses.push_back(random_like(random, DType::kF32, {2, heads, tokens}, 3));
  }
  for (std::size_t i = 0; i < outs.size(); ++i) {
    out_views.emplace_back(outs[i]);
    lse_views.emplace_back(lses[i]);
  }
  const Tensor sinks = random_like(random, DType::kF32, {heads});
  Tensor out(pick_float(random), shape);
  Tensor lse(DType::kF32, {2, heads, tokens});
  merge_attention(context, out_views, lse_views, out, lse,
                  chance(random, 0.5) ? ConstTensorView(sinks) : ConstTensorView());
  hashes.add("merged", out.view());
  hashes.add("merged_lse", lse.view());
}

void run_weights(const Context& context, Random& random, BitHashes& hashes) {
  const DType dtype = pick_float(random);
  const Tensor q = random_like(random, dtype, {1, 5, 4, 12});
  const Tensor k = random_like(random, dtype, {1, 9, 2, 12});
  Tensor weights(pick_float(random), {1, 4, 5, 9});
  attention_weights(
      context, q, k, {.causal = chance(random, 0.5), .softcap = 3}, weights,
      pick(random, {ScoreStage::kScaled, ScoreStage::kMasked, ScoreStage::kProbability}));
  hashes.add("weights", weights.view());
}

void run_heads_and_copies(const Context& context, Random& random, BitHashes& hashes) {
  const Tensor x = random_like(random, pick_float(random), {2, 1 + random.below(9), 3, 10}, 1e3);
  const Tensor repeated = repeat_kv(context, x, 1 + random.below(4));
  hashes.add("repeated", repeated.view());
  const Tensor merged = merge_heads(context, x.view().transpose(1, 2));
  hashes.add("merged_heads", merged.view());
  const Tensor converted =
      Tensor::copy_of(context, x.view().transpose(0, 3),
                      pick(random, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI8,
                                    DType::kU8, DType::kI32, DType::kBool}));
  hashes.add("converted", converted.view());
  Tensor uniform(pick_float(random), {1 + random.below(300)});
  fill_uniform(context, uniform, -2, 3, random.next_u64(), 5);
  hashes.add("uniform", uniform.view());
}

}  // namespace

void run_functions(const Context& context, Random& random, BitHashes& hashes) {
  const CaseData data(random_case(random));
  add_results(run(context, data), hashes);
}

void run_large_functions(const Context& context, Random& random, BitHashes& hashes) {
  // Several strips of tiles and blocks of backward, or splits of decoding.
  Case problem;
  problem.seed = random.next_u64();
  problem.num_kv_heads = 1 + random.below(2);
  problem.num_heads = problem.num_kv_heads * pick(random, {1, 2, 4});
  problem.dtype = pick(random, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  problem.kv_dtype = problem.dtype;
  problem.head_dim = pick(random, {40, 64, 128});
  problem.value_dim = chance(random, 0.7) ? problem.head_dim : 24;
  problem.causal = chance(random, 0.6);
  const bool decode = chance(random, 0.4);
  problem.query_len = decode ? 1 + random.below(3) : 100 + random.below(250);
  problem.kv_len = decode ? 1000 + random.below(1500) : 100 + random.below(250);
  if (chance(random, 0.3)) problem.window_left = 50 + random.below(100);
  problem.sinks = chance(random, 0.3);
  problem.memory = pick(random, {Memory::kDense, Memory::kHeadsFirst, Memory::kSliced});
  if (context.isa() == Isa::kReference) {
    problem.num_heads = problem.num_kv_heads = 1;
    problem.query_len = std::min<std::int64_t>(problem.query_len, 20);
  }
  const CaseData data(problem);
  add_results(run(context, data), hashes);
}

void run_caches(const Context& context, Random& random, BitHashes& hashes) {
  const DType query = pick(random, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  DType stored = pick(random, {DType::kF32, DType::kBF16, DType::kF16, DType::kI8});
  if (query == DType::kF64 && chance(random, 0.5)) stored = DType::kF64;
  const std::int64_t heads = 1 + random.below(3);
  const std::int64_t group = 1 + random.below(4);
  const std::int64_t dim = pick(random, {7, 16, 64, 80});
  const std::int64_t value_dim = chance(random, 0.7) ? dim : 24;
  const std::vector<CacheKind> kinds = {
      {"contiguous"}, {"paged", 1}, {"paged", 7}, {"paged", 16}, {"window", 0, 20}};
  const CacheKind& kind = kinds[static_cast<std::size_t>(random.below(5))];
  KvCache cache = make_cache(context, kind,
                             {.batch = 2,
                              .num_kv_heads = heads,
                              .head_dim = dim,
                              .value_dim = value_dim,
                              .format = stored});
  for (int step = 0; step < 3; ++step) {
    const std::int64_t count = step == 1 ? 1 : 1 + random.below(60);
    const std::vector<std::int64_t> lengths = {count, random.below(count + 1)};
    cache.append(context, random_like(random, query, {2, count, heads, dim}),
                 random_like(random, query, {2, count, heads, value_dim}), lengths);
    if (step == 1 && chance(random, 0.5)) cache = cache.fork(context);
    if (step == 1 && chance(random, 0.3)) cache.reorder(context, std::vector<std::int64_t>{1, 0});
    const std::int64_t queries = pick(random, {1, 2, 5});
    const Tensor q = random_like(random, query, {2, queries, heads * group, dim});
    Tensor out(query, {2, queries, heads * group, value_dim});
    Tensor lse(query == DType::kF64 ? DType::kF64 : DType::kF32, {2, heads * group, queries});
    AttentionOptions options{.causal = true};
    if (kind.name == "window") options.window_left = 20;
    attention(context, q, cache.view(), options, out, lse);
    hashes.add("out", out.view());
    hashes.add("lse", lse.view());
  }
  double sum = 0;
  for (const double number : content_of(cache, 0)) sum = sum * 0.999 + number;
  hashes.add("content", sum);
}

void run_small_operations(const Context& context, Random& random, BitHashes& hashes) {
  run_rope(context, random, hashes);
  run_merge(context, random, hashes);
  run_weights(context, random, hashes);
  run_heads_and_copies(context, random, hashes);
}

void run_optimisers(const Context& context, Random& random, BitHashes& hashes) {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 2; ++i) {
    const DType dtype = pick_float(random);
    Parameter parameter = Parameter::zeros("w", dtype, {1 + random.below(90), 17});
    fill_normal(context, parameter.value, 0, 1, random.next_u64());
    fill_normal(context, parameter.gradient, 0, 0.3, random.next_u64());
    parameters.push_back(std::move(parameter));
  }
  const std::vector<Parameter*> pointers = {&parameters[0], &parameters[1]};
  hashes.add("norm", clip_gradients(context, pointers, 0.5));
  Sgd plain(context, pointers, {.learning_rate = 0.1, .weight_decay = 0.1});
  Sgd heavy(context, pointers, {.learning_rate = 0.05, .momentum = 0.9});
  AdamW adam(context, pointers, {.learning_rate = 0.02});
  for (int step = 0; step < 3; ++step) {
    plain.step(context);
    heavy.step(context);
    adam.step(context);
  }
  for (const Parameter& parameter : parameters) {
    hashes.add("value", parameter.value.view());
    hashes.add("gradient", parameter.gradient.view());
  }
}

}  // namespace ladon::test
