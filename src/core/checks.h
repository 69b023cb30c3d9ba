// The checks of arguments that all operations share. Each throws Error, "operation: argument: got
// ..., expected ...", and returns where all is well.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// What messages call an operation, and the device that its operands must be on.
struct Operation {
  std::string_view name;
  DeviceId device;

  Operation(std::string_view called, const Context& context) noexcept
      : name(called), device(context.device()) {}
  Operation(std::string_view called, DeviceId where) noexcept : name(called), device(where) {}
  static Operation on_host(std::string_view called) noexcept { return {called, DeviceId()}; }

  operator std::string_view() const noexcept { return name; }
};

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
/// A value of the enum that is one of its names.
void check_known(std::string_view operation, std::string_view argument, DType dtype);
void check_no_negative_size(std::string_view operation, std::string_view argument,
                            const Dims& shape);

void check_present(std::string_view operation, const NamedView& argument);
/// A call runs where its Context is; operands must be there too. Absent views pass.
void check_device(const Operation& operation, const NamedView& argument);
void check_device(const Operation& operation, std::string_view argument, DeviceId device);
/// Where there are elements there must be a pointer to them.
void check_not_null(std::string_view operation, const NamedView& argument);

/// A present, non-null, aligned view of the wanted rank on the operation's device, whose bytes can
/// be counted.
void check_strided_view(const Operation& operation, const NamedView& argument, int rank);
/// The same, and its last dimension is contiguous.
void check_view(const Operation& operation, const NamedView& argument, int rank);

void check_float(std::string_view operation, const NamedView& argument);
void check_dtype(std::string_view operation, const NamedView& argument, DType wanted);
void check_shape(std::string_view operation, const NamedView& argument, const Dims& wanted);

/// check_view(), check_dtype() and check_shape() in one.
void check_tensor(const Operation& operation, const NamedView& argument, DType dtype,
                  const Dims& shape);
/// check_strided_view(), check_float() and check_shape() in one.
void check_strided_floats(const Operation& operation, const NamedView& argument, const Dims& shape);

/// No two indices of the output may reach one element.
void check_no_self_overlap(std::string_view operation, const NamedView& output);
/// The output must share no memory with the other. Absent views pass.
void check_apart(std::string_view operation, const NamedView& output, const NamedView& other);
/// Each output must be free of itself, of the other outputs and of all inputs. Absent views pass.
void check_no_overlap(std::string_view operation, std::span<const NamedView> outputs,
                      std::span<const NamedView> inputs);

}  // namespace ladon
