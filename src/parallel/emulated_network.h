// Ends for threads of one process with the links of a network between them: for tests and
// benchmarks of how communication hides behind computation, on a machine that has neither the
// network nor the cores.
//
// Time is virtual. A rank's clock (Communicator::seconds()) is the CPU time of its thread, so a
// rank computes as if it had a core to itself however many ranks share the cores; its Context must
// have one thread. A message leaves when those that its rank sent before have left, and takes
// latency + bytes / bandwidth. A rank that waits sets its clock forward to the arrival.
#pragma once

#include <memory>
#include <vector>

#include "ladon/communicator.h"

namespace ladon {

struct EmulatedLink {
  double latency = 0;    // seconds
  double bandwidth = 0;  // bytes per second
};

/// End i is rank i, and must be used by one thread, from which it takes its clock.
std::vector<std::unique_ptr<Communicator>> make_emulated_communicators(
    int count, const EmulatedLink& link, const CommunicatorOptions& options = {});

/// How much of a rank's waiting for data was for messages that were on their way, and not for ranks
/// that had not sent them yet. 0 where no network is emulated.
double link_seconds_waited(const Communicator& end);

}  // namespace ladon
