// The benchmark's cases of a GPU, which wants larger ones than a CPU.
#pragma once

#include <vector>

#include "cases.h"

namespace ladon::bench {

/// All of them, without targets.
std::vector<Case> list_gpu_cases(DeviceId device);

}  // namespace ladon::bench
