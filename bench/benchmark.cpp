#include "benchmark.h"

#include <memory>
#include <utility>

#include "ceiling.h"
#include "ladon/context.h"
#include "pinning.h"

namespace ladon::bench {
namespace {

struct Case {
  Isa isa = Isa::kBaseline;
  Shape shape;
  std::optional<double> target{};

  std::string full_name() const { return std::string(name_of(isa)) + " " + shape.name(); }
};

std::vector<Case> compute_cases(Isa isa) {
  std::vector<Case> cases;
  const auto add = [&](Pass pass, DType dtype, std::int64_t head_dim, bool causal) {
    Case one;
    one.isa = isa;
    one.shape.pass = pass;
    one.shape.dtype = dtype;
    one.shape.head_dim = head_dim;
    one.shape.causal = causal;
    if (one.full_name() == "avx512 f32 forward B1 H8 S2048 D128 full") one.target = 0.50;
    cases.push_back(one);
  };
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const std::int64_t head_dim : {128, 64}) {
      for (const bool causal : {false, true}) add(pass, DType::kF32, head_dim, causal);
    }
  }
  add(Pass::kForward, DType::kBF16, 128, false);
  add(Pass::kForward, DType::kF64, 128, false);
  return cases;
}

std::vector<Case> decode_cases(Isa isa) {
  std::vector<Case> cases;
  const auto add = [&](DType dtype, Source source, DType storage, std::int64_t batch) {
    Case one;
    one.isa = isa;
    one.shape.bound = Bound::kMemory;
    one.shape.dtype = dtype;
    one.shape.source = source;
    one.shape.storage = storage;
    one.shape.batch = batch;
    one.shape.query_len = 1;
    one.shape.kv_len = 8192;
    one.shape.num_heads = 32;
    one.shape.num_kv_heads = 8;
    cases.push_back(one);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    add(dtype, Source::kTensors, dtype, 1);
    add(dtype, Source::kContiguous, dtype, 1);
    add(dtype, Source::kPaged, dtype, 1);
    add(dtype, Source::kPaged, DType::kI8, 1);
  }
  // The same work twice: a batch whose sequences have their own pages, and one that shares them.
  add(DType::kF32, Source::kPaged, DType::kBF16, 8);
  add(DType::kF32, Source::kSharedPrefix, DType::kBF16, 8);
  return cases;
}

/// The instruction sets to measure, slowest first.
std::vector<Isa> chosen_isas(const BenchmarkOptions& options) {
  std::vector<Isa> isas;
  for (const IsaInfo& info : list_isas()) {
    if (!info.runnable || info.isa == Isa::kReference) continue;
    if (!options.isa || *options.isa == info.isa) isas.push_back(info.isa);
  }
  return isas;
}

class Benchmark {
 public:
  Benchmark(const BenchmarkOptions& options, BenchmarkListener listener)
      : options_(options), listener_(std::move(listener)) {
    if (options.quick) limits_ = {0.2, 3, 8};
    const std::vector<Isa> isas = chosen_isas(options_);
    if (isas.empty()) return;
    for (const Isa isa : isas) append(compute_cases(isa));
    append(decode_cases(isas.back()));
    scaled_ = compute_cases(isas.back()).front();
    scaled_.target.reset();
    scale_ = matches("scaling " + scaled_.full_name());
  }

  int count() const { return static_cast<int>(cases_.size()) + (scale_ ? 1 : 0); }

  BenchmarkResults run() {
    for (const Case& one : cases_) run_case(one);
    if (scale_ && make_context(scaled_.isa, options_.threads)->num_threads() > 1) run_scaling();
    return std::move(results_);
  }

 private:
  bool matches(const std::string& name) const {
    return name.find(options_.filter) != std::string::npos;
  }

  void append(const std::vector<Case>& more) {
    for (const Case& one : more) {
      if (matches(one.full_name())) cases_.push_back(one);
    }
  }

  static std::unique_ptr<Context> make_context(Isa isa, int threads) {
    ContextOptions options;
    options.isa = isa;
    options.num_threads = threads;
    return std::make_unique<Context>(options);
  }

  Work ceiling_of(const Case& one, const Context& context) {
    if (one.shape.bound == Bound::kCompute) return fma_ceiling(context, one.shape.dtype);
    if (!buffer_) buffer_ = std::make_unique<ReadBuffer>();
    return buffer_->read_ceiling(context);
  }

  static Work work_of(const Case& one, Problem& problem, const Context& context) {
    const bool compute = one.shape.bound == Bound::kCompute;
    return {[&] { problem.run(context); }, compute ? one.shape.flops() : one.shape.kv_bytes()};
  }

  /// False, and said so, when the case gives a wrong answer.
  bool passes(const Case& one, Problem& problem, const Context& context) {
    const std::string fault = problem.check(context);
    if (fault.empty()) return true;
    results_.faults.push_back({one.shape.name(), name_of(one.isa), fault});
    listener_.fault(results_.faults.back());
    return false;
  }

  /// The case and its ceiling are the first two of the pieces.
  void report(const Case& one, const std::string& name, int threads, const TimedPieces& timed) {
    results_.rows.push_back({name, name_of(one.isa), one.shape.bound, threads, timed.pieces[0],
                             timed.pieces[1], timed.disturbed, one.target});
    listener_.row(results_.rows.back());
  }

  void run_case(const Case& one) {
    listener_.begin(one.full_name());
    const std::unique_ptr<Context> context = make_context(one.isa, options_.threads);
    Problem problem(one.shape);
    if (!passes(one, problem, *context)) return;
    const PinnedThreads pinned(*context);
    const TimedPieces timed =
        time_in_turns({work_of(one, problem, *context), ceiling_of(one, *context)}, limits_);
    report(one, one.shape.name(), context->num_threads(), timed);
  }

  /// One thread and all of them in the same rounds.
  void run_scaling() {
    const Case& one = scaled_;
    listener_.begin("scaling " + one.full_name());
    const std::unique_ptr<Context> single = make_context(one.isa, 1);
    const std::unique_ptr<Context> all = make_context(one.isa, options_.threads);
    Problem problem(one.shape);
    if (!passes(one, problem, *single)) return;
    const PinnedThreads pinned(*all);
    const TimedPieces timed =
        time_in_turns({work_of(one, problem, *single), ceiling_of(one, *single),
                       work_of(one, problem, *all), ceiling_of(one, *all)},
                      limits_);
    report(one, one.shape.name() + ", 1 thread", 1, timed);
    const std::vector<Timing>& timings = timed.pieces;
    results_.scaling = {one.shape.name(),
                        name_of(one.isa),
                        all->num_threads(),
                        timings[2].rate / timings[0].rate,
                        timings[3].rate / timings[1].rate,
                        timed.disturbed};
  }

  BenchmarkOptions options_;
  BenchmarkListener listener_;
  TimingLimits limits_;
  std::vector<Case> cases_;
  Case scaled_;  // for the comparison of threads
  bool scale_ = false;
  std::unique_ptr<ReadBuffer> buffer_;  // made when first wanted
  BenchmarkResults results_;
};

}  // namespace

int count_cases(const BenchmarkOptions& options) { return Benchmark(options, {}).count(); }

BenchmarkResults run_benchmark(const BenchmarkOptions& options, const BenchmarkListener& listener) {
  return Benchmark(options, listener).run();
}

}  // namespace ladon::bench
