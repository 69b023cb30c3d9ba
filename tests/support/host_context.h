// The Context for what tests do on the host next to the calls that they test.
#pragma once

#include "ladon/context.h"

namespace ladon::test {

inline const Context& host_context() {
  static const Context context(ContextOptions{.num_threads = 1});
  return context;
}

}  // namespace ladon::test
