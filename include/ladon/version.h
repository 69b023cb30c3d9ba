// The library's version.
#pragma once

#include "ladon/export.h"

#define LADON_VERSION_MAJOR 0
#define LADON_VERSION_MINOR 2
#define LADON_VERSION_PATCH 0

namespace ladon {

/// "0.2.0", of the library that is linked.
LADON_API const char* version() noexcept;

}  // namespace ladon
