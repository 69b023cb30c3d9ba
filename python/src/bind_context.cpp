// Context, the instruction sets, the version, and the memory that caches need.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "keywords.h"
#include "ladon/alibi.h"
#include "ladon/cache_memory.h"
#include "ladon/context.h"
#include "ladon/error.h"
#include "ladon/isa.h"
#include "ladon/version.h"
#include "module.h"

namespace ladon::python {
namespace {

void make_context(Context* self, const nb::kwargs& kwargs) {
  Keywords keywords("Context", kwargs);
  std::int64_t num_threads = 0;
  std::optional<std::string> isa;
  keywords.read("num_threads", num_threads);
  keywords.read("isa", isa);
  keywords.finish();
  ContextOptions options;
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw_value_error(
        keywords.where("num_threads"),
        "got " + std::to_string(num_threads) + ", expected 0 to " + std::to_string(kMaxThreads));
  }
  options.num_threads = static_cast<int>(num_threads);
  if (isa) {
    options.isa = isa_from_name(*isa);
    if (!options.isa) {
      throw_value_error(keywords.where("isa"), "got '" + *isa + "', which is not in list_isas()");
    }
  }
  new (self) Context(options);
}

nb::list isa_list() {
  nb::list result;
  for (const IsaInfo& info : list_isas()) {
    nb::dict row;
    row["name"] = info.name;
    row["runnable"] = info.runnable;
    row["chosen"] = info.chosen;
    row["reason"] = info.reason;
    nb::list kernels;
    for (const std::string& kernel : info.kernels) kernels.append(kernel);
    row["kernels"] = kernels;
    result.append(row);
  }
  return result;
}

nb::list cache_memory(const nb::kwargs& kwargs) {
  Keywords keywords("compare_cache_memory", kwargs);
  CacheMemoryOptions options;
  keywords.read("length", options.length);
  keywords.read("batch", options.batch);
  keywords.read("num_layers", options.num_layers);
  keywords.read("dtype", options.format);
  keywords.read("num_heads", options.num_heads);
  keywords.read("head_dim", options.head_dim);
  keywords.read("value_dim", options.value_dim);
  keywords.read("num_kv_heads", options.num_kv_heads);
  keywords.read("kv_rank", options.kv_rank);
  keywords.read("rope_dim", options.rope_dim);
  keywords.finish();
  nb::list result;
  for (const CacheMemory& row : compare_cache_memory(options)) {
    nb::dict entry;
    entry["kind"] = nb::str(row.kind.data(), row.kind.size());
    entry["elements"] = row.elements;
    entry["bytes"] = row.bytes;
    entry["reduction"] = row.reduction;
    result.append(entry);
  }
  return result;
}

nb::list slopes(nb::handle num_heads) {
  nb::list result;
  for (const double slope : alibi_slopes(to_integer(num_heads, {"alibi_slopes", "num_heads"}))) {
    result.append(slope);
  }
  return result;
}

/// What the library would see of an array: for the tests of what is shared.
nb::object describe_array(nb::handle object) {
  const Array array = Array::input(object, {"_describe_array", "array"});
  const ConstTensorView view = array.view();
  nb::list shape;
  nb::list strides;
  for (const std::int64_t size : view.shape()) shape.append(size);
  for (const std::int64_t stride : view.strides()) strides.append(stride);
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(view.data()), name_of(view.dtype()),
                        nb::tuple(shape), nb::tuple(strides));
}

}  // namespace

void bind_context(nb::module_& module) {
  nb::class_<Context>(module, "Context",
                      "Threads and kernels that calls use: pass it as `context`. Calls without one "
                      "share a default of all CPUs\nand the fastest kernels. Results never depend "
                      "on the number of threads.")
      .def("__init__", &make_context,
           nb::sig("def __init__(self, *, num_threads: int = 0, isa: str | None = None) -> None"),
           "num_threads: 0 is one for each CPU. isa: a name of list_isas(); None is LADON_ISA, or "
           "else the fastest.")
      .def_prop_ro("num_threads", &Context::num_threads)
      .def_prop_ro("isa", [](const Context& self) { return name_of(self.isa()); })
      .def("__repr__", [](const Context& self) {
        return "ladon.Context(num_threads=" + std::to_string(self.num_threads()) + ", isa='" +
               name_of(self.isa()) + "')";
      });
  module.def("list_isas", &isa_list, nb::sig("def list_isas() -> list[dict[str, Any]]"),
             "Every instruction set that Ladon has kernels for, slowest first: name, runnable, "
             "chosen, reason, kernels.");
  module.def("version", &version, "The version of the library.");
  module.def(
      "compare_cache_memory", &cache_memory,
      nb::sig("def compare_cache_memory(*, length: int, num_heads: int, head_dim: int, batch: int "
              "= 1, num_layers: int = 1, dtype: DTypeLike = 'f32', value_dim: int = 0, "
              "num_kv_heads: int = 0, kv_rank: int = 0, rope_dim: int = 0) -> "
              "list[dict[str, Any]]"),
      "What the caches of MHA, GQA, MQA and MLA need for one model, side by side: kind, elements, "
      "bytes, reduction.");
  module.def("alibi_slopes", &slopes, nb::arg("num_heads"),
             nb::sig("def alibi_slopes(num_heads: int) -> list[float]"),
             "The slopes that ALiBi models are trained with.");
  module.def("_describe_array", &describe_array, nb::arg("array").none());
}

}  // namespace ladon::python
