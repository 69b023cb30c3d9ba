#include "reference/backend.h"

#include <optional>

#include "core/compute_dtype.h"
#include "core/element.h"
#include "core/host_copy.h"
#include "core/parallel.h"
#include "reference/merge.h"
#include "reference/projection_reference.h"

namespace ladon::reference {
namespace {

/// Calls body(row) for every row of the result; rows are independent of each other.
template <class Body>
void for_each_row(const Workers& workers, const ProjectionParams& params, std::int64_t rows,
                  const Body& body) {
  const double work = static_cast<double>(params.steps.heads) * static_cast<double>(params.rows) *
                      static_cast<double>(params.in_features) *
                      static_cast<double>(params.out_features);
  interruptible_for(workers, useful_threads(workers, work), rows,
                    [&](std::int64_t row, int) { body(row); });
}

}  // namespace

void ReferenceBackend::copy(const ConstTensorView& from, const TensorView& to) {
  copy_on_host(&workers(), from, to);
}

void ReferenceBackend::merge(const MergeParams& params) { reference::merge(host(), params); }

void ReferenceBackend::project(const ProjectionParams& params) {
  for_each_row(workers(), params, params.steps.heads * params.rows, [&](std::int64_t task) {
    project_row(of_head(params, task / params.rows), task % params.rows);
  });
}

void ReferenceBackend::project_input_gradient(const ProjectionParams& params) {
  for_each_row(workers(), params, params.steps.heads * params.rows, [&](std::int64_t task) {
    project_input_gradient_row(of_head(params, task / params.rows), task % params.rows);
  });
}

void ReferenceBackend::project_input_gradients(std::span<const ProjectionParams> params) {
  const ProjectionParams& first = params.front();
  const Dims shape{first.rows, first.in_features};
  const TensorView dx(first.dx.data, first.dx.dtype, shape, {first.dx.stride, 1});
  const DType dtype = compute_dtype(dx.dtype());
  std::optional<Workspace> memory;
  TensorView sums = dx;
  if (dtype != dx.dtype()) {
    memory.emplace(scratch(), static_cast<std::size_t>(dx.num_elements()) * size_of(dtype));
    sums = TensorView(memory->data(), dtype, shape);
  }
  zero(sums);
  for (ProjectionParams one : params) {
    one.dx = {sums.data(), dtype, sums.stride(0)};
    project_input_gradient(one);
  }
  if (memory) copy(sums, dx);
}

void ReferenceBackend::project_weight_gradient(const ProjectionParams& params) {
  for_each_row(workers(), params, params.out_features,
               [&](std::int64_t out) { project_weight_gradient_row(params, out); });
}

}  // namespace ladon::reference
