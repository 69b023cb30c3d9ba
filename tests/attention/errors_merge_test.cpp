// Every refusal of merge_attention(), and what it accepts.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// A legal merge of two parts, to be spoiled in one place. Views are of f32 memory, longer than
/// they need.
struct MergeCall {
  MergeCall() {
    std::uint64_t seed = 0;
    for (Tensor* tensor : {&part0, &part1, &lse0, &lse1, &sink, &merged, &merged_lse}) {
      *tensor = Tensor(DType::kF32, {256});
      fill_normal(host_context(), *tensor, 0, 1, ++seed);
    }
    outs = {TensorView(part0.data(), DType::kF32, shape),
            TensorView(part1.data(), DType::kF32, shape)};
    lses = {TensorView(lse0.data(), DType::kF32, lse_shape),
            TensorView(lse1.data(), DType::kF32, lse_shape)};
    sinks = TensorView(sink.data(), DType::kF32, {4});
    out = TensorView(merged.data(), DType::kF32, shape);
    lse = TensorView(merged_lse.data(), DType::kF32, lse_shape);
  }

  void run() {
    const std::vector<ConstTensorView> const_outs(outs.begin(), outs.end());
    const std::vector<ConstTensorView> const_lses(lses.begin(), lses.end());
    merge_attention(context, const_outs, const_lses, out, lse, sinks);
  }

  std::vector<std::uint8_t> bytes() const {
    std::vector<std::uint8_t> all;
    for (const Tensor* tensor : {&part0, &part1, &lse0, &lse1, &sink, &merged, &merged_lse}) {
      const auto* data = static_cast<const std::uint8_t*>(tensor->data());
      all.insert(all.end(), data, data + 1024);
    }
    return all;
  }

  const Dims shape{2, 3, 4, 6};
  const Dims lse_shape{2, 4, 3};
  Context context{ContextOptions{.num_threads = 2}};
  Tensor part0, part1, lse0, lse1, sink, merged, merged_lse;
  std::vector<TensorView> outs;
  std::vector<TensorView> lses;
  TensorView sinks;
  TensorView out;
  TensorView lse;
};

void expect_refusal(const std::string& what, const std::function<void(MergeCall&)>& spoil,
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  SCOPED_TRACE(what);
  MergeCall call;
  spoil(call);
  const std::vector<std::uint8_t> before = call.bytes();
  EXPECT_EQ(error_of([&] { call.run(); }, code), "merge_attention: " + what);
  EXPECT_TRUE(call.bytes() == before) << "memory was written";
}

/// Every tensor of the call by the name that a message gives it.
struct Named {
  std::string name;
  std::function<TensorView&(MergeCall&)> view;
};

const std::vector<Named> kTensors{
    {"outs[0]", [](MergeCall& call) -> TensorView& { return call.outs[0]; }},
    {"outs[1]", [](MergeCall& call) -> TensorView& { return call.outs[1]; }},
    {"lses[0]", [](MergeCall& call) -> TensorView& { return call.lses[0]; }},
    {"lses[1]", [](MergeCall& call) -> TensorView& { return call.lses[1]; }},
    {"out", [](MergeCall& call) -> TensorView& { return call.out; }},
    {"lse", [](MergeCall& call) -> TensorView& { return call.lse; }},
    {"sinks", [](MergeCall& call) -> TensorView& { return call.sinks; }},
};

bool is_lse(const std::string& name) { return name.substr(0, 3) == "lse"; }

TEST(MergeErrors, TheUnspoiledCallIsLegalAndWrites) {
  MergeCall call;
  const std::vector<std::uint8_t> before = call.bytes();
  EXPECT_NO_THROW(call.run());
  EXPECT_FALSE(call.bytes() == before);
  call.lse = {};
  call.sinks = {};
  EXPECT_NO_THROW(call.run());
}

TEST(MergeErrors, NumberOfParts) {
  expect_refusal("outs: got no parts, expected 1 or more", [](MergeCall& call) {
    call.outs.clear();
    call.lses.clear();
  });
  expect_refusal("lses: got 1 parts, expected 2 as in outs",
                 [](MergeCall& call) { call.lses.pop_back(); });
  expect_refusal("lses: got 2 parts, expected 1 as in outs",
                 [](MergeCall& call) { call.outs.pop_back(); });
}

TEST(MergeErrors, Memory) {
  for (const Named& tensor : kTensors) {
    expect_refusal(tensor.name + ": got a null pointer, expected data", [&](MergeCall& call) {
      TensorView& view = tensor.view(call);
      view = TensorView(nullptr, view.dtype(), view.shape());
    });
    expect_refusal(tensor.name + ": got data that is not aligned, expected a multiple of 4 bytes",
                   [&](MergeCall& call) {
                     TensorView& view = tensor.view(call);
                     view = TensorView(static_cast<std::uint8_t*>(view.data()) + 2, view.dtype(),
                                       view.shape());
                   });
    expect_refusal(
        tensor.name + ": got memory of cuda:0, expected memory of cpu, where the call runs",
        [&](MergeCall& call) {
          TensorView& view = tensor.view(call);
          view = TensorView(view.data(), view.dtype(), view.shape(), Device::kCuda);
        });
    const int rank = tensor.name == "sinks" ? 1 : is_lse(tensor.name) ? 3 : 4;
    expect_refusal(tensor.name + ": got [2, 3], expected " + std::to_string(rank) + " dimensions",
                   [&](MergeCall& call) {
                     tensor.view(call) = call.part0.view().slice(0, 0, 6).reshape({2, 3});
                   });
    if (tensor.name == "lse" || tensor.name == "sinks") continue;  // optional
    expect_refusal(tensor.name + ": got none, expected a tensor",
                   [&](MergeCall& call) { tensor.view(call) = {}; });
  }
}

TEST(MergeErrors, StridedRows) {
  for (const Named& tensor : kTensors) {
    if (tensor.name.substr(0, 3) != "out") continue;
    expect_refusal(tensor.name + ": got a last stride of 2, expected 1", [&](MergeCall& call) {
      TensorView& view = tensor.view(call);
      view = TensorView(view.data(), view.dtype(), view.shape(), {72, 24, 6, 2});
    });
  }
}

TEST(MergeErrors, Dtypes) {
  for (const Named& tensor : kTensors) {
    const auto set_dtype = [&](DType dtype) {
      return [&tensor, dtype](MergeCall& call) {
        TensorView& view = tensor.view(call);
        view = TensorView(view.data(), dtype, view.shape());
      };
    };
    if (!is_lse(tensor.name)) {
      expect_refusal(tensor.name + ": got dtype bool, expected f64, f32, f16 or bf16",
                     set_dtype(DType::kBool));
      continue;
    }
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kBool}) {
      expect_refusal(tensor.name + ": got dtype " + name_of(dtype) + ", expected f32 or f64",
                     set_dtype(dtype));
    }
  }
}

TEST(MergeErrors, Shapes) {
  for (const Named& tensor : kTensors) {
    if (tensor.name == "out") continue;  // the others are compared with it
    MergeCall legal;
    const Dims shape = tensor.view(legal).shape();
    for (int dim = 0; dim < shape.rank(); ++dim) {
      Dims longer = shape;
      ++longer[dim];
      expect_refusal(
          tensor.name + ": got " + longer.to_string() + ", expected " + shape.to_string(),
          [&](MergeCall& call) {
            TensorView& view = tensor.view(call);
            view = TensorView(view.data(), view.dtype(), longer);
          });
    }
  }
  expect_refusal("outs[0]: got [2, 3, 4, 6], expected [2, 3, 4, 5]",
                 [](MergeCall& call) { call.out = call.out.slice(3, 0, 5); });
}

TEST(MergeErrors, SizesThatOverflow) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  expect_refusal(
      "out: got [1099511627776, 1048576, 4, 1] with strides [0, 0, 0, 1], expected a size that "
      "fits 64 bits",
      [](MergeCall& call) {
        call.out =
            TensorView(call.out.data(), DType::kF32, {kHuge, kHuge >> 20, 4, 1}, {0, 0, 0, 1});
      });
}

TEST(MergeErrors, Overlaps) {
  for (const Named& output : kTensors) {
    if (output.name != "out" && output.name != "lse") continue;
    for (const Named& input : kTensors) {
      if (input.name == "out" || input.name == output.name) continue;
      const auto place = [&](MergeCall& call, std::int64_t elements) {
        TensorView& view = input.view(call);
        view = TensorView(static_cast<float*>(output.view(call).data()) + elements, DType::kF32,
                          view.shape());
      };
      MergeCall touching;
      const std::int64_t size = output.view(touching).num_elements();
      expect_refusal(
          output.name + ": got memory that overlaps " + input.name + ", expected separate memory",
          [&](MergeCall& call) { place(call, size - 1); });
      if (size + input.view(touching).num_elements() > 256) continue;
      place(touching, size);
      EXPECT_NO_THROW(touching.run()) << output.name << " together with " << input.name;
    }
  }
  expect_refusal(
      "out: got strides [72, 0, 6, 1] that reach one element twice, expected an output without "
      "overlap",
      [](MergeCall& call) {
        call.out = TensorView(call.out.data(), DType::kF32, call.shape, {72, 0, 6, 1});
      });
  expect_refusal(
      "lse: got strides [12, 2, 1] that reach one element twice, expected an output without "
      "overlap",
      [](MergeCall& call) {
        call.lse = TensorView(call.lse.data(), DType::kF32, call.lse_shape, {12, 2, 1});
      });
}

TEST(MergeErrors, EmptyIsLegal) {
  MergeCall call;
  for (const Dims& shape : {Dims{0, 3, 4, 6}, Dims{2, 0, 4, 6}, Dims{2, 3, 0, 6}}) {
    const Dims lse_shape{shape[0], shape[2], shape[1]};
    for (TensorView& out : call.outs) out = TensorView(nullptr, DType::kF32, shape);
    for (TensorView& lse : call.lses) lse = TensorView(nullptr, DType::kF32, lse_shape);
    call.out = TensorView(nullptr, DType::kF32, shape);
    call.lse = TensorView(nullptr, DType::kF32, lse_shape);
    call.sinks = TensorView(call.sink.data(), DType::kF32, {shape[2]});
    EXPECT_NO_THROW(call.run()) << shape.to_string();
  }
}

}  // namespace
}  // namespace ladon::test
