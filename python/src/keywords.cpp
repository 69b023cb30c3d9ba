#include "keywords.h"

#include <algorithm>

#include "ladon/error.h"

namespace ladon::python {

bool to_bool(nb::handle object, const Where& where) {
  if (PyBool_Check(object.ptr())) return object.is(Py_True);
  // NumPy has its own bool.
  const auto type = readable(object.type().attr("__name__"));
  if (type == "bool" || type == "bool_") {
    const int truth = PyObject_IsTrue(object.ptr());
    if (truth < 0) throw nb::python_error();
    return truth != 0;
  }
  throw_type_error(where, object, "a bool");
}

namespace {

nb::object to_index(nb::handle object, const Where& where) {
  if (PyBool_Check(object.ptr()) || PyIndex_Check(object.ptr()) == 0) {
    throw_type_error(where, object, "an integer");
  }
  nb::object number = nb::steal(PyNumber_Index(object.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();  // an array of several integers, for one
    throw_type_error(where, object, "an integer");
  }
  return number;
}

}  // namespace

std::int64_t to_integer(nb::handle object, const Where& where) {
  const nb::object number = to_index(object, where);
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) throw_value_error(where, "got an integer that does not fit 64 bits");
  return value;
}

std::uint64_t to_seed(nb::handle object, const Where& where) {
  const nb::object number = to_index(object, where);
  const std::uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw_value_error(where, "got an integer outside [0, 2^64)");
  }
  return value;
}

double to_number(nb::handle object, const Where& where) {
  if (PyBool_Check(object.ptr())) throw_type_error(where, object, "a number");
  const double value = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred() != nullptr) {
    const bool overflow = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    if (overflow) throw_value_error(where, "got an integer that no double can hold");
    throw_type_error(where, object, "a number");
  }
  return value;
}

std::string to_text(nb::handle object, const Where& where) {
  if (!nb::isinstance<nb::str>(object)) throw_type_error(where, object, "a str");
  std::string text;
  if (!nb::try_cast(object, text)) throw_value_error(where, "got text that is not Unicode");
  return text;
}

Keywords::Keywords(std::string_view operation, nb::handle dict)
    : operation_(operation), dict_(dict) {
  // Arrays on a GPU come in ordered by its stream; context() complains of what is none.
  const nb::handle object = take("context");
  used_.clear();
  if (object.is_valid() && !object.is_none()) {
    static_cast<void>(nb::try_cast(object, context_, /*convert=*/false));
  }
}

nb::handle Keywords::take(const char* name) {
  used_.emplace_back(name);
  if (!dict_.is_valid()) return {};
  const nb::str key(name);
  const nb::handle value = PyDict_GetItemWithError(dict_.ptr(), key.ptr());
  if (!value.is_valid() && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

void Keywords::read(const char* name, bool& value) {
  if (const nb::handle object = take(name); object.is_valid()) value = to_bool(object, where(name));
}

void Keywords::read(const char* name, std::int64_t& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = to_integer(object, where(name));
  }
}

void Keywords::read(const char* name, std::uint64_t& value) {
  if (const nb::handle object = take(name); object.is_valid()) value = to_seed(object, where(name));
}

void Keywords::read(const char* name, double& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = to_number(object, where(name));
  }
}

void Keywords::read(const char* name, std::string& value) {
  if (const nb::handle object = take(name); object.is_valid()) value = to_text(object, where(name));
}

void Keywords::read(const char* name, KvFormat& value) {
  DType dtype = value.dtype;
  read(name, dtype);
  value = dtype;
}

void Keywords::read(const char* name, DType& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = to_dtype(object, where(name));
  }
}

void Keywords::read(const char* name, Framework& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = to_framework(object, where(name));
  }
}

void Keywords::read(const char* name, std::vector<std::int64_t>& value) {
  const nb::handle object = take(name);
  if (object.is_valid() && !object.is_none()) value = to_integers(object, where(name));
}

void Keywords::read(const char* name, std::vector<double>& value) {
  const nb::handle object = take(name);
  if (!object.is_valid() || object.is_none()) return;
  const Array array = Array::numbers(object, where(name));
  if (!is_float(array.view().dtype())) throw_type_error(where(name), object, "floats");
  const Tensor dense =
      Tensor::copy_of(context_of(array.device()), array.view(), DType::kF64).to_host();
  const auto* const first = dense.data_as<double>();
  value.assign(first, first + dense.num_elements());
}

void Keywords::read(const char* name, std::vector<std::string>& value) {
  const nb::handle object = take(name);
  if (!object.is_valid() || object.is_none()) return;
  if (!nb::isinstance<nb::list>(object) && !nb::isinstance<nb::tuple>(object)) {
    throw_type_error(where(name), object, "a list of str");
  }
  value.clear();
  for (const nb::handle item : object) value.push_back(to_text(item, where(name)));
}

void Keywords::read(const char* name, Array& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = Array::input(object, where(name));
  }
}

void Keywords::read_numbers(const char* name, Array& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = Array::numbers(object, where(name));
  }
}

void Keywords::read_output(const char* name, Array& value) {
  if (const nb::handle object = take(name); object.is_valid()) {
    value = Array::output(object, where(name));
  }
}

void Keywords::read(const char* name, DeviceId& value) {
  const nb::handle object = take(name);
  if (object.is_valid() && !object.is_none()) value = to_device(object, where(name));
}

const BoundContext& Keywords::context(DeviceId device) {
  const nb::handle object = take("context");
  if (!object.is_valid() || object.is_none()) return context_of(device);
  if (context_ == nullptr) throw_type_error(where("context"), object, "a ladon.Context");
  return *context_;
}

void Keywords::finish() const {
  if (!dict_.is_valid()) return;
  for (const auto& [key, value] : nb::borrow<nb::dict>(dict_)) {
    const std::string name = to_text(key, where("a keyword"));
    if (std::find(used_.begin(), used_.end(), name) != used_.end()) continue;
    const std::string text =
        std::string(operation_) + ": got an unexpected keyword argument '" + name + "'";
    throw nb::type_error(text.c_str());
  }
}

}  // namespace ladon::python
