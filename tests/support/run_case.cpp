#include "support/run_case.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>

#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::test {

CaseResults run(const Context& context, const CaseData& data) {
  const Case& problem = data.problem();
  const AttentionOptions options = data.options();
  CaseResults results;
  results.out = PoisonedTensor(problem.dtype, data.out_shape(), problem.memory);
  results.dq = PoisonedTensor(problem.dtype, data.q().shape(), problem.memory);
  results.dk = PoisonedTensor(problem.kv_dtype, data.k().shape(), problem.memory);
  results.dv = PoisonedTensor(problem.kv_dtype, data.v().shape(), problem.memory);
  for (PoisonedTensor* tensor : {&results.out, &results.dq, &results.dk, &results.dv}) {
    tensor->guard();
  }
  results.lse = Tensor(data.lse_dtype(), data.lse_shape());
  host_attention(context, data.q(), data.k(), data.v(), options, results.out.view(), results.lse);
  AttentionGradients gradients{
      .dq = results.dq.view(), .dk = results.dk.view(), .dv = results.dv.view()};
  if (problem.bias.present) {
    results.dbias = Tensor(problem.bias_dtype, data.bias().shape());
    gradients.dbias = results.dbias;
  }
  if (problem.sinks) {
    results.dsinks = Tensor(DType::kF64, {problem.num_heads});
    gradients.dsinks = results.dsinks;
  }
  const AttentionSaved saved{
      .out = results.out.view(), .lse = results.lse, .dout = data.dout(), .dlse = data.dlse()};
  host_attention_backward(context, data.q(), data.k(), data.v(), options, saved, gradients);
  return results;
}

double Ratios::worst() const { return std::max({out, lse, dq, dk, dv, dbias, dsinks}); }

void Ratios::keep_worst(const Ratios& other) {
  out = std::max(out, other.out);
  lse = std::max(lse, other.lse);
  dq = std::max(dq, other.dq);
  dk = std::max(dk, other.dk);
  dv = std::max(dv, other.dv);
  dbias = std::max(dbias, other.dbias);
  dsinks = std::max(dsinks, other.dsinks);
}

std::string Ratios::describe() const {
  std::ostringstream text;
  text.precision(3);
  text << "out " << out << " lse " << lse << " dq " << dq << " dk " << dk << " dv " << dv
       << " dbias " << dbias << " dsinks " << dsinks;
  return text.str();
}

Ratios compare(const CaseResults& results, const CaseData& data, const Truth& truth) {
  const Case& problem = data.problem();
  // The coarser of two dtypes decides: gradients pass through out, and are rounded to their own.
  const auto coarser = [&](DType dtype) {
    return epsilon_of(dtype) > epsilon_of(problem.dtype) ? dtype : problem.dtype;
  };
  const DType compute = problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Ratios ratios;
  ratios.out = worst_ratio(results.out.view(), truth.out, problem.dtype);
  ratios.lse = worst_ratio(results.lse, truth.lse, compute);
  ratios.dq = worst_ratio(results.dq.view(), truth.dq, problem.dtype);
  ratios.dk = worst_ratio(results.dk.view(), truth.dk, coarser(problem.kv_dtype));
  ratios.dv = worst_ratio(results.dv.view(), truth.dv, coarser(problem.kv_dtype));
  if (problem.bias.present) {
    ratios.dbias = worst_ratio(results.dbias, truth.dbias, coarser(problem.bias_dtype));
  }
  if (problem.sinks) ratios.dsinks = worst_ratio(results.dsinks, truth.dsinks, problem.dtype);
  return ratios;
}

std::string check_case(const Context& context, const CaseData& data, const Truth& truth,
                       Ratios* ratios) {
  const std::string where =
      (context.device().is_cpu() ? name_of(context.isa()) : context.device().to_string()) + ", " +
      std::to_string(context.num_threads()) + " threads: " + data.problem().describe() + ": ";
  CaseResults results;
  try {
    results = run(context, data);
  } catch (const std::exception& error) {
    return where + error.what();
  }
  const Ratios found = compare(results, data, truth);
  if (ratios != nullptr) ratios->keep_worst(found);
  std::ostringstream text;
  if (found.worst() > 1) text << "errors as multiples of their bounds: " << found.describe();
  if (!results.out.guards_intact()) text << " written outside out";
  if (!results.dq.guards_intact()) text << " written outside dq";
  if (!results.dk.guards_intact()) text << " written outside dk";
  if (!results.dv.guards_intact()) text << " written outside dv";
  return text.str().empty() ? std::string() : where + text.str();
}

bool same_bits(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.absent() && b.absent()) return true;
  if (!(a.shape() == b.shape()) || a.dtype() != b.dtype()) return false;
  const Tensor dense_a = Tensor::copy_of(host_context(), a);
  const Tensor dense_b = Tensor::copy_of(host_context(), b);
  const auto bytes = static_cast<std::size_t>(dense_a.num_elements()) * size_of(a.dtype());
  return bytes == 0 || std::memcmp(dense_a.data(), dense_b.data(), bytes) == 0;
}

bool same_bits(const CaseResults& a, const CaseResults& b) {
  const auto same = [](const Tensor& x, const Tensor& y) {
    return x.rank() == 0 ? y.rank() == 0 : same_bits(ConstTensorView(x), ConstTensorView(y));
  };
  return same_bits(a.out.view(), b.out.view()) && same_bits(a.dq.view(), b.dq.view()) &&
         same_bits(a.dk.view(), b.dk.view()) && same_bits(a.dv.view(), b.dv.view()) &&
         same(a.lse, b.lse) && same(a.dbias, b.dbias) && same(a.dsinks, b.dsinks);
}

}  // namespace ladon::test
