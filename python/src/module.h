// The parts of the extension module, one function for each file.
#pragma once

#include <nanobind/nanobind.h>

namespace ladon::python {

void bind_errors(nanobind::module_& module);
void bind_context(nanobind::module_& module);
void bind_graph(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_rope(nanobind::module_& module);
void bind_caches(nanobind::module_& module);
void bind_pages(nanobind::module_& module);
void bind_layers(nanobind::module_& module);
void bind_layer_classes(nanobind::module_& module);
void bind_optimisers(nanobind::module_& module);
void bind_models(nanobind::module_& module);
void bind_convert(nanobind::module_& module);
void bind_communicator(nanobind::module_& module);
void bind_context_parallel(nanobind::module_& module);
void bind_context_parallel_latent(nanobind::module_& module);
void bind_tensor_parallel(nanobind::module_& module);
void bind_spread_cache(nanobind::module_& module);

}  // namespace ladon::python
