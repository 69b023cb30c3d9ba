#include "cases.h"

#include <array>
#include <cstdio>

#include "attention_workload.h"
#include "cached_layer.h"
#include "ladon/multi_head_attention.h"

namespace ladon::bench {
namespace {

constexpr std::array<Target, 20> kBestTargets{{
    {"f32 forward B1 H8 S2048 D128 full", 0.85, Limit::kFma, 1.3},
    {"f32 forward B1 H8 S2048 D128 causal", 0.75, Limit::kFma, 1.5},
    {"bf16 forward B1 H8 S2048 D128 full", 0.55, Limit::kAmx, 2.5},
    {"bf16 forward B1 H8 S2048 D128 causal", 0.45, Limit::kAmx, 2.5},
    {"bf16 forward B1 H8 S2048 D64 full", 0.35, Limit::kAmx, 2.5},
    {"f32 backward B1 H8 S2048 D128 full", 0.70, Limit::kFma, 1.4},
    {"bf16 backward B1 H8 S2048 D128 full", 0.40, Limit::kAmx, 3},
    {"bf16 decode B1 H32/32 S32768 D128", 0.85, Limit::kMemory, 1},
    {"bf16 decode B1 H32/8 S32768 D128", 0.85, Limit::kMemory, 2.5},
    {"bf16 decode B1 H32/1 S32768 D128", 0.75, Limit::kMemory, 10},
    {"bf16 MLA decode B1 H128 S8192 latent 512+64", 0.45, Limit::kAmx, 0},
    {"bf16 MLA decode B1 H16 S8192 latent 512+64", 0.75, Limit::kMemory, 0},
    {"f32 forward B8 H12 S128 D64 full", 0, Limit::kFma, 1.3},
    {"bf16 layer Llama-3-8B, prefill S1024", 0.60, Limit::kAmx, 0},
    {"bf16 layer Llama-3-8B, token at S8192", 0.80, Limit::kMemory, 0},
    {"bf16 layer Llama-3-8B with q/k norm, token at S8192", 0.60, Limit::kMemory, 0},
    {"bf16 append S32768 H8 D128, paged bf16", 0.60, Limit::kMemory, 0},
    {"bf16 append S32768 H8 D128, paged i8", 0.60, Limit::kMemory, 0},
    {"bf16 gather S32768 H8 D128, paged bf16", 0.60, Limit::kMemory, 0},
    {"bf16 AdamW step, 40M weights", 0.60, Limit::kMemory, 0},
}};

/// Of AVX2's kernels where the machine has faster ones.
constexpr Target kAvx2Target{"f32 forward B1 H8 S2048 D128 full", 0.75, Limit::kFma, 0};

Limit compute_limit(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 ? Limit::kAmx : Limit::kFma;
}

/// The cases of one instruction set, as they are added.
class CaseList {
 public:
  CaseList(std::vector<Case>& cases, Isa isa, Isa fastest_here)
      : cases_(cases), isa_(isa), fastest_here_(fastest_here) {}

  template <class Work>
  void add(const Work& work) {
    finish(case_of(isa_, work));
  }

 private:
  void finish(Case one) {
    const std::string name = one.name();
    if (isa_ == fastest_here_) {
      for (const Target& target : kBestTargets) {
        if (target.name == name) one.target = target;
      }
    } else if (isa_ == Isa::kAvx2 && name == kAvx2Target.name) {
      one.target = kAvx2Target;
    }
    if (one.target) one.limit = one.target->limit;
    cases_.push_back(one);
  }

  std::vector<Case>& cases_;
  Isa isa_;
  Isa fastest_here_;
};

/// On every instruction set.
void add_compute(CaseList& list) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const std::int64_t head_dim : {128, 64}) {
      for (const bool causal : {false, true}) {
        list.add(Shape{.pass = pass, .head_dim = head_dim, .causal = causal});
      }
    }
  }
  list.add(Shape{.dtype = DType::kBF16});
  list.add(Shape{.dtype = DType::kF64});
}

/// On the fastest alone, as all that follows.
void add_more_compute(CaseList& list) {
  list.add(Shape{.dtype = DType::kBF16, .causal = true});
  list.add(Shape{.dtype = DType::kBF16, .head_dim = 64});
  list.add(Shape{.pass = Pass::kBackward, .dtype = DType::kBF16});
  list.add(Shape{.pass = Pass::kBackward, .dtype = DType::kBF16, .causal = true});
  list.add(Shape{.batch = 8,
                 .query_len = 128,
                 .kv_len = 128,
                 .num_heads = 12,
                 .num_kv_heads = 12,
                 .head_dim = 64});
}

void add_decode(CaseList& list) {
  Shape shape{.query_len = 1, .kv_len = 32768, .num_heads = 32};
  shape.dtype = DType::kBF16;
  for (const std::int64_t num_kv_heads : {32, 8, 1}) {
    shape.num_kv_heads = num_kv_heads;
    list.add(shape);
  }
  // The same keys as int8: half the bytes.
  shape.num_kv_heads = 8;
  shape.source = Source::kPaged;
  shape.storage = DType::kI8;
  list.add(shape);
  shape.kv_len = 8192;
  const auto add = [&](DType dtype, Source source, DType storage, std::int64_t batch) {
    shape.dtype = dtype;
    shape.source = source;
    shape.storage = storage;
    shape.batch = batch;
    list.add(shape);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    add(dtype, Source::kTensors, dtype, 1);
    add(dtype, Source::kContiguous, dtype, 1);
    add(dtype, Source::kPaged, dtype, 1);
    add(dtype, Source::kPaged, DType::kI8, 1);
    add(dtype, Source::kPaged, DType::kF8E4M3, 1);
  }
  // The same work twice: a batch whose sequences have their own pages, and one that shares them.
  add(DType::kF32, Source::kPaged, DType::kBF16, 8);
  add(DType::kF32, Source::kSharedPrefix, DType::kBF16, 8);
}

/// DeepSeek's latents. Attention over the cache alone: what a layer does before and after it
/// (projections, absorbing W_uk and W_uv) is not part of the case.
void add_latent(CaseList& list) {
  for (const std::int64_t num_heads : {128, 16}) {
    list.add(Shape{.dtype = DType::kBF16,
                   .source = Source::kLatent,
                   .storage = DType::kBF16,
                   .query_len = 1,
                   .kv_len = 8192,
                   .num_heads = num_heads,
                   .num_kv_heads = 1,
                   .head_dim = 576,
                   .value_dim = 512});
  }
}

void add_layers(CaseList& list) {
  list.add(LayerShape{.prefill = true, .tokens = 1024});
  list.add(LayerShape{.prefill = false, .tokens = 8192});
  list.add(LayerShape{.prefill = false, .tokens = 8192, .qk_norm = true});
}

class LayerWorkload final : public Workload {
 public:
  LayerWorkload(const Context& context, const LayerShape& shape)
      : shape_(shape),
        layer_(context, make_layer(shape),
               {.batch = 1,
                .prompt = shape.prefill ? shape.tokens : 0,
                .context = shape.prefill ? 0 : shape.tokens}) {}

  std::string check(const Context& context) override {
    if (!shape_.prefill) layer_.fill_cache(context);
    const double error =
        shape_.prefill ? layer_.prompt_error(context) : layer_.token_error(context);
    const double allowed = layer_tolerance(DType::kBF16);
    if (error <= allowed) return {};
    std::array<char, 160> text{};
    std::snprintf(text.data(), text.size(), "out is wrong by %.2e of its largest; allowed are %.2e",
                  error, allowed);
    return text.data();
  }

  void run(const Context& context) override {
    if (shape_.prefill) {
      layer_.run_prompt(context);
    } else {
      layer_.run_token(context);
    }
  }

  double flops() const override {
    return shape_.prefill ? layer_.prompt_flops() : layer_.token_flops();
  }
  double bytes() const override { return layer_.token_bytes(); }

 private:
  static std::unique_ptr<AttentionLayer> make_layer(const LayerShape& shape) {
    auto layer =
        std::make_unique<MultiHeadAttention>(MultiHeadAttentionOptions{.embed_dim = 4096,
                                                                       .num_heads = 32,
                                                                       .num_kv_heads = 8,
                                                                       .head_dim = 128,
                                                                       .causal = true,
                                                                       .rope = RopeOptions{},
                                                                       .qk_norm = shape.qk_norm,
                                                                       .dtype = DType::kBF16},
                                             /*seed=*/1);
    layer->eval();
    return layer;
  }

  LayerShape shape_;
  CachedLayer layer_;
};

}  // namespace

std::string LayerShape::name() const {
  return std::string("bf16 layer Llama-3-8B") + (qk_norm ? " with q/k norm" : "") +
         (prefill ? ", prefill S" : ", token at S") + std::to_string(tokens);
}

std::span<const Target> best_targets() { return kBestTargets; }

std::string Case::name() const {
  return std::visit([](const auto& shape) { return shape.name(); }, work);
}

DType Case::dtype() const {
  const auto* shape = std::get_if<Shape>(&work);
  return shape == nullptr ? DType::kBF16 : shape->dtype;
}

const Shape* Case::peer_shape() const {
  const auto* shape = std::get_if<Shape>(&work);
  const bool is_known =
      shape != nullptr && shape->source == Source::kTensors && shape->rule == Rule::kNone;
  return is_known ? shape : nullptr;
}

Case case_of(Isa isa, const Shape& shape) {
  Case one;
  one.isa = isa;
  one.work = shape;
  one.limit = shape.query_len == 1 ? Limit::kRead : compute_limit(shape.dtype);
  return one;
}

Case case_of(Isa isa, const LayerShape& shape) {
  Case one;
  one.isa = isa;
  one.work = shape;
  one.limit = shape.prefill ? Limit::kAmx : Limit::kRead;
  return one;
}

Case case_of(Isa isa, const MemoryShape& shape) {
  Case one;
  one.isa = isa;
  one.work = shape;
  one.limit = Limit::kMemory;
  return one;
}

std::vector<Case> list_cases(std::span<const Isa> isas, Isa fastest_here) {
  std::vector<Case> cases;
  for (const Isa isa : isas) {
    CaseList list(cases, isa, fastest_here);
    add_compute(list);
  }
  CaseList list(cases, isas.back(), fastest_here);
  add_more_compute(list);
  add_decode(list);
  add_latent(list);
  add_layers(list);
  for (const MemoryShape& shape : memory_shapes()) list.add(shape);
  for (Case& one : cases) one.fastest = one.isa == isas.back();
  return cases;
}

std::unique_ptr<Workload> make_workload(const Context& context, const Case& one) {
  if (const auto* shape = std::get_if<Shape>(&one.work)) {
    return std::make_unique<AttentionWorkload>(context, *shape);
  }
  if (const auto* shape = std::get_if<MemoryShape>(&one.work)) {
    return make_memory_workload(context, *shape);
  }
  return std::make_unique<LayerWorkload>(context, std::get<LayerShape>(one.work));
}

}  // namespace ladon::bench
