// Every refusal of what attention_backward() takes besides q, k, v and options: what the forward
// call saved, and the gradients. And what is not an error: gradients that interleave in one buffer.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "attention/error_cases.h"
#include "ladon/attention.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

const std::vector<std::string> kSaved{"out", "lse", "dout", "dlse"};
const std::vector<std::string> kGradients{"dq", "dk", "dv", "dbias", "dsinks"};
constexpr std::int64_t kHuge = std::int64_t{1} << 40;

INSTANTIATE_TEST_SUITE_P(Isas, AttentionErrors, testing::ValuesIn(runnable_isas()), isa_test_name);

TEST_P(AttentionErrors, Memory) {
  for (const std::vector<std::string>& names : {kSaved, kGradients}) {
    for (const std::string& name : names) {
      refuses_bad_memory(kBackwardOnly, name);
      refuses_wrong_rank(kBackwardOnly, name);
    }
  }
  for (const char* name : {"out", "lse", "dout"}) refuses_absence(kBackwardOnly, name);
  for (const char* name : {"out", "dout", "dq", "dk", "dv"}) {
    refuses_strided_rows(kBackwardOnly, name);
  }
}

TEST_P(AttentionErrors, WhatMayBeLeftOut) {
  for (const std::string& name : kGradients) {
    Call call;
    call.leave_out(name);
    call.leave_out("dlse");
    EXPECT_NO_THROW(call.run(context_, Operation::kBackward)) << name;
  }
  Call call;
  for (const std::string& name : kGradients) call.leave_out(name);
  const std::vector<std::uint8_t> before = call.bytes();
  EXPECT_NO_THROW(call.run(context_, Operation::kBackward));
  EXPECT_TRUE(call.bytes() == before);
}

TEST_P(AttentionErrors, Dtypes) {
  for (const char* name : {"out", "lse", "dout", "dlse", "dq", "dk", "dv"}) {
    const bool is_lse = std::string(name).ends_with("lse");  // which may be f64
    for (const DType dtype : {DType::kF64, DType::kF16, DType::kBF16, DType::kBool}) {
      if (is_lse && dtype == DType::kF64) continue;
      refuses_dtype(kBackwardOnly, name, dtype, "f32");
    }
  }
  for (const char* name : {"dbias", "dsinks"}) {
    refuses_dtype(kBackwardOnly, name, DType::kBool, "f64, f32, f16 or bf16");
  }
}

TEST_P(AttentionErrors, GradientsTakeTheDtypeOfTheirInput) {
  const auto narrow_cache = [](Call& call) {
    call.set_dtype("k", DType::kBF16);
    call.set_dtype("v", DType::kBF16);
    call.set_dtype("dk", DType::kBF16);
    call.set_dtype("dv", DType::kBF16);
  };
  Call legal;
  narrow_cache(legal);
  EXPECT_NO_THROW(legal.run(context_, Operation::kBackward));
  for (const std::string name : {"dk", "dv"}) {
    expect_refusal(kBackwardOnly, name + ": got dtype f16, expected bf16", [&](Call& call) {
      narrow_cache(call);
      call.set_dtype(name, DType::kF16);
    });
    Call summed;  // sums of 16-bit inputs may be f32
    narrow_cache(summed);
    summed.set_dtype(name, DType::kF32);
    EXPECT_NO_THROW(summed.run(context_, Operation::kBackward));
  }
  for (const std::string name : {"lse", "dlse"}) {
    expect_refusal(kBackwardOnly, name + ": got dtype f32, expected f64", [&](Call& call) {
      for (const std::string other : {"q", "out", "lse", "dout", "dlse", "dq"}) {
        if (other != name) call.set_dtype(other, DType::kF64);
      }
    });
  }
}

TEST_P(AttentionErrors, Shapes) {
  for (const char* name : {"out", "dout", "dq", "dk", "dv", "dbias"}) {
    refuses_wrong_shape(kBackwardOnly, name, {0, 1, 2, 3});
  }
  refuses_wrong_shape(kBackwardOnly, "lse", {0, 1, 2});
  refuses_wrong_shape(kBackwardOnly, "dlse", {0, 1, 2});
  refuses_wrong_shape(kBackwardOnly, "dsinks", {0});
  // A gradient has its input's shape even where the forward call would have broadcast it.
  expect_refusal(kBackwardOnly, "dbias: got [1, 1, 3, 5], expected [1, 4, 3, 5]", [](Call& call) {
    call.set_shape("dbias", {1, 1, 3, 5});
  });
}

TEST_P(AttentionErrors, GradientsOfWhatWasNotGiven) {
  expect_refusal(kBackwardOnly, "dbias: got a tensor, expected none because options have no bias",
                 [](Call& call) { call.leave_out("bias"); });
  expect_refusal(kBackwardOnly, "dsinks: got a tensor, expected none because options have no sinks",
                 [](Call& call) { call.leave_out("sinks"); });
}

TEST_P(AttentionErrors, SizesThatOverflow) {
  expect_refusal(kBackwardOnly,
                 "dout: got [1099511627776, 1048576, 4, 1] with strides [0, 0, 0, 1], expected a "
                 "size that fits 64 bits",
                 [](Call& call) {
                   call["dout"] = TensorView(call["dout"].data(), DType::kF32,
                                             {kHuge, kHuge >> 20, 4, 1}, {0, 0, 0, 1});
                 });
}

TEST_P(AttentionErrors, Overlaps) {
  const std::vector<std::string> inputs{"q",    "k",    "v",    "out",          "lse",  "dout",
                                        "dlse", "mask", "bias", "alibi_slopes", "sinks"};
  for (std::size_t i = 0; i < kGradients.size(); ++i) {
    const std::string& output = kGradients[i];
    for (const std::string& input : inputs) refuses_overlap(Operation::kBackward, output, input);
    for (std::size_t j = i + 1; j < kGradients.size(); ++j) {
      refuses_overlap(Operation::kBackward, output, kGradients[j]);
    }
    refuses_self_overlap(kBackwardOnly, output);
  }
}

TEST_P(AttentionErrors, InputsMayRepeatTheirElements) {
  Call call;
  call.set_strides("out", {0, 24, 6, 1});
  call.set_strides("dout", {0, 0, 0, 1});
  call.set_strides("dlse", {0, 0, 0});
  call.set_strides("k", {0, 16, 8, 1});
  EXPECT_NO_THROW(call.run(context_, Operation::kBackward));
}

/// q, k, v and a fourth part (as q) as slices of one [batch, len, heads, head_dim] buffer.
struct PackedBuffer {
  explicit PackedBuffer(std::uint64_t seed) : memory(DType::kF32, {2, 7, 12, 8}) {
    fill_normal(host_context(), memory, 0, 1, seed);
  }
  TensorView q() { return memory.view().slice(2, 0, 4); }
  TensorView k() { return memory.view().slice(2, 4, 6); }
  TensorView v() { return memory.view().slice(2, 6, 8); }
  TensorView rest() { return memory.view().slice(2, 8, 12); }

  Tensor memory;
};

void expect_same_bits(const Tensor& expected, const ConstTensorView& view, const char* name) {
  const Tensor dense = Tensor::copy_of(host_context(), view);
  EXPECT_EQ(std::memcmp(expected.data(), dense.data(),
                        static_cast<std::size_t>(dense.num_elements()) * size_of(dense.dtype())),
            0)
      << name;
}

TEST_P(AttentionErrors, InterleavedViewsOfOneBufferAreNotRefused) {
  PackedBuffer packed(1);
  const Tensor q = Tensor::copy_of(host_context(), packed.q());
  const Tensor k = Tensor::copy_of(host_context(), packed.k());
  const Tensor v = Tensor::copy_of(host_context(), packed.v());
  const Dims lse_shape{2, 4, 7};
  Tensor out(DType::kF32, q.shape());
  Tensor lse(DType::kF32, lse_shape);
  Tensor packed_lse(DType::kF32, lse_shape);
  const AttentionOptions options{.causal = true};
  attention(context_, q, k, v, options, out, lse);
  // The output is between the inputs, in the same buffer.
  attention(context_, packed.q(), packed.k(), packed.v(), options, packed.rest(), packed_lse);
  expect_same_bits(out, packed.rest(), "out");
  expect_same_bits(lse, packed_lse, "lse");
  expect_same_bits(q, packed.q(), "q");
  expect_same_bits(k, packed.k(), "k");
  expect_same_bits(v, packed.v(), "v");

  PackedBuffer gradients(2);
  Tensor dq(DType::kF32, q.shape());
  Tensor dk(DType::kF32, k.shape());
  Tensor dv(DType::kF32, v.shape());
  const Tensor dout = Tensor::copy_of(host_context(), gradients.rest());
  attention_backward(context_, q, k, v, options, {out, lse, dout, {}}, {dq, dk, dv, {}, {}});
  attention_backward(context_, packed.q(), packed.k(), packed.v(), options,
                     {packed.rest(), packed_lse, gradients.rest(), {}},
                     {gradients.q(), gradients.k(), gradients.v(), {}, {}});
  expect_same_bits(dq, gradients.q(), "dq");
  expect_same_bits(dk, gradients.k(), "dk");
  expect_same_bits(dv, gradients.v(), "dv");
  expect_same_bits(dout, gradients.rest(), "dout");
}

TEST_P(AttentionErrors, InterleavedViewsThatMeetAreRefused) {
  PackedBuffer packed(1);
  PackedBuffer gradients(2);
  Tensor out(DType::kF32, {2, 7, 4, 8});
  Tensor lse(DType::kF32, {2, 4, 7});
  attention(context_, packed.q(), packed.k(), packed.v(), {}, out, lse);
  const Tensor before = Tensor::copy_of(host_context(), gradients.memory);
  const TensorView too_early = gradients.memory.view().slice(2, 3, 5);  // dq has heads 0 to 3
  EXPECT_EQ(error_of([&] {
              attention_backward(context_, packed.q(), packed.k(), packed.v(), {},
                                 {out, lse, out, {}},
                                 {gradients.q(), too_early, gradients.v(), {}, {}});
            }),
            "attention_backward: dq: got memory that overlaps dk, expected separate memory");
  expect_same_bits(before, gradients.memory, "gradients");
}

}  // namespace
}  // namespace ladon::test
