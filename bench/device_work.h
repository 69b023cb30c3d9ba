// Calls on a GPU as pieces of work: they return when they are enqueued.
#pragma once

#include <functional>

#include "ladon/context.h"
#include "timing.h"

namespace ladon::bench {

/// The call, which uses the Context, until it has run. Starting a kernel and waiting for it takes
/// the host some microseconds, so short ones are enqueued several times in a row on a GPU: enough
/// to be found out here, by running the call. All must outlive the work.
Work work_on(const Context& context, std::function<void()> call, double amount);

}  // namespace ladon::bench
