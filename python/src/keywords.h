// Keyword arguments, read one by one into the fields of an options struct.
//
// A field whose keyword is absent keeps its default, so defaults live in one place: the library's
// headers. Wrong types are TypeErrors and wrong values Errors, both in the library's own words:
// "attention: causal: got str, expected a bool".
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "ladon/context.h"
#include "ladon/kv_format.h"

namespace ladon::python {

bool to_bool(nb::handle object, const Where& where);
std::int64_t to_integer(nb::handle object, const Where& where);
std::uint64_t to_seed(nb::handle object, const Where& where);
double to_number(nb::handle object, const Where& where);
std::string to_text(nb::handle object, const Where& where);

/// Values of an enum and what Python calls them.
template <class Enum, std::size_t kCount>
using Names = std::array<std::pair<std::string_view, Enum>, kCount>;

template <class Enum, std::size_t kCount>
std::string_view name_in(const Names<Enum, kCount>& names, Enum value) {
  for (const auto& [name, candidate] : names) {
    if (candidate == value) return name;
  }
  return {};
}

class Keywords {
 public:
  /// `operation` begins the messages. The dict is borrowed.
  Keywords(std::string_view operation, nb::handle dict);

  std::string_view operation() const noexcept { return operation_; }
  Where where(std::string_view name) const noexcept { return {operation_, name, context_}; }

  /// The argument, or null where it was not given; from then on it counts as known.
  nb::handle take(const char* name);

  void read(const char* name, bool& value);
  void read(const char* name, std::int64_t& value);
  void read(const char* name, std::uint64_t& value);
  void read(const char* name, double& value);
  void read(const char* name, std::string& value);
  void read(const char* name, DType& value);
  void read(const char* name, KvFormat& value);
  void read(const char* name, Framework& value);
  void read(const char* name, std::vector<std::int64_t>& value);
  void read(const char* name, std::vector<double>& value);
  void read(const char* name, std::vector<std::string>& value);
  void read(const char* name, Array& value);
  void read_numbers(const char* name, Array& value);
  void read_output(const char* name, Array& value);

  /// None leaves it empty.
  template <class T>
  void read(const char* name, std::optional<T>& value) {
    const nb::handle object = take(name);
    if (!object.is_valid() || object.is_none()) return;
    T inner{};
    used_.pop_back();
    read(name, inner);
    value = std::move(inner);
  }

  template <class Enum, std::size_t kCount>
  void read(const char* name, Enum& value, const Names<Enum, kCount>& names) {
    const nb::handle object = take(name);
    if (!object.is_valid()) return;
    const std::string text = to_text(object, where(name));
    std::string known;
    for (const auto& [candidate, meaning] : names) {
      if (text == candidate) {
        value = meaning;
        return;
      }
      known.append(known.empty() ? "'" : ", '").append(candidate).append("'");
    }
    throw_value_error(where(name), "got '" + text + "', expected one of " + known);
  }

  void read(const char* name, DeviceId& value);
  /// The Context given as `context`, or the one that all calls on the device without it share.
  const BoundContext& context(DeviceId device);

  /// TypeError where an argument was given that was not taken.
  void finish() const;

 private:
  std::string_view operation_;
  nb::handle dict_;
  const BoundContext* context_ = nullptr;  // that was given
  std::vector<std::string_view> used_;
};

/// Runs work that touches no Python object while other Python threads go on.
template <class Work>
decltype(auto) without_gil(Work&& work) {
  const nb::gil_scoped_release release;
  return std::forward<Work>(work)();
}

}  // namespace ladon::python
