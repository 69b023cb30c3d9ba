// KeepArrays: what a Graph's step reads must live until the graph is enqueued.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace ladon::python {

namespace nb = nanobind;

/// While one is alive, it keeps the arrays that calls of its thread read: a Graph reads them later.
class KeepArrays {
 public:
  KeepArrays() noexcept;
  ~KeepArrays();
  KeepArrays(const KeepArrays&) = delete;
  KeepArrays& operator=(const KeepArrays&) = delete;

  static void add(nb::handle object);

 private:
  std::vector<nb::object> objects_;
  KeepArrays* const outer_;
};

}  // namespace ladon::python
