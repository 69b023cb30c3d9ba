#include "support/case.h"

#include <algorithm>
#include <iterator>
#include <sstream>

namespace ladon::test {
namespace {

template <class T, std::size_t kCount>
T pick(Random& random, const T (&values)[kCount]) {
  return values[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(kCount)))];
}

bool chance(Random& random, double probability) { return random.uniform() < probability; }

/// Lengths around the tiles' and vectors' edges, zeros and primes among them.
std::int64_t random_length(Random& random) {
  constexpr std::int64_t kLengths[] = {0,  1,  1,  2,  3,  4,  5,  7,  8,  9,  13,  15,  16, 17,
                                       23, 31, 32, 33, 47, 63, 64, 65, 67, 97, 127, 128, 129};
  return pick(random, kLengths);
}

std::int64_t random_dim(Random& random) {
  constexpr std::int64_t kDims[] = {1,  2,  3,  4,  5,  7,  8,  9,  12, 15, 16, 17,
                                    20, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96};
  return pick(random, kDims);
}

Broadcast random_broadcast(Random& random) {
  Broadcast broadcast;
  broadcast.present = true;
  for (bool& full : broadcast.full) full = chance(random, 0.6);
  return broadcast;
}

void random_sizes(Random& random, Case& problem) {
  constexpr std::int64_t kGroups[] = {1, 1, 2, 3, 4, 5, 8};
  constexpr std::int64_t kKvHeads[] = {1, 1, 2, 3};
  constexpr std::int64_t kBatches[] = {0, 1, 1, 1, 2, 2, 3, 5};
  // What the reference costs is about this many multiplications; reduce until it is bearable.
  constexpr double kBudget = 2e5;
  problem.batch = pick(random, kBatches);
  problem.num_kv_heads = pick(random, kKvHeads);
  problem.num_heads = problem.num_kv_heads * pick(random, kGroups);
  problem.query_len = random_length(random);
  problem.kv_len = random_length(random);
  problem.head_dim = random_dim(random);
  problem.value_dim = chance(random, 0.5) ? problem.head_dim : random_dim(random);
  if (chance(random, 0.06)) {  // decoding: few rows, keys past one split
    problem.query_len = 1 + random.below(3);
    problem.kv_len = 500 + random.below(1200);
  } else if (chance(random, 0.03)) {  // keys past one block of the backward pass, and past four
    problem.query_len = 1 + random.below(20);
    problem.kv_len = 250 + random.below(1100);
  }
  const auto cost = [&] {
    return static_cast<double>(problem.batch * problem.num_heads) *
           static_cast<double>(problem.query_len * problem.kv_len) *
           static_cast<double>(problem.head_dim + problem.value_dim);
  };
  while (cost() > kBudget) {
    if (problem.batch > 1) {
      --problem.batch;
    } else if (problem.num_heads > problem.num_kv_heads && problem.query_len < 5) {
      problem.num_heads -= problem.num_kv_heads;
    } else if (problem.head_dim > 8 || problem.value_dim > 8) {
      problem.head_dim = std::min<std::int64_t>(problem.head_dim, 1 + random.below(16));
      problem.value_dim = std::min<std::int64_t>(problem.value_dim, 1 + random.below(16));
    } else if (problem.num_kv_heads > 1) {
      problem.num_heads /= problem.num_kv_heads;
      problem.num_kv_heads = 1;
    } else if (problem.num_heads > 1) {
      problem.num_heads = (problem.num_heads + 1) / 2;
    } else {
      problem.query_len /= 2;
    }
  }
}

}  // namespace

Case random_case(Random& random) {
  constexpr DType kTypes[] = {DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  Case problem;
  problem.seed = random.next_u64();
  random_sizes(random, problem);
  problem.dtype = pick(random, kTypes);
  problem.kv_dtype = problem.dtype;
  if (chance(random, 0.2)) {  // a cache narrower than q
    const DType narrower = pick(random, kFloats);
    if (size_of(narrower) < size_of(problem.dtype)) problem.kv_dtype = narrower;
  }
  if (chance(random, 0.3)) problem.scale = random.uniform(-0.5, 0.7);
  problem.causal = chance(random, 0.4);
  if (chance(random, 0.3)) problem.alignment = Alignment::kTopLeft;
  if (chance(random, 0.2)) problem.window_left = random.below(40);
  if (chance(random, 0.2)) problem.window_right = random.below(40);
  problem.lengths =
      pick(random, {Lengths::kFull, Lengths::kFull, Lengths::kPadded, Lengths::kPacked});
  if (chance(random, 0.2)) problem.mask = random_broadcast(random);
  if (chance(random, 0.2)) problem.bias = random_broadcast(random);
  problem.bias_dtype = pick(random, kFloats);
  if (chance(random, 0.2)) problem.softcap = random.uniform(0.5, 30);
  problem.alibi = chance(random, 0.2);
  problem.sinks = chance(random, 0.2);
  if (chance(random, 0.2)) problem.dropout = random.uniform(0.05, 0.9);
  problem.dlse = chance(random, 0.2);
  problem.memory = pick(random, {Memory::kDense, Memory::kHeadsFirst, Memory::kSliced});
  return problem;
}

void make_shard(Random& random, Case& problem) {
  problem.alignment = Alignment::kBottomRight;
  problem.position_offset = random.below(200) - 60;
  problem.first_head = random.below(9);
  problem.first_query = random.below(1000);
  problem.first_key = random.below(1000);
}

std::string Case::describe() const {
  std::ostringstream text;
  const auto broadcast = [&](const char* name, const Broadcast& value) {
    if (!value.present) return;
    text << ' ' << name << '[';
    for (const bool full : value.full) text << (full ? 'N' : '1');
    text << ']';
  };
  text << name_of(dtype);
  if (kv_dtype != dtype) text << "/kv " << name_of(kv_dtype);
  text << " batch " << batch << " query_len " << query_len << " kv_len " << kv_len << " heads "
       << num_heads << '/' << num_kv_heads << " dim " << head_dim << '/' << value_dim;
  if (scale.has_value()) text << " scale " << *scale;
  if (causal) text << " causal";
  if (alignment == Alignment::kTopLeft) text << " top-left";
  if (position_offset.has_value()) text << " offset " << *position_offset;
  if (window_left.has_value()) text << " left " << *window_left;
  if (window_right.has_value()) text << " right " << *window_right;
  if (lengths == Lengths::kPadded) text << " padded";
  if (lengths == Lengths::kPacked) text << " packed";
  broadcast("mask", mask);
  broadcast("bias", bias);
  if (bias.present) text << ' ' << name_of(bias_dtype);
  if (softcap != 0) text << " softcap " << softcap;
  if (alibi) text << " alibi";
  if (sinks) text << " sinks";
  if (dropout != 0) text << " dropout " << dropout;
  if (first_head + first_query + first_key != 0) {
    text << " from " << first_head << '/' << first_query << '/' << first_key;
  }
  if (dlse) text << " dlse";
  if (memory == Memory::kHeadsFirst) text << " heads-first";
  if (memory == Memory::kSliced) text << " sliced";
  text << " seed " << seed;
  return text.str();
}

}  // namespace ladon::test
