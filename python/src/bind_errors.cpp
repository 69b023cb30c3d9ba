// ladon::Error becomes one of the classes in ladon/_errors.py, by its code.
#include <nanobind/nanobind.h>

#include <array>
#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

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

/// The errno whose text the message quotes: 'got "No such file or directory", expected ...'. Errors
/// of the library are text alone; the text is the C library's, so it is found again.
int errno_in(std::string_view message) {
  constexpr std::string_view kMark = ": got \"";
  const std::size_t begin = message.find(kMark);
  if (begin == std::string_view::npos) {
    return message.find(": got a folder,") == std::string_view::npos ? 0 : EISDIR;
  }
  const std::string_view text = message.substr(begin + kMark.size());
  constexpr int kMostErrors = 134;  // Linux
  for (int number = 1; number < kMostErrors; ++number) {
    const std::string name = std::generic_category().message(number);
    if (text.starts_with(name) && text.substr(name.size()).starts_with('"')) return number;
  }
  return 0;
}

/// The message with the operation and the argument as Python calls them: "KvCache::save: ..." is
/// "KvCache.save: ...", and members of options are keywords.
std::string in_python(const std::string& message) {
  const std::size_t end = message.find(": ");
  std::string operation = message.substr(0, end);
  if (operation == "SafetensorsFile") operation = "load_safetensors";
  if (operation == "write_safetensors") operation = "save_safetensors";
  for (std::size_t at = operation.find("::"); at != std::string::npos; at = operation.find("::")) {
    operation.replace(at, 2, ".");
  }
  if (end == std::string::npos) return operation;
  std::string rest = message.substr(end);
  // Where the keyword has another name than the member.
  constexpr std::array<std::array<std::string_view, 2>, 7> kKeywords{{
      {": dropout.probability:", ": dropout:"},
      {": dropout.", ": dropout_"},
      {": format:", ": dtype:"},
      {": from:", ": from_:"},
      {": table.", ": "},
      {": options.rotary_dim:", ": rotary_dim:"},
      {": device_index:", ": device:"},
  }};
  for (const auto& [member, keyword] : kKeywords) {
    if (!rest.starts_with(member)) continue;
    rest.replace(0, member.size(), keyword);
    break;
  }
  // What backward() of layers writes; another output can be named behind the argument.
  constexpr std::array<std::array<std::string_view, 2>, 3> kOutputs{
      {{"gradients.query", "out[0]"}, {"gradients.key", "out[1]"}, {"gradients.value", "out[2]"}}};
  if (!operation.ends_with("backward")) return operation + rest;
  for (const auto& [member, item] : kOutputs) {
    for (std::size_t at; (at = rest.find(member)) != std::string::npos;) {
      rest.replace(at, member.size(), item);
    }
  }
  return operation + rest;
}

}  // namespace

void bind_errors(nb::module_& /*module*/) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void* /*payload*/) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const nb::object errors = nb::module_::import_("ladon._errors");
      // Messages can quote file names and keys of any bytes.
      const std::string message = in_python(error.what());
      const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
          message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
      if (error.code() == ErrorCode::kIo) {
        const nb::object made = errors.attr("file_error")(text, errno_in(error.what()));
        PyErr_SetObject(made.type().ptr(), made.ptr());
      } else {
        PyErr_SetObject(errors.attr(class_name(error.code())).ptr(), text.ptr());
      }
    }
  });
}

}  // namespace ladon::python
