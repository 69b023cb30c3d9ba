// Graph: steps that run as one CUDA graph.
#include "ladon/graph.h"

#include <nanobind/nanobind.h>

#include "devices.h"
#include "module.h"

namespace ladon::python {
namespace {

nb::dict statistics_of(const Graph& graph) {
  const GraphStatistics statistics = graph.statistics();
  nb::dict result;
  result["num_nodes"] = statistics.num_nodes;
  result["num_changed"] = statistics.num_changed;
  result["num_built"] = statistics.num_built;
  return result;
}

/// The step's result. Calls within it let go of the interpreter themselves.
nb::object run(Graph& graph, const nb::callable& step) {
  nb::object result;
  graph.run([&] { result = step(); });
  return result;
}

}  // namespace

void bind_graph(nb::module_& module) {
  nb::class_<Graph>(module, "Graph",
                    "Runs a step that is repeated, such as the decoding of one token, as one CUDA "
                    "graph: results are those of the same calls without it, to the bit.")
      .def(
          "__init__", [](Graph* self, const BoundContext& context) { new (self) Graph(context); },
          nb::arg("context"), nb::keep_alive<1, 2>(),
          nb::sig("def __init__(self, context: Context) -> None"))
      .def("run", &run, nb::arg("step"), nb::sig("def run(self, step: Callable[[], Any]) -> Any"),
           "Calls step() and returns what it returns. Its calls with the Context are gathered and "
           "enqueued at once. None of them may wait for the device, which copies to and from the "
           "CPU do. On the CPU it calls step() and that is all.")
      .def("statistics", &statistics_of, nb::sig("def statistics(self) -> dict[str, int]"),
           "Of the last run: num_nodes, num_changed since the graph ran before, and num_built, the "
           "graphs that were built so far.");
}

}  // namespace ladon::python
