// Graph: steps that run as one CUDA graph.
#include "ladon/graph.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "devices.h"
#include "keep_arrays.h"
#include "keywords.h"
#include "module.h"

namespace ladon::python {
namespace {

struct BoundGraph {
  const BoundContext& context;  // kept alive by Python
  Graph graph;
};

nb::dict statistics_of(const BoundGraph& self) {
  const GraphStatistics statistics = self.graph.statistics();
  nb::dict result;
  result["num_nodes"] = statistics.num_nodes;
  result["num_changed"] = statistics.num_changed;
  result["num_built"] = statistics.num_built;
  return result;
}

/// Calls the step, and returns its result when its work is enqueued.
nb::object run(BoundGraph& self, const nb::callable& step) {
  if (self.context.device().is_cpu()) return step();
  nb::object result;
  // Until then other libraries must not reuse the memory that the step reads.
  const KeepArrays keep;
  without_gil([&] {
    self.graph.run([&] {
      const nb::gil_scoped_acquire acquire;
      result = step();
    });
  });
  // Within the step PyTorch's stream has waited for nothing.
  if (torch_uses_gpu()) hand_over_to_torch(self.context);
  return result;
}

}  // namespace

void bind_graph(nb::module_& module) {
  nb::class_<BoundGraph>(module, "Graph",
                         "Runs a step that is repeated, such as the decoding of one token, as one "
                         "CUDA graph: results are those of the same calls without it, to the bit.")
      .def(
          "__init__",
          [](BoundGraph* self, const BoundContext& context) {
            new (self) BoundGraph{context, Graph(context)};
          },
          nb::arg("context"), nb::keep_alive<1, 2>(),
          nb::sig("def __init__(self, context: Context) -> None"))
      .def("run", &run, nb::arg("step"), nb::sig("def run(self, step: Callable[[], Any]) -> Any"),
           "Calls step() and returns what it returns. Its calls with the Context are gathered and "
           "enqueued at once, after everything else that the step enqueues: work of other "
           "libraries on their results belongs after run(). None of them may wait for the device, "
           "which copies to and from the CPU do. On the CPU it calls step() and that is all.")
      .def("statistics", &statistics_of, nb::sig("def statistics(self) -> dict[str, int]"),
           "Of the last run: num_nodes, num_changed since the graph ran before, and num_built, the "
           "graphs that were built so far.")
      .def("__repr__", [](const BoundGraph& self) {
        const GraphStatistics statistics = self.graph.statistics();
        return "<ladon.Graph on " + self.context.device().to_string() + ": " +
               std::to_string(statistics.num_nodes) + " nodes, built " +
               std::to_string(statistics.num_built) + " times>";
      });
}

}  // namespace ladon::python
