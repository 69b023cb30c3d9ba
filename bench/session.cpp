#include "session.h"

namespace ladon::bench {

Session::Session(const BenchmarkOptions& options, const BenchmarkListener& listener)
    : options_(options), listener_(listener) {
  if (options.quick) limits_ = {.min_seconds = 0.2, .min_rounds = 3, .max_seconds = 8};
}

std::unique_ptr<Context> Session::make_context(Isa isa, int threads) {
  ContextOptions options;
  options.isa = isa;
  options.num_threads = threads;
  return std::make_unique<Context>(options);
}

Work Session::ceiling(const Context& context, Limit limit, DType dtype) {
  if (limit != Limit::kMemory) return compute_ceiling(context, limit, dtype);
  if (!buffer_) buffer_ = std::make_unique<ReadBuffer>();
  return buffer_->read_ceiling(context);
}

Work Session::work_of(const Case& one, Workload& workload, const Context& context) {
  return {.run = [&workload, &context] { workload.run(context); },
          .amount = one.limit == Limit::kMemory ? workload.bytes() : workload.flops()};
}

bool Session::passes(const Case& one, Workload& workload, const Context& context) {
  const std::string fault = workload.check(context);
  if (fault.empty()) return true;
  results_.faults.push_back({one.name(), ladon::name_of(one.isa), fault});
  listener_.fault(results_.faults.back());
  return false;
}

}  // namespace ladon::bench
