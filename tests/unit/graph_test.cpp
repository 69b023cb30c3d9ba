// Graph where there is nothing to gather; tests/cuda has the others.
#include "ladon/graph.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

#include "support/error_of.h"
#include "support/places.h"

namespace ladon::test {
namespace {

TEST(GraphTest, CallsTheStep) {
  const Context context;
  Graph graph(context);
  int calls = 0;
  graph.run([&] { ++calls; });
  Graph moved = std::move(graph);
  moved.run([&] { ++calls; });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(moved.statistics().num_nodes, 0);
  EXPECT_THROW(moved.run([] { throw std::runtime_error("mine"); }), std::runtime_error);
}

TEST(GraphTest, RefusesNoStep) {
  for (const Place& place : places()) {
    const Context context = place.context();
    Graph graph(context);
    EXPECT_EQ(error_of([&] { graph.run({}); }), "Graph::run: step: got none, expected a function");
  }
}

}  // namespace
}  // namespace ladon::test
