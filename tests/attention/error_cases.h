// What the error tests of attention share: a legal call to be spoiled in one place, and a check
// that the refusal says what it should and that no memory changed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/error_of.h"
#include "support/host_context.h"
#include "support/isas.h"

namespace ladon::test {

enum class Operation { kForward, kForwardNew, kBackward, kWeights };

inline std::string name_of_operation(Operation operation) {
  switch (operation) {
    case Operation::kForward:
    case Operation::kForwardNew: return "attention";
    case Operation::kBackward: return "attention_backward";
    case Operation::kWeights: return "attention_weights";
  }
  return {};
}

using Operations = std::vector<Operation>;

inline const Operations kForwardOnly{Operation::kForward};
inline const Operations kBackwardOnly{Operation::kBackward};
inline const Operations kWeightsOnly{Operation::kWeights};
inline const Operations kWithValues{Operation::kForward, Operation::kForwardNew,
                                    Operation::kBackward};
inline const Operations kAllOperations{Operation::kForward, Operation::kForwardNew,
                                       Operation::kBackward, Operation::kWeights};

/// A legal call of every operation. All views are of f32 (mask: bool) memory, longer than they
/// need.
class Call {
 public:
  Call() {
    add("q", {2, 3, 4, 8});
    add("k", {2, 5, 2, 8});
    add("v", {2, 5, 2, 6});
    add("mask", {2, 1, 3, 5}, DType::kBool);
    add("bias", {1, 4, 3, 5});
    add("alibi_slopes", {4});
    add("sinks", {4});
    add("out", {2, 3, 4, 6});
    add("lse", {2, 4, 3});
    add("dout", {2, 3, 4, 6});
    add("dlse", {2, 4, 3});
    add("dq", {2, 3, 4, 8});
    add("dk", {2, 5, 2, 8});
    add("dv", {2, 5, 2, 6});
    add("dbias", {1, 4, 3, 5});
    add("dsinks", {4});
    add("weights", {2, 4, 3, 5});
  }

  TensorView& operator[](const std::string& name) { return views_.at(name); }

  void set_dtype(const std::string& name, DType dtype) {
    TensorView& view = (*this)[name];
    view = TensorView(view.data(), dtype, view.shape());
  }
  void set_shape(const std::string& name, const Dims& shape) {
    TensorView& view = (*this)[name];
    view = TensorView(view.data(), view.dtype(), shape);
  }
  void set_strides(const std::string& name, const Dims& strides) {
    TensorView& view = (*this)[name];
    view = TensorView(view.data(), view.dtype(), view.shape(), strides);
  }
  void set_data(const std::string& name, void* data) {
    TensorView& view = (*this)[name];
    view = TensorView(data, view.dtype(), view.shape());
  }
  void leave_out(const std::string& name) { (*this)[name] = {}; }
  void set_lengths(std::vector<std::int64_t> lengths) {
    lengths_ = std::move(lengths);
    options.kv_lengths = lengths_;
  }
  void set_offsets(std::vector<std::int64_t> queries, std::vector<std::int64_t> keys) {
    query_offsets_ = std::move(queries);
    kv_offsets_ = std::move(keys);
    options.query_offsets = query_offsets_;
    options.kv_offsets = kv_offsets_;
  }
  /// The same memory as one row of packed sequences; mask and bias are left out.
  void pack() {
    for (const char* name : {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}) {
      const Dims& shape = (*this)[name].shape();
      set_shape(name, {1, shape[0] * shape[1], shape[2], shape[3]});
    }
    set_shape("lse", {1, 4, 6});
    set_shape("dlse", {1, 4, 6});
    for (const char* name : {"mask", "bias", "dbias"}) leave_out(name);
    set_offsets({0, 2, 6}, {0, 9, 10});
  }

  void run(const Context& context, Operation operation) {
    AttentionOptions all = options;
    all.mask = (*this)["mask"];
    all.bias = (*this)["bias"];
    all.alibi_slopes = (*this)["alibi_slopes"];
    all.sinks = (*this)["sinks"];
    const ConstTensorView q = (*this)["q"];
    const ConstTensorView k = (*this)["k"];
    const ConstTensorView v = (*this)["v"];
    switch (operation) {
      case Operation::kForward:
        attention(context, q, k, v, all, (*this)["out"], (*this)["lse"]);
        return;
      case Operation::kForwardNew: static_cast<void>(attention(context, q, k, v, all)); return;
      case Operation::kBackward:
        attention_backward(
            context, q, k, v, all,
            {(*this)["out"], (*this)["lse"], (*this)["dout"], (*this)["dlse"]},
            {(*this)["dq"], (*this)["dk"], (*this)["dv"], (*this)["dbias"], (*this)["dsinks"]});
        return;
      case Operation::kWeights: attention_weights(context, q, k, all, (*this)["weights"]); return;
    }
  }

  /// Every byte of every tensor, inputs included.
  std::vector<std::uint8_t> bytes() const {
    std::vector<std::uint8_t> all(memory_.size() * kBytes);
    std::size_t at = 0;
    for (const auto& [name, tensor] : memory_) {
      std::memcpy(all.data() + at, tensor.data(), kBytes);
      at += kBytes;
    }
    return all;
  }

  AttentionOptions options;

 private:
  static constexpr std::size_t kBytes = 4096;

  void add(const std::string& name, const Dims& shape, DType dtype = DType::kF32) {
    Tensor& tensor = memory_.emplace(name, Tensor(DType::kF32, {kBytes / 4})).first->second;
    fill_normal(host_context(), tensor, 0, 1, memory_.size());
    views_.emplace(name, TensorView(tensor.data(), dtype, shape));
  }

  std::map<std::string, Tensor> memory_;
  std::map<std::string, TensorView> views_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int64_t> query_offsets_;
  std::vector<std::int64_t> kv_offsets_;
};

class AttentionErrors : public testing::TestWithParam<Isa> {
 protected:
  /// `spoil` makes each operation throw "operation: what" and leaves all memory as it was.
  void expect_refusal(const Operations& operations, const std::string& what,
                      const std::function<void(Call&)>& spoil,
                      ErrorCode code = ErrorCode::kInvalidArgument) {
    for (const Operation operation : operations) {
      const std::string expected = name_of_operation(operation) + ": " + what;
      SCOPED_TRACE(expected);
      Call call;
      spoil(call);
      const std::vector<std::uint8_t> before = call.bytes();
      EXPECT_EQ(error_of([&] { call.run(context_, operation); }, code), expected);
      EXPECT_TRUE(call.bytes() == before) << "memory was written";
    }
  }

  // What every tensor is refused for, whatever its part.

  void refuses_bad_memory(const Operations& operations, const std::string& name) {
    expect_refusal(operations, name + ": got a null pointer, expected data",
                   [&](Call& call) { call.set_data(name, nullptr); });
    expect_refusal(
        operations, name + ": got memory of cuda:0, expected memory of cpu, where the call runs",
        [&](Call& call) {
          const TensorView view = call[name];
          call[name] = TensorView(view.data(), view.dtype(), view.shape(), Device::kCuda);
        });
    if (name == "mask") return;  // a byte is always aligned
    for (const int shift : {1, 2, 3}) {
      expect_refusal(operations,
                     name + ": got data that is not aligned, expected a multiple of 4 bytes",
                     [&](Call& call) {
                       call.set_data(name, static_cast<std::uint8_t*>(call[name].data()) + shift);
                     });
    }
  }

  void refuses_wrong_rank(const Operations& operations, const std::string& name) {
    Call legal;
    const Dims shape = legal[name].shape();
    const std::string expected = ", expected " + std::to_string(shape.rank()) + " dimensions";
    std::vector<std::int64_t> sizes(shape.begin(), shape.end());
    sizes.push_back(1);
    expect_refusal(operations, name + ": got " + Dims(sizes).to_string() + expected,
                   [&](Call& call) { call.set_shape(name, Dims(sizes)); });
    sizes.resize(sizes.size() - 2);
    expect_refusal(operations, name + ": got " + Dims(sizes).to_string() + expected,
                   [&](Call& call) { call.set_shape(name, Dims(sizes)); });
  }

  void refuses_absence(const Operations& operations, const std::string& name) {
    expect_refusal(operations, name + ": got none, expected a tensor",
                   [&](Call& call) { call.leave_out(name); });
  }

  /// Each of the dimensions one longer than it must be.
  void refuses_wrong_shape(const Operations& operations, const std::string& name,
                           const std::vector<int>& dims, const std::string& note = "") {
    Call legal;
    const Dims shape = legal[name].shape();
    for (const int dim : dims) {
      Dims longer = shape;
      ++longer[dim];
      expect_refusal(operations,
                     name + ": got " + longer.to_string() + ", expected " +
                         (note.empty() ? shape.to_string() : note),
                     [&](Call& call) { call.set_shape(name, longer); });
    }
  }

  void refuses_dtype(const Operations& operations, const std::string& name, DType dtype,
                     const std::string& expected) {
    expect_refusal(operations, name + ": got dtype " + name_of(dtype) + ", expected " + expected,
                   [&](Call& call) { call.set_dtype(name, dtype); });
  }

  /// For tensors whose last dimension must be dense.
  void refuses_strided_rows(const Operations& operations, const std::string& name) {
    for (const std::int64_t stride : {2, 0, -1}) {
      expect_refusal(operations,
                     name + ": got a last stride of " + std::to_string(stride) + ", expected 1",
                     [&](Call& call) {
                       Dims strides = call[name].strides();
                       strides[3] = stride;
                       call.set_strides(name, strides);
                     });
    }
  }

  /// Memory of `output` and `other` that meets in one element is refused; memory that touches is
  /// not.
  void refuses_overlap(Operation operation, const std::string& output, const std::string& other) {
    const auto place = [&](Call& call, std::int64_t elements) {
      auto* start = static_cast<std::uint8_t*>(call[output].data());
      call.set_data(other, start + elements * 4);
    };
    Call touching;
    const std::int64_t size = touching[output].num_elements();
    for (const std::int64_t at : {std::int64_t{0}, size - 1}) {
      expect_refusal({operation},
                     output + ": got memory that overlaps " + other + ", expected separate memory",
                     [&](Call& call) { place(call, at); });
    }
    place(touching, size);
    EXPECT_NO_THROW(touching.run(context_, operation)) << output << " together with " << other;
  }

  /// A stride of 0, and strides that let two rows meet in one element.
  void refuses_self_overlap(const Operations& operations, const std::string& output) {
    Call legal;
    const TensorView view = legal[output];
    const int last = view.rank() - 1;
    for (int dim = 0; dim <= last; ++dim) {
      // A dense last dimension and a size of 1 are other matters.
      if (view.size(dim) == 1 || (dim == 3 && output != "weights" && output != "dbias")) continue;
      Dims strides = view.strides();
      strides[dim] = 0;
      refuses_strides(operations, output, strides);
      if (dim == last) continue;
      strides[dim] = view.size(last) - 1;
      refuses_strides(operations, output, strides);
    }
  }

  Context context_{ContextOptions{.num_threads = 2, .isa = GetParam()}};

 private:
  void refuses_strides(const Operations& operations, const std::string& output,
                       const Dims& strides) {
    expect_refusal(operations,
                   output + ": got strides " + strides.to_string() +
                       " that reach one element twice, expected an output without overlap",
                   [&](Call& call) { call.set_strides(output, strides); });
  }
};

}  // namespace ladon::test
