// Every refusal of q, k, v, the options and the outputs of attention() and attention_weights(): the
// message names the operation and the argument, says what came and what was expected, and no memory
// changes. errors_backward_test.cpp has what attention_backward() adds.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/error_cases.h"
#include "core/checks.h"
#include "ladon/attention.h"

namespace ladon::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kHuge = std::int64_t{1} << 40;
const char* const kAnyFloat = "f64, f32, f16 or bf16";

/// Which operations read the argument.
Operations readers_of(const std::string& name) {
  if (name == "v") return kWithValues;
  if (name == "out" || name == "lse") return kForwardOnly;
  return name == "weights" ? kWeightsOnly : kAllOperations;
}

INSTANTIATE_TEST_SUITE_P(Isas, AttentionErrors, testing::ValuesIn(runnable_isas()), isa_test_name);

TEST_P(AttentionErrors, TheUnspoiledCallsAreLegalAndWrite) {
  for (const bool packed : {false, true}) {
    for (const Operation operation : kAllOperations) {
      if (packed && operation == Operation::kWeights) continue;
      Call call;
      if (packed) call.pack();
      const std::vector<std::uint8_t> before = call.bytes();
      EXPECT_NO_THROW(call.run(context_, operation)) << name_of_operation(operation);
      EXPECT_EQ(call.bytes() == before, operation == Operation::kForwardNew);
    }
  }
}

TEST_P(AttentionErrors, Memory) {
  for (const char* name :
       {"q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "out", "lse", "weights"}) {
    refuses_bad_memory(readers_of(name), name);
    refuses_wrong_rank(readers_of(name), name);
  }
  for (const char* name : {"q", "k", "v", "out", "weights"}) {
    refuses_absence(readers_of(name), name);
  }
  for (const char* name : {"q", "k", "v", "out"}) refuses_strided_rows(readers_of(name), name);
}

TEST_P(AttentionErrors, MisalignedElementsOfEachSize) {
  const auto shift = [](Call& call, const char* name, DType dtype, int bytes) {
    call.set_dtype(name, dtype);
    call.set_data(name, static_cast<std::uint8_t*>(call[name].data()) + bytes);
  };
  expect_refusal(kAllOperations, "q: got data that is not aligned, expected a multiple of 8 bytes",
                 [&](Call& call) { shift(call, "q", DType::kF64, 4); });
  expect_refusal(kAllOperations, "k: got data that is not aligned, expected a multiple of 2 bytes",
                 [&](Call& call) { shift(call, "k", DType::kBF16, 1); });
}

TEST_P(AttentionErrors, AScalarIsNotAbsent) {
  expect_refusal(kAllOperations, "mask: got [], expected 4 dimensions", [](Call& call) {
    call["mask"] = TensorView(call["mask"].data(), DType::kBool, {});
  });
}

TEST_P(AttentionErrors, Dtypes) {
  const std::string narrower = "q's f32 or a narrower one";
  refuses_dtype(kAllOperations, "q", DType::kBool, kAnyFloat);
  refuses_dtype(kAllOperations, "k", DType::kBool, kAnyFloat);
  refuses_dtype(kAllOperations, "k", DType::kF64, narrower);
  refuses_dtype(kWithValues, "v", DType::kBool, "f32");
  refuses_dtype(kWithValues, "v", DType::kBF16, "f32");
  refuses_dtype(kWithValues, "v", DType::kF64, "f32");
  refuses_dtype(kAllOperations, "mask", DType::kF32, "bool");
  for (const char* name : {"bias", "alibi_slopes", "sinks"}) {
    refuses_dtype(kAllOperations, name, DType::kBool, kAnyFloat);
  }
  for (const DType dtype : {DType::kF64, DType::kF16, DType::kBF16, DType::kBool}) {
    refuses_dtype(kForwardOnly, "out", dtype, "f32");
    if (dtype != DType::kF64) refuses_dtype(kForwardOnly, "lse", dtype, "f32");
  }
  refuses_dtype(kWeightsOnly, "weights", DType::kBool, kAnyFloat);
}

TEST_P(AttentionErrors, DtypesOfSmallAndLargeQueries) {
  // Of two 16-bit types neither is the narrower one.
  for (const auto& [q, k] : {std::pair{DType::kF16, DType::kBF16}, {DType::kBF16, DType::kF16}}) {
    expect_refusal(kAllOperations,
                   std::string("k: got dtype ") + name_of(k) + ", expected q's " + name_of(q) +
                       " or a narrower one",
                   [q = q, k = k](Call& call) {
                     call.set_dtype("q", q);
                     call.set_dtype("k", k);
                     call.set_dtype("v", k);
                   });
  }
  expect_refusal(kAllOperations, "k: got dtype f32, expected q's bf16 or a narrower one",
                 [](Call& call) { call.set_dtype("q", DType::kBF16); });
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    expect_refusal(kForwardOnly, std::string("lse: got dtype ") + name_of(dtype) + ", expected f64",
                   [&](Call& call) {
                     call.set_dtype("q", DType::kF64);
                     call.set_dtype("out", DType::kF64);
                     call.set_dtype("lse", dtype);
                   });
  }
  expect_refusal(kForwardOnly, "lse: got dtype bf16, expected f32", [](Call& call) {
    for (const char* name : {"q", "k", "v", "out", "lse"}) call.set_dtype(name, DType::kBF16);
  });
}

TEST_P(AttentionErrors, Shapes) {
  refuses_wrong_shape(kAllOperations, "k", {0, 3});
  refuses_wrong_shape(kWithValues, "v", {0, 1, 2});
  refuses_wrong_shape(kForwardOnly, "out", {0, 1, 2, 3});
  refuses_wrong_shape(kForwardOnly, "lse", {0, 1, 2});
  refuses_wrong_shape(kWeightsOnly, "weights", {0, 1, 2, 3});
  refuses_wrong_shape(kAllOperations, "alibi_slopes", {0});
  refuses_wrong_shape(kAllOperations, "sinks", {0});
  const std::string broadcast = "[2, 4, 3, 5] or 1 in any place";
  for (const char* name : {"mask", "bias"}) {
    expect_refusal(kAllOperations, std::string(name) + ": got [2, 2, 3, 5], expected " + broadcast,
                   [&](Call& call) {
                     call.set_shape(name, {2, 2, 3, 5});
                   });
    expect_refusal(kAllOperations, std::string(name) + ": got [2, 4, 0, 5], expected " + broadcast,
                   [&](Call& call) {
                     call.set_shape(name, {2, 4, 0, 5});
                   });
  }
  refuses_wrong_shape(kAllOperations, "mask", {0, 1, 2, 3}, broadcast);
  refuses_wrong_shape(kAllOperations, "bias", {1, 2, 3}, broadcast);
}

TEST_P(AttentionErrors, HeadsAndDims) {
  const std::string divisor = " KV heads, expected a divisor of q's 4 heads";
  for (const std::int64_t heads : {3, 8}) {
    expect_refusal(kAllOperations, "k: got " + std::to_string(heads) + divisor, [&](Call& call) {
      call.set_shape("k", {2, 5, heads, 8});
    });
  }
  expect_refusal(kAllOperations, "q: got [2, 3, 4, 0], expected a head_dim of 1 or more",
                 [](Call& call) {
                   call.set_shape("q", {2, 3, 4, 0});
                 });
  expect_refusal(kAllOperations, "q: got [2, 3, 0, 8], expected 1 head or more", [](Call& call) {
    call.set_shape("q", {2, 3, 0, 8});
  });
  expect_refusal(kAllOperations, "k: got [2, 5, 0, 8], expected 1 head or more", [](Call& call) {
    call.set_shape("k", {2, 5, 0, 8});
  });
  expect_refusal(kAllOperations, "k: got [2, 5, 2, 0], expected [2, 5, 2, 8]", [](Call& call) {
    call.set_shape("k", {2, 5, 2, 0});
  });
  expect_refusal(kWithValues, "v: got [2, 5, 2, 0], expected a value_dim of 1 or more",
                 [](Call& call) {
                   call.set_shape("v", {2, 5, 2, 0});
                 });
}

TEST_P(AttentionErrors, Numbers) {
  for (const double value : {kNaN, kInfinity, -kInfinity}) {
    const std::string what = ": got " + text_of(value) + ", expected a finite number";
    expect_refusal(kAllOperations, "scale" + what, [&](Call& call) { call.options.scale = value; });
    expect_refusal(kAllOperations, "softcap" + what,
                   [&](Call& call) { call.options.softcap = value; });
  }
  expect_refusal(kAllOperations, "softcap: got -2.5, expected a positive number, or 0 for none",
                 [](Call& call) { call.options.softcap = -2.5; });
  expect_refusal(kAllOperations, "window_left: got -1, expected 0 or more",
                 [](Call& call) { call.options.window_left = -1; });
  expect_refusal(kAllOperations, "window_right: got -9223372036854775808, expected 0 or more",
                 [](Call& call) {
                   call.options.causal = true;
                   call.options.window_right = std::numeric_limits<std::int64_t>::min();
                 });
  for (const double value : {-0.1, 1.0, 1.5, kNaN, kInfinity, -kInfinity}) {
    expect_refusal(kAllOperations,
                   "dropout.probability: got " + text_of(value) + ", expected a number in [0, 1)",
                   [&](Call& call) { call.options.dropout.probability = value; });
  }
  expect_refusal(kAllOperations, "dropout.first_sequence: got -7, expected 0 or more",
                 [](Call& call) { call.options.dropout.first_sequence = -7; });
  expect_refusal(kAllOperations, "dropout.first_head: got -1, expected 0 to 2^56",
                 [](Call& call) { call.options.dropout.first_head = -1; });
  expect_refusal(kAllOperations, "dropout.first_query: got -2, expected 0 to 2^56",
                 [](Call& call) { call.options.dropout.first_query = -2; });
  expect_refusal(kAllOperations, "dropout.first_key: got 72057594037927936, expected 0 to 2^56",
                 [](Call& call) { call.options.dropout.first_key = std::int64_t{1} << 56; });
  expect_refusal(
      kAllOperations,
      "position_offset: got -72057594037927936, expected a number between -2^56 and 2^56",
      [](Call& call) { call.options.position_offset = -(std::int64_t{1} << 56); });
  expect_refusal(
      kAllOperations,
      "position_offset: got one together with an alignment of kTopLeft, expected one of them",
      [](Call& call) {
        call.options.position_offset = 1;
        call.options.alignment = Alignment::kTopLeft;
      });
}

TEST_P(AttentionErrors, ExtremeNumbersThatAreLegal) {
  Call call;
  call.options.scale = -1e30;
  call.options.window_left = std::numeric_limits<std::int64_t>::max();
  call.options.window_right = std::numeric_limits<std::int64_t>::max();
  call.options.dropout.probability = std::nextafter(1.0, 0.0);
  for (const Operation operation : kAllOperations) {
    EXPECT_NO_THROW(call.run(context_, operation));
  }
}

TEST_P(AttentionErrors, Lengths) {
  expect_refusal(kAllOperations, "kv_lengths: got 3 lengths, expected batch = 2", [](Call& call) {
    call.set_lengths({5, 5, 5});
  });
  expect_refusal(kAllOperations, "kv_lengths: got 1 lengths, expected batch = 2",
                 [](Call& call) { call.set_lengths({5}); });
  expect_refusal(kAllOperations, "kv_lengths: got -1 at index 1, expected 0 to kv_len = 5",
                 [](Call& call) {
                   call.set_lengths({5, -1});
                 });
  expect_refusal(kAllOperations, "kv_lengths: got 6 at index 0, expected 0 to kv_len = 5",
                 [](Call& call) {
                   call.set_lengths({6, 0});
                 });
}

TEST_P(AttentionErrors, Offsets) {
  struct Refusal {
    std::string what;
    std::vector<std::int64_t> queries;
    std::vector<std::int64_t> keys;
  };
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::string falls = ", expected offsets that do not fall";
  const Refusal refusals[] = {
      {"query_offsets: got a first offset of 1, expected 0", {1, 6}, {0, 10}},
      {"kv_offsets: got a first offset of -1, expected 0", {0, 6}, {-1, 10}},
      {"query_offsets: got 2 after 4 at index 2" + falls, {0, 4, 2, 6}, {0, 1, 2, 10}},
      {"kv_offsets: got -3 after 0 at index 1" + falls, {0, 4, 6}, {0, -3, 10}},
      {"kv_offsets: got 10 after " + std::to_string(most) + " at index 2" + falls,
       {0, 4, 6},
       {0, most, 10}},
      {"query_offsets: got a last offset of 5, expected the total of 6 tokens", {0, 5}, {0, 10}},
      {"kv_offsets: got a last offset of 11, expected the total of 10 tokens", {0, 6}, {0, 11}},
      {"query_offsets: got a last offset of 0, expected the total of 6 tokens", {0}, {0}},
      {"kv_offsets: got none, expected offsets for both queries and keys of a packed batch",
       {0, 6},
       {}},
      {"query_offsets: got none, expected offsets for both queries and keys of a packed batch",
       {},
       {0, 10}},
      {"kv_offsets: got 3 offsets, expected 2 as in query_offsets", {0, 6}, {0, 5, 10}},
  };
  for (const Refusal& refusal : refusals) {
    expect_refusal(kAllOperations, refusal.what, [&](Call& call) {
      call.pack();
      call.set_offsets(refusal.queries, refusal.keys);
    });
  }
  expect_refusal(kAllOperations, "q: got a batch of 2, expected 1 in a packed batch",
                 [](Call& call) {
                   call.set_offsets({0, 3}, {0, 5});
                 });
  for (const bool only_keys : {false, true}) {
    expect_refusal(kAllOperations,
                   "kv_lengths: got both kv_lengths and offsets, expected a padded or a packed "
                   "batch, not both",
                   [&](Call& call) {
                     call.pack();
                     call.set_lengths({10});
                     if (only_keys) call.set_offsets({}, {0, 10});
                   });
  }
}

TEST_P(AttentionErrors, PackedMasksCountSequences) {
  // Two sequences of 2 and 4 queries, and of 9 and 1 keys.
  for (const char* name : {"mask", "bias"}) {
    expect_refusal(
        kAllOperations,
        std::string(name) + ": got [1, 1, 6, 10], expected [2, 4, 4, 9] or 1 in any place",
        [&](Call& call) {
          const TensorView view = call[name];
          call.pack();
          call[name] = TensorView(view.data(), view.dtype(), {1, 1, 6, 10});
        });
  }
}

TEST_P(AttentionErrors, WeightsOfAPackedBatch) {
  expect_refusal(
      kWeightsOnly,
      "query_offsets: got a packed batch, expected one sequence at a time or a padded batch",
      [](Call& call) { call.pack(); }, ErrorCode::kUnsupported);
}

TEST_P(AttentionErrors, SizesThatOverflow) {
  // A view refuses what it cannot count (tensor_test reads the whole message); one that repeats its
  // elements is counted by the call.
  Call call;
  const auto expect_start = [](const std::string& message, const std::string& start) {
    EXPECT_EQ(message.substr(0, start.size()), start);
  };
  expect_start(error_of([&] {
                 call.set_shape("q", {kHuge, kHuge, 1, 1});
               }),
               "row_major_strides: shape: ");
  expect_start(error_of([&] { call.set_shape("q", {2, -3, 4, 8}); }), "row_major_strides: shape: ");
  expect_start(error_of([&] {
                 call.set_strides("q", {1, std::int64_t{1} << 61, 8, 1});
               }),
               "TensorView: strides: ");
  expect_refusal(kAllOperations,
                 "q: got [1099511627776, 1048576, 4, 1] with strides [0, 0, 0, 1], expected a size "
                 "that fits 64 bits",
                 [](Call& spoiled) {
                   spoiled["q"] = TensorView(spoiled["q"].data(), DType::kF32,
                                             {kHuge, kHuge >> 20, 4, 1}, {0, 0, 0, 1});
                 });
}

TEST_P(AttentionErrors, AnOutputTooLargeForMemory) {
  const auto spoil = [](Call& call) {
    call["q"] = TensorView(call["q"].data(), DType::kF32, {2, kHuge, 4, 8}, {0, 0, 8, 1});
    call.leave_out("mask");
    call.leave_out("bias");
  };
  Call call;
  spoil(call);
  const std::string message =
      error_of([&] { call.run(context_, Operation::kForwardNew); }, ErrorCode::kOutOfMemory);
  EXPECT_NE(message.find("[2, 1099511627776, 4, 6] of f32"), std::string::npos) << message;
}

TEST_P(AttentionErrors, Overlaps) {
  const std::vector<std::string> options{"mask", "bias", "alibi_slopes", "sinks"};
  for (const std::string output : {"out", "lse"}) {
    for (const std::string input : {"q", "k", "v"}) {
      refuses_overlap(Operation::kForward, output, input);
    }
    for (const std::string& input : options) refuses_overlap(Operation::kForward, output, input);
  }
  refuses_overlap(Operation::kForward, "out", "lse");
  for (const std::string input : {"q", "k"}) {
    refuses_overlap(Operation::kWeights, "weights", input);
  }
  for (const std::string& input : options) {
    refuses_overlap(Operation::kWeights, "weights", input);
  }
  refuses_self_overlap(kForwardOnly, "out");
  refuses_self_overlap(kForwardOnly, "lse");
  refuses_self_overlap(kWeightsOnly, "weights");
}

}  // namespace
}  // namespace ladon::test
