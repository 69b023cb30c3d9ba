#include "session.h"

#include "device_work.h"
#include "pinning.h"

namespace ladon::bench {

TimingLimits timing_limits(const BenchmarkOptions& options) {
  if (options.quick) return {.min_seconds = 0.2, .min_rounds = 3, .max_seconds = 2};
  return {};
}

Session::Session(const BenchmarkOptions& options, const BenchmarkListener& listener)
    : options_(options), listener_(listener), limits_(timing_limits(options)) {}

std::unique_ptr<Context> Session::make_context(Isa isa, int threads) const {
  ContextOptions options;
  options.device = options_.device.device;
  options.device_index = options_.device.index;
  if (options_.device.is_cpu()) options.isa = isa;
  options.num_threads = threads;
  return std::make_unique<Context>(options);
}

Work Session::ceiling(const Context& context, Limit limit, DType dtype) {
  if (!counts_bytes(limit)) return compute_ceiling(context, limit, dtype);
  if (!buffer_) buffer_ = std::make_unique<ReadBuffer>(context);
  return limit == Limit::kRead ? buffer_->read_ceiling(context) : buffer_->memory_ceiling(context);
}

Work Session::work_of(const Case& one, Workload& workload, const Context& context) {
  return work_on(
      context, [&workload, &context] { workload.run(context); },
      counts_bytes(one.limit) ? workload.bytes() : workload.flops());
}

void Session::start_peers() {
  if (options_.peers.interpreter.empty()) return;
  ContextOptions plain;
  plain.num_threads = options_.threads;
  const Context context(plain);
  peers_ = bench::start_peers(options_.peers, context.num_threads(), cpus_to_pin(context),
                              options_.device);
  for (const auto& peer : peers_) {
    results_.peers.push_back({peer->name(), peer->version(), peer->problem()});
    listener_.peer(results_.peers.back());
  }
}

Peer* Session::peer(const std::string& name) {
  for (const auto& peer : peers_) {
    if (peer->name() == name && peer->available()) return peer.get();
  }
  return nullptr;
}

std::vector<Peer*> Session::prepare_peers(const Shape& shape, Row& row) {
  std::vector<Peer*> ready;
  for (const auto& peer : peers_) {
    const std::string why_not = peer->available() ? peer->prepare(shape) : peer->problem();
    if (why_not.empty()) {
      ready.push_back(peer.get());
    } else {
      row.peers.push_back({.peer = peer->name(), .why_not = why_not});
    }
  }
  note_peers();
  return ready;
}

void Session::release_peers(const std::vector<Peer*>& prepared) {
  for (Peer* peer : prepared) {
    if (peer->available()) peer->release();
  }
  note_peers();
}

void Session::note_peers() {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i]->problem() == results_.peers[i].problem) continue;
    results_.peers[i].problem = peers_[i]->problem();
    listener_.peer(results_.peers[i]);
  }
}

bool Session::passes(const Case& one, Workload& workload, const Context& context) {
  const std::string fault = workload.check(context);
  if (fault.empty()) return true;
  results_.faults.push_back({one.name(), one.kernels(), fault});
  listener_.fault(results_.faults.back());
  return false;
}

}  // namespace ladon::bench
