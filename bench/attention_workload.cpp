#include "attention_workload.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <vector>

#include "compare_tensors.h"
#include "core/host_copy.h"
#include "host_cache.h"
#include "ladon/paged_kv_cache.h"
#include "ladon/random.h"
#include "random_inputs.h"

namespace ladon::bench {
namespace {

// Rows or keys per place that is checked.
constexpr std::int64_t kCheckedRows = 2;

Tensor random_tensor(const Context& context, DType dtype, const Dims& shape, std::uint64_t stream) {
  Tensor tensor = Tensor::uninitialized(context, dtype, shape);
  fill_with_normal(context, tensor, /*seed=*/42, stream);
  return tensor;
}

KvCacheOptions cache_options(const Shape& shape, std::int64_t batch) {
  return {.batch = batch,
          .num_kv_heads = shape.num_kv_heads,
          .head_dim = shape.head_dim,
          .value_dim = shape.values(),
          .values_in_keys = shape.source == Source::kLatent,
          .num_heads = shape.num_heads,
          .format = shape.storage};
}

/// The first `count` tokens of a stream of random ones, to every sequence of the cache.
void append_random(const Context& context, KvCache& cache, std::int64_t count,
                   std::uint64_t stream) {
  const KvCacheOptions& options = cache.options();
  // In pieces, so that no second copy of a large cache is ever there.
  constexpr std::int64_t kPiece = 256;
  for (std::int64_t done = 0; done < count; done += kPiece) {
    const std::int64_t tokens = std::min(kPiece, count - done);
    const auto piece = stream + 2 * static_cast<std::uint64_t>(done);
    const auto random = [&](std::int64_t width, std::uint64_t part) {
      return random_tensor(context, DType::kF32,
                           {options.batch, tokens, options.num_kv_heads, width}, piece + part);
    };
    const Tensor k = random(options.head_dim, 0);
    if (options.values_in_keys) {
      cache.append(context, k, {});
    } else {
      cache.append(context, k, random(options.value_dim, 1));
    }
  }
}

KvCache make_cache(const Context& context, const Shape& shape) {
  if (shape.source == Source::kContiguous || shape.source == Source::kLatent) {
    KvCache cache = KvCache::contiguous(context, cache_options(shape, shape.batch), shape.kv_len);
    append_random(context, cache, shape.kv_len, 100);
    return cache;
  }
  const std::int64_t pages = shape.stored_tokens() / kPageSize + 2 * shape.batch;
  const auto pool = std::make_shared<PagePool>(context, cache_options(shape, 1), kPageSize, pages);
  const bool shared = shape.source == Source::kSharedPrefix;
  KvCache cache = KvCache::paged(pool, shared ? 1 : shape.batch);
  append_random(context, cache, shape.kv_len - (shared ? kOwnTokens : 0), 100);
  if (shared) {
    cache.reorder(context, std::vector<std::int64_t>(static_cast<std::size_t>(shape.batch), 0));
    append_random(context, cache, kOwnTokens, 100000);
  }
  return cache;
}

Tensor slice_f64(const Tensor& tensor, int dim, std::int64_t begin, std::int64_t end) {
  if (!tensor.device().is_cpu()) return slice_f64(tensor.to_host(), dim, begin, end);
  return host_copy_of(tensor.view().slice(dim, begin, end), DType::kF64);
}

Tensor whole_f64(const Tensor& tensor) { return slice_f64(tensor, 0, 0, tensor.size(0)); }

/// An error may be `tolerance` of the largest expected magnitude.
std::string compare(const char* what, const Tensor& got, const Tensor& expected, double tolerance) {
  const double error = largest_error(got, expected);
  if (error <= tolerance) return {};
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), "%s is wrong by %.2e of its largest; allowed are %.2e",
                what, error, tolerance);
  return text.data();
}

}  // namespace

AttentionWorkload::AttentionWorkload(const Context& context, const Shape& shape) : shape_(shape) {
  const Dims q_shape{shape.batch, shape.query_len, shape.num_heads, shape.head_dim};
  const Dims out_shape{shape.batch, shape.query_len, shape.num_heads, shape.values()};
  const Dims k_shape{shape.batch, shape.kv_len, shape.num_kv_heads, shape.head_dim};
  const Dims v_shape{shape.batch, shape.kv_len, shape.num_kv_heads, shape.values()};
  const DType lse_dtype = shape.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  options_.causal = shape.causal;
  make_rule(context);
  q_ = random_tensor(context, shape.dtype, q_shape, 1);
  if (shape.source == Source::kTensors) {
    k_ = random_tensor(context, shape.dtype, k_shape, 2);
    v_ = random_tensor(context, shape.dtype, v_shape, 3);
  } else {
    cache_ = make_cache(context, shape);
  }
  out_ = Tensor(context, shape.dtype, out_shape);
  lse_ = Tensor(context, lse_dtype, {shape.batch, shape.num_heads, shape.query_len});
  if (shape.pass == Pass::kBackward) {
    dout_ = random_tensor(context, shape.dtype, out_shape, 4);
    dq_ = Tensor(context, shape.dtype, q_shape);
    dk_ = Tensor(context, shape.dtype, k_shape);
    dv_ = Tensor(context, shape.dtype, v_shape);
  }
}

void AttentionWorkload::make_rule(const Context& context) {
  switch (shape_.rule) {
    case Rule::kNone: break;
    case Rule::kSoftcap: options_.softcap = 30; break;
    case Rule::kAlibi:
      slopes_ = random_tensor(context, DType::kF32, {shape_.num_heads}, 5);
      options_.alibi_slopes = slopes_;
      break;
    case Rule::kMask: {
      mask_ = Tensor(DType::kBool, {1, 1, shape_.query_len, shape_.kv_len});
      Random random(42, 6);
      auto* const may_see = static_cast<unsigned char*>(mask_.data());
      for (std::int64_t i = 0; i < mask_.num_elements(); ++i) {
        may_see[i] = static_cast<unsigned char>(random.next_u64() & 1U);
      }
      mask_ = mask_.to(context);
      options_.mask = mask_;
      break;
    }
    case Rule::kBias:
      bias_ = random_tensor(context, shape_.dtype,
                            {1, shape_.num_heads, shape_.query_len, shape_.kv_len}, 7);
      options_.bias = bias_;
      break;
    case Rule::kDropout: options_.dropout = {.probability = 0.1, .seed = 8}; break;
  }
}

void AttentionWorkload::run(const Context& context) {
  if (cache_.has_value()) {
    attention(context, q_, cache_->view(), options_, out_, lse_);
  } else if (shape_.pass == Pass::kForward) {
    attention(context, q_, k_, v_, options_, out_, lse_);
  } else {
    attention_backward(context, q_, k_, v_, options_, {out_, lse_, dout_, {}},
                       {dq_, dk_, dv_, {}, {}});
  }
}

double AttentionWorkload::tolerance() const {
  // The result's own rounding, and that of sums in f32 or f64. Gradients are sums of differences;
  // kernels for 16-bit floats may round weights and their gradients to 16 bits on the way.
  const DType computed_in = shape_.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const bool forward = shape_.pass == Pass::kForward;
  return (forward ? 1 : 3) * epsilon_of(shape_.dtype) +
         (forward ? 64 : 256) * epsilon_of(computed_in);
}

// A few query rows alone: bottom-right alignment puts the last of them at the last key given, so a
// causal case is cut behind its last row's own key.
std::string AttentionWorkload::check_forward(const Context& context, const Context& reference,
                                             std::int64_t row) const {
  const std::int64_t end = std::min(row + kCheckedRows, shape_.query_len);
  const std::int64_t keys = shape_.causal ? end : shape_.kv_len;
  AttentionOptions options = options_;
  options.dropout.first_query = row;
  // The rule's tensors, on the host.
  const auto part = [&](const Tensor& tensor) {
    if (tensor.num_elements() == 0) return Tensor();
    return Tensor::copy_of(context, tensor.view().slice(2, row, end).slice(3, 0, keys)).to_host();
  };
  const Tensor slopes = slopes_.num_elements() == 0 ? Tensor() : slopes_.to_host();
  const Tensor mask = part(mask_);
  const Tensor bias = part(bias_);
  options.alibi_slopes = slopes;
  options.mask = mask;
  options.bias = bias;
  const Tensor expected = attention(reference, slice_f64(q_, 1, row, end),
                                    slice_f64(k_, 1, 0, keys), slice_f64(v_, 1, 0, keys), options);
  return compare("out", slice_f64(out_, 1, row, end), expected, tolerance());
}

std::string AttentionWorkload::check_cached(const Context& context,
                                            const Context& reference) const {
  const Tensor q = whole_f64(q_);
  Tensor expected(DType::kF64, out_.shape());
  attention(reference, q, HostCache(context, *cache_).view(), options_, expected);
  return compare("out", whole_f64(out_), expected, tolerance());
}

std::string AttentionWorkload::check_dq(const Context& reference, std::int64_t row) const {
  const std::int64_t end = std::min(row + kCheckedRows, shape_.query_len);
  const std::int64_t keys = shape_.causal ? end : shape_.kv_len;
  const Tensor q = slice_f64(q_, 1, row, end);
  const Tensor out = slice_f64(out_, 1, row, end);
  const Tensor lse = slice_f64(lse_, 2, row, end);
  const Tensor dout = slice_f64(dout_, 1, row, end);
  Tensor expected(DType::kF64, q.shape());
  attention_backward(reference, q, slice_f64(k_, 1, 0, keys), slice_f64(v_, 1, 0, keys), options_,
                     {out, lse, dout, {}}, {expected, {}, {}, {}, {}});
  return compare("dq", slice_f64(dq_, 1, row, end), expected, tolerance());
}

// A few keys alone: the saved lse stands for all the others. Both alignments that exist put a
// causal case's rows right: top-left for the first keys, bottom-right for the last.
std::string AttentionWorkload::check_dkv(const Context& reference, bool last_keys) const {
  const std::int64_t count = std::min(kCheckedRows, shape_.kv_len);
  const std::int64_t begin = last_keys ? shape_.kv_len - count : 0;
  AttentionOptions options = options_;
  options.alignment = last_keys ? Alignment::kBottomRight : Alignment::kTopLeft;
  const Tensor k = slice_f64(k_, 1, begin, begin + count);
  const Tensor out = whole_f64(out_);
  const Tensor lse = whole_f64(lse_);
  const Tensor dout = whole_f64(dout_);
  Tensor dk(DType::kF64, k.shape());
  const Tensor v = slice_f64(v_, 1, begin, begin + count);
  Tensor dv(DType::kF64, v.shape());
  attention_backward(reference, whole_f64(q_), k, v, options, {out, lse, dout, {}},
                     {{}, dk, dv, {}, {}});
  std::string fault = compare("dk", slice_f64(dk_, 1, begin, begin + count), dk, tolerance());
  if (!fault.empty()) return fault;
  return compare("dv", slice_f64(dv_, 1, begin, begin + count), dv, tolerance());
}

std::string AttentionWorkload::check(const Context& context) {
  const Context reference = reference_for(context);
  if (shape_.pass == Pass::kBackward) attention(context, q_, k_, v_, options_, out_, lse_);
  run(context);
  if (cache_.has_value()) return check_cached(context, reference);
  std::int64_t before = -1;
  for (const std::int64_t row : {std::int64_t{0}, shape_.query_len / 2,
                                 std::max<std::int64_t>(shape_.query_len - kCheckedRows, 0)}) {
    if (row <= before) continue;  // all of them are one where there are few rows
    before = row;
    std::string fault = shape_.pass == Pass::kForward ? check_forward(context, reference, row)
                                                      : check_dq(reference, row);
    if (!fault.empty()) return fault;
  }
  if (shape_.pass == Pass::kForward) return {};
  std::string fault = check_dkv(reference, false);
  return fault.empty() ? check_dkv(reference, true) : fault;
}

}  // namespace ladon::bench
