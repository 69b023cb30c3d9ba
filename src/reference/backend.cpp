#include "reference/backend.h"

#include "core/element.h"
#include "core/host_copy.h"
#include "reference/merge.h"
#include "reference/projection_reference.h"

namespace ladon::reference {

void ReferenceBackend::copy(const ConstTensorView& from, const TensorView& to) {
  copy_on_host(&workers(), from, to);
}

void ReferenceBackend::merge(const MergeParams& params) { reference::merge(host(), params); }

void ReferenceBackend::project(const ProjectionParams& params) {
  for (std::int64_t h = 0; h < params.steps.heads; ++h) reference::project(of_head(params, h));
}

void ReferenceBackend::project_input_gradient(const ProjectionParams& params) {
  for (std::int64_t h = 0; h < params.steps.heads; ++h) {
    reference::project_input_gradient(of_head(params, h));
  }
}

void ReferenceBackend::project_weight_gradient(const ProjectionParams& params) {
  reference::project_weight_gradient(params);
}

}  // namespace ladon::reference
