// Error: the exception type of the library.
//
// Besides it std::bad_alloc leaves the library, and nothing else: where the few bytes that a call
// needs for its own lists or messages are not to be had. Memory of tensors, caches and workspaces
// that is not to be had is an Error (kOutOfMemory).
//
// Every message reads "operation: argument: got ..., expected ...", so that it can be shown to a
// user as it stands. A call that throws has changed nothing.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ladon/export.h"

namespace ladon {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument,  // the caller passed something that breaks the contract
  kUnsupported,      // valid, but this build or this machine cannot do it; the message says why
  kOutOfMemory,      // an allocation failed or a size would not fit the address space
  kIo,               // a file could not be read, written or trusted
  kDevice,           // a GPU failed; after a fault of a kernel every later call on it says so
  kCommunication,    // ranks disagree, or one of them failed, stopped or sent nothing in time
};

class LADON_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace ladon
