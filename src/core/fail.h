// How the library refuses: one message shape for every error.
#pragma once

#include <string>
#include <string_view>

#include "ladon/error.h"

namespace ladon {

/// Throws Error with "operation: argument: what". `what` reads "got ..., expected ...".
[[noreturn]] inline void fail(ErrorCode code, std::string_view operation, std::string_view argument,
                              std::string_view what) {
  std::string message;
  message.reserve(operation.size() + argument.size() + what.size() + 4);
  message.append(operation).append(": ").append(argument).append(": ").append(what);
  throw Error(code, message);
}

/// The usual case: the caller broke the contract.
[[noreturn]] inline void fail(std::string_view operation, std::string_view argument,
                              std::string_view what) {
  fail(ErrorCode::kInvalidArgument, operation, argument, what);
}

}  // namespace ladon
