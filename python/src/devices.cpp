#include "devices.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "interrupt.h"
#include "keywords.h"
#include "ladon/error.h"

namespace ladon::python {
namespace {

/// Every Context of Python's that is alive. Never destroyed, as default_context() is not.
struct Registry {
  std::mutex mutex;
  std::vector<const BoundContext*> contexts;
};

Registry& registry() {
  static auto* const kRegistry = new Registry();
  return *kRegistry;
}

ContextOptions interruptible(ContextOptions options) {
  options.check_interrupt = &check_signals;
  return options;
}

nb::object stream_object(const nb::object& torch, DeviceId device) {
  return torch.attr("cuda").attr("current_stream")(device.index);
}

/// PyTorch's current stream where PyTorch uses the GPU already; else CUDA's default stream.
std::uintptr_t current_stream(DeviceId device) {
  if (!torch_uses_gpu()) return 0;
  return nb::cast<std::uintptr_t>(stream_object(imported_torch(), device).attr("cuda_stream"));
}

}  // namespace

BoundContext::BoundContext(const ContextOptions& options, nb::object stream)
    : StreamOwner{std::move(stream)}, Context(interruptible(options)) {
  if (options.stream) stream_ = reinterpret_cast<std::uintptr_t>(*options.stream);
  const std::lock_guard lock(registry().mutex);
  registry().contexts.push_back(this);
}

BoundContext::~BoundContext() {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().contexts, this);
}

const BoundContext& default_context() {
  static const auto* const kContext = new BoundContext(ContextOptions{});
  return *kContext;
}

const BoundContext& context_of(DeviceId device) {
  if (device.is_cpu()) return default_context();
  // One for each stream that has been current; streams of PyTorch's live as long as the program.
  using Key = std::pair<int, std::uintptr_t>;
  static auto* const kContexts = new std::map<Key, std::unique_ptr<BoundContext>>();
  static auto* const kMutex = new std::mutex();
  const std::uintptr_t stream = current_stream(device);
  const std::lock_guard lock(*kMutex);
  std::unique_ptr<BoundContext>& context = (*kContexts)[Key{device.index, stream}];
  if (context == nullptr) {
    ContextOptions options;
    options.device = device.device;
    options.device_index = device.index;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has a stream as a number
    options.stream = reinterpret_cast<void*>(stream);
    context = std::make_unique<BoundContext>(options);
  }
  return *context;
}

void settle(DeviceId device) {
  if (device.is_cpu()) return;
  const nb::gil_scoped_release release;
  const std::lock_guard lock(registry().mutex);
  for (const BoundContext* context : registry().contexts) {
    if (context->device() != device) continue;
    try {
      context->synchronize();
    } catch (const Error& error) {
      // One that a Graph records has enqueued nothing that could be waited for.
      if (error.code() != ErrorCode::kInvalidArgument) throw;
    }
  }
}

DeviceId to_device(nb::handle object, const Where& where) {
  const bool is_text = nb::isinstance<nb::str>(object);
  if (!is_text && !(nb::hasattr(object, "type") && nb::hasattr(object, "index"))) {
    throw_type_error(where, object, "a device such as 'cpu' or 'cuda:0'");
  }
  const std::string name = readable(object);
  if (name == "cpu") return {};
  if (name == "cuda") return Device::kCuda;
  const std::string_view prefix = "cuda:";
  const std::string number = name.starts_with(prefix) ? name.substr(prefix.size()) : "";
  const bool is_number = !number.empty() && number.size() < 5 &&
                         std::all_of(number.begin(), number.end(),
                                     [](char letter) { return letter >= '0' && letter <= '9'; });
  if (!is_number)
    throw_value_error(where, "got '" + name + "', expected 'cpu', 'cuda' or 'cuda:N'");
  return {Device::kCuda, std::stoi(number)};
}

std::uintptr_t to_stream(nb::handle object, const Where& where) {
  for (const char* field : {"cuda_stream", "ptr"}) {
    if (nb::hasattr(object, field)) return to_seed(object.attr(field), where);
  }
  // DLPack's number of the default stream is CUDA's too.
  const std::uint64_t handle = to_seed(object, where);
  return handle == 1 ? 0 : handle;
}

nb::object imported_torch() {
  const nb::object name = nb::str("torch");
  nb::object torch = nb::steal(PyImport_GetModule(name.ptr()));
  if (!torch.is_valid() && PyErr_Occurred() != nullptr) throw nb::python_error();
  return torch;
}

bool torch_uses_gpu() {
  const nb::object torch = imported_torch();
  return torch.is_valid() && nb::hasattr(torch, "cuda") &&
         nb::cast<bool>(torch.attr("cuda").attr("is_initialized")());
}

void hand_over_to_torch(const BoundContext& context) {
  if (context.device().is_cpu()) return;
  const nb::object torch = imported_torch();
  const nb::object current = stream_object(torch, context.device());
  if (nb::cast<std::uintptr_t>(current.attr("cuda_stream")) == context.stream()) return;
  const nb::object ours = torch.attr("cuda").attr("ExternalStream")(
      context.stream(), nb::arg("device") = context.device().index);
  current.attr("wait_stream")(ours);
}

}  // namespace ladon::python
