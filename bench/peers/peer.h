// Peers: other people's attention, timed between Ladon's own calls.
//
// Each is a Python process (peer_worker.py, which also tells of the protocol) with as many threads
// as Ladon has, or on the same GPU. One that cannot be had, or that fails, is left out, and the
// reason is kept.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ladon/device.h"
#include "peers/worker_process.h"
#include "shape.h"
#include "timing.h"

namespace ladon::bench {

struct PeerOptions {
  std::string interpreter{};  // empty: no peers
  double seconds = 120;       // that one answer may take
};

class Peer {
 public:
  /// Starts it and waits until it says that it is there. With `cpus` its threads are pinned.
  Peer(std::string name, const PeerOptions& options, int threads, const std::vector<int>& cpus,
       DeviceId device = {});

  const std::string& name() const { return name_; }
  const std::string& version() const { return version_; }
  bool available() const { return !worker_.failed(); }
  /// Why it is not, or no longer, available.
  const std::string& problem() const { return worker_.failure(); }

  /// Makes the case ready to run. Empty, or why it cannot be run.
  std::string prepare(const Shape& shape);
  /// Once prepared. The peer must outlive the work, which has no amount.
  Work work();
  void release();

  /// Gradients of attention: reads q, k, v and dout from one file and writes dq, dk and dv to
  /// another (raw bf16, dense). Empty, or why not.
  std::string gradients(const Shape& shape, const std::string& inputs, const std::string& outputs);

 private:
  /// Empty where the answer is that it is ready; else why it is not.
  std::string ask_for_ready(const std::string& request);
  std::optional<double> run_once();

  std::string name_;
  std::string version_;
  double seconds_;
  WorkerProcess worker_;
};

/// PyTorch and ONNX Runtime, each started; on a GPU PyTorch as it chooses its kernels, and by two
/// of them; none without an interpreter.
std::vector<std::unique_ptr<Peer>> start_peers(const PeerOptions& options, int threads,
                                               const std::vector<int>& cpus, DeviceId device = {});

}  // namespace ladon::bench
