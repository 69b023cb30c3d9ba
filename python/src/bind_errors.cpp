// ladon::Error becomes one of the classes in ladon/_errors.py, by its code.
#include <nanobind/nanobind.h>

#include "ladon/error.h"
#include "module.h"

namespace ladon::python {
namespace {

namespace nb = nanobind;

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "InvalidArgumentError";
    case ErrorCode::kUnsupported: return "UnsupportedError";
    case ErrorCode::kOutOfMemory: return "OutOfMemoryError";
    case ErrorCode::kIo: return "FileError";
    case ErrorCode::kDevice: return "DeviceError";
    case ErrorCode::kCommunication: return "CommunicationError";
  }
  return "Error";
}

}  // namespace

void bind_errors(nb::module_& /*module*/) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void* /*payload*/) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const nb::object type = nb::module_::import_("ladon._errors").attr(class_name(error.code()));
      // Messages can quote file names and keys of any bytes.
      const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
          error.what(), static_cast<Py_ssize_t>(std::char_traits<char>::length(error.what())),
          "backslashreplace"));
      PyErr_SetObject(type.ptr(), text.ptr());
    }
  });
}

}  // namespace ladon::python
