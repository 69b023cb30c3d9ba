// Random problems whose results are hashed bit for bit, for bit_record.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/random.h"
#include "ladon/tensor_view.h"

namespace ladon::test {

/// The hashes of one case's results, each by name.
class BitHashes {
 public:
  struct Entry {
    std::string name;
    std::uint64_t hash = 0;
  };

  /// The elements of a view in row-major order; an absent view counts as nothing.
  void add(std::string_view name, const ConstTensorView& view);
  void add(std::string_view name, double number);

  const std::vector<Entry>& entries() const { return entries_; }
  /// All of them in one number.
  std::uint32_t total() const;

 private:
  std::vector<Entry> entries_;
};

/// A kind of problem: case number i depends on i alone.
struct BitFamily {
  std::string_view name;
  int count = 0;
  void (*run)(const Context& context, Random& random, BitHashes& hashes) = nullptr;
};

std::span<const BitFamily> bit_families();

// The families, by file.
void run_functions(const Context& context, Random& random, BitHashes& hashes);
void run_large_functions(const Context& context, Random& random, BitHashes& hashes);
void run_caches(const Context& context, Random& random, BitHashes& hashes);
void run_small_operations(const Context& context, Random& random, BitHashes& hashes);
void run_optimisers(const Context& context, Random& random, BitHashes& hashes);
void run_multi_head(const Context& context, Random& random, BitHashes& hashes);
void run_multi_head_cached(const Context& context, Random& random, BitHashes& hashes);
void run_latent(const Context& context, Random& random, BitHashes& hashes);
void run_latent_cached(const Context& context, Random& random, BitHashes& hashes);

template <class T, std::size_t kCount>
T pick(Random& random, const T (&values)[kCount]) {
  return values[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(kCount)))];
}

inline bool chance(Random& random, double probability) { return random.uniform() < probability; }

inline DType pick_float(Random& random) {
  return pick(random, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
}

}  // namespace ladon::test
