// Context, the instruction sets, the version, and the memory that caches need.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "keywords.h"
#include "ladon/alibi.h"
#include "ladon/cache_memory.h"
#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/error.h"
#include "ladon/isa.h"
#include "ladon/version.h"
#include "module.h"

namespace ladon::python {
namespace {

void make_context(BoundContext* self, const nb::kwargs& kwargs) {
  Keywords keywords("Context", kwargs);
  std::int64_t num_threads = 0;
  std::optional<std::string> isa;
  keywords.read("num_threads", num_threads);
  keywords.read("isa", isa);
  DeviceId device;
  keywords.read("device", device);
  const nb::handle stream = keywords.take("stream");
  keywords.finish();
  ContextOptions options;
  options.device = device.device;
  options.device_index = device.index;
  if (!device.is_cpu()) options.stream = nullptr;  // CUDA's default stream
  if (stream.is_valid() && !stream.is_none()) {
    if (device.is_cpu()) {
      throw_value_error(keywords.where("stream"), "got one for the CPU, expected none");
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has a stream as a number
    options.stream = reinterpret_cast<void*>(to_stream(stream, keywords.where("stream")));
  }
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
  new (self) BoundContext(options, nb::borrow(stream));
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

nb::dict device_list() {
  const DeviceList list = list_devices();
  nb::list devices;
  for (const DeviceInfo& info : list.devices) {
    nb::dict row;
    row["device"] = info.id.to_string();
    row["name"] = info.name;
    row["capability"] = info.capability;
    row["memory_bytes"] = info.memory_bytes;
    row["free_bytes"] = info.free_bytes;
    row["num_multiprocessors"] = info.num_multiprocessors;
    devices.append(row);
  }
  nb::dict result;
  result["devices"] = devices;
  result["reason"] = list.reason;
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

/// What the consumer's stream must wait for, and then the capsule.
nb::object dlpack_of(const DeviceArray& self, const nb::kwargs& kwargs) {
  Keywords keywords("__dlpack__", kwargs);
  const nb::handle stream = keywords.take("stream");
  const bool given = stream.is_valid() && !stream.is_none();
  const std::int64_t number = given ? to_integer(stream, keywords.where("stream")) : 1;
  const nb::handle copy = keywords.take("copy");
  if (copy.is_valid() && !copy.is_none() && to_bool(copy, keywords.where("copy"))) {
    throw_value_error(keywords.where("copy"), "got true, expected no copy: numpy() makes one");
  }
  keywords.take("max_version");
  keywords.take("dl_device");
  keywords.finish();
  const BoundContext* const context = self.context;
  const bool in_order =
      context != nullptr && static_cast<std::uintptr_t>(number) == context->dlpack_stream();
  if (number != -1 && !in_order) {  // -1 asks for no order at all
    if (context == nullptr) {
      settle(self.view.device());
    } else {
      without_gil([&] { context->synchronize(); });
    }
  }
  return capsule_of(self);
}

nb::object on_host(const DeviceArray& self) {
  settle(self.view.device());
  const BoundContext& context = context_of(self.view.device());
  Tensor host = without_gil([&] { return Tensor::copy_of(context, self.view).to_host(); });
  return to_array(std::move(host), Framework::kNumpy, default_context());
}

nb::tuple shape_of(const DeviceArray& self) {
  nb::list shape;
  for (const std::int64_t size : self.view.shape()) shape.append(size);
  return nb::tuple(shape);
}

void bind_device_array(nb::module_& module) {
  nb::class_<DeviceArray>(module, "DeviceArray",
                          "An array on a GPU, for any library that speaks DLPack: "
                          "cupy.from_dlpack(array). PyTorch's tensors are given back as such.")
      .def("__dlpack__", &dlpack_of, nb::arg("kwargs"),
           nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, "
                   "int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | "
                   "None = None) -> Any"))
      .def(
          "__dlpack_device__",
          [](const DeviceArray& self) {
            return nb::make_tuple(nb::device::cuda::value, self.view.device().index);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def_prop_ro("shape", &shape_of, nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("dtype", [](const DeviceArray& self) { return name_of(self.view.dtype()); })
      .def_prop_ro("device", [](const DeviceArray& self) { return self.view.device().to_string(); })
      .def("numpy", &on_host, nb::sig("def numpy(self) -> Any"), "A copy in the CPU's memory.")
      .def("__repr__", [](const DeviceArray& self) {
        return "<ladon.DeviceArray: " + self.view.shape().to_string() + ", " +
               name_of(self.view.dtype()) + ", " + self.view.device().to_string() + ">";
      });
}

}  // namespace

void bind_context(nb::module_& module) {
  nb::class_<BoundContext>(
      module, "Context",
      R"(The device, threads and kernels of a call, which takes it as `context`.

Calls without a Context run where their arrays are: on all CPUs with the fastest kernels, or on a GPU, on PyTorch's current stream
where it has one and on CUDA's default stream otherwise.

Parameters
----------
num_threads : int
    0 is one for each CPU. Results never depend on it.
isa : str, optional
    A name of list_isas(). Without it the environment variable LADON_ISA decides, or the fastest kernels are used.
device : optional
    "cpu", "cuda" or "cuda:1".
stream : int, torch.cuda.Stream or cupy.cuda.Stream, optional
    Of a GPU; CUDA's default stream unless given. The Context keeps the object; an integer's owner must keep the stream.)")
      .def(
          "__init__", &make_context,
          nb::sig("def __init__(self, *, num_threads: int = 0, isa: IsaName | None = None, device: "
                  "DeviceLike = 'cpu', stream: Any = None) -> None"))
      .def_prop_ro("num_threads", [](const BoundContext& self) { return self.num_threads(); })
      .def_prop_ro("isa", [](const BoundContext& self) { return name_of(self.isa()); })
      .def_prop_ro("device", [](const BoundContext& self) { return self.device().to_string(); })
      .def_prop_ro("stream", &BoundContext::stream, "A cudaStream_t; 0 is CUDA's default stream.")
      .def(
          "synchronize", [](const BoundContext& self) { self.synchronize(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Waits until all calls that were made with this Context have run.")
      .def("__repr__", [](const BoundContext& self) {
        const std::string kernels = self.device().is_cpu()
                                        ? std::string("isa='") + name_of(self.isa())
                                        : "device='" + self.device().to_string() +
                                              "', stream=" + std::to_string(self.stream()) +
                                              ", isa='" + name_of(self.isa());
        return "ladon.Context(num_threads=" + std::to_string(self.num_threads()) + ", " + kernels +
               "')";
      });
  bind_device_array(module);
  module.def("list_devices", &device_list, nb::sig("def list_devices() -> dict[str, Any]"),
             "The GPUs that can be used (`devices`), or why there are none (`reason`).");
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
      R"(The memory that caches of MHA, GQA, MQA and MLA need for one model.

Parameters
----------
length : int
    Tokens of each sequence.
num_heads, head_dim : int
    Query heads, and the features of a key.
batch, num_layers : int
dtype : optional
    Of the cache.
value_dim : int
    Features of a value; 0 is head_dim.
num_kv_heads : int
    Of GQA; 0 leaves it out.
kv_rank, rope_dim : int
    Of MLA's latent and rope key; 0 leaves it out.

Returns
-------
list of dict
    With kind, elements, bytes and reduction (compared with MHA).)");
  module.def("alibi_slopes", &slopes, nb::arg("num_heads"),
             nb::sig("def alibi_slopes(num_heads: int) -> list[float]"),
             "The slopes that ALiBi models are trained with.");
  module.def("_describe_array", &describe_array, nb::arg("array").none());
}

}  // namespace ladon::python
