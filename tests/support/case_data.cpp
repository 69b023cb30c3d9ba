#include "support/case_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/element.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

std::int64_t element_offset(const ConstTensorView& view, std::int64_t a, std::int64_t b,
                            std::int64_t c, std::int64_t d) {
  // A dimension of size 1 is broadcast.
  const auto step = [&](int dim, std::int64_t index) {
    return view.size(dim) == 1 ? 0 : index * view.stride(dim);
  };
  return step(0, a) + step(1, b) + step(2, c) + step(3, d);
}

double element(const ConstTensorView& view, std::int64_t a, std::int64_t b, std::int64_t c,
               std::int64_t d) {
  return load_element(view.data(), view.dtype(), element_offset(view, a, b, c, d));
}

Dims broadcast_shape(const Broadcast& broadcast, std::int64_t sequences, std::int64_t heads,
                     std::int64_t queries, std::int64_t keys) {
  Dims shape{sequences, heads, queries, keys};
  for (int dim = 0; dim < 4; ++dim) {
    if (!broadcast.full[static_cast<std::size_t>(dim)]) shape[dim] = 1;
  }
  return shape;
}

}  // namespace

PoisonedTensor::PoisonedTensor(DType dtype, const Dims& shape, Memory memory) {
  switch (memory) {
    case Memory::kDense:
      storage_ = Tensor(dtype, {shape[0] + 1, shape[1], shape[2], shape[3]});
      view_ = storage_.view().slice(0, 0, shape[0]);
      break;
    case Memory::kHeadsFirst:
      storage_ = Tensor(dtype, {shape[0] + 1, shape[2], shape[1], shape[3]});
      view_ = storage_.view().slice(0, 0, shape[0]).transpose(1, 2);
      break;
    case Memory::kSliced:
      storage_ = Tensor(dtype, {shape[0] + 1, shape[1] + 3, shape[2] + 1, shape[3] + 5});
      view_ = storage_.view()
                  .slice(0, 1, shape[0] + 1)
                  .slice(1, 2, shape[1] + 2)
                  .slice(2, 1, shape[2] + 1)
                  .slice(3, 3, shape[3] + 3);
      break;
  }
  auto* bytes = static_cast<unsigned char*>(storage_.data());
  std::fill_n(bytes, static_cast<std::size_t>(storage_.num_elements()) * size_of(dtype), 0xFF);
}

void PoisonedTensor::guard() {
  const auto* bytes = static_cast<const unsigned char*>(storage_.data());
  saved_.assign(bytes,
                bytes + static_cast<std::size_t>(storage_.num_elements()) * size_of(view_.dtype()));
}

bool PoisonedTensor::guards_intact() const {
  // With the view's own elements made alike, all that is left must be as it was.
  Tensor now = Tensor::copy_of(host_context(), storage_);
  const auto offset = static_cast<const unsigned char*>(view_.data()) -
                      static_cast<const unsigned char*>(storage_.data());
  const TensorView inside(static_cast<unsigned char*>(now.data()) + offset, view_.dtype(),
                          view_.shape(), view_.strides());
  const ConstTensorView before(saved_.data() + offset, view_.dtype(), view_.shape(),
                               view_.strides());
  const std::size_t size = size_of(view_.dtype());
  for (std::int64_t a = 0; a < view_.size(0); ++a) {
    for (std::int64_t b = 0; b < view_.size(1); ++b) {
      for (std::int64_t c = 0; c < view_.size(2); ++c) {
        const auto start = static_cast<std::size_t>(a * view_.stride(0) + b * view_.stride(1) +
                                                    c * view_.stride(2));
        std::memcpy(static_cast<unsigned char*>(inside.data()) + start * size,
                    static_cast<const unsigned char*>(before.data()) + start * size,
                    static_cast<std::size_t>(view_.size(3)) * size);
      }
    }
  }
  return saved_.empty() || std::memcmp(now.data(), saved_.data(), saved_.size()) == 0;
}

CaseData::CaseData(const Case& problem) : problem_(problem) {
  Random random(problem.seed, 100);
  cut_sequences(random);
  const std::int64_t heads = problem.num_heads;
  const std::int64_t kv_heads = problem.num_kv_heads;
  q_ = PoisonedTensor(problem.dtype, {batch_, query_len_, heads, problem.head_dim}, problem.memory);
  k_ = PoisonedTensor(problem.kv_dtype, {batch_, kv_len_, kv_heads, problem.head_dim},
                      problem.memory);
  v_ = PoisonedTensor(problem.kv_dtype, {batch_, kv_len_, kv_heads, problem.value_dim},
                      problem.memory);
  dout_ = PoisonedTensor(problem.dtype, out_shape(), problem.memory);
  fill_normal(host_context(), q_.view(), 0, 1, problem.seed, 1);
  fill_normal(host_context(), k_.view(), 0, 1, problem.seed, 2);
  fill_normal(host_context(), v_.view(), 0, 1, problem.seed, 3);
  fill_normal(host_context(), dout_.view(), 0, 1, problem.seed, 4);
  if (problem.dlse) {
    dlse_ = Tensor(lse_dtype(), lse_shape());
    fill_normal(host_context(), dlse_, 0, 1, problem.seed, 5);
  }
  std::int64_t longest_query = 0;
  std::int64_t longest_kv = problem.lengths == Lengths::kPadded ? kv_len_ : 0;
  for (const SequencePart& part : sequences_) {
    longest_query = std::max(longest_query, part.query_len);
    longest_kv = std::max(longest_kv, part.kv_len);
  }
  if (problem.lengths != Lengths::kPacked) {  // an empty batch still has lengths
    longest_query = query_len_;
    longest_kv = kv_len_;
  }
  const auto sequences = static_cast<std::int64_t>(sequences_.size());
  if (problem.mask.present) {
    mask_ = Tensor(DType::kBool,
                   broadcast_shape(problem.mask, sequences, heads, longest_query, longest_kv));
    const double hidden = random.uniform(0, 0.9);
    auto* bytes = static_cast<unsigned char*>(mask_.data());
    for (std::int64_t i = 0; i < mask_.num_elements(); ++i) {
      bytes[i] = static_cast<unsigned char>(random.uniform() >= hidden);
    }
  }
  if (problem.bias.present) {
    bias_ = Tensor(problem.bias_dtype,
                   broadcast_shape(problem.bias, sequences, heads, longest_query, longest_kv));
    fill_normal(host_context(), bias_, 0, 1, problem.seed, 6);
    for (std::int64_t i = 0; i < bias_.num_elements(); ++i) {  // some of it masks
      if (random.uniform() < 0.1) {
        store_element(bias_.data(), problem.bias_dtype, i,
                      -std::numeric_limits<double>::infinity());
      }
    }
  }
  if (problem.alibi) {
    slopes_ = Tensor(DType::kF32, {heads});
    fill_uniform(host_context(), slopes_, 0, 0.5, problem.seed, 7);
  }
  if (problem.sinks) {
    sinks_ = Tensor(DType::kF32, {heads});
    fill_normal(host_context(), sinks_, 0, 2, problem.seed, 8);
  }
  poison_unseen_keys();
}

void CaseData::cut_sequences(Random& random) {
  const Case& problem = problem_;
  batch_ = problem.batch;
  query_len_ = problem.query_len;
  kv_len_ = problem.kv_len;
  for (std::int64_t s = 0; s < problem.batch; ++s) {
    SequencePart part{0, problem.query_len, 0, problem.kv_len};
    if (problem.lengths == Lengths::kPadded) {
      part.kv_len = random.below(problem.kv_len + 1);
      kv_lengths_.push_back(part.kv_len);
    } else if (problem.lengths == Lengths::kPacked) {
      // Sequences of different lengths, the last of them full.
      if (s + 1 < problem.batch) {
        part.query_len = random.below(problem.query_len + 1);
        part.kv_len = random.below(problem.kv_len + 1);
      }
    }
    sequences_.push_back(part);
  }
  if (problem.lengths != Lengths::kPacked) return;
  batch_ = 1;
  query_len_ = 0;
  kv_len_ = 0;
  query_offsets_.push_back(0);
  kv_offsets_.push_back(0);
  for (SequencePart& part : sequences_) {
    part.query_begin = query_len_;
    part.kv_begin = kv_len_;
    query_len_ += part.query_len;
    kv_len_ += part.kv_len;
    query_offsets_.push_back(query_len_);
    kv_offsets_.push_back(kv_len_);
  }
}

Dims CaseData::out_shape() const {
  return {batch_, query_len_, problem_.num_heads, problem_.value_dim};
}

Dims CaseData::lse_shape() const { return {batch_, problem_.num_heads, query_len_}; }

AttentionOptions CaseData::options() const {
  AttentionOptions options;
  options.scale = problem_.scale;
  options.causal = problem_.causal;
  options.alignment = problem_.alignment;
  options.position_offset = problem_.position_offset;
  options.window_left = problem_.window_left;
  options.window_right = problem_.window_right;
  options.mask = mask();
  options.bias = bias();
  options.kv_lengths = kv_lengths_;
  options.query_offsets = query_offsets_;
  options.kv_offsets = kv_offsets_;
  options.softcap = problem_.softcap;
  if (problem_.alibi) options.alibi_slopes = slopes_;
  if (problem_.sinks) options.sinks = sinks_;
  options.dropout = {.probability = problem_.dropout,
                     .seed = problem_.seed ^ 0x5eed,
                     .first_head = problem_.first_head,
                     .first_query = problem_.first_query,
                     .first_key = problem_.first_key};
  return options;
}

bool CaseData::visible(std::int64_t sequence, std::int64_t head, std::int64_t query,
                       std::int64_t key) const {
  const SequencePart& part = sequences_[static_cast<std::size_t>(sequence)];
  if (key >= part.kv_len) return false;
  const std::int64_t offset = problem_.position_offset.value_or(
      problem_.alignment == Alignment::kBottomRight ? part.kv_len - part.query_len : 0);
  const std::int64_t position = query + offset;
  if (problem_.causal && key > position) return false;
  if (problem_.window_left.has_value() && key < position - *problem_.window_left) return false;
  if (problem_.window_right.has_value() && key > position + *problem_.window_right) return false;
  if (problem_.mask.present && element(mask_, sequence, head, query, key) == 0) return false;
  return !problem_.bias.present || !std::isinf(element(bias_, sequence, head, query, key));
}

void CaseData::poison_unseen_keys() {
  const std::int64_t group = problem_.num_heads / problem_.num_kv_heads;
  const auto poison = [](const TensorView& view, std::int64_t batch, std::int64_t key,
                         std::int64_t head) {
    for (std::int64_t i = 0; i < view.size(3); ++i) {
      store_element(view.data(), view.dtype(),
                    batch * view.stride(0) + key * view.stride(1) + head * view.stride(2) + i,
                    std::numeric_limits<double>::quiet_NaN());
    }
  };
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    const SequencePart& part = sequences_[s];
    const auto sequence = static_cast<std::int64_t>(s);
    const bool packed = problem_.lengths == Lengths::kPacked;
    const std::int64_t keys = packed ? part.kv_len : kv_len_;
    for (std::int64_t kv_head = 0; kv_head < problem_.num_kv_heads; ++kv_head) {
      for (std::int64_t key = 0; key < keys; ++key) {
        bool seen = false;
        for (std::int64_t row = 0; row < part.query_len * group && !seen; ++row) {
          seen = visible(sequence, kv_head * group + row % group, row / group, key);
        }
        if (seen) continue;
        poison(k_.view(), packed ? 0 : sequence, part.kv_begin + key, kv_head);
        poison(v_.view(), packed ? 0 : sequence, part.kv_begin + key, kv_head);
      }
    }
  }
}

}  // namespace ladon::test
