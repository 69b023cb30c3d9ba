#include "ladon/graph.h"

#include "core/context_impl.h"
#include "core/fail.h"
#include "core/step_recorder.h"

namespace ladon {

Graph::Graph(const Context& context) : recorder_(backend_of(context).make_recorder()) {}
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

void Graph::run(const std::function<void()>& step) {
  if (step == nullptr) fail("Graph::run", "step", "got none, expected a function");
  if (recorder_ == nullptr) return step();
  recorder_->begin();
  try {
    step();
  } catch (...) {
    // What was called before has changed lengths of caches; it must happen. The step's own error is
    // the one to report.
    try {
      recorder_->end();
    } catch (...) {
    }
    throw;
  }
  recorder_->end();
}

GraphStatistics Graph::statistics() const noexcept {
  return recorder_ == nullptr ? GraphStatistics{} : recorder_->statistics();
}

}  // namespace ladon
