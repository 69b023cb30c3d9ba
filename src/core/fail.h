// How the library refuses: one message shape for every error.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

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

/// Runs work that calls other public operations, whose errors then name the one that the caller
/// called: "load_attention: path: ..." instead of "describe_model: path: ...". Where their
/// arguments are members of one of its own, `member` is that: "rope.".
template <class Work>
decltype(auto) as_part_of(std::string_view operation, Work&& work, std::string_view member = {}) {
  try {
    return std::forward<Work>(work)();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    constexpr std::string_view kColon = ": ";
    const std::size_t end = message.find(kColon);
    if (end == std::string_view::npos) throw;
    throw Error(error.code(), std::string(operation).append(kColon).append(member).append(
                                  message.substr(end + kColon.size())));
  }
}

}  // namespace ladon
