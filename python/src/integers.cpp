// Integers from lists, however they are nested, and from arrays.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "arrays.h"
#include "ladon/context.h"

namespace ladon::python {
namespace {

bool is_list(nb::handle object) {
  return nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object);
}

std::int64_t integer_in(nb::handle item, const Where& where) {
  if (PyIndex_Check(item.ptr()) == 0 || PyBool_Check(item.ptr())) {
    throw_type_error(where, item, "an integer in the sequence");
  }
  const nb::object number = nb::steal(PyNumber_Index(item.ptr()));
  if (!number.is_valid()) throw nb::python_error();
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) throw_value_error(where, "got an integer that does not fit 64 bits");
  return value;
}

}  // namespace

std::vector<std::int64_t> to_integers(nb::handle object, const Where& where) {
  constexpr std::string_view kExpected = "a sequence or an array of integers";
  std::vector<std::int64_t> values;
  if (is_list(object)) {
    // Rows of the same length, as an array of rank 2 has them.
    std::size_t row_length = 0;
    bool first = true;
    for (const nb::handle item : object) {
      if (!is_list(item)) {
        values.push_back(integer_in(item, where));
        continue;
      }
      const std::size_t before = values.size();
      for (const nb::handle inner : item) values.push_back(integer_in(inner, where));
      const std::size_t length = values.size() - before;
      if (!first && length != row_length) {
        throw_value_error(where, "got rows of " + std::to_string(row_length) + " and " +
                                     std::to_string(length) + " integers, expected equal ones");
      }
      row_length = length;
      first = false;
    }
    return values;
  }
  if (nb::isinstance<nb::str>(object) || nb::isinstance<nb::bytes>(object)) {
    throw_type_error(where, object, kExpected);
  }
  const Array array = Array::input(object, where);
  const DType dtype = array.view().dtype();
  if (array.absent() || is_float(dtype) || dtype == DType::kBool || dtype == DType::kU64) {
    throw_type_error(where, object, std::string(kExpected) + " (not u64)");
  }
  const Tensor dense =
      Tensor::copy_of(context_of(array.device()), array.view(), DType::kI64).to_host();
  const auto* const first = dense.data_as<std::int64_t>();
  values.assign(first, first + dense.num_elements());
  return values;
}

}  // namespace ladon::python
