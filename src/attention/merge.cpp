// merge_attention(): checks, then the backend.

#include <string>
#include <vector>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "ladon/attention.h"

namespace ladon {
namespace {

void check_lse_part(const Operation& operation, const NamedView& argument, const Dims& shape) {
  check_strided_view(operation, argument, 3);
  check_shape(operation, argument, shape);
  if (argument.view.dtype() != DType::kF32 && argument.view.dtype() != DType::kF64) {
    fail(operation, argument.name,
         std::string("got dtype ") + name_of(argument.view.dtype()) + ", expected f32 or f64");
  }
}

MergePart merge_part(const ConstTensorView& out, const ConstTensorView& lse) {
  MergePart part{.out = out.data(), .out_dtype = out.dtype()};
  for (int dim = 0; dim < 3; ++dim) part.out_strides[dim] = out.stride(dim);
  if (lse.absent()) return part;
  part.lse = lse.data();
  part.lse_dtype = lse.dtype();
  for (int dim = 0; dim < 3; ++dim) part.lse_strides[dim] = lse.stride(dim);
  return part;
}

}  // namespace

void merge_attention(const Context& context, std::span<const ConstTensorView> outs,
                     std::span<const ConstTensorView> lses, const TensorView& out,
                     const TensorView& lse, const ConstTensorView& sinks) {
  const Operation operation("merge_attention", context);
  if (outs.empty()) fail(operation, "outs", "got no parts, expected 1 or more");
  if (lses.size() != outs.size()) {
    fail(operation, "lses",
         "got " + std::to_string(lses.size()) + " parts, expected " + std::to_string(outs.size()) +
             " as in outs");
  }
  check_view(operation, {"out", out}, 4);
  check_float(operation, {"out", out});
  const Dims lse_shape{out.size(0), out.size(2), out.size(1)};
  std::vector<std::string> names;
  names.reserve(2 * outs.size());  // the views below point into it
  std::vector<NamedView> inputs{{"sinks", sinks}};
  std::vector<MergePart> parts;
  for (std::size_t i = 0; i < outs.size(); ++i) {
    inputs.push_back({names.emplace_back("outs[" + std::to_string(i) + "]"), outs[i]});
    check_view(operation, inputs.back(), 4);
    check_float(operation, inputs.back());
    check_shape(operation, inputs.back(), out.shape());
    inputs.push_back({names.emplace_back("lses[" + std::to_string(i) + "]"), lses[i]});
    check_lse_part(operation, inputs.back(), lse_shape);
    parts.push_back(merge_part(outs[i], lses[i]));
  }
  if (!lse.absent()) check_lse_part(operation, {"lse", lse}, lse_shape);
  if (!sinks.absent()) {
    check_strided_floats(operation, {"sinks", sinks}, {out.size(2)});
  }
  const NamedView outputs[] = {{"out", out}, {"lse", lse}};
  check_no_overlap(operation, outputs, inputs);

  MergeParams params{.batch = out.size(0),
                     .query_len = out.size(1),
                     .num_heads = out.size(2),
                     .value_dim = out.size(3),
                     .parts = parts,
                     .result = merge_part(out, lse)};
  if (!sinks.absent()) {
    params.sinks = {const_cast<void*>(sinks.data()), sinks.dtype(), sinks.stride(0)};
  }
  backend_of(context).merge(params);
}

}  // namespace ladon
