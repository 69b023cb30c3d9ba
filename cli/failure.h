// The two ways in which a command can end badly, besides ladon::Error. What they say is the line
// that the user reads, after "ladon: ".
#pragma once

#include <stdexcept>

namespace ladon::cli {

/// It could not be done, or a check failed: exit status 1.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The command line cannot be understood, or combines what does not go together: exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace ladon::cli
