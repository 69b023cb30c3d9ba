// Dims, views, tensors and copy().
#include "ladon/tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/element.h"
#include "ladon/random.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::error_of;
using test::host_context;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

static_assert(std::is_trivially_copyable_v<TensorView>);
static_assert(std::is_copy_constructible_v<TensorView>);
static_assert(std::is_convertible_v<TensorView, ConstTensorView>);
static_assert(!std::is_constructible_v<TensorView, ConstTensorView>);
static_assert(!std::is_copy_constructible_v<Tensor>);

/// 0, 1, 2, ... in row-major order.
Tensor counting(DType dtype, const Dims& shape) {
  Tensor tensor(dtype, shape);
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
    store_element(tensor.data(), dtype, i, static_cast<double>(i));
  }
  return tensor;
}

std::vector<double> values_of(const ConstTensorView& view) {
  const Tensor dense = Tensor::copy_of(host_context(), view, DType::kF64);
  const auto* data = static_cast<const double*>(dense.data());
  return {data, data + dense.num_elements()};
}

using Values = std::vector<double>;

TEST(Dims, HoldsUpToEight) {
  const Dims dims{1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_EQ(dims.rank(), 8);
  EXPECT_EQ(dims[7], 8);
  EXPECT_EQ(dims.to_string(), "[1, 2, 3, 4, 5, 6, 7, 8]");
  EXPECT_EQ(Dims().to_string(), "[]");
  EXPECT_EQ((Dims{-4}).to_string(), "[-4]");
  EXPECT_EQ(error_of([] {
              Dims({1, 2, 3, 4, 5, 6, 7, 8, 9});
            }),
            "Dims: values: got 9 dimensions, expected at most 8");
}

TEST(Dims, CompareByRankAndValues) {
  EXPECT_EQ((Dims{1, 2}), (Dims{1, 2}));
  EXPECT_FALSE((Dims{1, 2}) == (Dims{1, 3}));
  EXPECT_FALSE((Dims{1}) == (Dims{1, 0}));
  EXPECT_EQ(Dims(), Dims{});
}

TEST(RowMajorStrides, AreProductsOfTheSizesAfter) {
  EXPECT_EQ(row_major_strides({2, 3, 4}), (Dims{12, 4, 1}));
  EXPECT_EQ(row_major_strides({}), Dims{});
  EXPECT_EQ(row_major_strides({2, 0, 3}), (Dims{3, 3, 1}));  // a size of 0 counts as 1
  EXPECT_EQ(row_major_strides({kMax}), (Dims{1}));
}

TEST(RowMajorStrides, RefusesWhatCannotBeCounted) {
  EXPECT_EQ(
      error_of([] {
        row_major_strides({kMax, 2});
      }),
      "row_major_strides: shape: got [9223372036854775807, 2], expected a size that fits 64 bits");
  EXPECT_EQ(
      error_of([] {
        row_major_strides({2, std::int64_t{1} << 62});
      }),
      "row_major_strides: shape: got [2, 4611686018427387904], expected a size that fits 64 bits");
  EXPECT_EQ(error_of([] {
              row_major_strides({0, kMax, kMax});
            }),
            "row_major_strides: shape: got [0, 9223372036854775807, 9223372036854775807], "
            "expected a size that fits 64 bits");
  EXPECT_EQ(error_of([] {
              row_major_strides({2, -1});
            }),
            "row_major_strides: shape: got [2, -1], expected no negative size");
}

TEST(View, RefusesWhatCannotBeAddressed) {
  float value = 0;
  EXPECT_EQ(error_of([&] {
              TensorView(&value, DType::kF32, {2, 3}, {1});
            }),
            "TensorView: strides: got [1], expected 2 strides for shape [2, 3]");
  EXPECT_EQ(error_of([&] { TensorView(&value, DType::kF32, {-2}, {1}); }),
            "TensorView: shape: got [-2], expected no negative size");
  // Two elements in all directions overflow a count of elements, even where all are the same one.
  EXPECT_EQ(error_of([&] {
              TensorView(&value, DType::kF32, {kMax, 2}, {0, 0});
            }),
            "TensorView: shape: got [9223372036854775807, 2], expected a size that fits 64 bits");
  for (const std::int64_t stride : {kMax, kMin, -kMax, kMax / 16}) {
    const std::string text = std::to_string(stride);
    EXPECT_EQ(error_of([&] {
                ConstTensorView(&value, DType::kF32, {2, 2}, {stride, 1});
              }),
              "TensorView: strides: got [" + text +
                  ", 1] over shape [2, 2], expected a span that fits the address space");
  }
  // Strides that are never used may be anything.
  const auto unknown = static_cast<DType>(99);
  EXPECT_EQ(error_of([&] { ConstTensorView(&value, unknown, {1}, {1}); }),
            "TensorView: dtype: got 99, expected a DType");
  EXPECT_EQ(error_of([&] { Tensor(unknown, {1}); }), "Tensor: dtype: got 99, expected a DType");
  EXPECT_EQ(error_of([&] {
              const Tensor known(DType::kF32, {1});
              Tensor::copy_of(host_context(), known, unknown);
            }),
            "Tensor: dtype: got 99, expected a DType");
  const ConstTensorView one(&value, DType::kF32, {1, 1}, {kMin, kMax});
  EXPECT_TRUE(one.is_contiguous());
  const ConstTensorView none(&value, DType::kF32, {0, 5}, {kMin, kMax});
  EXPECT_EQ(none.num_elements(), 0);
}

TEST(View, KnowsWhetherItIsContiguous) {
  Tensor tensor(DType::kF32, {2, 3, 4});
  const TensorView view = tensor.view();
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_FALSE(view.transpose(0, 1).is_contiguous());
  EXPECT_TRUE(view.slice(0, 1, 2).transpose(0, 1).is_contiguous());  // a size of 1 moves nothing
  EXPECT_FALSE(view.slice(1, 0, 2).is_contiguous());
  EXPECT_TRUE(view.slice(1, 2, 2).is_contiguous());  // empty
  EXPECT_TRUE(view.select(1, 2).slice(0, 0, 1).is_contiguous());
}

TEST(View, AbsentIsNeitherEmptyNorScalar) {
  EXPECT_TRUE(TensorView().absent());
  EXPECT_TRUE(ConstTensorView(TensorView()).absent());
  Tensor scalar(DType::kF32, {});
  EXPECT_FALSE(scalar.view().absent());
  EXPECT_EQ(scalar.view().num_elements(), 1);
  Tensor empty(DType::kF32, {0});
  EXPECT_FALSE(empty.view().absent());
  Tensor nothing;
  EXPECT_TRUE(nothing.view().absent());
  EXPECT_EQ(nothing.num_elements(), 0);
}

TEST(View, GivesItsDataInItsOwnTypeAlone) {
  Tensor tensor = Tensor::from_values(DType::kF32, {2}, {1, 2});
  EXPECT_EQ(tensor.data_as<float>()[1], 2.0F);
  const Tensor& constant = tensor;
  static_assert(std::is_same_v<decltype(constant.data_as<float>()), const float*>);
  EXPECT_EQ(error_of([&] { tensor.data_as<float16>(); }),
            "data_as: T: got dtype f16, expected the view's f32");
  EXPECT_EQ(error_of([&] { constant.data_as<bool>(); }),
            "data_as: T: got dtype bool, expected the view's f32");
}

TEST(View, TransposeSliceSelectReshape) {
  Tensor tensor = counting(DType::kF32, {2, 3, 4});
  const TensorView view = tensor.view();
  const TensorView turned = view.transpose(0, 2);
  EXPECT_EQ(turned.shape(), (Dims{4, 3, 2}));
  EXPECT_EQ(turned.strides(), (Dims{1, 4, 12}));
  EXPECT_EQ(values_of(view.slice(1, 1, 3).select(0, 1)), (Values{16, 17, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(values_of(view.select(2, 3)), (Values{3, 7, 11, 15, 19, 23}));
  EXPECT_EQ(values_of(view.select(0, 1).select(0, 2).select(0, 0)), (Values{20}));
  EXPECT_EQ(values_of(view.reshape({4, 6}).select(0, 2)), (Values{12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(view.slice(0, 0, 0).reshape({5, 0}).shape(), (Dims{5, 0}));
  EXPECT_EQ(view.slice(2, 0, 4).data(), view.data());
}

TEST(View, ReversedByANegativeStride) {
  Tensor tensor = counting(DType::kF64, {5});
  const ConstTensorView reversed(tensor.data_as<double>() + 4, DType::kF64, {5}, {-1});
  EXPECT_EQ(values_of(reversed), (Values{4, 3, 2, 1, 0}));
  EXPECT_EQ(values_of(reversed.slice(0, 1, 3)), (Values{3, 2}));
}

TEST(View, SlicesOfEmptyTensorsKeepTheirNullPointer) {
  Tensor empty(DType::kF32, {4, 0, 2});
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.view().slice(0, 2, 4).data(), nullptr);
  EXPECT_EQ(empty.view().select(2, 1).data(), nullptr);
}

TEST(View, RefusesWrongDimensionsAndRanges) {
  Tensor tensor(DType::kF32, {2, 3});
  const TensorView view = tensor.view();
  EXPECT_EQ(error_of([&] { view.transpose(2, 0); }),
            "transpose: dim_a: got 2, expected a dimension in [0, 2)");
  EXPECT_EQ(error_of([&] { view.transpose(0, -1); }),
            "transpose: dim_b: got -1, expected a dimension in [0, 2)");
  EXPECT_EQ(error_of([&] { view.slice(5, 0, 1); }),
            "slice: dim: got 5, expected a dimension in [0, 2)");
  EXPECT_EQ(error_of([&] { view.slice(1, 0, 4); }),
            "slice: begin, end: got [0, 4), expected a range within [0, 3) of dimension 1 of "
            "[2, 3]");
  EXPECT_EQ(error_of([&] { view.slice(1, -1, 2); }),
            "slice: begin, end: got [-1, 2), expected a range within [0, 3) of dimension 1 of "
            "[2, 3]");
  EXPECT_EQ(error_of([&] { view.slice(1, 2, 1); }),
            "slice: begin, end: got [2, 1), expected a range within [0, 3) of dimension 1 of "
            "[2, 3]");
  EXPECT_EQ(error_of([&] { view.select(-1, 0); }),
            "select: dim: got -1, expected a dimension in [0, 2)");
  EXPECT_EQ(error_of([&] { view.select(0, 2); }),
            "select: index: got 2, expected one in [0, 2) of dimension 0 of [2, 3]");
  EXPECT_EQ(error_of([&] { view.reshape({4}); }),
            "reshape: shape: got [4] with 4 elements, expected 6 as in the view's [2, 3]");
  EXPECT_EQ(error_of([&] { view.transpose(0, 1).reshape({6}); }),
            "reshape: view: got strides [1, 3] over shape [3, 2], expected a contiguous view");
}

TEST(Tensor, IsAlignedAndZero) {
  for (const std::int64_t size : {1, 3, 1000}) {
    Tensor tensor(DType::kBF16, {size, 3});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % 64, 0U);
    EXPECT_EQ(values_of(tensor), Values(static_cast<std::size_t>(3 * size), 0.0));
  }
}

TEST(Tensor, MovesAndLeavesNothingBehind) {
  Tensor first = Tensor::from_values(DType::kF64, {2}, {1, 2});
  const void* const memory = first.data();
  Tensor second = std::move(first);
  EXPECT_EQ(second.data(), memory);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(first.view().absent());
  Tensor third(DType::kF32, {7});
  third = std::move(second);
  EXPECT_EQ(values_of(third), (Values{1, 2}));
  EXPECT_EQ(third.dtype(), DType::kF64);
  Tensor& itself = third;
  third = std::move(itself);
  EXPECT_EQ(values_of(third), (Values{1, 2}));
}

TEST(Tensor, FromValuesRoundsAndCounts) {
  const Tensor tensor = Tensor::from_values(DType::kF16, {2, 2}, {1, 2049, -0.5, 1e9});
  EXPECT_EQ(values_of(tensor), (Values{1, 2048, -0.5, std::numeric_limits<double>::infinity()}));
  EXPECT_EQ(Tensor::from_values(DType::kF32, {0}, {}).num_elements(), 0);
  EXPECT_EQ(error_of([] {
              Tensor::from_values(DType::kF32, {2, 3}, {1, 2, 3, 4, 5});
            }),
            "Tensor::from_values: values: got 5 values, expected 6 for shape [2, 3]");
}

TEST(Tensor, RefusesImpossibleShapes) {
  EXPECT_EQ(error_of([] {
              Tensor(DType::kF32, {3, -1});
            }),
            "Tensor: shape: got [3, -1], expected no negative size");
  EXPECT_EQ(
      error_of([] { Tensor(DType::kF64, {std::int64_t{1} << 60}); }, ErrorCode::kOutOfMemory),
      "Tensor: shape: got [1152921504606846976] of f64, expected a size that fits the address "
      "space");
  EXPECT_EQ(error_of(
                [] {
                  Tensor(DType::kBool, {kMax, kMax, 0});
                },
                ErrorCode::kOutOfMemory),
            "Tensor: shape: got [9223372036854775807, 9223372036854775807, 0] of bool, expected a "
            "size that fits the address space");
  EXPECT_EQ(
      error_of([] { Tensor(DType::kF32, {std::int64_t{1} << 58}); }, ErrorCode::kOutOfMemory),
      "Tensor: shape: got [288230376151711744] of f32, which takes 1152921504606846976 bytes, "
      "expected a size that fits the memory");
  EXPECT_EQ(error_of([] { Tensor::copy_of(host_context(), ConstTensorView()); }),
            "Tensor::copy_of: view: got none, expected a tensor");
}

/// copy() element by element, by div and mod.
void copy_slowly(const ConstTensorView& from, const TensorView& to) {
  for (std::int64_t i = 0; i < from.num_elements(); ++i) {
    std::int64_t index = i;
    std::int64_t from_offset = 0;
    std::int64_t to_offset = 0;
    for (int dim = from.rank() - 1; dim >= 0; --dim) {
      from_offset += index % from.size(dim) * from.stride(dim);
      to_offset += index % from.size(dim) * to.stride(dim);
      index /= from.size(dim);
    }
    store_element(to.data(), to.dtype(), to_offset,
                  load_element(from.data(), from.dtype(), from_offset));
  }
}

TEST(Copy, ConvertsBetweenAllTypesAndStrides) {
  constexpr std::array<DType, 5> kDtypes{DType::kF64, DType::kF32, DType::kF16, DType::kBF16,
                                         DType::kBool};
  for (const DType from_dtype : kDtypes) {
    for (const DType to_dtype : kDtypes) {
      Tensor source(from_dtype, {4, 6, 3, 5});
      if (is_float(from_dtype)) {
        fill_normal(host_context(), source, 0, 100, 5);
        store_element(source.data(), from_dtype, 7, 0);
      } else {
        for (int i = 0; i < 360; ++i) store_element(source.data(), from_dtype, i, i % 3);
      }
      for (int layout = 0; layout < 4; ++layout) {
        TensorView from = source.view();
        if (layout == 1) from = from.transpose(1, 3);
        if (layout == 2) from = from.slice(1, 2, 5).slice(3, 1, 4);
        if (layout == 3) {  // reversed, and repeated
          from = TensorView(static_cast<std::byte*>(source.data()) + 59 * size_of(from_dtype),
                            from_dtype, {3, 5, 4}, {0, -12, -3});
        }
        Tensor target(to_dtype, {2, 7, 720});
        Tensor expected(to_dtype, {2, 7, 720});
        // A target with gaps, whose last dimension is not the densest.
        Dims strides = row_major_strides(from.shape());
        for (int dim = 0; dim < strides.rank(); ++dim) strides[dim] *= 2;
        const TensorView to = TensorView(target.data(), to_dtype, from.shape(), strides);
        copy(host_context(), from, to);
        copy_slowly(from, TensorView(expected.data(), to_dtype, from.shape(), strides));
        EXPECT_EQ(std::memcmp(target.data(), expected.data(), 2 * 7 * 720 * size_of(to_dtype)), 0)
            << name_of(from_dtype) << " to " << name_of(to_dtype) << ", layout " << layout;
        const Tensor dense = Tensor::copy_of(host_context(), from, to_dtype);
        EXPECT_EQ(values_of(dense), values_of(to));
      }
    }
  }
}

TEST(Copy, BoolsAreZeroOrNot) {
  const Tensor floats = Tensor::from_values(DType::kF32, {5}, {0, -0.0, 3, 1e-40, std::nan("")});
  EXPECT_EQ(values_of(Tensor::copy_of(host_context(), floats, DType::kBool)),
            (Values{0, 0, 1, 1, 1}));
  std::array<std::uint8_t, 3> bytes{0, 1, 200};  // any byte but 0 is true
  const ConstTensorView bools(bytes.data(), DType::kBool, {3});
  EXPECT_EQ(values_of(Tensor::copy_of(host_context(), bools, DType::kBF16)), (Values{0, 1, 1}));
  // The smallest double is not zero, though a float would make it so.
  EXPECT_EQ(values_of(Tensor::copy_of(
                host_context(), Tensor::from_values(DType::kF64, {1}, {5e-324}), DType::kBool)),
            (Values{1}));
}

TEST(Copy, TakesEmptyAndScalarViews) {
  Tensor from(DType::kF32, {3, 0});
  Tensor to(DType::kF16, {3, 0});
  copy(host_context(), from, to);
  EXPECT_EQ(values_of(Tensor::copy_of(host_context(), Tensor::from_values(DType::kF32, {}, {4}))),
            (Values{4}));
}

TEST(Copy, RefusesWhatItCannotDo) {
  Tensor a(DType::kF32, {2, 3});
  Tensor b(DType::kF32, {3, 2});
  EXPECT_EQ(error_of([&] { copy(host_context(), a, b); }), "copy: to: got [3, 2], expected [2, 3]");
  EXPECT_EQ(error_of([&] { copy(host_context(), a, a); }),
            "copy: to: got memory that overlaps from, expected separate memory");
  const TensorView repeated(b.data(), DType::kF32, {2, 3}, {0, 1});
  EXPECT_EQ(error_of([&] { copy(host_context(), a, repeated); }),
            "copy: to: got strides [0, 1] that reach one element twice, expected an output without "
            "overlap");
  const TensorView cuda(b.data(), DType::kF32, {2, 3}, Device::kCuda);
  EXPECT_EQ(error_of([&] { copy(host_context(), a, cuda); }),
            "copy: to: got memory of cuda:0, expected memory of cpu, where the call runs");
  const ConstTensorView null(nullptr, DType::kF32, {2, 3});
  EXPECT_EQ(error_of([&] { copy(host_context(), null, a); }),
            "copy: from: got a null pointer, expected data");
}

}  // namespace
}  // namespace ladon
