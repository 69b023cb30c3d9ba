#include "ladon/version.h"

#define LADON_QUOTE(text) #text
#define LADON_QUOTE_VALUE(macro) LADON_QUOTE(macro)

namespace ladon {

const char* version() noexcept {
  return LADON_QUOTE_VALUE(LADON_VERSION_MAJOR) "." LADON_QUOTE_VALUE(
      LADON_VERSION_MINOR) "." LADON_QUOTE_VALUE(LADON_VERSION_PATCH);
}

}  // namespace ladon
