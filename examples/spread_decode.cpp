// Decoding over a cache that is spread over ranks, each of which holds some of the keys. Ranks are
// threads here, so that the program runs anywhere; in a program for MPI each process has one
// ladon::MpiCommunicator (ladon/mpi.h), and the rest is the same.
#include <ladon/ladon.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 3;
constexpr std::int64_t kPrompt = 4000;
constexpr std::int64_t kNumHeads = 8;
constexpr std::int64_t kNumKvHeads = 2;
constexpr std::int64_t kHeadDim = 64;
constexpr int kNewTokens = 4;

const ladon::KvCacheOptions kCacheOptions{
    .num_kv_heads = kNumKvHeads, .head_dim = kHeadDim, .format = ladon::DType::kBF16};

ladon::Tensor random_tokens(const ladon::Context& context, std::int64_t tokens,
                            std::int64_t num_heads, std::uint64_t seed) {
  ladon::Tensor tensor(ladon::DType::kF32, {1, tokens, num_heads, kHeadDim});
  ladon::fill_normal(context, tensor, 0, 1, seed);
  return tensor;
}

/// A prompt, and then tokens one by one; returns the attention of the last. `append` and `step` say
/// how.
template <class Append, class Step>
ladon::Tensor decode(const ladon::Context& context, const Append& append, const Step& step) {
  append(random_tokens(context, kPrompt, kNumKvHeads, 1),
         random_tokens(context, kPrompt, kNumKvHeads, 2));
  ladon::Tensor out(ladon::DType::kF32, {1, 1, kNumHeads, kHeadDim});
  for (std::uint64_t i = 0; i < kNewTokens; ++i) {
    step(random_tokens(context, 1, kNumHeads, 10 + i),
         random_tokens(context, 1, kNumKvHeads, 20 + i),
         random_tokens(context, 1, kNumKvHeads, 30 + i), out);
  }
  return out;
}

ladon::Tensor decode_alone() {
  const ladon::Context context;
  ladon::KvCache cache = ladon::KvCache::contiguous(context, kCacheOptions);
  return decode(
      context, [&](const ladon::Tensor& k, const ladon::Tensor& v) { cache.append(context, k, v); },
      [&](const ladon::Tensor& q, const ladon::Tensor& k, const ladon::Tensor& v,
          ladon::Tensor& out) {
        cache.append(context, k, v);
        ladon::attention(context, q, cache.view(), {.causal = true}, out);
      });
}

/// What each rank does. All of them pass the same tokens, and all get the result.
ladon::Tensor decode_on_rank(ladon::Communicator& ranks) {
  const ladon::Context context(ladon::ContextOptions{.num_threads = 1});
  ladon::SpreadKvCache cache(ranks, ladon::KvCache::contiguous(context, kCacheOptions));
  ladon::Tensor out = decode(
      context, [&](const ladon::Tensor& k, const ladon::Tensor& v) { cache.append(context, k, v); },
      [&](const ladon::Tensor& q, const ladon::Tensor& k, const ladon::Tensor& v,
          ladon::Tensor& result) {
        ladon::append_and_attend(context, cache, q, k, v, {.causal = true}, result, {},
                                 {.reproducible = true});
      });
  std::printf("rank %d holds %lld of %lld keys and has sent %lld bytes\n", ranks.rank(),
              static_cast<long long>(cache.local().length()),
              static_cast<long long>(cache.length()),
              static_cast<long long>(ranks.statistics().bytes_sent));
  return out;
}

bool same_bits(const ladon::Tensor& a, const ladon::Tensor& b) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.num_elements()) * 4) == 0;
}

int run() {
  const ladon::Tensor expected = decode_alone();
  const auto ends = ladon::make_thread_communicators(kRanks);
  std::vector<std::string> errors(ends.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        if (!same_bits(decode_on_rank(*ends[rank]), expected)) errors[rank] = "another result";
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int status = 0;
  for (const std::string& error : errors) {
    if (error.empty()) continue;
    std::printf("failed: %s\n", error.c_str());
    status = 1;
  }
  if (status == 0) std::puts("every rank has the bits of one process");
  return status;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
}
