// Every refusal of rope() and its relatives: the message names the operation and the argument, says
// what it got and what it expected, and the output is untouched.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ladon/context.h"
#include "ladon/error.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "support/host_context.h"
#include "support/isas.h"
#include "support/rope_support.h"

namespace ladon {
namespace {

using test::host_context;

/// A legal call, to be spoiled in one place.
struct Call {
  Tensor x_memory = normal_tensor(DType::kF32, {2, 3, 4, 8}, 1);
  Tensor out_memory = normal_tensor(DType::kF32, {2, 3, 4, 8}, 2);
  Tensor cos_memory{DType::kF32, {10, 4}};
  Tensor sin_memory{DType::kF32, {10, 4}};
  Tensor other_memory{DType::kF32, {64, 64}};  // for views that a spoiler wants elsewhere
  ConstTensorView x = x_memory;
  TensorView out = out_memory;
  RopeOptions options;
  RopePositions positions;
  std::vector<std::int64_t> position_list;
  std::optional<RopeTable> table;

  void use_table() { table = RopeTable{cos_memory, sin_memory}; }
  void use_positions(std::vector<std::int64_t> list) {
    position_list = std::move(list);
    positions.explicit_positions = position_list;
  }
};

class RopeErrors : public test::IsaTest {
 protected:
  /// `what` is the message after the operation; {in} and {out} stand for the tensors' names.
  void expect_refusal(const std::string& what, const std::function<void(Call&)>& spoil,
                      ErrorCode code = ErrorCode::kInvalidArgument) {
    for (const bool backward : {false, true}) {
      Call call;
      spoil(call);
      const Tensor out_before = Tensor::copy_of(host_context(), call.out_memory);
      const Tensor x_before = Tensor::copy_of(host_context(), call.x_memory);
      const auto run = [&] {
        if (call.table && backward) {
          rope_backward(context_, call.x, call.options, *call.table, call.positions, call.out);
        } else if (call.table) {
          rope(context_, call.x, call.options, *call.table, call.positions, call.out);
        } else if (backward) {
          rope_backward(context_, call.x, call.options, call.positions, call.out);
        } else {
          rope(context_, call.x, call.options, call.positions, call.out);
        }
      };
      std::string message = (backward ? "rope_backward: " : "rope: ") + what;
      replace(message, "{in}", backward ? "dout" : "x");
      replace(message, "{out}", backward ? "dx" : "out");
      expect_error(run, message, code);
      EXPECT_TRUE(same_bits(call.out_memory, out_before)) << message;
      EXPECT_TRUE(same_bits(call.x_memory, x_before)) << message;
    }
  }

 private:
  static void replace(std::string& text, const std::string& from, const std::string& to) {
    for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from)) {
      text.replace(at, from.size(), to);
    }
  }
};

LADON_FOR_EACH_ISA(RopeErrors);

TEST_P(RopeErrors, TheUnspoiledCallsAreLegal) {
  Call call;
  rope(context_, call.x, call.options, call.positions, call.out);
  rope(context_, call.x, call.options, call.positions, call.x_memory);
  call.use_table();
  rope(context_, call.x, call.options, *call.table, call.positions, call.out);
}

TEST_P(RopeErrors, Shapes) {
  expect_refusal("{in}: got none, expected a tensor", [](Call& call) { call.x = {}; });
  expect_refusal("{in}: got [3, 4, 8], expected 4 dimensions",
                 [](Call& call) { call.x = call.x.select(0, 0); });
  expect_refusal("{in}: got [2, 3, 4, 0], expected a head_dim of 1 or more",
                 [](Call& call) { call.x = call.x.slice(3, 0, 0); });
  expect_refusal("{out}: got [2, 3, 4, 6], expected [2, 3, 4, 8]",
                 [](Call& call) { call.out = call.out.slice(3, 0, 6); });
  expect_refusal("{out}: got none, expected a tensor", [](Call& call) { call.out = {}; });
}

TEST_P(RopeErrors, TypesDevicesAndMemory) {
  expect_refusal("{in}: got dtype bool, expected f64, f32, f16 or bf16", [](Call& call) {
    call.x = ConstTensorView(call.x.data(), DType::kBool, call.x.shape());
  });
  expect_refusal("{out}: got dtype bool, expected f32", [](Call& call) {
    call.out = TensorView(call.out.data(), DType::kBool, call.out.shape());
  });
  expect_refusal("{out}: got dtype bf16, expected f32", [](Call& call) {
    call.out = TensorView(call.out.data(), DType::kBF16, call.out.shape());
  });
  const std::string on_cuda = "got memory of cuda:0, expected memory of cpu, where the call runs";
  expect_refusal("{in}: " + on_cuda, [](Call& call) {
    call.x = ConstTensorView(call.x.data(), DType::kF32, call.x.shape(), Device::kCuda);
  });
  expect_refusal("{out}: " + on_cuda, [](Call& call) {
    call.out = TensorView(call.out.data(), DType::kF32, call.out.shape(), Device::kCuda);
  });
  expect_refusal("{in}: got a null pointer, expected data", [](Call& call) {
    call.x = ConstTensorView(nullptr, DType::kF32, call.x.shape());
  });
  expect_refusal("{out}: got a null pointer, expected data",
                 [](Call& call) { call.out = TensorView(nullptr, DType::kF32, call.out.shape()); });
  expect_refusal("{in}: got data that is not aligned, expected a multiple of 4 bytes",
                 [](Call& call) {
                   call.x = ConstTensorView(static_cast<const std::byte*>(call.x.data()) + 2,
                                            DType::kF32, {1, 3, 4, 8});
                   call.out = call.out.slice(0, 0, 1);
                 });
  expect_refusal(
      "{out}: got data that is not aligned, expected a multiple of 4 bytes", [](Call& call) {
        call.x = call.x.slice(0, 0, 1);
        call.out =
            TensorView(static_cast<std::byte*>(call.out.data()) + 1, DType::kF32, {1, 3, 4, 8});
      });
}

TEST_P(RopeErrors, StridesAndOverlaps) {
  const Dims every_second = {96, 32, 8, 2};
  expect_refusal("{in}: got a last stride of 2, expected 1", [&](Call& call) {
    call.x = ConstTensorView(call.other_memory.data(), DType::kF32, {2, 3, 4, 8}, every_second);
  });
  expect_refusal("{out}: got a last stride of 2, expected 1", [&](Call& call) {
    call.out = TensorView(call.other_memory.data(), DType::kF32, {2, 3, 4, 8}, every_second);
  });
  expect_refusal(
      "{out}: got strides [96, 32, 0, 1] that reach one element twice, expected an output without "
      "overlap",
      [](Call& call) {
        call.out = TensorView(call.out.data(), DType::kF32, {2, 3, 4, 8}, {96, 32, 0, 1});
      });
  expect_refusal("{out}: got memory that overlaps {in}, expected the same view or separate memory",
                 [](Call& call) {
                   call.x = call.x.slice(1, 0, 2);
                   call.out = call.x_memory.view().slice(1, 1, 3);
                 });
  // The same memory in another order is not the same view.
  expect_refusal("{out}: got memory that overlaps {in}, expected the same view or separate memory",
                 [](Call& call) {
                   call.x = call.x.slice(1, 0, 3).slice(2, 0, 3);
                   call.out = call.x_memory.view().slice(2, 0, 3).transpose(1, 2);
                 });
  for (const bool is_cos : {true, false}) {
    expect_refusal(std::string("{out}: got memory that overlaps table.") +
                       (is_cos ? "cos" : "sin") + ", expected separate memory",
                   [&](Call& call) {
                     call.use_table();
                     (is_cos ? call.table->cos : call.table->sin) =
                         ConstTensorView(call.out.data(), DType::kF32, {10, 4});
                   });
  }
}

TEST_P(RopeErrors, RotaryDimAndLayout) {
  const auto with = [](std::int64_t rotary_dim) {
    return [rotary_dim](Call& call) { call.options.rotary_dim = rotary_dim; };
  };
  expect_refusal("rotary_dim: got 3, expected a positive even number", with(3));
  expect_refusal("rotary_dim: got -2, expected a positive even number", with(-2));
  expect_refusal("rotary_dim: got 10, expected at most head_dim, which is 8", with(10));
  expect_refusal(
      "rotary_dim: got 0 (all of head_dim) with the odd head_dim 7, expected an even "
      "number",
      [](Call& call) {
        call.x = call.x.slice(3, 0, 7);
        call.out = call.out.slice(3, 0, 7);
      });
  expect_refusal(
      "rotary_dim: got 0 (all of head_dim) with the odd head_dim 1, expected an even "
      "number",
      [](Call& call) {
        call.x = call.x.slice(3, 0, 1);
        call.out = call.out.slice(3, 0, 1);
      });
  expect_refusal("layout: got 9, expected a RopeLayout",
                 [](Call& call) { call.options.layout = static_cast<RopeLayout>(9); });
}

TEST_P(RopeErrors, Frequencies) {
  expect_refusal("base: got 0, expected a positive finite number",
                 [](Call& call) { call.options.base = 0; });
  expect_refusal("scaling.factor: got -1.5, expected a positive finite number", [](Call& call) {
    call.options.scaling = {.kind = RopeScaling::kLinear, .factor = -1.5};
  });
  const auto explicitly = [](std::vector<double> frequencies) {
    return [=](Call& call) { call.options.frequencies = frequencies; };
  };
  expect_refusal("frequencies: got 3 of them, expected 4, one for each pair of rotary_dim 8",
                 explicitly({1, 2, 3}));
  expect_refusal("frequencies: got nan at index 1, expected finite numbers whose angles are finite",
                 explicitly({1, kNaN, 3, 4}));
  expect_refusal(
      "frequencies: got -1e+300 at index 3, expected finite numbers whose angles are finite",
      explicitly({1, 2, 3, -1e300}));
  expect_refusal("base: got a base together with explicit frequencies, expected the default",
                 [](Call& call) {
                   call.options.frequencies = {1, 2, 3, 4};
                   call.options.base = 5;
                 });
  expect_refusal("scaling: got a scaling together with explicit frequencies, expected the default",
                 [](Call& call) {
                   call.options.frequencies = {1, 2, 3, 4};
                   call.options.scaling.factor = 2;
                 });
  expect_refusal("magnitude: got 0, expected a positive finite number", [](Call& call) {
    call.options.frequencies = {1, 2, 3, 4};
    call.options.magnitude = 0;
  });
  expect_refusal("magnitude: got 2 without explicit frequencies, expected 1",
                 [](Call& call) { call.options.magnitude = 2; });
  // They are refused before there is anything to rotate, too.
  expect_refusal("base: got nan, expected a positive finite number", [](Call& call) {
    call.options.base = kNaN;
    call.x = call.x.slice(0, 0, 0);
    call.out = call.out.slice(0, 0, 0);
  });
}

TEST_P(RopeErrors, Positions) {
  expect_refusal(
      "positions.explicit_positions: got 4 positions, expected 3 (seq) or 6 (batch * seq)",
      [](Call& call) {
        call.use_positions({0, 1, 2, 3});
      });
  expect_refusal("positions.first: got 5 together with an explicit list, expected 0",
                 [](Call& call) {
                   call.use_positions({0, 1, 2});
                   call.positions.first = 5;
                 });
  expect_refusal(
      "positions.first: got 9223372036854775806 with 3 tokens, expected positions that fit 64 "
      "bits",
      [](Call& call) { call.positions.first = std::numeric_limits<std::int64_t>::max() - 1; });
}

TEST_P(RopeErrors, Tables) {
  const auto table_of = [](const Dims& cos_shape, const Dims& sin_shape) {
    return [=](Call& call) {
      const void* memory = call.other_memory.data();
      call.table = RopeTable{ConstTensorView(memory, DType::kF32, cos_shape),
                             ConstTensorView(memory, DType::kF32, sin_shape)};
    };
  };
  const std::string shapes = ", expected [max_position, 4] or [2, 3, 4]";
  expect_refusal("table.cos: got [4]" + shapes, table_of({4}, {4}));
  expect_refusal("table.cos: got [10, 8]" + shapes, table_of({10, 8}, {10, 8}));
  expect_refusal("table.cos: got [2, 4, 4]" + shapes, table_of({2, 4, 4}, {2, 4, 4}));
  expect_refusal("table.cos: got [1, 3, 4]" + shapes, table_of({1, 3, 4}, {1, 3, 4}));
  expect_refusal("table.sin: got [9, 4], expected [10, 4]", table_of({10, 4}, {9, 4}));
  expect_refusal("table.cos: got none, expected a tensor",
                 [](Call& call) { call.table = RopeTable{}; });

  const auto spoiled = [](bool cos, const ConstTensorView& view) {
    return [=](Call& call) {
      call.use_table();
      (cos ? call.table->cos : call.table->sin) = view;
    };
  };
  alignas(8) static const std::byte memory[256]{};
  for (const bool cos : {true, false}) {
    const std::string name = cos ? "table.cos: " : "table.sin: ";
    expect_refusal(name + "got dtype bool, expected f64, f32, f16 or bf16",
                   spoiled(cos, {memory, DType::kBool, {10, 4}}));
    expect_refusal(name + "got a null pointer, expected data",
                   spoiled(cos, {nullptr, DType::kF32, {10, 4}}));
    expect_refusal(name + "got data that is not aligned, expected a multiple of 4 bytes",
                   spoiled(cos, {memory + 1, DType::kF32, {10, 4}}));
    expect_refusal(name + "got memory of cuda:0, expected memory of cpu, where the call runs",
                   spoiled(cos, {memory, DType::kF32, {10, 4}, Device::kCuda}));
  }
  expect_refusal("base: got a base together with a table, expected the default", [](Call& call) {
    call.use_table();
    call.options.base = 500000;
  });
  expect_refusal("frequencies: got frequencies together with a table, expected none",
                 [](Call& call) {
                   call.use_table();
                   call.options.frequencies = {1, 2, 3, 4};
                 });
  expect_refusal("magnitude: got a magnitude together with a table, expected 1", [](Call& call) {
    call.use_table();
    call.options.magnitude = 2;
  });
  expect_refusal("scaling: got a scaling together with a table, expected the default",
                 [](Call& call) {
                   call.use_table();
                   call.options.scaling.factor = 8;
                 });
}

TEST_P(RopeErrors, PositionsBeyondTheTable) {
  const std::string range = ", expected 0 or more and less than the table's 10 rows";
  const auto list = [](const std::vector<std::int64_t>& positions) {
    return [=](Call& call) {
      call.use_table();
      call.use_positions(positions);
    };
  };
  expect_refusal("positions: got position 10 at index 2" + range, list({0, 9, 10}));
  expect_refusal("positions: got position -1 at index 5" + range, list({0, 1, 2, 3, 4, -1}));
  const auto first = [](std::int64_t position) {
    return [=](Call& call) {
      call.use_table();
      call.positions.first = position;
    };
  };
  expect_refusal("positions: got position -1 at index 0" + range, first(-1));
  expect_refusal("positions: got position 10 at index 2" + range, first(8));
  const auto with_token_table = [](auto change) {
    return [=](Call& call) {
      call.table = RopeTable{ConstTensorView(call.other_memory.data(), DType::kF32, {2, 3, 4}),
                             ConstTensorView(call.other_memory.data(), DType::kF32, {2, 3, 4})};
      change(call);
    };
  };
  const std::string with_rows =
      "positions: got positions together with a table with a row for each token, expected the "
      "default";
  expect_refusal(with_rows, with_token_table([](Call& call) { call.positions.first = 1; }));
  expect_refusal(with_rows, with_token_table([](Call& call) { call.use_positions({0, 1, 2}); }));
}

}  // namespace
}  // namespace ladon
