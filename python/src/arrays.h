// Arrays between Python and views: NumPy, PyTorch and anything else with DLPack or the buffer
// protocol comes in without a copy, and tensors go out the same way.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "devices.h"
#include "ladon/dtype.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon::python {

namespace nb = nanobind;

/// Names an argument in an error message: "attention: q". Work on it will be of this Context where
/// the caller has given one.
struct Where {
  std::string_view operation;
  std::string_view argument;
  const BoundContext* context = nullptr;
};

/// str(object), and a name for what is not Unicode in it: fit for a message whatever it holds.
std::string readable(nb::handle object);

/// TypeError: "attention: q: got str, expected an array".
[[noreturn]] void throw_type_error(const Where& where, nb::handle got, std::string_view expected);
/// Error (kInvalidArgument) in the library's own form.
[[noreturn]] void throw_value_error(const Where& where, const std::string& text);

/// Whose arrays a call gives back: those of the library that its first input came from.
enum class Framework : std::uint8_t { kNumpy, kTorch };

Framework framework_of(nb::handle array);

/// An array argument. Keeps the memory alive, so it must outlive its views, and like all Python
/// objects it must be made and destroyed with the GIL held. Absent where it was None.
class Array {
 public:
  Array() = default;
  /// Throws TypeError for what is not an array, and Error for one that no view can describe.
  static Array input(nb::handle object, const Where& where);
  /// May be written to. Throws Error for a read-only array.
  static Array output(nb::handle object, const Where& where);
  /// As input(), and a list or tuple of numbers becomes an array of f64.
  static Array numbers(nb::handle object, const Where& where);

  bool absent() const noexcept { return !object_.is_valid(); }
  /// Absent views for absent arrays.
  ConstTensorView view() const noexcept { return view_; }
  TensorView writable_view() const noexcept { return view_; }
  nb::object object() const { return object_; }
  Framework framework() const { return framework_of(object_); }
  DeviceId device() const noexcept { return view_.device(); }
  /// Moves what came as a list of numbers to the Context's device.
  void follow(const Context& context);

 private:
  template <class Memory>
  void take(nb::handle object, const Where& where);
  template <class Memory>
  bool import_memory(nb::handle source, const Where& where, std::optional<DType> dtype);

  nb::object object_;  // what the caller gave
  nb::object memory_;  // what keeps the memory; another view of it for bfloat16
  nb::ndarray<nb::ro> read_;
  nb::ndarray<> write_;
  bool is_list_ = false;
  Tensor moved_;
  TensorView view_;
};

/// An array on a GPU for consumers other than PyTorch: DLPack is all it has.
struct DeviceArray {
  TensorView view;
  nb::object owner;
  /// That wrote it; null where any may have.
  const BoundContext* context = nullptr;
};

/// Gives a tensor away as an array. The Context is the one that wrote it.
nb::object to_array(Tensor&& tensor, Framework framework, const BoundContext& context);
/// The array that the caller gave for the result, where one was given; else the result's memory.
nb::object give_result(const Array& given, Tensor&& memory, Framework framework,
                       const BoundContext& context);
/// An array that shares memory with `view` and keeps `owner` alive. Without a Context any may have
/// written it.
nb::object share_array(const TensorView& view, nb::handle owner, Framework framework,
                       const BoundContext* context = nullptr);
/// DLPack's capsule.
nb::object capsule_of(const DeviceArray& array);

/// Integers from a list or a tuple, of rows or not, or an integer array of any rank, in row-major
/// order.
std::vector<std::int64_t> to_integers(nb::handle object, const Where& where);

/// "f32", "float32", numpy.float32, torch.float32, numpy.dtype("float32"), ...
DType to_dtype(nb::handle object, const Where& where);
/// "numpy" or "torch".
Framework to_framework(nb::handle object, const Where& where);

/// A view of rank 1 to 3 with leading dimensions of 1, as NumPy broadcasts; rank 4 as it is.
template <class View>
View as_rank_4(const View& view) {
  if (view.rank() >= 4 || view.rank() < 1) return view;
  Dims shape{1, 1, 1, 1};
  Dims strides{0, 0, 0, 0};
  for (int dim = 0; dim < view.rank(); ++dim) {
    shape[4 - view.rank() + dim] = view.size(dim);
    strides[4 - view.rank() + dim] = view.stride(dim);
  }
  return View(view.data(), view.dtype(), shape, strides, view.device());
}

/// The same of a mask, where bytes are true unless they are 0, as in bool arrays.
inline ConstTensorView as_mask(const ConstTensorView& view) {
  const ConstTensorView mask = as_rank_4(view);
  if (mask.dtype() != DType::kU8) return mask;
  return {mask.data(), DType::kBool, mask.shape(), mask.strides(), mask.device()};
}

}  // namespace ladon::python
