#include "rank_bench.h"

#include <algorithm>
#include <array>
#include <exception>
#include <numeric>
#include <thread>

#include "ladon/attention.h"
#include "parallel/emulated_network.h"
#include "rank_problem.h"

namespace ladon::bench {
namespace {

/// A rank's measurement of one call.
struct Measured {
  double elapsed = 0;
  double computed = 0;
  double waited = 0;
  double messages = 0;
  double sent = 0;
};
constexpr std::int64_t kFields = 5;

/// Of all ranks.
std::vector<Measured> gather(const Context& context, Communicator& communicator,
                             const Measured& own) {
  const std::array<double, kFields> fields{own.elapsed, own.computed, own.waited, own.messages,
                                           own.sent};
  Tensor part(DType::kF64, {kFields});
  std::copy(fields.begin(), fields.end(), part.data_as<double>());
  Tensor all(DType::kF64, {communicator.size(), kFields});
  all_gather(context, communicator, part, all);
  std::vector<Measured> ranks;
  for (std::int64_t rank = 0; rank < communicator.size(); ++rank) {
    const double* const values = all.data_as<double>() + rank * kFields;
    ranks.push_back({values[0], values[1], values[2], values[3], values[4]});
  }
  return ranks;
}

template <class Field>
double most(const std::vector<Measured>& ranks, const Field& field) {
  double value = 0;
  for (const Measured& rank : ranks) value = std::max(value, rank.*field);
  return value;
}
template <class Field>
double sum(const std::vector<Measured>& ranks, const Field& field) {
  double value = 0;
  for (const Measured& rank : ranks) value += rank.*field;
  return value;
}

class RankBench {
 public:
  RankBench(const Context& context, Communicator& communicator, const RankBenchOptions& options,
            const Link& link)
      : context_(context), communicator_(communicator), options_(options), link_(link) {}

  void run(std::int64_t tokens, std::vector<RankRow>& rows) {
    RankProblem problem(context_, options_, tokens);
    // All ranks compute the whole at the same time, so that they share the machine as later on.
    const double forward = least([&] {
      attention(context_, problem.q, problem.k, problem.v, problem.options, problem.out,
                problem.lse);
    });
    const double backward = least([&] {
      attention_backward(context_, problem.q, problem.k, problem.v, problem.options,
                         {.out = problem.out, .lse = problem.lse, .dout = problem.dout},
                         {.dq = problem.dq, .dk = problem.dk, .dv = problem.dv});
    });
    const double merging = merge_seconds(problem);
    for (const ContextScheme scheme :
         {ContextScheme::kAllGather, ContextScheme::kUlysses, ContextScheme::kRing}) {
      const bool divides = options_.num_heads % communicator_.size() == 0 &&
                           options_.num_kv_heads % communicator_.size() == 0;
      if (scheme == ContextScheme::kUlysses && !divides) continue;
      RankPart part(context_, communicator_, problem, scheme);
      // A ring merges partial results, which one process does not have.
      const double extra = scheme == ContextScheme::kRing ? merging : 0;
      rows.push_back(row(problem, part, scheme, false, forward, extra));
      rows.push_back(row(problem, part, scheme, true, backward, 0));
    }
  }

 private:
  /// The least time of the rank that took longest.
  template <class Work>
  double least(const Work& work) {
    double least = 0;
    for (int i = 0; i < options_.repetitions; ++i) {
      barrier(communicator_);
      const double began = communicator_.seconds();
      work();
      const Measured own{.elapsed = communicator_.seconds() - began};
      const double now = most(gather(context_, communicator_, own), &Measured::elapsed);
      if (i == 0 || now < least) least = now;
    }
    return least;
  }

  /// What a rank of a ring takes to merge: each merge, and each part that it reads.
  double merge_seconds(const RankProblem& problem) {
    const std::int64_t tokens = problem.tokens / (2 * communicator_.size());
    const std::int64_t heads = problem.sizes.num_heads;
    const auto out_of = [&] {
      return Tensor(DType::kF32, {1, tokens, heads, problem.sizes.head_dim});
    };
    const auto lse_of = [&] { return Tensor(DType::kF64, {1, heads, tokens}); };
    std::vector<Tensor> outs, lses;
    for (int i = 0; i < 4; ++i) {
      outs.push_back(out_of());
      lses.push_back(lse_of());
    }
    const auto seconds = [&](std::size_t parts) {
      const std::vector<ConstTensorView> from(outs.begin(),
                                              outs.begin() + static_cast<std::ptrdiff_t>(parts));
      const std::vector<ConstTensorView> from_lse(
          lses.begin(), lses.begin() + static_cast<std::ptrdiff_t>(parts));
      return least([&] { merge_attention(context_, from, from_lse, outs.back(), lses.back()); });
    };
    const double one = seconds(1);
    const double of_part = std::max(0.0, (seconds(3) - one) / 2);
    const RingMerges count = ring_merges(communicator_.size());
    return count.merges * (one - of_part) + count.parts * of_part;
  }

  Measured measure(RankPart& part, bool backward) {
    barrier(communicator_);
    communicator_.reset_statistics();
    const double on_links = link_seconds_waited(communicator_);
    const double began = communicator_.seconds();
    part.run(backward);
    Measured own;
    own.elapsed = communicator_.seconds() - began;
    const CommunicatorStatistics& statistics = communicator_.statistics();
    own.computed = own.elapsed - statistics.seconds_waited - statistics.control_seconds_waited;
    own.waited = link_.name.empty() ? statistics.seconds_waited
                                    : link_seconds_waited(communicator_) - on_links;
    own.messages = static_cast<double>(statistics.messages_sent);
    own.sent = static_cast<double>(statistics.bytes_sent);
    return own;
  }

  /// `extra` is what a rank computes besides its share of what one process does.
  RankRow row(const RankProblem& problem, RankPart& part, ContextScheme scheme, bool backward,
              double alone, double extra) {
    std::vector<Measured> best;
    for (int i = 0; i < options_.repetitions; ++i) {
      const std::vector<Measured> ranks = gather(context_, communicator_, measure(part, backward));
      const auto elapsed = &Measured::elapsed;
      if (i == 0 || most(ranks, elapsed) < most(best, elapsed)) best = ranks;
    }
    const int count = communicator_.size();
    const Measured wrong{.elapsed = part.error(backward)};
    const double error = most(gather(context_, communicator_, wrong), &Measured::elapsed);
    const double others = std::max(1, count - 1);
    // Every stage sends to all others; where results are sent, there are two steps more.
    const bool has_results = backward || scheme == ContextScheme::kUlysses;
    const int stages =
        std::max(1, static_cast<int>(best[0].messages / others) - (has_results ? 2 : 0));
    double expected = 0;
    RankVolume largest;
    for (int rank = 0; rank < count; ++rank) {
      const RankVolume volume = volume_of(problem, scheme, backward, count, rank);
      expected += volume.inputs + volume.results;
      largest.inputs = std::max(largest.inputs, volume.inputs);
      largest.results = std::max(largest.results, volume.results);
    }
    const bool is_ring = scheme == ContextScheme::kRing;
    const double messages = is_ring ? others : stages * others;
    const std::vector<RankStep> steps =
        steps_of(scheme, backward, count, stages, alone / count + extra,
                 link_.seconds(messages, largest.inputs),
                 has_results ? link_.seconds(messages, largest.results) : 0);
    const double agreement = link_.seconds(kAgreementRounds * (count - 1), 0);
    const double communication =
        link_.seconds(sum(best, &Measured::messages), sum(best, &Measured::sent));
    const double computed = sum(best, &Measured::computed);
    RankRow result{.scheme = is_ring                             ? "ring"
                             : scheme == ContextScheme::kUlysses ? "Ulysses"
                                                                 : "all-gather",
                   .backward = backward,
                   .ranks = count,
                   .tokens = problem.tokens,
                   .sent = static_cast<std::int64_t>(sum(best, &Measured::sent)),
                   .expected = static_cast<std::int64_t>(expected),
                   .seconds = most(best, &Measured::elapsed),
                   .predicted = seconds_of(steps) + agreement,
                   .overlap = 1 - sum(best, &Measured::waited) / communication,
                   .imbalance = most(best, &Measured::computed) * count / computed};
    result.efficiency = alone / (count * result.seconds);
    constexpr double kMostError = 1e-4;
    if (!(error <= kMostError)) result.fault = "error " + std::to_string(error);
    return result;
  }

  const Context& context_;
  Communicator& communicator_;
  const RankBenchOptions& options_;
  const Link& link_;
};

/// From collectives with little and with much data, which have three rounds of messages.
void measure_link(const Context& context, Communicator& communicator, Link& link) {
  const auto time = [&](std::int64_t bytes) {
    const Tensor part(DType::kU8, {bytes});
    Tensor all(DType::kU8, {communicator.size(), bytes});
    double least = 1e30;
    for (int i = 0; i < 10; ++i) {
      barrier(communicator);
      const double began = communicator.seconds();
      all_gather(context, communicator, part, all);
      least = std::min(least, communicator.seconds() - began);
    }
    return least;
  };
  constexpr std::int64_t kLarge = 4 << 20;
  const double others = std::max(1, communicator.size() - 1);
  const double little = time(64);
  const double much = time(kLarge);
  const Measured own{.elapsed = little / (3 * others),
                     .computed = others * kLarge / std::max(much - little, 1e-9)};
  const std::vector<Measured> ranks = gather(context, communicator, own);
  link.latency = most(ranks, &Measured::elapsed);
  link.bandwidth = most(ranks, &Measured::computed);
}

/// 2, 4, ... and all of them.
std::vector<int> counts_up_to(int ranks) {
  std::vector<int> counts;
  for (int count = 2; count < ranks; count *= 2) counts.push_back(count);
  counts.push_back(ranks);
  return counts;
}

}  // namespace

std::int64_t usual_tokens(int ranks, std::int64_t about) {
  std::int64_t unit = 1;
  for (const int count : counts_up_to(ranks)) unit = std::lcm(unit, std::int64_t{2} * count);
  return (about + unit - 1) / unit * unit;
}

std::vector<RankRow> bench_ranks(const Context& context, Communicator& communicator,
                                 const RankBenchOptions& options, Link& link) {
  if (link.bandwidth == 0) measure_link(context, communicator, link);
  std::vector<RankRow> rows;
  for (const int count : counts_up_to(communicator.size())) {
    const bool takes_part = communicator.rank() < count;
    const auto group = communicator.split(takes_part ? 0 : 1, communicator.rank());
    if (takes_part) {
      RankBench bench(context, *group, options, link);
      bench.run(options.tokens, rows);
      if (count < communicator.size())
        bench.run(options.tokens / communicator.size() * count, rows);
    }
    barrier(communicator);
  }
  return rows;
}

std::vector<RankRow> bench_emulated_ranks(const ContextOptions& context_options, int ranks,
                                          const RankBenchOptions& options, const Link& link) {
  const auto ends =
      make_emulated_communicators(ranks, {.latency = link.latency, .bandwidth = link.bandwidth},
                                  {.deadline = std::chrono::minutes(10)});
  std::vector<RankRow> rows;
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(ends.size());
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ContextOptions own = context_options;
        own.num_threads = 1;  // the clock is that of the rank's thread
        const Context context(own);
        Link own_link = link;
        std::vector<RankRow> own_rows = bench_ranks(context, *ends[rank], options, own_link);
        if (rank == 0) rows = std::move(own_rows);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  return rows;
}

}  // namespace ladon::bench
