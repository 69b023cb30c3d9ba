// Runs a function on several ranks. ranks_threads.cpp: threads of this process. ranks_mpi.cpp: the
// processes that mpirun started, each of which runs all tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "ladon/communicator.h"

namespace ladon::test {

/// The numbers of ranks that tests run with here.
std::vector<int> rank_counts();

/// Does run_ranks(count) run this rank in this process?
bool runs_here(int count, int rank);

/// What each rank threw: its message, or "" where it returned or ran elsewhere.
using RankErrors = std::vector<std::string>;

/// Calls work() on every rank, with ends of a new communicator. Does nothing where there are not
/// as many ranks.
RankErrors run_ranks(int count, const std::function<void(Communicator&)>& work,
                     std::chrono::milliseconds deadline = std::chrono::seconds(60));

/// Every rank must return.
inline void expect_all_return(const RankErrors& errors) {
  EXPECT_EQ(errors, RankErrors(errors.size()));
}

}  // namespace ladon::test
