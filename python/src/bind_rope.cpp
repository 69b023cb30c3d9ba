// rope() and its backward, by options or by tables.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "attention_call.h"
#include "ladon/rope.h"
#include "module.h"

namespace ladon::python {
namespace {

nb::object rotate(nb::handle x_object, const nb::kwargs& kwargs, bool back) {
  Keywords keywords(back ? "rope_backward" : "rope", kwargs);
  const Array x = required(x_object, keywords.where(back ? "dout" : "x"));
  RopeOptions options;
  read_rope(keywords, options);
  PositionArgument positions;
  positions.read(keywords, "positions");
  Array cos;
  Array sin;
  Array out;
  keywords.read("cos", cos);
  keywords.read("sin", sin);
  keywords.read_output("out", out);
  const BoundContext& context = keywords.context(x.device());
  keywords.finish();

  Tensor memory;
  if (out.absent()) {
    memory = Tensor::uninitialized(context, float_or_f32(x.view().dtype()), x.view().shape());
  }
  const TensorView target = out.absent() ? memory.view() : out.writable_view();
  const RopeTable table{.cos = cos.view(), .sin = sin.view()};
  const bool by_table = !cos.absent() || !sin.absent();
  without_gil([&] {
    if (by_table && back) {
      rope_backward(context, x.view(), options, table, positions.positions, target);
    } else if (by_table) {
      rope(context, x.view(), options, table, positions.positions, target);
    } else if (back) {
      rope_backward(context, x.view(), options, positions.positions, target);
    } else {
      rope(context, x.view(), options, positions.positions, target);
    }
  });
  return give_result(out, std::move(memory), x.framework(), context);
}

nb::object py_rope(nb::handle x, const nb::kwargs& kwargs) { return rotate(x, kwargs, false); }

nb::object py_rope_backward(nb::handle dout, const nb::kwargs& kwargs) {
  return rotate(dout, kwargs, true);
}

nb::object py_rope_table(nb::handle max_position, nb::handle rotary_dim, const nb::kwargs& kwargs) {
  Keywords keywords("make_rope_table", kwargs);
  const std::int64_t rows = to_integer(max_position, keywords.where("max_position"));
  const std::int64_t width = to_integer(rotary_dim, keywords.where("rotary_dim"));
  RopeOptions options;
  DType dtype = DType::kF32;
  keywords.read("base", options.base);
  const nb::handle scaling = keywords.take("scaling");
  if (scaling.is_valid() && !scaling.is_none()) {
    nb::dict rope;
    rope["scaling"] = scaling;
    options = to_rope(rope, keywords.where("scaling"), options);
  }
  keywords.read("frequencies", options.frequencies);
  keywords.read("magnitude", options.magnitude);
  keywords.read("dtype", dtype);
  keywords.finish();
  if (rows < 0) {
    throw_value_error(keywords.where("max_position"),
                      "got " + std::to_string(rows) + ", expected 0 or more");
  }
  if (width <= 0 || width % 2 != 0) {
    throw_value_error(keywords.where("rotary_dim"),
                      "got " + std::to_string(width) + ", expected a positive even number");
  }
  Tensor cos = Tensor::uninitialized(dtype, {rows, width / 2});
  Tensor sin = Tensor::uninitialized(dtype, {rows, width / 2});
  without_gil([&] { make_rope_table(default_context(), options, width, cos, sin); });
  return nb::make_tuple(to_array(std::move(cos), Framework::kNumpy, default_context()),
                        to_array(std::move(sin), Framework::kNumpy, default_context()));
}

}  // namespace

void bind_rope(nb::module_& module) {
  const std::string options =
      "layout: RopeLayout = 'half_split', rotary_dim: int = 0, base: float = 10000.0, scaling: "
      "RopeScaling | None = None, frequencies: Array | Sequence[float] | None = None, magnitude: "
      "float "
      "= 1.0, positions: int | IntegersLike | None = None, cos: Array | None = "
      "None, sin: Array | None = None, out: Array | None = None, context: Context | None = None";
  module.def("rope", &py_rope, nb::arg("x").none(), nb::arg("kwargs"),
             nb::sig(("def rope(x: Array, *, " + options + ") -> Any").c_str()),
             R"(Rotary position embedding.

Parameters
----------
x : array [batch, seq, heads, head_dim]
layout : {"half_split", "interleaved"}
    Pairs (n, n + rotary_dim / 2), or (2n, 2n + 1).
rotary_dim : int
    How many leading elements of a head are rotated; 0 is all.
base : float
    Of the frequencies.
scaling : dict, optional
    A RopeScaling: its kind ("linear", "llama3", "yarn", "dynamic", "longrope") and its numbers.
frequencies : array or sequence of float, optional
    One for each pair, instead of base and scaling.
magnitude : float
    With frequencies: a factor of the cosines and sines.
positions : int or array, optional
    None for 0, 1, 2, ..., a number to start at, or an array of [seq] or [batch, seq].
cos, sin : array, optional
    Precomputed tables, instead of all of these.
out : array, optional
    Takes the result; may be x itself.
context : Context, optional
    Device, threads and kernels; where x is unless given.

Returns
-------
array
    Of the shape of x.)");
  module.def("rope_backward", &py_rope_backward, nb::arg("dout").none(), nb::arg("kwargs"),
             nb::sig(("def rope_backward(dout: Array, *, " + options + ") -> Any").c_str()),
             R"(The gradient of rope()'s input.

The other options are those of the rope() call.

Parameters
----------
dout : array [batch, seq, heads, head_dim]
    The gradient of its output.
out : array, optional
    Takes the result; may be dout itself.

Returns
-------
array
    Of the shape of dout.)");
  module.def(
      "make_rope_table", &py_rope_table, nb::arg("max_position").none(),
      nb::arg("rotary_dim").none(), nb::arg("kwargs"),
      nb::sig("def make_rope_table(max_position: int, rotary_dim: int, *, base: float = "
              "10000.0, scaling: RopeScaling | None = None, frequencies: Array | "
              "Sequence[float] | None = None, magnitude: float = 1.0, dtype: DTypeLike = 'f32') -> "
              "tuple[Any, Any]"),
      R"(Tables of cosines and sines for rope().

Parameters
----------
max_position : int
    Rows, for positions 0, 1, ...
rotary_dim : int
    Leading elements of a head that are rotated.
base, scaling, frequencies, magnitude : optional
    As rope() takes them.
dtype : optional
    Of the tables.

Returns
-------
cos, sin : array [max_position, rotary_dim / 2])");
}

}  // namespace ladon::python
