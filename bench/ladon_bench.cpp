// The benchmark: each case is checked, then timed in turns with the machine's own limit.
//
// Only ratios inside one run mean anything: the share of the ceiling, and one row beside another.
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ceiling.h"
#include "ladon/ladon.h"
#include "options.h"
#include "pinning.h"
#include "problem.h"
#include "report.h"
#include "timing.h"

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
std::vector<Isa> chosen_isas(const Options& options) {
  std::vector<Isa> isas;
  for (const IsaInfo& info : list_isas()) {
    if (!info.runnable || info.isa == Isa::kReference) continue;
    if (!options.isa || *options.isa == info.isa) isas.push_back(info.isa);
  }
  return isas;
}

class Benchmark {
 public:
  explicit Benchmark(const Options& options) : options_(options) {
    if (options.quick) limits_ = {0.2, 3, 8};
  }

  /// The exit status.
  int run() {
    const std::vector<Isa> isas = chosen_isas(options_);
    std::vector<Case> cases;
    for (const Isa isa : isas) append(cases, compute_cases(isa));
    append(cases, decode_cases(isas.back()));
    Case scaled = compute_cases(isas.back()).front();
    scaled.target.reset();
    const std::string scaling_name = "scaling " + scaled.full_name();
    const bool scale = matches(scaling_name);
    if (cases.empty() && !scale)
      throw UsageError("--filter: no case holds '" + options_.filter + "'");

    const int threads = make_context(isas.back(), options_.threads)->num_threads();
    const Machine machine = describe_machine(threads);
    print_head(machine);
    for (const Case& one : cases) run_case(one);
    if (scale && threads > 1) run_scaling(scaled);
    if (!options_.json.empty()) {
      write_json(options_.json, machine, options_.quick, rows_, scaling_);
      std::printf("\nwrote %s\n", options_.json.c_str());
    }
    return faults_ == 0 ? 0 : 1;
  }

 private:
  bool matches(const std::string& name) const {
    return name.find(options_.filter) != std::string::npos;
  }

  void append(std::vector<Case>& cases, const std::vector<Case>& more) const {
    for (const Case& one : more) {
      if (matches(one.full_name())) cases.push_back(one);
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
    print_fault(name_of(one.isa), one.shape.name(), fault);
    ++faults_;
    return false;
  }

  /// The case and its ceiling are the first two of the pieces.
  void report(const Case& one, const std::string& name, int threads, const TimedPieces& timed) {
    rows_.push_back({name, name_of(one.isa), one.shape.bound, threads, timed.pieces[0],
                     timed.pieces[1], timed.disturbed, one.target});
    print_row(rows_.back());
  }

  void run_case(const Case& one) {
    const std::unique_ptr<Context> context = make_context(one.isa, options_.threads);
    Problem problem(one.shape);
    if (!passes(one, problem, *context)) return;
    const PinnedThreads pinned(*context);
    const TimedPieces timed =
        time_in_turns({work_of(one, problem, *context), ceiling_of(one, *context)}, limits_);
    report(one, one.shape.name(), context->num_threads(), timed);
  }

  /// One thread and all of them in the same rounds.
  void run_scaling(const Case& one) {
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
    scaling_ = {one.shape.name(),
                name_of(one.isa),
                all->num_threads(),
                timings[2].rate / timings[0].rate,
                timings[3].rate / timings[1].rate,
                timed.disturbed};
    print_scaling(*scaling_);
  }

  Options options_;
  TimingLimits limits_;
  std::unique_ptr<ReadBuffer> buffer_;  // made when first wanted
  std::vector<Row> rows_;
  std::optional<Scaling> scaling_;
  int faults_ = 0;
};

}  // namespace
}  // namespace ladon::bench

int main(int argc, char** argv) {
  using namespace ladon::bench;
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) {
      std::fputs(kUsage, stdout);
      return 0;
    }
    if (!options.json.empty()) check_json_path(options.json);
    return Benchmark(options).run();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "ladon_bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ladon_bench: %s\n", error.what());
    return 1;
  }
}
