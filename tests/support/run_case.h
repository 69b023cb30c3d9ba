// Runs a Case on one Context, wherever that is, and compares everything with the truth.
#pragma once

#include <string>

#include "ladon/context.h"
#include "support/case.h"
#include "support/case_data.h"
#include "support/truth.h"

namespace ladon::test {

/// Results of one run on the host, with their guards.
struct CaseResults {
  PoisonedTensor out, dq, dk, dv;
  Tensor lse, dbias, dsinks;
};

/// forward and backward of the case.
CaseResults run(const Context& context, const CaseData& data);

/// The worst error of each output, as a multiple of its bound.
struct Ratios {
  double out = 0, lse = 0, dq = 0, dk = 0, dv = 0, dbias = 0, dsinks = 0;

  double worst() const;
  void keep_worst(const Ratios& other);
  std::string describe() const;
};

Ratios compare(const CaseResults& results, const CaseData& data, const Truth& truth);

/// Runs and compares; an empty string when all is right, else what is wrong.
std::string check_case(const Context& context, const CaseData& data, const Truth& truth,
                       Ratios* ratios = nullptr);

/// True when two runs gave the same bits everywhere.
bool same_bits(const CaseResults& a, const CaseResults& b);
bool same_bits(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace ladon::test
