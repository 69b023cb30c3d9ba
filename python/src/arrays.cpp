#include "arrays.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>

#include "keep_arrays.h"
#include "keywords.h"
#include "ladon/error.h"

namespace ladon::python {
namespace {

using Code = nb::dlpack::dtype_code;

struct DTypeNames {
  DType dtype;
  Code code;
  std::array<std::string_view, 3> names;  // Ladon's first
};

constexpr std::array<DTypeNames, 14> kDTypes{{
    {DType::kF64, Code::Float, {"f64", "float64", "double"}},
    {DType::kF32, Code::Float, {"f32", "float32", "float"}},
    {DType::kF16, Code::Float, {"f16", "float16", "half"}},
    {DType::kBF16, Code::Bfloat, {"bf16", "bfloat16", "bfloat16"}},
    {DType::kBool, Code::Bool, {"bool", "bool_", "bool"}},
    {DType::kI8, Code::Int, {"i8", "int8", "int8"}},
    {DType::kU8, Code::UInt, {"u8", "uint8", "uint8"}},
    {DType::kI16, Code::Int, {"i16", "int16", "int16"}},
    {DType::kU16, Code::UInt, {"u16", "uint16", "uint16"}},
    {DType::kI32, Code::Int, {"i32", "int32", "int32"}},
    {DType::kU32, Code::UInt, {"u32", "uint32", "uint32"}},
    {DType::kI64, Code::Int, {"i64", "int64", "int64"}},
    {DType::kU64, Code::UInt, {"u64", "uint64", "uint64"}},
    {DType::kF8E4M3, Code::Float8_E4M3FN, {"f8e4m3", "float8_e4m3fn", "fp8"}},
}};

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  nb::dlpack::dtype result{};
  for (const DTypeNames& row : kDTypes) {
    if (row.dtype == dtype) result.code = static_cast<std::uint8_t>(row.code);
  }
  result.bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  result.lanes = 1;
  return result;
}

std::optional<DType> ladon_dtype(nb::dlpack::dtype dtype) {
  for (const DTypeNames& row : kDTypes) {
    if (dlpack_dtype(row.dtype) == dtype) return row.dtype;
  }
  return {};
}

std::string message(const Where& where, std::string_view text) {
  std::string result;
  for (const std::string_view part : {where.operation, where.argument}) {
    if (!part.empty()) result.append(part).append(": ");
  }
  return result.append(text);
}

std::string class_of(nb::handle object) { return readable(object.type().attr("__name__")); }

/// The name of an array's dtype as its library spells it; empty where it has none.
std::string dclass_of(nb::handle array) {
  if (!nb::hasattr(array, "dtype")) return {};
  const nb::object dtype = array.attr("dtype");
  return readable(nb::hasattr(dtype, "name") ? dtype.attr("name") : dtype);
}

bool is_numpy(nb::handle object) {
  const nb::object numpy = nb::module_::import_("numpy");
  return nb::isinstance(object, numpy.attr("ndarray"));
}

/// Why an object that looks like an array could not be read.
[[noreturn]] void throw_unreadable(const Where& where, nb::handle object, bool writing) {
  const bool looks_like_array = nb::hasattr(object, "__dlpack__") ||
                                PyObject_CheckBuffer(object.ptr()) != 0 ||
                                PyCapsule_CheckExact(object.ptr()) != 0;
  if (!looks_like_array) throw_type_error(where, object, "an array");
  if (writing && Array::input(object, where).view().rank() >= 0) {
    throw_value_error(where, "got a read-only array, expected one that can be written to");
  }
  const std::string name = dclass_of(object);
  throw_type_error(where, object,
                   "an array of floats, integers or bool in the machine's byte order" +
                       (name.empty() ? std::string() : "; its dtype is " + name));
}

}  // namespace

std::string readable(nb::handle object) {
  const nb::str text(object);
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
}

void throw_type_error(const Where& where, nb::handle got, std::string_view expected) {
  const std::string text =
      message(where, "got " + class_of(got) + ", expected " + std::string(expected));
  throw nb::type_error(text.c_str());
}

void throw_value_error(const Where& where, const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, message(where, text));
}

Framework framework_of(nb::handle array) {
  // Only where torch has been imported can there be a tensor of it.
  const nb::object torch = imported_torch();
  if (!torch.is_valid()) return Framework::kNumpy;
  const nb::object tensor = nb::getattr(torch, "Tensor", nb::none());
  if (tensor.is_none()) return Framework::kNumpy;  // it is being imported
  return nb::isinstance(array, tensor) ? Framework::kTorch : Framework::kNumpy;
}

namespace {

/// What autograd should know of and would not: the gradient would silently be lost.
void refuse_gradient(const Where& where, nb::handle tensor) {
  if (framework_of(tensor) != Framework::kTorch) return;
  if (!nb::cast<bool>(tensor.attr("requires_grad"))) return;
  if (!nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")())) return;
  throw_value_error(where,
                    "got a tensor that requires a gradient, expected none: use ladon.torch, which "
                    "autograd knows, torch.no_grad() or .detach()");
}

/// DLPack's capsule of an array on a GPU, after everything that its library has enqueued for it;
/// all others as they are.
nb::object handed_over(nb::handle object, const Where& where) {
  if (!nb::hasattr(object, "__dlpack_device__")) return nb::borrow(object);
  const nb::object place = object.attr("__dlpack_device__")();
  const auto type = nb::cast<int>(nb::int_(place[0]));
  if (type != nb::device::cuda::value && type != nb::device::cuda_managed::value) {
    return nb::borrow(object);
  }
  const DeviceId device(Device::kCuda, nb::cast<int>(nb::int_(place[1])));
  const bool given = where.context != nullptr && where.context->device() == device;
  const BoundContext& context = given ? *where.context : context_of(device);
  const bool is_torch = framework_of(object) == Framework::kTorch;
  const nb::object plain = is_torch ? object.attr("detach")() : nb::borrow(object);
  return plain.attr("__dlpack__")(nb::arg("stream") = context.dlpack_stream());
}

/// Where the memory is; empty for devices that Ladon does not know.
std::optional<DeviceId> ladon_device(int type, int index) {
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return DeviceId();
  if (type == nb::device::cuda::value || type == nb::device::cuda_managed::value) {
    return DeviceId(Device::kCuda, index);
  }
  return {};
}

}  // namespace

template <class Memory>
bool Array::import_memory(nb::handle source, const Where& where, std::optional<DType> dtype) {
  Memory memory;
  if (!nb::try_cast<Memory>(source, memory, /*convert=*/false)) return false;
  const auto device = ladon_device(memory.device_type(), memory.device_id());
  if (!device) {
    throw_value_error(where,
                      "got an array on another device, expected one on the CPU or an NVIDIA GPU");
  }
  if (!dtype) dtype = ladon_dtype(memory.dtype());
  if (!dtype) return false;
  const auto rank = memory.ndim();
  if (rank > kMaxRank) {
    throw_value_error(where, "got " + std::to_string(rank) + " dimensions, expected at most " +
                                 std::to_string(kMaxRank));
  }
  const Dims shape(std::span(memory.shape_ptr(), rank));
  Dims strides(std::span(memory.stride_ptr(), rank));
  // Strides that no element is reached by can be anything; NumPy's are 0 in empty arrays.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) strides = row_major_strides(shape);
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (shape[dim] == 1) strides[dim] = 1;
  }
  auto* const data = const_cast<void*>(static_cast<const void*>(memory.data()));
  if (reinterpret_cast<std::uintptr_t>(data) % size_of(*dtype) != 0) {
    throw_value_error(where, "got memory that is not aligned, expected a multiple of " +
                                 std::to_string(size_of(*dtype)) + " bytes");
  }
  view_ = TensorView(data, *dtype, shape, strides, *device);
  if constexpr (std::is_same_v<Memory, nb::ndarray<>>) {
    write_ = std::move(memory);
  } else {
    read_ = std::move(memory);
  }
  return true;
}

template <class Memory>
void Array::take(nb::handle object, const Where& where) {
  object_ = nb::borrow(object);
  KeepArrays::add(object);
  refuse_gradient(where, object);
  memory_ = handed_over(object, where);
  if (import_memory<Memory>(memory_, where, {})) return;
  // NumPy does not export the types that ml_dtypes brings. The same memory as integers is fine.
  if (is_numpy(object) && dclass_of(object) == "bfloat16") {
    memory_ = object.attr("view")("uint16");
    if (import_memory<Memory>(memory_, where, DType::kBF16)) return;
  }
  if (is_numpy(object) && dclass_of(object) == "float8_e4m3fn") {
    memory_ = object.attr("view")("uint8");
    if (import_memory<Memory>(memory_, where, DType::kF8E4M3)) return;
  }
  throw_unreadable(where, object, std::is_same_v<Memory, nb::ndarray<>>);
}

Array Array::input(nb::handle object, const Where& where) {
  Array array;
  if (!object.is_none()) array.take<nb::ndarray<nb::ro>>(object, where);
  return array;
}

Array Array::output(nb::handle object, const Where& where) {
  Array array;
  if (!object.is_none()) array.take<nb::ndarray<>>(object, where);
  return array;
}

Array Array::numbers(nb::handle object, const Where& where) {
  if (!nb::isinstance<nb::list>(object) && !nb::isinstance<nb::tuple>(object)) {
    return input(object, where);
  }
  nb::object numbers;
  try {
    numbers = nb::module_::import_("numpy").attr("array")(object, "float64");
  } catch (const nb::python_error&) {
    throw_type_error(where, object, "an array or a sequence of numbers");
  }
  Array array = input(numbers, where);
  array.is_list_ = true;
  return array;
}

void Array::follow(const Context& context) {
  if (!is_list_ || context.device().is_cpu()) return;
  moved_ = Tensor::copy_of(default_context(), view_).to(context);
  view_ = moved_.view();
}

namespace {

std::array<std::size_t, kMaxRank> sizes_of(const TensorView& view) {
  std::array<std::size_t, kMaxRank> sizes{};
  std::copy(view.shape().begin(), view.shape().end(), sizes.begin());
  return sizes;
}

nb::object share_on_gpu(const TensorView& view, nb::handle owner, Framework framework,
                        const BoundContext* context) {
  // A Context of the caller's must be there as long as something may have to wait for it.
  const nb::object keep =
      context == nullptr ? nb::object() : nb::find(const_cast<BoundContext&>(*context));
  const nb::object both =
      keep.is_valid() ? nb::object(nb::make_tuple(nb::borrow(owner), keep)) : nb::borrow(owner);
  const DeviceArray array{view, both, context};
  if (framework != Framework::kTorch)
    return nb::cast(new DeviceArray(array), nb::rv_policy::take_ownership);
  nb::object result =
      nb::module_::import_("torch.utils.dlpack").attr("from_dlpack")(capsule_of(array));
  if (context != nullptr) {
    hand_over_to_torch(*context);
  } else {
    settle(view.device());
  }
  return result;
}

}  // namespace

nb::object capsule_of(const DeviceArray& array) {
  const TensorView& view = array.view;
  const auto shape = sizes_of(view);
  const nb::ndarray<> exported(view.data(), static_cast<std::size_t>(view.rank()), shape.data(),
                               array.owner, view.strides().begin(), dlpack_dtype(view.dtype()),
                               nb::device::cuda::value, view.device().index);
  return nb::cast(exported, nb::rv_policy::reference);
}

nb::object give_result(const Array& given, Tensor&& memory, Framework framework,
                       const BoundContext& context) {
  if (given.absent()) return to_array(std::move(memory), framework, context);
  if (given.framework() == Framework::kTorch) hand_over_to_torch(context);
  return given.object();
}

nb::object share_array(const TensorView& view, nb::handle owner, Framework framework,
                       const BoundContext* context) {
  if (!view.device().is_cpu()) return share_on_gpu(view, owner, framework, context);
  const bool as_integers = framework == Framework::kNumpy && view.dtype() == DType::kBF16;
  const nb::dlpack::dtype dtype = dlpack_dtype(as_integers ? DType::kU16 : view.dtype());
  const auto shape = sizes_of(view);
  // An empty tensor has no memory; NumPy wants an address.
  alignas(64) static std::byte nothing[64];
  void* const data = view.data() != nullptr ? view.data() : nothing;
  const auto rank = static_cast<std::size_t>(view.rank());
  const std::int64_t* const strides = view.strides().begin();
  if (framework == Framework::kTorch) {
    try {
      nb::module_::import_("torch.utils.dlpack");
    } catch (const nb::python_error&) {
      throw Error(ErrorCode::kUnsupported,
                  "ladon: torch tensors need PyTorch, which cannot be imported: pip install torch");
    }
    const nb::ndarray<nb::pytorch> array(data, rank, shape.data(), owner, strides, dtype,
                                         nb::device::cpu::value);
    return nb::cast(array, nb::rv_policy::reference);
  }
  const nb::ndarray<nb::numpy> array(data, rank, shape.data(), owner, strides, dtype,
                                     nb::device::cpu::value);
  nb::object result = nb::cast(array, nb::rv_policy::reference);
  if (!as_integers) return result;
  // Importing ml_dtypes teaches NumPy the type.
  nb::object bfloat16;
  try {
    bfloat16 = nb::module_::import_("ml_dtypes").attr("bfloat16");
  } catch (const nb::python_error&) {
    throw Error(ErrorCode::kUnsupported,
                "ladon: NumPy arrays of bf16 need the package ml_dtypes: pip install ml_dtypes");
  }
  return result.attr("view")(bfloat16);
}

nb::object to_array(Tensor&& tensor, Framework framework, const BoundContext& context) {
  auto owned = std::make_unique<Tensor>(std::move(tensor));
  const TensorView view = owned->view();
  const nb::capsule owner(owned.get(),
                          [](void* memory) noexcept { delete static_cast<Tensor*>(memory); });
  owned.release();  // NOLINT(bugprone-unused-return-value): the capsule has it
  return share_array(view, owner, framework, &context);
}

DType to_dtype(nb::handle object, const Where& where) {
  std::string name;
  if (nb::isinstance<nb::str>(object)) {
    name = readable(object);
  } else if (nb::hasattr(object, "name")) {  // numpy.dtype
    name = readable(object.attr("name"));
  } else if (nb::hasattr(object, "__name__")) {  // numpy.float32
    name = readable(object.attr("__name__"));
  } else {  // torch.float32
    name = readable(object);
    if (!name.starts_with("torch.")) throw_type_error(where, object, "a dtype");
    name.erase(0, name.find('.') + 1);
  }
  for (const DTypeNames& row : kDTypes) {
    for (const std::string_view known : row.names) {
      if (name == known) return row.dtype;
    }
  }
  throw_value_error(where, "got '" + name + "', expected a dtype such as 'f32', 'f64', 'bf16'");
}

Framework to_framework(nb::handle object, const Where& where) {
  if (!nb::isinstance<nb::str>(object)) throw_type_error(where, object, "'numpy' or 'torch'");
  const auto name = readable(object);
  if (name == "numpy") return Framework::kNumpy;
  if (name == "torch") return Framework::kTorch;
  throw_value_error(where, "got '" + name + "', expected 'numpy' or 'torch'");
}

}  // namespace ladon::python
