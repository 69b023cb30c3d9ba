// The benchmark's command line.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "ladon/isa.h"

namespace ladon::bench {

/// The command line cannot be understood, or asks for what is not here.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  bool quick = false;
  bool help = false;
  std::optional<Isa> isa;  // empty: all
  std::string filter;
  int threads = 0;   // 0: as a Context chooses
  std::string json;  // empty: none
};

extern const char* const kUsage;

/// Throws UsageError.
Options parse_options(int argc, const char* const* argv);

}  // namespace ladon::bench
