// Random magnitudes: forward and backward of small problems whose inputs are anything from 1e-30 to
// 1e15, in every dtype and on every instruction set, against plain loops in long double.
//
//   magnitude_fuzz [cases] [seed]
//
// Checks the bound of docs/numerics.md in the form that holds for scores of any size, and that
// nothing is NaN or infinite where the truth fits the dtype. Exits with 1 on a failure.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/runnable_isas.h"

namespace ladon::test {
namespace {

using Real = long double;

constexpr Real kBoundFactor = 32;  // c of docs/numerics.md

struct MagnitudeCase {
  std::int64_t queries, keys, heads, group, dim, value_dim;
  DType dtype;
  bool causal, biased;
  Tensor q, k, v, dout, bias;
};

struct Results {
  Tensor out, lse, dq, dk, dv;
};

/// What each element should be, and how far from it an element may be.
struct Expected {
  explicit Expected(const Tensor& like)
      : value(static_cast<std::size_t>(like.num_elements())), bound(value.size()) {}
  std::vector<Real> value, bound;

  void add(std::int64_t index, Real some, Real error) {
    value[static_cast<std::size_t>(index)] += some;
    bound[static_cast<std::size_t>(index)] += error;
  }
};

Real at(const Tensor& tensor, std::int64_t index) {
  return static_cast<Real>(load_element(tensor.data(), tensor.dtype(), index));
}

/// Elements of one random magnitude, some of them equal, some 0.
Tensor random_tensor(Random& random, DType dtype, const Dims& shape) {
  Tensor tensor(dtype, shape);
  const double top = dtype == DType::kF16 ? 4.5 : 15;
  const double magnitude = std::pow(10.0, random.uniform(dtype == DType::kF16 ? -7 : -30, top));
  const bool equal = random.below(6) == 0;
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
    const double some = equal ? magnitude : magnitude * random.uniform(-1, 1);
    store_element(tensor.data(), dtype, i, random.below(20) == 0 && !equal ? 0 : some);
  }
  return tensor;
}

MagnitudeCase random_case(Random& random) {
  constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  MagnitudeCase problem{};
  problem.queries = 1 + random.below(random.below(2) == 0 ? 4 : 24);
  problem.keys = 1 + random.below(random.below(2) == 0 ? 5 : 90);
  problem.heads = 1 + random.below(2);
  problem.group = 1 + random.below(3);
  problem.dim = 1 + random.below(40);
  problem.value_dim = 1 + random.below(40);
  problem.dtype = kDTypes[random.below(4)];
  problem.causal = random.below(3) == 0;
  problem.biased = random.below(4) == 0;
  const std::int64_t query_heads = problem.heads * problem.group;
  problem.q = random_tensor(random, problem.dtype, {1, problem.queries, query_heads, problem.dim});
  problem.k = random_tensor(random, problem.dtype, {1, problem.keys, problem.heads, problem.dim});
  problem.v =
      random_tensor(random, problem.dtype, {1, problem.keys, problem.heads, problem.value_dim});
  problem.dout =
      random_tensor(random, problem.dtype, {1, problem.queries, query_heads, problem.value_dim});
  if (problem.biased) problem.bias = random_tensor(random, DType::kF32, {1, 1, 1, problem.keys});
  return problem;
}

AttentionOptions options_of(const MagnitudeCase& problem) {
  AttentionOptions options{.causal = problem.causal};
  if (problem.biased) options.bias = problem.bias;
  return options;
}

Results run(const Context& context, const MagnitudeCase& problem) {
  const DType lse_dtype = problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Results results;
  results.out = Tensor(problem.dtype, problem.dout.shape());
  results.lse = Tensor(lse_dtype, {1, problem.q.size(2), problem.queries});
  results.dq = Tensor(problem.dtype, problem.q.shape());
  results.dk = Tensor(problem.dtype, problem.k.shape());
  results.dv = Tensor(problem.dtype, problem.v.shape());
  const AttentionOptions options = options_of(problem);
  attention(context, problem.q, problem.k, problem.v, options, results.out, results.lse);
  attention_backward(context, problem.q, problem.k, problem.v, options,
                     {.out = results.out, .lse = results.lse, .dout = problem.dout},
                     {.dq = results.dq, .dk = results.dk, .dv = results.dv});
  return results;
}

/// The truth in long double.
class Truth {
 public:
  Truth(const MagnitudeCase& problem, const Results& like)
      : out(like.out), dq(like.dq), dk(like.dk), dv(like.dv), problem_(problem) {
    for (std::int64_t head = 0; head < problem.q.size(2); ++head) {
      for (std::int64_t query = 0; query < problem.queries; ++query) add_row(head, query);
    }
  }

  Expected out, dq, dk, dv;

 private:
  std::int64_t key_index(std::int64_t key, std::int64_t head, std::int64_t dim) const {
    return (key * problem_.heads + head / problem_.group) * dim;
  }

  void add_row(std::int64_t head, std::int64_t query) {
    const bool wide = problem_.dtype == DType::kF64;
    const Real epsilon = wide ? 0x1p-52L : 0x1p-23L;
    const Real storage = problem_.dtype == DType::kF16    ? 0x1p-10L
                         : problem_.dtype == DType::kBF16 ? 1.5L * 0x1p-7L
                                                          : 0;
    // Products and weights below the smallest normal number lose digits, or count as 0.
    const Real floor = wide ? 0x1p-1022L : 0x1p-126L;
    const Real out_floor = problem_.dtype == DType::kF16 ? 0x1p-24L : floor;
    const std::int64_t dim = problem_.dim;
    const std::int64_t value_dim = problem_.value_dim;
    const std::int64_t q = (query * problem_.q.size(2) + head) * dim;
    const std::int64_t o = (query * problem_.q.size(2) + head) * value_dim;
    const Real scale = 1 / std::sqrt(static_cast<Real>(dim));
    const std::int64_t last =
        problem_.causal ? query + problem_.keys - problem_.queries : problem_.keys - 1;
    const std::int64_t seen = std::min(problem_.keys, last + 1);
    if (seen <= 0) return;

    std::vector<Real> weight(static_cast<std::size_t>(seen));
    Real top = -std::numeric_limits<Real>::infinity();
    Real size = 0;
    for (std::int64_t key = 0; key < seen; ++key) {
      const std::int64_t k = key_index(key, head, dim);
      Real score = 0;
      Real absolute = 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        const Real product = scale * at(problem_.q, q + i) * at(problem_.k, k + i);
        score += product;
        absolute += std::abs(product);
      }
      if (problem_.biased) {
        score += at(problem_.bias, key);
        absolute += std::abs(at(problem_.bias, key));
      }
      weight[static_cast<std::size_t>(key)] = score;
      top = std::max(top, score);
      size = std::max(size, absolute);
    }
    Real sum = 0;
    for (Real& one : weight) sum += one = std::exp(one - top);
    for (Real& one : weight) one /= sum;
    // A score is off by up to delta; a weight, which is the quotient of two exponentials, by a
    // factor of exp(2 * delta), and it stays between 0 and 1.
    const Real delta = kBoundFactor * epsilon * (1 + size + std::abs(top + std::log(sum)));
    std::vector<Real> spread(weight.size());
    for (std::size_t j = 0; j < weight.size(); ++j) {
      spread[j] = std::min<Real>(1, weight[j] * std::exp(2 * delta)) -
                  weight[j] * std::exp(-2 * delta) + floor;
    }

    const Real relative = kBoundFactor * epsilon + storage;
    Real row_delta = 0;   // rowsum(dout * out)
    Real delta_size = 0;  // of its terms
    Real delta_error = 0;
    for (std::int64_t i = 0; i < value_dim; ++i) {
      Real value = 0;
      Real error = out_floor;
      Real terms = 0;
      for (std::int64_t key = 0; key < seen; ++key) {
        const auto j = static_cast<std::size_t>(key);
        const Real v = at(problem_.v, key_index(key, head, value_dim) + i);
        value += weight[j] * v;
        terms += weight[j] * std::abs(v);
        error += (spread[j] + relative * (weight[j] + spread[j])) * std::abs(v) + floor;
      }
      out.add(o + i, value, error);
      const Real dout = at(problem_.dout, o + i);
      row_delta += dout * value;
      delta_size += std::abs(dout) * terms;
      delta_error += std::abs(dout) * error + floor;
    }
    for (std::int64_t key = 0; key < seen; ++key) {
      const auto j = static_cast<std::size_t>(key);
      const std::int64_t v = key_index(key, head, value_dim);
      Real dweight = 0;
      Real dweight_size = 0;
      for (std::int64_t i = 0; i < value_dim; ++i) {
        const Real dout = at(problem_.dout, o + i);
        dweight += dout * at(problem_.v, v + i);
        dweight_size += std::abs(dout * at(problem_.v, v + i)) + floor;
        dv.add(v + i, weight[j] * dout,
               (spread[j] + relative * (weight[j] + spread[j])) * std::abs(dout) + out_floor);
      }
      const Real terms = dweight_size + delta_size + delta_error;
      const Real dscore = weight[j] * (dweight - row_delta);
      const Real error =
          spread[j] * terms + (weight[j] + spread[j]) * (relative * terms + delta_error) + floor;
      const std::int64_t k = key_index(key, head, dim);
      for (std::int64_t i = 0; i < dim; ++i) {
        const Real some_k = at(problem_.k, k + i);
        const Real some_q = at(problem_.q, q + i);
        dq.add(q + i, scale * dscore * some_k, (error + floor) * std::abs(some_k) + out_floor);
        dk.add(k + i, scale * dscore * some_q, (error + floor) * std::abs(some_q) + out_floor);
      }
    }
  }

  const MagnitudeCase& problem_;
};

Real largest_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 0x1p1023L;
    case DType::kF16: return 65504;
    default: return 0x1p127L;
  }
}

/// The first element that is too far off; empty where none is.
std::string compare(const char* name, const Tensor& got, const Expected& expected) {
  const Real largest = largest_of(got.dtype());
  for (std::int64_t i = 0; i < got.num_elements(); ++i) {
    const Real truth = expected.value[static_cast<std::size_t>(i)];
    const Real bound = expected.bound[static_cast<std::size_t>(i)];
    // Where terms pass the largest number, so may their sum.
    if (std::abs(truth) + bound >= largest / 256) continue;
    const Real value = at(got, i);
    if (!std::isfinite(value) || std::abs(value - truth) > bound) {
      return std::string(name) + "[" + std::to_string(i) + "]: got " +
             std::to_string(static_cast<double>(value)) + ", expected " +
             std::to_string(static_cast<double>(truth)) + " within " +
             std::to_string(static_cast<double>(bound));
    }
  }
  return {};
}

std::string check(const MagnitudeCase& problem, const Results& results, const Truth& truth) {
  for (std::string wrong :
       {compare("out", results.out, truth.out), compare("dq", results.dq, truth.dq),
        compare("dk", results.dk, truth.dk), compare("dv", results.dv, truth.dv)}) {
    if (wrong.empty()) continue;
    return wrong + " (" + name_of(problem.dtype) + ", " + std::to_string(problem.queries) +
           " queries, " + std::to_string(problem.keys) + " keys, heads " +
           std::to_string(problem.heads) + " x " + std::to_string(problem.group) + ", dims " +
           std::to_string(problem.dim) + ", " + std::to_string(problem.value_dim) +
           (problem.causal ? ", causal" : "") + (problem.biased ? ", bias" : "") + ")";
  }
  return {};
}

int fuzz(std::int64_t cases, std::uint64_t seed) {
  const std::vector<Isa> isas = runnable_isas();
  std::vector<Context> contexts;
  for (const Isa isa : isas) contexts.emplace_back(ContextOptions{.num_threads = 1, .isa = isa});
  int failures = 0;
  for (std::int64_t i = 0; i < cases && failures < 10; ++i) {
    Random random(seed, static_cast<std::uint64_t>(i));
    const MagnitudeCase problem = random_case(random);
    std::vector<Results> results;
    for (const Context& context : contexts) results.push_back(run(context, problem));
    const Truth truth(problem, results.front());
    for (std::size_t isa = 0; isa < isas.size(); ++isa) {
      const std::string wrong = check(problem, results[isa], truth);
      if (wrong.empty()) continue;
      ++failures;
      std::cout << "case " << i << " of seed " << seed << " on " << name_of(isas[isa]) << ": "
                << wrong << std::endl;
    }
  }
  std::cout << cases << " cases on " << isas.size() << " instruction sets, " << failures
            << " failures" << std::endl;
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ladon::test

int main(int count, char** values) {
  const std::int64_t cases = count > 1 ? std::atoll(values[1]) : 500;
  const std::uint64_t seed =
      count > 2 ? static_cast<std::uint64_t>(std::atoll(values[2])) : 20261117;
  return ladon::test::fuzz(cases, seed);
}
