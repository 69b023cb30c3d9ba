// Graph: a step that is repeated, such as the decoding of one token, as one launch of a CUDA graph.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "ladon/context.h"
#include "ladon/export.h"

namespace ladon {

class StepRecorder;

/// How a Graph's last run went.
struct GraphStatistics {
  std::int64_t num_nodes = 0;    // kernels and copies
  std::int64_t num_changed = 0;  // whose params differ from the run before
  std::int64_t num_built = 0;    // graphs that were built so far: at first, and for other kernels
};

/// Runs a step whose kernels are gathered first and then enqueued at once. GPUs start the kernels
/// of a graph faster one after the other than launches that come one by one.
///
///   ladon::Graph graph(context);
///   while (...) {
///     graph.run([&] { layer.forward(context, token, cache, {}, output); });
///     ...
///   }
///
/// A step is any code that calls Ladon with the Context: layers over caches of any kind, forks and
/// truncations in between. It runs anew each time, so lengths, pages and everything else that the
/// host decides are right; on the device only what changed since the last run is changed. Results
/// are those of the same calls without a Graph, to the bit.
///
/// The gathered work comes after everything else that is enqueued within the step. So work of other
/// libraries on its results belongs after run(), and memory that is not a Tensor's and that the
/// step reads must stay until then.
///
/// Within a step nothing can be read back or waited for: copies between the host and the device,
/// synchronize() and clip_gradients() throw Error. So do calls with the Context from other threads.
/// A step that throws has the effects of the calls before.
///
/// On the CPU, where there is nothing to gather, run() calls the step and that is all.
class LADON_API Graph {
 public:
  /// Whose Context must outlive it.
  explicit Graph(const Context& context);
  ~Graph();
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Calls step() once, and enqueues what it gathered. Not to be called within a step.
  void run(const std::function<void()>& step);

  GraphStatistics statistics() const noexcept;

 private:
  std::unique_ptr<StepRecorder> recorder_;  // null on the CPU
};

}  // namespace ladon
