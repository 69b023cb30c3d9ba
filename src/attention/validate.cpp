#include "attention/validate.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include "core/compute_dtype.h"
#include "core/fail.h"

namespace ladon {
namespace {

void check_offsets(const Operation& operation, std::string_view argument,
                   std::span<const std::int64_t> offsets, std::int64_t total) {
  if (offsets.front() != 0) {
    fail(operation, argument,
         "got a first offset of " + std::to_string(offsets.front()) + ", expected 0");
  }
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      fail(operation, argument,
           "got " + std::to_string(offsets[i]) + " after " + std::to_string(offsets[i - 1]) +
               " at index " + std::to_string(i) + ", expected offsets that do not fall");
    }
  }
  if (offsets.back() != total) {
    fail(operation, argument,
         "got a last offset of " + std::to_string(offsets.back()) + ", expected the total of " +
             std::to_string(total) + " tokens");
  }
}

void check_packed_batch(const Operation& operation, const ConstTensorView& q) {
  if (q.size(0) == 1) return;
  fail(operation, "q",
       "got a batch of " + std::to_string(q.size(0)) + ", expected 1 in a packed batch");
}

std::int64_t longest_of(std::span<const std::int64_t> offsets) {
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    longest = std::max(longest, offsets[i] - offsets[i - 1]);
  }
  return longest;
}

void check_lengths(const Operation& operation, const AttentionOptions& options,
                   const ConstTensorView& q, const ConstTensorView& k) {
  if (!options.kv_lengths.empty()) {
    if (!options.query_offsets.empty() || !options.kv_offsets.empty()) {
      fail(operation, "kv_lengths",
           "got both kv_lengths and offsets, expected a padded or a packed batch, not both");
    }
    check_kv_lengths(operation, options.kv_lengths, q.size(0), k.size(1));
  }
  if (options.query_offsets.empty() && options.kv_offsets.empty()) return;
  if (options.query_offsets.empty() || options.kv_offsets.empty()) {
    fail(operation, options.query_offsets.empty() ? "query_offsets" : "kv_offsets",
         "got none, expected offsets for both queries and keys of a packed batch");
  }
  if (options.query_offsets.size() != options.kv_offsets.size()) {
    fail(operation, "kv_offsets",
         "got " + std::to_string(options.kv_offsets.size()) + " offsets, expected " +
             std::to_string(options.query_offsets.size()) + " as in query_offsets");
  }
  check_packed_batch(operation, q);
  check_offsets(operation, "query_offsets", options.query_offsets, q.size(1));
  check_offsets(operation, "kv_offsets", options.kv_offsets, k.size(1));
}

/// The slots of every sequence must be within the cache.
void check_cache_sequence(const Operation& operation, const KvCacheView& cache, std::size_t index) {
  const KvSequenceView& sequence = cache.sequences[index];
  const auto refuse = [&](const std::string& what) {
    fail(operation, "cache", "sequence " + std::to_string(index) + ": " + what);
  };
  const std::int64_t length = sequence.length;
  if (length < 0 || length >= kMaxLength) {
    refuse("got a length of " + std::to_string(length) + ", expected 0 to 2^56");
  }
  if (sequence.key_origin < 0 || sequence.key_origin >= kMaxLength) {
    refuse("got a key_origin of " + std::to_string(sequence.key_origin) + ", expected 0 to 2^56");
  }
  if (cache.page_size != 0) {
    const std::int64_t num_pages = cache.num_slots / cache.page_size;
    if (length > 0 && sequence.pages == nullptr) refuse("got no pages, expected a page table");
    for (std::int64_t i = 0; i * cache.page_size < length; ++i) {
      if (sequence.pages[i] < 0 || sequence.pages[i] >= num_pages) {
        refuse("got page " + std::to_string(sequence.pages[i]) + " at index " + std::to_string(i) +
               ", expected 0 to " + std::to_string(num_pages - 1));
      }
    }
    return;
  }
  const std::int64_t slots = cache.ring_slots != 0 ? cache.ring_slots : length;
  if (length > slots || sequence.first_slot < 0 || slots > cache.num_slots ||
      sequence.first_slot > cache.num_slots - slots) {
    refuse("got " + std::to_string(length) + " keys from slot " +
           std::to_string(sequence.first_slot) + " on, expected them within " +
           (cache.ring_slots != 0 ? "a ring of " + std::to_string(slots) + " of " : "") +
           std::to_string(cache.num_slots) + " slots");
  }
  if (sequence.ring_start < 0 || sequence.ring_start >= std::max<std::int64_t>(slots, 1)) {
    refuse("got a ring_start of " + std::to_string(sequence.ring_start) +
           ", expected a slot of the ring");
  }
}

/// Scales are read from the first element on, so their strides may not be negative.
void check_scales(const Operation& operation, std::string_view name, const KvCacheView& cache,
                  const float* scales) {
  if (cache.scale_slot_stride < 0 || cache.scale_head_stride < 0) {
    fail(operation, name,
         "got strides of " + std::to_string(cache.scale_slot_stride) + " and " +
             std::to_string(cache.scale_head_stride) + ", expected none below 0");
  }
  const ConstTensorView view(scales, DType::kF32, {cache.num_slots, cache.num_kv_heads},
                             {cache.scale_slot_stride, cache.scale_head_stride}, cache.device);
  check_strided_view(operation, {name, view}, 2);
}

/// The view itself: it is plain data, which anyone can fill in.
void check_cache_layout(const Operation& operation, const KvCacheView& cache, DType q_dtype) {
  const auto& [dtype, scaled] = cache.format;
  if (scaled != needs_scale(dtype) || (!scaled && !is_float(dtype))) {
    fail(operation, "cache",
         std::string("got dtype ") + name_of(dtype) + (scaled ? " that is scaled" : "") +
             ", expected a float dtype, i8 or f8e4m3");
  }
  if (dtype == DType::kF64 && q_dtype != DType::kF64) {
    fail(operation, "cache",
         std::string("got dtype f64, expected a narrower one for queries of ") + name_of(q_dtype));
  }
  const bool has_scales = cache.k_scales != nullptr && cache.v_scales != nullptr;
  const bool has_some = cache.k_scales != nullptr || cache.v_scales != nullptr;
  if (scaled ? !has_scales && cache.num_slots > 0 : has_some) {
    fail(operation, "cache",
         std::string("got dtype ") + name_of(dtype) + (scaled ? " without" : " with") +
             " scales, expected scales with i8 and f8e4m3 only");
  }
  if (cache.value_dim < 1) {
    fail(operation, "cache",
         "got a value_dim of " + std::to_string(cache.value_dim) + ", expected 1 or more");
  }
  if (cache.page_size < 0 || cache.ring_slots < 0 ||
      (cache.page_size != 0 && cache.ring_slots != 0)) {
    fail(operation, "cache",
         "got a page_size of " + std::to_string(cache.page_size) + " and " +
             std::to_string(cache.ring_slots) + " ring_slots, expected one of them, or none");
  }
  // Their construction counts the bytes; what cannot be counted is refused there.
  check_view(operation, {"cache.k", cache_keys(cache)}, 3);
  check_view(operation, {"cache.v", cache_values(cache)}, 3);
  if (scaled && cache.num_slots > 0) {
    check_scales(operation, "cache.k_scales", cache, cache.k_scales);
    check_scales(operation, "cache.v_scales", cache, cache.v_scales);
  }
  for (std::size_t i = 0; i < cache.sequences.size(); ++i) {
    check_cache_sequence(operation, cache, i);
  }
}

}  // namespace

ConstTensorView cache_keys(const KvCacheView& cache) {
  return {cache.k,
          cache.format.dtype,
          {cache.num_slots, cache.num_kv_heads, cache.head_dim},
          {cache.k_slot_stride, cache.k_head_stride, 1},
          cache.device};
}

ConstTensorView cache_values(const KvCacheView& cache) {
  return {cache.v,
          cache.format.dtype,
          {cache.num_slots, cache.num_kv_heads, cache.value_dim},
          {cache.v_slot_stride, cache.v_head_stride, 1},
          cache.device};
}

AttentionSizes sizes_of_inputs(const ConstTensorView& q, const ConstTensorView& k,
                               const ConstTensorView& v, const AttentionOptions& options) {
  AttentionSizes sizes{.batch = q.size(0),
                       .num_sequences = q.size(0),
                       .query_len = q.size(1),
                       .kv_len = k.size(1),
                       .max_query_len = q.size(1),
                       .max_kv_len = k.size(1),
                       .num_heads = q.size(2),
                       .num_kv_heads = k.size(2),
                       .head_dim = q.size(3),
                       .value_dim = v.absent() ? 0 : v.size(3)};
  if (options.query_offsets.empty()) return sizes;
  sizes.packed = true;
  sizes.num_sequences = static_cast<std::int64_t>(options.query_offsets.size()) - 1;
  sizes.max_query_len = longest_of(options.query_offsets);
  sizes.max_kv_len = longest_of(options.kv_offsets);
  return sizes;
}

AttentionSizes sizes_of_cache_inputs(const ConstTensorView& q, const KvCacheView& cache,
                                     const AttentionOptions& options) {
  AttentionSizes sizes{.batch = q.size(0),
                       .num_sequences = q.size(0),
                       .query_len = q.size(1),
                       .max_query_len = q.size(1),
                       .num_heads = q.size(2),
                       .num_kv_heads = cache.num_kv_heads,
                       .head_dim = q.size(3),
                       .value_dim = cache.value_dim};
  for (const KvSequenceView& sequence : cache.sequences) {
    sizes.max_kv_len = std::max(sizes.max_kv_len, sequence.length);
  }
  sizes.kv_len = sizes.max_kv_len;
  if (options.query_offsets.empty()) return sizes;
  sizes.packed = true;
  sizes.num_sequences = static_cast<std::int64_t>(options.query_offsets.size()) - 1;
  sizes.max_query_len = longest_of(options.query_offsets);
  return sizes;
}

AttentionSizes check_inputs(const Operation& operation, const ConstTensorView& q,
                            const ConstTensorView& k, const ConstTensorView& v,
                            const AttentionOptions& options) {
  check_view(operation, {"q", q}, 4);
  check_view(operation, {"k", k}, 4);
  check_float(operation, {"q", q});
  check_float(operation, {"k", k});
  const std::int64_t num_heads = q.size(2);
  const std::int64_t num_kv_heads = k.size(2);
  for (const NamedView& argument : {NamedView{"q", q}, NamedView{"k", k}}) {
    // Only views that repeat their elements get this far; positions must stay countable.
    if (argument.view.size(1) >= kMaxLength) {
      fail(operation, argument.name, got_shape(argument.view) + ", expected a length below 2^56");
    }
  }
  if (q.size(3) == 0) fail(operation, "q", got_shape(q) + ", expected a head_dim of 1 or more");
  if (num_heads == 0) fail(operation, "q", got_shape(q) + ", expected 1 head or more");
  if (num_kv_heads == 0) fail(operation, "k", got_shape(k) + ", expected 1 head or more");
  if (num_heads % num_kv_heads != 0) {
    fail(operation, "k",
         "got " + std::to_string(num_kv_heads) + " KV heads, expected a divisor of q's " +
             std::to_string(num_heads) + " heads");
  }
  check_shape(operation, {"k", k}, {q.size(0), k.size(1), num_kv_heads, q.size(3)});
  if (k.dtype() != q.dtype() && size_of(k.dtype()) >= size_of(q.dtype())) {
    fail(operation, "k",
         std::string("got dtype ") + name_of(k.dtype()) + ", expected q's " + name_of(q.dtype()) +
             " or a narrower one");
  }
  if (!v.absent()) {
    check_view(operation, {"v", v}, 4);
    check_dtype(operation, {"v", v}, k.dtype());
    if (v.size(3) == 0) fail(operation, "v", got_shape(v) + ", expected a value_dim of 1 or more");
    check_shape(operation, {"v", v}, {q.size(0), k.size(1), num_kv_heads, v.size(3)});
  }
  check_lengths(operation, options, q, k);
  const AttentionSizes sizes = sizes_of_inputs(q, k, v, options);
  check_options(operation, options, sizes);
  return sizes;
}

AttentionSizes check_cache_inputs(const Operation& operation, const ConstTensorView& q,
                                  const KvCacheView& cache, const AttentionOptions& options) {
  check_view(operation, {"q", q}, 4);
  check_float(operation, {"q", q});
  if (q.size(1) >= kMaxLength) {
    fail(operation, "q", got_shape(q) + ", expected a length below 2^56");
  }
  if (cache.num_kv_heads < 1 || q.size(2) == 0 || q.size(2) % cache.num_kv_heads != 0) {
    fail(operation, "cache",
         "got " + std::to_string(cache.num_kv_heads) + " KV heads, expected a divisor of q's " +
             std::to_string(q.size(2)) + " heads");
  }
  if (cache.head_dim < 1 || cache.head_dim != q.size(3)) {
    fail(operation, "cache",
         "got a head_dim of " + std::to_string(cache.head_dim) + ", expected q's " +
             std::to_string(q.size(3)));
  }
  check_cache_layout(operation, cache, q.dtype());
  if (!options.kv_lengths.empty() || !options.kv_offsets.empty()) {
    fail(operation, options.kv_lengths.empty() ? "kv_offsets" : "kv_lengths",
         "got some together with a cache, expected none because a cache has its own");
  }
  if (options.alignment != Alignment::kBottomRight) {
    fail(operation, "alignment",
         "got another together with a cache, expected kBottomRight: its newest tokens are the "
         "queries");
  }
  if (!options.query_offsets.empty()) {
    check_packed_batch(operation, q);
    check_offsets(operation, "query_offsets", options.query_offsets, q.size(1));
  }
  const AttentionSizes sizes = sizes_of_cache_inputs(q, cache, options);
  if (static_cast<std::int64_t>(cache.sequences.size()) != sizes.num_sequences) {
    fail(operation, "cache",
         "got " + std::to_string(cache.sequences.size()) + " sequences, expected q's " +
             std::to_string(sizes.num_sequences));
  }
  check_options(operation, options, sizes);
  return sizes;
}

void check_kv_lengths(const Operation& operation, std::span<const std::int64_t> kv_lengths,
                      std::int64_t batch, std::int64_t kv_len) {
  if (kv_lengths.empty()) return;
  if (static_cast<std::int64_t>(kv_lengths.size()) != batch) {
    fail(operation, "kv_lengths",
         "got " + std::to_string(kv_lengths.size()) +
             " lengths, expected batch = " + std::to_string(batch));
  }
  for (std::size_t b = 0; b < kv_lengths.size(); ++b) {
    if (kv_lengths[b] >= 0 && kv_lengths[b] <= kv_len) continue;
    fail(operation, "kv_lengths",
         "got " + std::to_string(kv_lengths[b]) + " at index " + std::to_string(b) +
             ", expected 0 to kv_len = " + std::to_string(kv_len));
  }
}

void check_result(const Operation& operation, const NamedView& argument, DType dtype,
                  const Dims& shape) {
  const bool is_partial =
      size_of(dtype) == 2 && !argument.view.absent() && argument.view.dtype() == DType::kF32;
  check_tensor(operation, argument, is_partial ? DType::kF32 : dtype, shape);
}

void check_lse(const Operation& operation, const NamedView& argument, const AttentionSizes& sizes,
               DType q_dtype) {
  check_strided_view(operation, argument, 3);
  if (argument.view.dtype() != DType::kF64) {
    check_dtype(operation, argument, compute_dtype(q_dtype));
  }
  check_shape(operation, argument, {sizes.batch, sizes.num_heads, sizes.query_len});
}

void check_side_gradient(const Operation& operation, const NamedView& gradient,
                         const NamedView& input) {
  if (gradient.view.absent()) return;
  if (input.view.absent()) {
    fail(operation, gradient.name,
         "got a tensor, expected none because options have no " + std::string(input.name));
  }
  check_strided_floats(operation, gradient, input.view.shape());
}

}  // namespace ladon
