#include "cache/kv_cache_impl.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/arena.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"

namespace ladon {
namespace {

void check_rows(const Operation& operation, const NamedView& argument, std::int64_t heads,
                std::int64_t dim) {
  check_view(operation, argument, 4);
  check_float(operation, argument);
  if (argument.view.size(2) != heads || argument.view.size(3) != dim) {
    fail(operation, argument.name,
         got_shape(argument.view) + ", expected [batch, new_len, " + std::to_string(heads) + ", " +
             std::to_string(dim) + "] as the cache holds");
  }
}

}  // namespace

KvCache::Impl::Impl(const KvCacheOptions& options)
    : options_(options),
      lengths_(static_cast<std::size_t>(options.batch), 0),
      counts_(static_cast<std::size_t>(options.batch), 0),
      views_(static_cast<std::size_t>(options.batch)) {}

std::int64_t KvCache::Impl::window_left() const noexcept {
  return std::numeric_limits<std::int64_t>::max();
}

void KvCache::Impl::refresh() noexcept {
  for (std::int64_t b = 0; b < options_.batch; ++b) refresh(b);
}

void KvCache::Impl::refresh(std::int64_t sequence) noexcept {
  const std::size_t i = index(sequence);
  views_[i] = describe(sequence, lengths_[i] + counts_[i]);
}

KvCacheView KvCache::Impl::view() const noexcept {
  KvCacheView view;
  view.format = options_.format;
  view.num_kv_heads = options_.num_kv_heads;
  view.head_dim = options_.head_dim;
  view.value_dim = options_.value_dim;
  storage().set(view);
  set_layout(view);
  view.sequences = views_;
  return view;
}

void KvCache::Impl::check_idle(std::string_view operation) const {
  if (busy_) {
    fail(operation, "cache",
         "got one with a KvAppend that has not ended, expected commit() or its end first");
  }
}

void KvCache::Impl::check_context(const Context& context, std::string_view operation) const {
  check_device(Operation(operation, context), "cache", device());
}

void KvCache::Impl::check_sequence(std::string_view operation, std::int64_t sequence) const {
  if (sequence < 0 || sequence >= options_.batch) {
    fail(operation, "sequence",
         "got " + std::to_string(sequence) + ", expected 0 to " +
             std::to_string(options_.batch - 1) + ": the cache has " +
             std::to_string(options_.batch) + (options_.batch == 1 ? " sequence" : " sequences"));
  }
}

void check_append(const Operation& operation, const KvCacheOptions& options,
                  const ConstTensorView& k, const ConstTensorView& v,
                  std::span<const std::int64_t> new_lengths) {
  check_rows(operation, {"k", k}, options.num_kv_heads, options.head_dim);
  if (options.values_in_keys) {
    if (!v.absent()) {
      fail(operation, "v", got_shape(v) + ", expected none because the values are in the keys");
    }
  } else {
    check_rows(operation, {"v", v}, options.num_kv_heads, options.value_dim);
  }
  if (!v.absent() && (v.size(0) != k.size(0) || v.size(1) != k.size(1))) {
    fail(operation, "v",
         got_shape(v) + ", expected as many sequences and tokens as in k's " +
             k.shape().to_string());
  }
  const auto batch = static_cast<std::size_t>(options.batch);
  if (new_lengths.empty()) {
    if (k.size(0) != options.batch) {
      fail(operation, "k",
           got_shape(k) + ", expected a batch of " + std::to_string(options.batch) +
               " as the cache has");
    }
    return;
  }
  if (new_lengths.size() != batch) {
    fail(operation, "new_lengths",
         "got " + std::to_string(new_lengths.size()) + " lengths, expected " +
             std::to_string(batch) + ": one for each sequence of the cache");
  }
  const bool packed = k.size(0) == 1 && options.batch != 1;
  std::int64_t total = 0;
  for (std::size_t b = 0; b < batch; ++b) {
    if (new_lengths[b] < 0 || new_lengths[b] > k.size(1)) {
      fail(operation, "new_lengths",
           "got " + std::to_string(new_lengths[b]) + " at index " + std::to_string(b) +
               ", expected 0 to " + std::to_string(k.size(1)) + ", k's tokens");
    }
    total += new_lengths[b];
    if (packed && total > k.size(1)) break;
  }
  if (packed ? total != k.size(1) : k.size(0) != options.batch) {
    fail(operation, "k",
         got_shape(k) + ", expected a batch of " + std::to_string(options.batch) +
             ", or 1 with as many tokens as new_lengths sum up to");
  }
}

void KvCache::Impl::set_counts(const Operation& operation, const ConstTensorView& k,
                               const ConstTensorView& v,
                               std::span<const std::int64_t> new_lengths) {
  check_append(operation, options_, k, v, new_lengths);
  if (new_lengths.empty()) {
    std::fill(counts_.begin(), counts_.end(), k.size(1));
  } else {
    std::copy(new_lengths.begin(), new_lengths.end(), counts_.begin());
  }
  for (std::size_t b = 0; b < counts_.size(); ++b) {
    if (counts_[b] > kMostTokens - lengths_[b]) {
      fail(operation, "k",
           got_shape(k) + ", expected sequences of at most " + std::to_string(kMostTokens) +
               " tokens");
    }
  }
}

namespace {

struct RunList {
  RunList(Arena& arena, std::int64_t count) : runs(arena.take<KvRun>(count)) {}
  KvRun* runs;
};

Operand operand_of(const ConstTensorView& rows) {
  if (rows.absent()) return {};
  // One struct serves inputs and outputs.
  return {const_cast<void*>(rows.data()), rows.dtype(), rows.stride(1), rows.stride(2)};
}

}  // namespace

void KvCache::Impl::write_tokens(const Context& context, std::string_view operation,
                                 const ConstTensorView& k, const ConstTensorView& v,
                                 const AppendSteps& steps) {
  for (const NamedView& rows : {NamedView{"k", k}, NamedView{"v", v}}) {
    check_apart(operation, rows, {"the cache", storage().k});
    check_apart(operation, rows, {"the cache", storage().v});
  }
  std::int64_t num_runs = 0;
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    for_each_run(b, lengths_[index(b)], lengths_[index(b)] + counts_[index(b)],
                 [&](std::int64_t, std::int64_t, std::int64_t) { ++num_runs; });
  }
  const InWorkspace<RunList> list(context.impl().host_scratch(), num_runs);
  KvRun* next = list->runs;
  const bool packed = k.size(0) == 1;
  std::int64_t packed_start = 0;
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t length = lengths_[index(b)];
    const std::int64_t count = counts_[index(b)];
    const auto start_of = [&](const ConstTensorView& rows, std::int64_t token) {
      if (rows.absent()) return std::int64_t{0};
      return packed ? (packed_start + token) * rows.stride(1)
                    : b * rows.stride(0) + token * rows.stride(1);
    };
    for_each_run(b, length, length + count,
                 [&](std::int64_t token, std::int64_t run, std::int64_t slot) {
                   *next++ = {.slot = slot,
                              .count = run,
                              .k = start_of(k, token - length),
                              .v = start_of(v, token - length)};
                 });
    packed_start += count;
  }
  KvRowsParams params = kv_rows_params(view());
  params.runs = list->runs;
  params.num_runs = num_runs;
  params.k = operand_of(k);
  params.v = operand_of(v);
  backend_of(context).append_kv(steps, params);
}

void KvCache::Impl::begin(const Context& context, std::string_view operation,
                          const ConstTensorView& k, const ConstTensorView& v,
                          std::span<const std::int64_t> new_lengths, const AppendSteps& steps) {
  check_idle(operation);
  check_context(context, operation);
  try {
    set_counts(Operation(operation, context), k, v, new_lengths);
    allocate_slots(context, operation, counts_);
  } catch (...) {
    std::fill(counts_.begin(), counts_.end(), 0);
    refresh();  // a page table may have moved to a larger place before there were too few pages
    throw;
  }
  busy_ = true;
  try {
    write_tokens(context, operation, k, v, steps);
  } catch (...) {
    abandon();
    throw;
  }
  refresh();
}

void KvCache::Impl::begin_raw(const Context& context, std::string_view operation,
                              std::span<const std::int64_t> counts) {
  std::copy(counts.begin(), counts.end(), counts_.begin());
  try {
    allocate_slots(context, operation, counts_);
  } catch (...) {
    std::fill(counts_.begin(), counts_.end(), 0);
    throw;
  }
  busy_ = true;
}

void KvCache::Impl::commit(const Context& context) noexcept {
  for (std::size_t b = 0; b < lengths_.size(); ++b) lengths_[b] += counts_[b];
  std::fill(counts_.begin(), counts_.end(), 0);
  keep_slots(context);
  busy_ = false;
  refresh();
}

void KvCache::Impl::abandon() noexcept {
  release_slots();
  std::fill(counts_.begin(), counts_.end(), 0);
  busy_ = false;
  refresh();
}

void KvCache::Impl::truncate(std::int64_t sequence, std::int64_t length) {
  constexpr std::string_view kOperation = "KvCache::truncate";
  check_idle(kOperation);
  check_sequence(kOperation, sequence);
  const std::int64_t now = lengths_[index(sequence)];
  const std::int64_t least = shortest(sequence);
  if (length < least || length > now) {
    fail(kOperation, "length",
         "got " + std::to_string(length) + ", expected " + std::to_string(least) + " to " +
             std::to_string(now) +
             (length >= 0 && length < least
                  ? ": the window has dropped what an earlier token would see"
                  : ""));
  }
  lengths_[index(sequence)] = length;
  drop_tail(sequence);
  refresh(sequence);
}

void KvCache::Impl::reset(std::int64_t sequence) noexcept {
  lengths_[index(sequence)] = 0;
  drop_tail(sequence);
  refresh(sequence);
}

void KvCache::Impl::publish_prefix(std::int64_t, std::span<const std::int64_t>) {
  fail(ErrorCode::kUnsupported, "KvCache::publish_prefix", "cache",
       "got a " + std::string(kind()) + " cache, expected a paged one");
}

std::int64_t KvCache::Impl::adopt_prefix(std::int64_t, std::span<const std::int64_t>) {
  fail(ErrorCode::kUnsupported, "KvCache::adopt_prefix", "cache",
       "got a " + std::string(kind()) + " cache, expected a paged one");
}

std::int64_t KvCache::Impl::tokens_held() const noexcept {
  std::int64_t tokens = 0;
  for (std::int64_t b = 0; b < options_.batch; ++b) tokens += length(b) - first_held(b);
  return tokens;
}

std::int64_t KvCache::Impl::tokens_seen() const noexcept {
  std::int64_t tokens = 0;
  for (std::int64_t b = 0; b < options_.batch; ++b) tokens += length(b);
  return tokens;
}

}  // namespace ladon
