#include "gpu_cases.h"

namespace ladon::bench {
namespace {

// For case_of(): a device's kernels have no instruction set.
constexpr Isa kNoIsa = Isa::kReference;

Shape attention_shape(std::int64_t batch, std::int64_t num_heads, std::int64_t length) {
  return {.dtype = DType::kBF16,
          .batch = batch,
          .query_len = length,
          .kv_len = length,
          .num_heads = num_heads,
          .num_kv_heads = num_heads,
          .causal = true};
}

std::vector<Shape> compute_shapes() {
  std::vector<Shape> shapes;
  for (const std::int64_t head_dim : {128, 64}) {
    for (const bool causal : {true, false}) {
      Shape shape = attention_shape(4, 16, 4096);
      shape.head_dim = head_dim;
      shape.causal = causal;
      shapes.push_back(shape);
    }
  }
  shapes.push_back(attention_shape(16, 16, 1024));
  shapes.push_back(attention_shape(1, 16, 16384));
  Shape grouped = attention_shape(2, 32, 8192);
  grouped.num_kv_heads = 8;
  shapes.push_back(grouped);
  Shape narrow = attention_shape(1, 32, 16384);
  narrow.head_dim = 64;
  shapes.push_back(narrow);
  Shape wide = attention_shape(1, 8, 16384);
  wide.head_dim = 256;
  shapes.push_back(wide);
  Shape expanded = attention_shape(1, 128, 4096);  // MLA's, in prefill and training
  expanded.head_dim = 192;
  expanded.value_dim = 128;
  shapes.push_back(expanded);
  Shape half = attention_shape(4, 16, 4096);
  half.dtype = DType::kF16;
  shapes.push_back(half);
  Shape single = attention_shape(2, 16, 2048);
  single.dtype = DType::kF32;
  shapes.push_back(single);
  return shapes;
}

/// What each rule costs.
std::vector<Shape> rule_shapes() {
  std::vector<Shape> shapes;
  for (const Rule rule : {Rule::kSoftcap, Rule::kAlibi, Rule::kMask, Rule::kBias, Rule::kDropout}) {
    Shape shape = attention_shape(4, 16, 4096);
    shape.causal = rule == Rule::kSoftcap || rule == Rule::kAlibi;
    shape.rule = rule;
    shapes.push_back(shape);
  }
  return shapes;
}

std::vector<Shape> decode_shapes() {
  std::vector<Shape> shapes;
  Shape shape{.dtype = DType::kBF16, .query_len = 1, .num_heads = 64, .num_kv_heads = 8};
  const auto add = [&](std::int64_t batch, std::int64_t kv_len, Source source, DType storage) {
    shape.batch = batch;
    shape.kv_len = kv_len;
    shape.source = source;
    shape.storage = storage;
    shapes.push_back(shape);
  };
  add(64, 8192, Source::kTensors, DType::kBF16);
  add(64, 8192, Source::kContiguous, DType::kBF16);
  add(64, 8192, Source::kPaged, DType::kBF16);
  add(64, 8192, Source::kPaged, DType::kI8);
  add(64, 8192, Source::kPaged, DType::kF8E4M3);
  add(64, 8192, Source::kSharedPrefix, DType::kBF16);
  add(1, 32768, Source::kTensors, DType::kBF16);
  shape.num_heads = shape.num_kv_heads = 32;
  add(8, 8192, Source::kTensors, DType::kBF16);
  shape.num_kv_heads = 1;
  add(32, 8192, Source::kTensors, DType::kBF16);
  for (const std::int64_t batch : {32, 1}) {
    shapes.push_back({.dtype = DType::kBF16,
                      .source = Source::kLatent,
                      .storage = DType::kBF16,
                      .batch = batch,
                      .query_len = 1,
                      .kv_len = 8192,
                      .num_heads = 128,
                      .num_kv_heads = 1,
                      .head_dim = 576,
                      .value_dim = 512});
  }
  return shapes;
}

}  // namespace

std::vector<Case> list_gpu_cases(DeviceId device) {
  std::vector<Case> cases;
  const auto add = [&](const auto& work) { cases.push_back(case_of(kNoIsa, work)); };
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (Shape shape : compute_shapes()) {
      shape.pass = pass;
      add(shape);
    }
  }
  add(Shape{.dtype = DType::kF64, .causal = true});
  for (const Shape& shape : rule_shapes()) add(shape);
  for (const Shape& shape : decode_shapes()) add(shape);
  add(LayerShape{.prefill = true, .tokens = 4096});
  add(LayerShape{.prefill = false, .tokens = 8192});
  for (const MemoryShape& shape : memory_shapes()) add(shape);
  for (Case& one : cases) {
    one.device = device;
    one.fastest = true;
  }
  return cases;
}

}  // namespace ladon::bench
