// The checks of arguments that all operations share. Each throws Error, "operation: argument: got
// ..., expected ...", and returns where all is well.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ladon/tensor_view.h"

namespace ladon {

/// An argument, and what messages call it.
struct NamedView {
  std::string_view name;
  ConstTensorView view;
};

/// The shortest text that reads back as the same double.
std::string text_of(double value);
/// "got [2, 3]": how a message about a shape begins.
std::string got_shape(const ConstTensorView& view);

void check_finite(std::string_view operation, std::string_view argument, double value);
void check_no_negative_size(std::string_view operation, std::string_view argument,
                            const Dims& shape);

void check_present(std::string_view operation, const NamedView& argument);
void check_on_cpu(std::string_view operation, const NamedView& argument);
/// Where there are elements there must be a pointer to them.
void check_not_null(std::string_view operation, const NamedView& argument);

/// A present, non-null, aligned view of the wanted rank in CPU memory whose bytes can be counted.
void check_strided_view(std::string_view operation, const NamedView& argument, int rank);
/// The same, and its last dimension is dense.
void check_view(std::string_view operation, const NamedView& argument, int rank);

void check_float(std::string_view operation, const NamedView& argument);
void check_dtype(std::string_view operation, const NamedView& argument, DType wanted);
void check_shape(std::string_view operation, const NamedView& argument, const Dims& wanted);

/// check_view(), check_dtype() and check_shape() in one.
void check_tensor(std::string_view operation, const NamedView& argument, DType dtype,
                  const Dims& shape);
/// check_strided_view(), check_float() and check_shape() in one.
void check_strided_floats(std::string_view operation, const NamedView& argument, const Dims& shape);

/// No two indices of the output may reach one element.
void check_no_self_overlap(std::string_view operation, const NamedView& output);
/// The output must share no memory with the other. Absent views pass.
void check_apart(std::string_view operation, const NamedView& output, const NamedView& other);
/// Each output must be free of itself, of the other outputs and of all inputs. Absent views pass.
void check_no_overlap(std::string_view operation, std::span<const NamedView> outputs,
                      std::span<const NamedView> inputs);

}  // namespace ladon
