#include "support/host_calls.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "ladon/context.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kGuard = 128;     // bytes on either side
constexpr std::int64_t kAlignment = 64;  // operands keep their addresses' remainder of it

/// The offsets in elements of a view's lowest and highest element.
struct Span {
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
};

Span span_of(const ConstTensorView& view) {
  Span span;
  for (int dim = 0; dim < view.rank(); ++dim) {
    const std::int64_t reach = (view.size(dim) - 1) * view.stride(dim);
    (reach < 0 ? span.lowest : span.highest) += reach;
  }
  return span;
}

}  // namespace

DeviceOperands::Operand& DeviceOperands::place(const ConstTensorView& host) {
  Operand& operand = operands_.emplace_back();
  auto* const data = static_cast<unsigned char*>(const_cast<void*>(host.data()));
  if (host.absent()) return operand;
  if (context_.device().is_cpu()) {
    operand.there = TensorView(data, host.dtype(), host.shape(), host.strides());
    return operand;
  }
  unsigned char* there = nullptr;
  if (host.num_elements() != 0) {
    const auto size = static_cast<std::int64_t>(size_of(host.dtype()));
    const Span span = span_of(host);
    const unsigned char* const begin = data + span.lowest * size;
    const std::int64_t bytes = (span.highest - span.lowest + 1) * size;
    const auto before =
        kGuard + static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(begin) % kAlignment);
    operand.bytes.assign(static_cast<std::size_t>(before + bytes + kGuard), 0xFF);
    std::memcpy(operand.bytes.data() + before, begin, static_cast<std::size_t>(bytes));
    Tensor staged =
        Tensor::uninitialized(DType::kU8, {static_cast<std::int64_t>(operand.bytes.size())});
    std::memcpy(staged.data(), operand.bytes.data(), operand.bytes.size());
    operand.memory = staged.to(context_);
    operand.first = before - span.lowest * size;
    there = static_cast<unsigned char*>(operand.memory.data()) + operand.first;
  }
  operand.there = TensorView(there, host.dtype(), host.shape(), host.strides(), context_.device());
  return operand;
}

TensorView DeviceOperands::output(const TensorView& host) {
  Operand& operand = place(host);
  operand.host = host;
  return operand.there;
}

AttentionOptions DeviceOperands::input(const AttentionOptions& options) {
  AttentionOptions there = options;
  there.mask = input(options.mask);
  there.bias = input(options.bias);
  there.alibi_slopes = input(options.alibi_slopes);
  there.sinks = input(options.sinks);
  return there;
}

void DeviceOperands::copy_back(const Operand& output) {
  Tensor now = output.memory.to_host();
  auto* const bytes = static_cast<unsigned char*>(now.data());
  const TensorView elements(bytes + output.first, output.host.dtype(), output.host.shape(),
                            output.host.strides());
  copy(host_context(), elements, output.host);
  // With the elements as they were sent, all the rest must be too.
  const ConstTensorView sent(output.bytes.data() + output.first, output.host.dtype(),
                             output.host.shape(), output.host.strides());
  copy(host_context(), sent, elements);
  if (std::memcmp(bytes, output.bytes.data(), output.bytes.size()) != 0) {
    throw std::runtime_error("device memory outside an output was written");
  }
}

void DeviceOperands::finish() {
  for (const Operand& operand : operands_) {
    if (!operand.host.absent() && !operand.bytes.empty()) copy_back(operand);
  }
}

void host_attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                    const ConstTensorView& v, const AttentionOptions& options,
                    const TensorView& out, const TensorView& lse) {
  DeviceOperands operands(context);
  attention(context, operands.input(q), operands.input(k), operands.input(v),
            operands.input(options), operands.output(out), operands.output(lse));
  operands.finish();
}

Tensor host_attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                      const ConstTensorView& v, const AttentionOptions& options) {
  DeviceOperands operands(context);
  return attention(context, operands.input(q), operands.input(k), operands.input(v),
                   operands.input(options))
      .to_host();
}

void host_attention_backward(const Context& context, const ConstTensorView& q,
                             const ConstTensorView& k, const ConstTensorView& v,
                             const AttentionOptions& options, const AttentionSaved& saved,
                             const AttentionGradients& gradients) {
  DeviceOperands operands(context);
  attention_backward(context, operands.input(q), operands.input(k), operands.input(v),
                     operands.input(options),
                     {.out = operands.input(saved.out),
                      .lse = operands.input(saved.lse),
                      .dout = operands.input(saved.dout),
                      .dlse = operands.input(saved.dlse)},
                     {.dq = operands.output(gradients.dq),
                      .dk = operands.output(gradients.dk),
                      .dv = operands.output(gradients.dv),
                      .dbias = operands.output(gradients.dbias),
                      .dsinks = operands.output(gradients.dsinks)});
  operands.finish();
}

void host_attention_weights(const Context& context, const ConstTensorView& q,
                            const ConstTensorView& k, const AttentionOptions& options,
                            const TensorView& weights, ScoreStage stage) {
  DeviceOperands operands(context);
  attention_weights(context, operands.input(q), operands.input(k), operands.input(options),
                    operands.output(weights), stage);
  operands.finish();
}

void host_merge_attention(const Context& context, std::span<const ConstTensorView> outs,
                          std::span<const ConstTensorView> lses, const TensorView& out,
                          const TensorView& lse, const ConstTensorView& sinks) {
  DeviceOperands operands(context);
  std::vector<ConstTensorView> device_outs;
  std::vector<ConstTensorView> device_lses;
  for (const ConstTensorView& part : outs) device_outs.push_back(operands.input(part));
  for (const ConstTensorView& part : lses) device_lses.push_back(operands.input(part));
  merge_attention(context, device_outs, device_lses, operands.output(out), operands.output(lse),
                  operands.input(sinks));
  operands.finish();
}

void host_rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
               const RopeTable& table, const RopePositions& positions, const TensorView& out) {
  DeviceOperands operands(context);
  rope(context, operands.input(x), options,
       {.cos = operands.input(table.cos), .sin = operands.input(table.sin)}, positions,
       operands.output(out));
  operands.finish();
}

}  // namespace ladon::test
