// The public face of the caches: every call is checked here or in the Impl, and passed on.
#include "ladon/kv_cache.h"

#include <string>
#include <utility>

#include "cache/cache_file.h"
#include "cache/gather.h"
#include "cache/kinds.h"
#include "cache/kv_cache_impl.h"
#include "core/checks.h"
#include "core/fail.h"

namespace ladon {

KvCache::KvCache(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

KvCache KvCache::contiguous(const Context& context, const KvCacheOptions& options,
                            std::int64_t capacity) {
  return KvCache(make_contiguous(context, options, capacity));
}
KvCache KvCache::window(const Context& context, const KvCacheOptions& options,
                        std::int64_t window_left, std::int64_t spare) {
  return KvCache(make_window(context, options, window_left, spare));
}
KvCache KvCache::paged(const std::shared_ptr<PagePool>& pool, std::int64_t batch) {
  return KvCache(make_paged(pool, batch));
}

std::string_view KvCache::kind() const noexcept { return impl_->kind(); }
const KvCacheOptions& KvCache::options() const noexcept { return impl_->options(); }
std::int64_t KvCache::window_left() const noexcept { return impl_->window_left(); }
DeviceId KvCache::device() const noexcept { return impl_->device(); }

std::int64_t KvCache::length(std::int64_t sequence) const {
  impl_->check_sequence("KvCache::length", sequence);
  return impl_->length(sequence);
}
std::int64_t KvCache::held(std::int64_t sequence) const {
  impl_->check_sequence("KvCache::held", sequence);
  return impl_->length(sequence) - impl_->first_held(sequence);
}

void KvCache::append(const Context& context, const ConstTensorView& k, const ConstTensorView& v,
                     std::span<const std::int64_t> new_lengths) {
  impl_->begin(context, "KvCache::append", k, v, new_lengths);
  impl_->commit(context);
}

void KvCache::truncate(std::int64_t sequence, std::int64_t length) {
  impl_->truncate(sequence, length);
}
void KvCache::reset(std::int64_t sequence) {
  impl_->check_idle("KvCache::reset");
  impl_->check_sequence("KvCache::reset", sequence);
  impl_->reset(sequence);
}
void KvCache::reset() {
  impl_->check_idle("KvCache::reset");
  for (std::int64_t b = 0; b < batch(); ++b) impl_->reset(b);
}

void KvCache::reorder(const Context& context, std::span<const std::int64_t> from) {
  impl_->check_idle("KvCache::reorder");
  impl_->check_context(context, "KvCache::reorder");
  for (std::size_t b = 0; b < from.size(); ++b) {
    if (from[b] < 0 || from[b] >= batch()) {
      fail("KvCache::reorder", "from",
           "got " + std::to_string(from[b]) + " at index " + std::to_string(b) +
               ", expected 0 to " + std::to_string(batch() - 1));
    }
  }
  impl_ = impl_->reordered(context, from);
}

void KvCache::reserve(const Context& context, std::int64_t length) {
  impl_->check_idle("KvCache::reserve");
  impl_->check_context(context, "KvCache::reserve");
  if (length < 0 || length > kMostTokens) {
    fail("KvCache::reserve", "length",
         "got " + std::to_string(length) + ", expected 0 to " + std::to_string(kMostTokens));
  }
  impl_->reserve(context, length);
}

KvCache KvCache::fork(const Context& context) const {
  impl_->check_idle("KvCache::fork");
  impl_->check_context(context, "KvCache::fork");
  return KvCache(impl_->fork(context));
}

void KvCache::save(const Context& context, const std::filesystem::path& path) const {
  impl_->check_idle("KvCache::save");
  impl_->check_context(context, "KvCache::save");
  save_cache(context, *impl_, path);
}
void KvCache::load(const Context& context, const std::filesystem::path& path) {
  impl_->check_idle("KvCache::load");
  impl_->check_context(context, "KvCache::load");
  impl_ = load_cache(context, *impl_, path);
}

void KvCache::publish_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids) {
  impl_->publish_prefix(sequence, token_ids);
}
std::int64_t KvCache::adopt_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids) {
  return impl_->adopt_prefix(sequence, token_ids);
}

namespace {

Tensor read_back(const Context& context, std::string_view name, const KvCache& cache,
                 std::int64_t sequence, std::optional<DType> dtype, bool keys) {
  const Operation operation(name, context);
  cache.impl().check_sequence(name, sequence);
  check_device(operation, "cache", cache.device());
  const KvFormat& format = cache.options().format;
  const DType wanted = dtype.value_or(format.scaled ? DType::kF32 : format.dtype);
  if (!is_float(wanted)) {
    fail(operation, "dtype",
         std::string("got ") + name_of(wanted) + ", expected f64, f32, f16 or bf16");
  }
  const std::int64_t heads = cache.options().num_kv_heads;
  const std::int64_t dim = keys ? cache.options().head_dim : cache.options().value_dim;
  const std::int64_t held = cache.held(sequence);
  Tensor read = Tensor::uninitialized(context, wanted, {held, heads, dim});
  const TensorView rows = read.view().reshape({held, heads * dim});
  if (held != 0) {
    gather_sequence(context, cache.view(), static_cast<std::size_t>(sequence),
                    keys ? rows : TensorView(), keys ? TensorView() : rows);
  }
  return read;
}

}  // namespace

Tensor KvCache::keys(const Context& context, std::int64_t sequence,
                     std::optional<DType> dtype) const {
  return read_back(context, "KvCache::keys", *this, sequence, dtype, true);
}
Tensor KvCache::values(const Context& context, std::int64_t sequence,
                       std::optional<DType> dtype) const {
  return read_back(context, "KvCache::values", *this, sequence, dtype, false);
}

KvCacheView KvCache::view() const {
  impl_->check_idle("KvCache::view");
  return impl_->view();
}

std::int64_t KvCache::elements_used() const noexcept {
  return impl_->tokens_held() * elements_per_token(options());
}
std::int64_t KvCache::bytes_used() const noexcept {
  return impl_->tokens_held() * bytes_per_token(options());
}
std::int64_t KvCache::bytes_reserved() const noexcept { return impl_->bytes_reserved(); }
std::int64_t KvCache::mha_elements() const noexcept {
  return impl_->tokens_seen() * options().num_heads * options().mha_dim;
}
std::int64_t KvCache::mha_bytes() const noexcept {
  return impl_->tokens_seen() * mha_bytes_per_token(options());
}
double KvCache::reduction() const noexcept {
  const std::int64_t mha = mha_bytes();
  return mha == 0 ? 0 : 1 - static_cast<double>(bytes_used()) / static_cast<double>(mha);
}

KvAppend::KvAppend(const Context& context, KvCache& cache, const ConstTensorView& k,
                   const ConstTensorView& v, std::span<const std::int64_t> new_lengths)
    : KvAppend(context, cache, k, v, new_lengths, AppendSteps{}) {}

KvAppend::KvAppend(const Context& context, KvCache& cache, const ConstTensorView& k,
                   const ConstTensorView& v, std::span<const std::int64_t> new_lengths,
                   const AppendSteps& steps)
    : context_(context), impl_(cache.impl()) {
  impl_.begin(context, "KvCache::append", k, v, new_lengths, steps);
}

KvAppend::~KvAppend() {
  if (!committed_) impl_.abandon();
}

KvCacheView KvAppend::view() const noexcept { return impl_.view(); }

void KvAppend::commit() noexcept {
  if (!std::exchange(committed_, true)) impl_.commit(context_);
}

}  // namespace ladon
