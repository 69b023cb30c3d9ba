// What the functions that attend write: outputs and gradients, in new memory or in the caller's.
#include "attention_call.h"

#include <algorithm>
#include <string>
#include <utility>

namespace ladon::python {

AttentionOutputs::AttentionOutputs(Keywords& keywords) {
  keywords.read_output("out", given_);
  keywords.read("return_lse", wants_lse_);
}

void AttentionOutputs::allocate(const Context& context, const ConstTensorView& q,
                                std::int64_t value_dim) {
  // Where q is wrong the library says so before it looks at the outputs.
  const bool sound = q.rank() == 4;
  const DType dtype = float_or_f32(q.dtype());
  if (given_.absent()) {
    const Dims shape = sound ? Dims{q.size(0), q.size(1), q.size(2), value_dim} : Dims{0, 0, 0, 0};
    out_memory_ = Tensor::uninitialized(context, dtype, shape);
  }
  if (wants_lse_) {
    const Dims shape = sound ? Dims{q.size(0), q.size(2), q.size(1)} : Dims{0, 0, 0};
    lse_memory_ =
        Tensor::uninitialized(context, dtype == DType::kF64 ? DType::kF64 : DType::kF32, shape);
  }
}

TensorView AttentionOutputs::out() {
  return given_.absent() ? out_memory_.view() : given_.writable_view();
}

TensorView AttentionOutputs::lse() { return wants_lse_ ? lse_memory_.view() : TensorView{}; }

nb::object AttentionOutputs::give(Framework framework, const BoundContext& context) {
  nb::object out = give_result(given_, std::move(out_memory_), framework, context);
  if (!wants_lse_) return out;
  return nb::make_tuple(out, to_array(std::move(lse_memory_), framework, context));
}

GradientOutputs::GradientOutputs(Keywords& keywords, const Array& q, const Array& k, const Array& v,
                                 const AttentionArguments& arguments)
    : table_{{{"dq", q, gradients_.dq, false},
              {"dk", k, gradients_.dk, false},
              {"dv", v, gradients_.dv, false},
              {"dbias", arguments.bias, gradients_.dbias, true},
              {"dsinks", arguments.sinks, gradients_.dsinks, false}}} {
  std::vector<std::string> wanted;
  for (const Gradient& row : table_) wanted.emplace_back(row.name);
  keywords.read("wanted", wanted);
  for (Gradient& row : table_) {
    keywords.read_output(row.name, row.given);
    row.wanted = std::erase(wanted, row.name) > 0;
    if (!row.given.absent() && row.of.absent()) {
      throw_value_error(keywords.where(row.name), "got it for an input that is absent");
    }
  }
  if (!wanted.empty()) {
    throw_value_error(keywords.where("wanted"), "got '" + wanted.front() + "', expected dq, ...");
  }
}

void GradientOutputs::allocate(const Context& context) {
  for (Gradient& row : table_) {
    if (row.given.absent()) {
      if (!row.wanted || row.of.absent()) continue;
      const ConstTensorView view = row.of.view();
      // Not the dtype of an integer: the library's message about that input is the better one.
      row.memory = Tensor::uninitialized(
          context, is_float(view.dtype()) ? view.dtype() : DType::kF32, view.shape());
    }
    const TensorView memory = row.given.absent() ? row.memory.view() : row.given.writable_view();
    row.target = row.as_rank_4 ? as_rank_4(memory) : memory;
  }
}

nb::object GradientOutputs::give(Framework framework, const BoundContext& context) {
  nb::dict fields;
  for (Gradient& row : table_) {
    fields[row.name] = row.target.absent()
                           ? nb::none()
                           : give_result(row.given, std::move(row.memory), framework, context);
  }
  return nb::module_::import_("ladon._types").attr("AttentionGradients")(**fields);
}

}  // namespace ladon::python
