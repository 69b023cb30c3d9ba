// PythonCommunicator: bytes go through bytearrays, which both Ladon and the engine can hold.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "arrays.h"
#include "communicator_objects.h"
#include "ladon/error.h"

namespace ladon::python {
namespace {

/// An exception of the engine as the library's error.
[[noreturn]] void throw_engine_error(nb::python_error& error) {
  std::string text = nb::cast<std::string>(error.type().attr("__name__"));
  if (error.value().is_valid()) {  // Python may set the class alone
    const std::string message = readable(error.value());
    const bool own = error.matches(nb::module_::import_("ladon._errors").attr("Error"));
    text = own ? message : text + (message.empty() ? "" : ": ") + message;
  }
  throw Error(ErrorCode::kCommunication, text);
}

/// Not initialised where there is no data.
nb::object make_bytearray(const std::byte* data, std::size_t size) {
  PyObject* const made = PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(data),
                                                       static_cast<Py_ssize_t>(size));
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace

template <class Work>
auto PythonCommunicator::with_engine(const Work& work) const {
  const nb::gil_scoped_acquire gil;
  try {
    return work();
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) interrupted_ = true;
    throw_engine_error(error);
  } catch (const nb::cast_error&) {
    throw Error(ErrorCode::kCommunication, "the engine: got a result of another type");
  }
}

PythonCommunicator::PythonCommunicator(nb::object engine, const CommunicatorOptions& options)
    : Communicator(options), engine_(std::move(engine)) {
  rank_ = nb::cast<int>(engine_.attr("rank"));
  size_ = nb::cast<int>(engine_.attr("size"));
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    throw_value_error({"Communicator", "engine"}, "got rank " + std::to_string(rank_) + " of " +
                                                      std::to_string(size_) +
                                                      ", expected 0 <= rank < size");
  }
}

PythonCommunicator::~PythonCommunicator() {
  if (!nb::is_alive()) {  // the interpreter has ended, and with it its objects
    engine_.release();
    for (auto& [receive, buffer] : arriving_) buffer.release();
    return;
  }
  const nb::gil_scoped_acquire gil;
  arriving_.clear();
  engine_.reset();
}

void PythonCommunicator::start(std::span<const Send> sends, std::span<const Receive> receives) {
  with_engine([&] {
    arriving_.clear();
    nb::list outgoing;
    nb::list incoming;
    for (const Send& send : sends) {
      outgoing.append(nb::make_tuple(send.to, make_bytearray(send.data.data(), send.data.size())));
    }
    for (const Receive& receive : receives) {
      arriving_.emplace_back(receive, make_bytearray(nullptr, receive.data.size()));
      incoming.append(nb::make_tuple(receive.from, arriving_.back().second));
    }
    engine_.attr("start")(outgoing, incoming);
  });
}

bool PythonCommunicator::poll() {
  if (!failed_pause_.empty()) throw Error(ErrorCode::kCommunication, failed_pause_);
  return with_engine([&] {
    if (!nb::cast<bool>(engine_.attr("poll")())) return false;
    for (const auto& [receive, buffer] : arriving_) {
      if (PyByteArray_Size(buffer.ptr()) != static_cast<Py_ssize_t>(receive.data.size())) {
        throw Error(ErrorCode::kCommunication, "the engine: got a message of another size");
      }
      if (receive.data.empty()) continue;
      std::memcpy(receive.data.data(), PyByteArray_AsString(buffer.ptr()), receive.data.size());
    }
    arriving_.clear();
    return true;
  });
}

// The library expects errors of poll() alone.
void PythonCommunicator::pause() {
  try {
    with_engine([&] { engine_.attr("pause")(); });
  } catch (const Error& error) {
    failed_pause_ = error.what();
  }
}

std::vector<int> PythonCommunicator::silent_ranks() const {
  try {
    return with_engine([&] {
      std::vector<int> ranks;
      for (const nb::handle rank : engine_.attr("silent_ranks")()) {
        ranks.push_back(nb::cast<int>(rank));
      }
      return ranks;
    });
  } catch (const Error&) {
    return {};  // the call fails already
  }
}

void PythonCommunicator::abort(std::string_view reason) noexcept {
  try {
    with_engine([&] {
      engine_.attr("abort")(nb::steal(PyUnicode_DecodeUTF8(
          reason.data(), static_cast<Py_ssize_t>(reason.size()), "backslashreplace")));
    });
  } catch (...) {
    // The others wait until their deadline.
  }
  if (interrupted_) PyErr_SetInterrupt();  // raised when the call has returned
}

std::unique_ptr<Communicator> PythonCommunicator::make_group(std::span<const int> group, int color,
                                                             int key) {
  return with_engine([&]() -> std::unique_ptr<Communicator> {
    nb::list members;
    for (const int member : group) members.append(member);
    return std::make_unique<PythonCommunicator>(engine_.attr("split")(members, color, key),
                                                options());
  });
}

}  // namespace ladon::python
