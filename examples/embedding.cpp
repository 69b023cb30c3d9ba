// Ladon inside a program that has its own memory, its own KV pages and its own threads:
// docs/embedding.md walks through it. Ladon allocates nothing here but its workspaces.
#include <ladon/ladon.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 64;
constexpr std::int64_t kPageSize = 16;

/// The program's own thread pool: a queue of jobs, as many programs have one.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(workers_.size()); }

  void submit(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return done_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  bool done_ = false;
  std::vector<std::thread> workers_;
};

/// Lets Ladon run on that pool. The caller's thread works too, so that a call makes progress even
/// when every worker is busy with something else.
class PoolExecutor final : public ladon::Executor {
 public:
  explicit PoolExecutor(Pool& pool) : pool_(pool) {}

  int concurrency() const noexcept override { return pool_.size() + 1; }

  void run(int count, void (*body)(void*, int), void* state) override {
    calls_.fetch_add(1);
    // Shared, because a helper that starts late may look at it after run() has returned.
    const auto call = std::make_shared<Call>();
    const auto help = [call, count, body, state] {
      for (int i = call->next.fetch_add(1); i < count; i = call->next.fetch_add(1)) {
        body(state, i);
        if (call->finished.fetch_add(1) + 1 == count) call->finished.notify_all();
      }
    };
    for (int i = 0; i < std::min(count - 1, pool_.size()); ++i) pool_.submit(help);
    help();
    for (int done = call->finished.load(); done < count; done = call->finished.load()) {
      call->finished.wait(done);
    }
  }

  int calls() const { return calls_.load(); }

 private:
  struct Call {
    std::atomic<int> next{0};
    std::atomic<int> finished{0};
  };
  Pool& pool_;
  std::atomic<int> calls_{0};
};

float sample(std::uint64_t i) { return std::sin(static_cast<float>(i * 2654435761U % 10007U)); }

/// Attention over one buffer of the program's, as a fused projection writes it: for each token
/// kHeads queries, then kKvHeads keys, then kKvHeads values. Views are strided: nothing is copied.
std::vector<float> attend_packed(const ladon::Context& context, const std::vector<float>& qkv,
                                 std::int64_t tokens) {
  const std::int64_t row = (kHeads + 2 * kKvHeads) * kHeadDim;
  const auto heads = [&](std::int64_t first, std::int64_t count) {
    return ladon::ConstTensorView(qkv.data() + first * kHeadDim, ladon::DType::kF32,
                                  {1, tokens, count, kHeadDim}, {tokens * row, row, kHeadDim, 1});
  };
  std::vector<float> out(static_cast<std::size_t>(tokens * kHeads * kHeadDim));
  ladon::attention(
      context, heads(0, kHeads), heads(kHeads, kKvHeads), heads(kHeads + kKvHeads, kKvHeads),
      {.causal = true},
      ladon::TensorView(out.data(), ladon::DType::kF32, {1, tokens, kHeads, kHeadDim}));
  return out;
}

/// The program's own KV pages: a slab for keys and one for values, [page, slot, kv_head, dim], and
/// a page table for each sequence.
struct Pages {
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<std::vector<std::int32_t>> tables;  // of each sequence
  std::vector<std::int64_t> lengths;              // its tokens
};

/// One new query for each sequence, over the keys that its pages hold.
std::vector<float> decode(const ladon::Context& context, const Pages& pages,
                          const std::vector<float>& queries) {
  const auto batch = static_cast<std::int64_t>(pages.tables.size());
  std::vector<ladon::KvSequenceView> sequences;
  for (std::size_t b = 0; b < pages.tables.size(); ++b) {
    sequences.push_back({.length = pages.lengths[b], .pages = pages.tables[b].data()});
  }
  const std::int64_t slot = kKvHeads * kHeadDim;
  const ladon::KvCacheView cache{
      .format = ladon::DType::kF32,
      .num_kv_heads = kKvHeads,
      .head_dim = kHeadDim,
      .value_dim = kHeadDim,
      .num_slots = static_cast<std::int64_t>(pages.keys.size()) / slot,
      .k = pages.keys.data(),
      .v = pages.values.data(),
      .k_slot_stride = slot,
      .k_head_stride = kHeadDim,
      .v_slot_stride = slot,
      .v_head_stride = kHeadDim,
      .page_size = kPageSize,
      .sequences = sequences,
  };
  std::vector<float> out(queries.size());
  ladon::attention(
      context,
      ladon::ConstTensorView(queries.data(), ladon::DType::kF32, {batch, 1, kHeads, kHeadDim}),
      cache, {.causal = true},
      ladon::TensorView(out.data(), ladon::DType::kF32, {batch, 1, kHeads, kHeadDim}));
  return out;
}

/// The pages of a sequence whose tokens are the rows of a packed buffer, scattered backwards.
Pages scatter(const std::vector<float>& qkv, std::int64_t tokens) {
  const std::int64_t row = (kHeads + 2 * kKvHeads) * kHeadDim;
  const std::int64_t slot = kKvHeads * kHeadDim;
  const std::int64_t used = (tokens + kPageSize - 1) / kPageSize;
  const auto elements = static_cast<std::size_t>(used * kPageSize * slot);
  // What no sequence has written yet is never read: NaN shows it.
  Pages pages{std::vector<float>(elements, std::nanf("")),
              std::vector<float>(elements, std::nanf("")),
              {{}},
              {tokens}};
  for (std::int64_t page = 0; page < used; ++page) {
    pages.tables[0].push_back(static_cast<std::int32_t>(used - 1 - page));
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t to =
        (pages.tables[0][static_cast<std::size_t>(t / kPageSize)] * kPageSize + t % kPageSize) *
        slot;
    const auto from = qkv.begin() + t * row + kHeads * kHeadDim;
    std::copy_n(from, slot, pages.keys.begin() + to);
    std::copy_n(from + slot, slot, pages.values.begin() + to);
  }
  return pages;
}

double largest_difference(const std::vector<float>& a, const float* b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= largest)) largest = difference;  // NaN too
  }
  return largest;
}

int demonstrate() {
  constexpr std::int64_t kTokens = 300;
  const std::int64_t row = (kHeads + 2 * kKvHeads) * kHeadDim;
  std::vector<float> qkv(static_cast<std::size_t>(kTokens * row));
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = sample(i);

  Pool pool(2);
  PoolExecutor executor(pool);
  const ladon::Context context({.executor = &executor});
  const std::vector<float> whole = attend_packed(context, qkv, kTokens);
  std::printf("%lld tokens from one packed buffer, on the program's %d threads (%d jobs)\n",
              static_cast<long long>(kTokens), pool.size(), executor.calls());

  // Any threads give the same bits: the program's, Ladon's own, or one.
  const bool same_bits = attend_packed(ladon::Context({.num_threads = 1}), qkv, kTokens) == whole;
  std::printf("one thread of Ladon's own: %s\n", same_bits ? "the same bits" : "OTHER BITS");

  // The last token again, decoded over pages.
  const std::int64_t last = (kTokens - 1) * row;
  const std::vector<float> query(qkv.begin() + last, qkv.begin() + last + kHeads * kHeadDim);
  const std::vector<float> decoded = decode(context, scatter(qkv, kTokens), query);
  const double error =
      largest_difference(decoded, whole.data() + (kTokens - 1) * kHeads * kHeadDim);
  std::printf("the last token, decoded over the program's pages: largest difference %.1e\n", error);
  return same_bits && executor.calls() > 0 && error < 1e-5 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return demonstrate();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "embedding: %s\n", error.what());
    return 1;
  }
}
