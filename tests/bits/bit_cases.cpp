#include "bits/bit_cases.h"

#include <bit>
#include <cstddef>

#include "ladon/tensor.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// FNV-1a.
class Fnv {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* byte = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) value_ = (value_ ^ byte[i]) * 0x100000001b3ULL;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

// A new family goes to the end; what is there keeps its cases.
constexpr BitFamily kFamilies[] = {
    {"functions", 110, run_functions},
    {"large_functions", 20, run_large_functions},
    {"caches", 30, run_caches},
    {"small_operations", 40, run_small_operations},
    {"optimisers", 20, run_optimisers},
    {"multi_head", 50, run_multi_head},
    {"multi_head_cached", 50, run_multi_head_cached},
    {"latent", 40, run_latent},
    {"latent_cached", 40, run_latent_cached},
};

}  // namespace

void BitHashes::add(std::string_view name, const ConstTensorView& view) {
  if (view.absent()) return;
  const Tensor dense = Tensor::copy_of(host_context(), view);
  Fnv hash;
  hash.add(dense.data(), static_cast<std::size_t>(dense.num_elements()) * size_of(dense.dtype()));
  entries_.push_back({std::string(name), hash.value()});
}

void BitHashes::add(std::string_view name, double number) {
  entries_.push_back({std::string(name), std::bit_cast<std::uint64_t>(number)});
}

std::uint32_t BitHashes::total() const {
  Fnv hash;
  for (const Entry& entry : entries_) hash.add(&entry.hash, sizeof entry.hash);
  return static_cast<std::uint32_t>(hash.value() ^ (hash.value() >> 32));
}

std::span<const BitFamily> bit_families() { return kFamilies; }

}  // namespace ladon::test
