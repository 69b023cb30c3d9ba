// One thread against all of them.
#pragma once

#include <span>
#include <vector>

#include "cases.h"
#include "session.h"

namespace ladon::bench {

/// Those of the large cases on the fastest of the kernels that are measured.
std::vector<Case> scaled_cases(std::span<const Case> cases);

/// One thread and all of them in the same rounds. Nothing where there is but one thread.
void run_scaling(Session& session, const Case& one);

}  // namespace ladon::bench
