// A ring of slots for each sequence, just large enough for what a window can see. A chunk of many
// tokens would overwrite keys that its first queries still see: it goes, with the keys that are
// held, into a staging block, and what the window keeps of it into the ring when it is committed.
#include <algorithm>
#include <string>
#include <vector>

#include "cache/kinds.h"
#include "cache/kv_cache_impl.h"
#include "core/fail.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "KvCache::window";

class Window final : public KvCache::Impl {
 public:
  Window(const Context& context, const KvCacheOptions& options, std::int64_t window_left,
         std::int64_t spare)
      : Impl(options),
        window_left_(window_left),
        past_(window_left + spare),
        ring_(past_ + 1),
        first_(static_cast<std::size_t>(options.batch), 0),
        storage_(KvStorage::make(context, options, options.batch, ring_)) {
    refresh();
  }

  std::string_view kind() const noexcept override { return "window"; }
  std::int64_t window_left() const noexcept override { return window_left_; }
  std::int64_t first_held(std::int64_t sequence) const noexcept override {
    return first_[index(sequence)];
  }

  std::unique_ptr<Impl> fork(const Context& context) const override {
    auto other = empty(context, options_.batch);
    for (std::int64_t b = 0; b < options_.batch; ++b) other->take(context, b, *this, b);
    other->refresh();
    return other;
  }

  std::unique_ptr<Impl> reordered(const Context& context,
                                  std::span<const std::int64_t> from) const override {
    auto other = empty(context, static_cast<std::int64_t>(from.size()));
    for (std::size_t b = 0; b < from.size(); ++b) {
      other->take(context, static_cast<std::int64_t>(b), *this, from[b]);
    }
    other->refresh();
    return other;
  }

  std::unique_ptr<Impl> empty_at(const Context& context, std::span<const std::int64_t> first,
                                 std::span<const std::int64_t> lengths) const override {
    for (std::size_t b = 0; b < first.size(); ++b) {
      if (first[b] > std::max<std::int64_t>(0, lengths[b] - window_left_)) return nullptr;
    }
    auto other = empty(context, options_.batch);
    std::copy(first.begin(), first.end(), other->first_.begin());
    std::copy(first.begin(), first.end(), other->lengths_.begin());
    return other;
  }

  KvStorage& storage() noexcept override { return staged() ? staging_ : storage_; }
  std::int64_t slot_of(std::int64_t sequence, std::int64_t token) const noexcept override {
    return staged() ? sequence * staging_stride_ + token - first_[index(sequence)]
                    : sequence * ring_ + token % ring_;
  }

 private:
  std::unique_ptr<Window> empty(const Context& context, std::int64_t batch) const {
    KvCacheOptions options = options_;
    options.batch = batch;
    return std::make_unique<Window>(context, options, window_left_, past_ - window_left_);
  }

  void take(const Context& context, std::int64_t to, const Window& other,
            std::int64_t from) noexcept {
    lengths_[index(to)] = other.lengths_[index(from)];
    first_[index(to)] = other.first_[index(from)];
    for_each_ring_run(from, first_[index(to)], lengths_[index(to)],
                      [&](std::int64_t, std::int64_t count, std::int64_t slot) {
                        storage_.copy_slots(context, other.storage_, slot,
                                            slot + (to - from) * ring_, count);
                      });
  }

  /// copy(token, count, slot) for tokens [begin, end), as many at a time as are consecutive in the
  /// ring.
  template <class Copy>
  void for_each_ring_run(std::int64_t sequence, std::int64_t begin, std::int64_t end,
                         const Copy& copy) const noexcept {
    for (std::int64_t token = begin; token < end;) {
      const std::int64_t place = token % ring_;
      const std::int64_t count = std::min(end - token, ring_ - place);
      copy(token, count, sequence * ring_ + place);
      token += count;
    }
  }

  bool staged() const noexcept { return staging_stride_ != 0; }

  void allocate_slots(const Context& context, std::string_view,
                      std::span<const std::int64_t> counts) override {
    // One token goes where nothing is held: the ring has a slot more than past_.
    if (std::all_of(counts.begin(), counts.end(), [](std::int64_t n) { return n <= 1; })) return;
    std::int64_t stride = 0;
    for (std::size_t b = 0; b < counts.size(); ++b) {
      stride = std::max(stride, lengths_[b] - first_[b] + counts[b]);
    }
    KvStorage staging = KvStorage::make(context, options_, options_.batch, stride);
    for (std::int64_t b = 0; b < options_.batch; ++b) {
      const std::int64_t first = first_[index(b)];
      for_each_ring_run(b, first, lengths_[index(b)],
                        [&](std::int64_t token, std::int64_t count, std::int64_t slot) {
                          staging.copy_slots(context, storage_, slot, b * stride + token - first,
                                             count);
                        });
    }
    staging_ = std::move(staging);
    staging_stride_ = stride;
  }

  void keep_slots(const Context& context) noexcept override {
    for (std::int64_t b = 0; b < options_.batch; ++b) {
      const std::int64_t length = lengths_[index(b)];
      const std::int64_t kept = std::max(first_[index(b)], length - past_);
      if (staged()) {
        for_each_ring_run(b, kept, length,
                          [&](std::int64_t token, std::int64_t count, std::int64_t slot) {
                            storage_.copy_slots(context, staging_, slot_of(b, token), slot, count);
                          });
      }
      first_[index(b)] = kept;
    }
    release_slots();
  }

  void release_slots() noexcept override {
    staging_ = {};
    staging_stride_ = 0;
  }

  void drop_tail(std::int64_t sequence) noexcept override {
    first_[index(sequence)] = std::min(first_[index(sequence)], lengths_[index(sequence)]);
  }

  std::int64_t shortest(std::int64_t sequence) const noexcept override {
    const std::int64_t first = first_[index(sequence)];
    return first == 0 ? 0 : first + window_left_;
  }

  KvSequenceView describe(std::int64_t sequence, std::int64_t length) const noexcept override {
    const std::int64_t first = first_[index(sequence)];
    if (staged()) {
      return {
          .length = length - first, .first_slot = sequence * staging_stride_, .key_origin = first};
    }
    return {.length = length - first,
            .first_slot = sequence * ring_,
            .ring_start = first % ring_,
            .key_origin = first};
  }

  void set_layout(KvCacheView& view) const noexcept override {
    if (!staged()) view.ring_slots = ring_;
  }

  const std::int64_t window_left_;
  const std::int64_t past_;          // most keys that are held
  const std::int64_t ring_;          // slots of each sequence
  std::vector<std::int64_t> first_;  // oldest token that is held
  KvStorage storage_;
  KvStorage staging_;                // during an append of more than one token
  std::int64_t staging_stride_ = 0;  // slots of each sequence there; 0: none
};

}  // namespace

std::unique_ptr<KvCache::Impl> make_window(const Context& context, const KvCacheOptions& options,
                                           std::int64_t window_left, std::int64_t spare) {
  if (window_left < 0 || window_left > kMostTokens) {
    fail(kOperation, "window_left",
         "got " + std::to_string(window_left) + ", expected 0 to " + std::to_string(kMostTokens));
  }
  if (spare < 0 || spare > kMostTokens) {
    fail(kOperation, "spare",
         "got " + std::to_string(spare) + ", expected 0 to " + std::to_string(kMostTokens));
  }
  return std::make_unique<Window>(context, checked_options(kOperation, options), window_left,
                                  spare);
}

}  // namespace ladon
