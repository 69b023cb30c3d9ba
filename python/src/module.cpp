#include <nanobind/nanobind.h>

#include "module.h"

NB_MODULE(_ladon, module) {
  using namespace ladon::python;  // NOLINT(google-build-using-namespace)
  // What is still held when the interpreter ends (by a module's variable in a cycle, by another
  // extension) is not the user's to mend: the system takes the memory back.
  nanobind::set_leak_warnings(false);
  module.doc() = "The compiled part of the package ladon.";
  bind_errors(module);
  bind_context(module);
  bind_graph(module);
  bind_attention(module);
  bind_rope(module);
  bind_caches(module);
  bind_pages(module);
  bind_layers(module);
  bind_layer_classes(module);
  bind_optimisers(module);
  bind_models(module);
  bind_convert(module);
  bind_communicator(module);
  bind_context_parallel(module);
  bind_context_parallel_latent(module);
  bind_tensor_parallel(module);
  bind_spread_cache(module);
}
