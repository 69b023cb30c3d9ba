// SpreadKvCache: who has which keys, and what is appended on all ranks or on none.

#include "ladon/spread_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cache/gather.h"
#include "cache/kv_cache_impl.h"
#include "core/fail.h"
#include "parallel/host_messages.h"
#include "parallel/spread_call.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "SpreadKvCache";

/// Calls body(first key, end) for the runs of keys [begin, end) that a rank has.
template <class Body>
void for_each_own_run(int rank, int ranks, std::int64_t begin, std::int64_t end, const Body& body) {
  constexpr std::int64_t kSplit = SpreadKvCache::kSplitKeys;
  for (std::int64_t split = begin / kSplit; split * kSplit < end; ++split) {
    if (split % ranks != rank) continue;
    body(std::max(begin, split * kSplit), std::min(end, (split + 1) * kSplit));
  }
}

}  // namespace

SpreadKvCache::SpreadKvCache(Communicator& communicator, KvCache local)
    : communicator_(communicator), local_(std::move(local)) {
  if (local_.kind() == "window") {
    fail(ErrorCode::kUnsupported, kOperation, "local",
         "got a window, expected a contiguous or paged cache: a window fits one rank");
  }
  const std::int64_t page_size = local_.view().page_size;
  if (page_size != 0 && kSplitKeys % page_size != 0) {
    fail(kOperation, "local",
         "got pages of " + std::to_string(page_size) + " tokens, expected a divisor of " +
             std::to_string(kSplitKeys));
  }
  for (std::int64_t b = 0; b < batch(); ++b) {
    if (local_.length(b) == 0) continue;
    fail(kOperation, "local",
         "got " + std::to_string(local_.length(b)) + " tokens in sequence " + std::to_string(b) +
             ", expected an empty cache");
  }
  lengths_.resize(static_cast<std::size_t>(batch()));
}

std::int64_t SpreadKvCache::length(std::int64_t sequence) const {
  local_.impl().check_sequence("SpreadKvCache::length", sequence);
  return lengths_[static_cast<std::size_t>(sequence)];
}

std::int64_t SpreadKvCache::keys_of(int rank, int ranks, std::int64_t length) noexcept {
  const std::int64_t round = kSplitKeys * ranks;
  const std::int64_t rest = length % round - kSplitKeys * rank;
  return length / round * kSplitKeys + std::clamp<std::int64_t>(rest, 0, kSplitKeys);
}

void SpreadKvCache::truncate(std::int64_t sequence, std::int64_t length) {
  const std::int64_t before = this->length(sequence);
  if (length < 0 || length > before) {
    fail("SpreadKvCache::truncate", "length",
         "got " + std::to_string(length) + ", expected 0 to " + std::to_string(before));
  }
  local_.truncate(sequence, keys_of(communicator_.rank(), communicator_.size(), length));
  lengths_[static_cast<std::size_t>(sequence)] = length;
}

void SpreadKvCache::reset() {
  local_.reset();
  std::fill(lengths_.begin(), lengths_.end(), 0);
}

void SpreadCall::append(const Operation& operation, const ConstTensorView& k,
                        const ConstTensorView& v, std::span<const std::int64_t> new_lengths,
                        CallSignature& signature) {
  cache_.local_.impl().check_context(context_, operation);
  cache_.local_.impl().check_idle(operation);
  check_append(operation, cache_.options(), k, v, new_lengths);
  std::vector<std::int64_t> counts(lengths_.size(), k.size(1));
  std::copy(new_lengths.begin(), new_lengths.end(), counts.begin());
  for (std::size_t b = 0; b < lengths_.size(); ++b) {
    if (counts[b] <= kMostTokens - lengths_[b]) continue;
    fail(operation, "k",
         got_shape(k) + ", expected sequences of at most " + std::to_string(kMostTokens) +
             " tokens");
  }
  write(k, v, counts);
  signature.add("k", k);
  signature.add("v", v);
  signature.add("new_lengths", new_lengths);
}

void SpreadCall::write(const ConstTensorView& k, const ConstTensorView& v,
                       std::span<const std::int64_t> counts) {
  const int rank = cache_.communicator_.rank();
  const int ranks = cache_.communicator_.size();
  std::vector<std::int64_t> own(lengths_.size());
  std::int64_t total = 0;
  for (std::size_t b = 0; b < lengths_.size(); ++b) {
    own[b] = SpreadKvCache::keys_of(rank, ranks, lengths_[b] + counts[b]) -
             SpreadKvCache::keys_of(rank, ranks, lengths_[b]);
    total += own[b];
  }
  const auto own_rows = [&](const ConstTensorView& all) {
    if (all.absent()) return Tensor();
    Tensor rows =
        Tensor::uninitialized(context_, all.dtype(), {1, total, all.size(2), all.size(3)});
    const bool packed = all.size(0) == 1;
    std::int64_t next = 0;
    std::int64_t packed_start = 0;
    for (std::size_t b = 0; b < lengths_.size(); ++b) {
      const auto batch = static_cast<std::int64_t>(packed ? 0 : b);
      const std::int64_t shift = (packed ? packed_start : 0) - lengths_[b];
      for_each_own_run(rank, ranks, lengths_[b], lengths_[b] + counts[b],
                       [&](std::int64_t begin, std::int64_t end) {
                         copy(context_,
                              all.slice(0, batch, batch + 1).slice(1, begin + shift, end + shift),
                              rows.view().slice(1, next, next + end - begin));
                         next += end - begin;
                       });
      packed_start += counts[b];
    }
    return rows;
  };
  own_k_ = own_rows(k);
  own_v_ = own_rows(v);
  const auto present = [](const Tensor& tensor) {
    return tensor.rank() == 0 ? ConstTensorView() : ConstTensorView(tensor);
  };
  appended_.emplace(context_, cache_.local_, present(own_k_), present(own_v_), own);
  for (std::size_t b = 0; b < lengths_.size(); ++b) lengths_[b] += counts[b];
}

Tensor SpreadCall::gather_keys(CollectiveCall& call, std::int64_t sequence, DType dtype) const {
  const auto b = static_cast<std::size_t>(sequence);
  const std::int64_t width = cache_.options().num_kv_heads * cache_.options().head_dim;
  const auto count_of = [&](int rank) {
    return SpreadKvCache::keys_of(rank, call.size(), lengths_[b]);
  };
  Tensor own = Tensor::uninitialized(context_, dtype, {count_of(call.rank()), width});
  gather_sequence(context_, local_view(), b, own, {});
  const Tensor sent = on_host(context_, own);
  std::vector<Tensor> parts;
  parts.reserve(static_cast<std::size_t>(call.size()));
  for (int rank = 0; rank < call.size(); ++rank) {
    parts.push_back(Tensor::uninitialized(dtype, {count_of(rank), width}));
  }
  gather_bytes(call, host_bytes(sent),
               [&](int rank) { return host_bytes(parts[static_cast<std::size_t>(rank)].view()); });
  Tensor all = Tensor::uninitialized(context_, dtype, {lengths_[b], width});
  for (int rank = 0; rank < call.size(); ++rank) {
    const TensorView part = parts[static_cast<std::size_t>(rank)];
    std::int64_t next = 0;
    for_each_own_run(rank, call.size(), 0, lengths_[b], [&](std::int64_t begin, std::int64_t end) {
      copy(context_, part.slice(0, next, next + end - begin), all.view().slice(0, begin, end));
      next += end - begin;
    });
  }
  context_.synchronize();  // before the parts are freed
  return all;
}

void SpreadCall::commit() noexcept {
  appended_->commit();
  cache_.lengths_ = std::move(lengths_);
}

void SpreadKvCache::append(const Context& context, const ConstTensorView& k,
                           const ConstTensorView& v, std::span<const std::int64_t> new_lengths) {
  const Operation operation("SpreadKvCache::append", context);
  SpreadCall own(context, *this);
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        own.describe(signature);
        own.append(operation, k, v, new_lengths, signature);
      },
      [](CollectiveCall&) {}, [&] { own.commit(); });
}

}  // namespace ladon
