// Ladon's functions over tensors of the host's, on any device: a test writes its operands and reads
// its results as plain memory, wherever the call runs.
//
// For a device, operands are copied there in their layout, with strides and gaps, between guard
// bytes of 0xFF (NaN); afterwards outputs are copied back, and a write outside of one is an
// exception. For the CPU, the functions are called as they are.
#pragma once

#include <list>
#include <span>
#include <vector>

#include "ladon/attention.h"
#include "ladon/rope.h"

namespace ladon::test {

/// The operands of one call on a Context's device.
class DeviceOperands {
 public:
  explicit DeviceOperands(const Context& context) : context_(context) {}

  /// The same elements there. Absent views stay absent.
  ConstTensorView input(const ConstTensorView& host) { return place(host).there; }
  AttentionOptions input(const AttentionOptions& options);
  /// The same, to be copied back.
  TensorView output(const TensorView& host);

  /// After the call: copies outputs back. Throws std::runtime_error where a byte around one of
  /// them, or in its gaps, has changed.
  void finish();

 private:
  struct Operand {
    Tensor memory;                     // bytes, on the device
    std::vector<unsigned char> bytes;  // as they were sent
    std::int64_t first = 0;            // byte of the view's first element
    TensorView there;
    TensorView host;  // absent for inputs
  };

  Operand& place(const ConstTensorView& host);
  static void copy_back(const Operand& output);

  const Context& context_;
  std::list<Operand> operands_;
};

void host_attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                    const ConstTensorView& v, const AttentionOptions& options,
                    const TensorView& out, const TensorView& lse = {});
Tensor host_attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                      const ConstTensorView& v, const AttentionOptions& options = {});
void host_attention_backward(const Context& context, const ConstTensorView& q,
                             const ConstTensorView& k, const ConstTensorView& v,
                             const AttentionOptions& options, const AttentionSaved& saved,
                             const AttentionGradients& gradients);
void host_attention_weights(const Context& context, const ConstTensorView& q,
                            const ConstTensorView& k, const AttentionOptions& options,
                            const TensorView& weights, ScoreStage stage = ScoreStage::kProbability);
void host_merge_attention(const Context& context, std::span<const ConstTensorView> outs,
                          std::span<const ConstTensorView> lses, const TensorView& out,
                          const TensorView& lse = {}, const ConstTensorView& sinks = {});
void host_rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
               const RopeTable& table, const RopePositions& positions, const TensorView& out);

}  // namespace ladon::test
