// error_of(): what a call threw, for tests that read messages.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "ladon/error.h"

namespace ladon::test {

/// The message of the Error that `call` throws; fails the test when it throws none, or one with
/// another code.
template <class Call>
std::string error_of(Call&& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

}  // namespace ladon::test
