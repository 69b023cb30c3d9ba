// Communicator: ends over mpi4py, torch.distributed and threads, and the collectives.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "attention_call.h"
#include "communicator_objects.h"
#include "module.h"

namespace ladon::python {
namespace {

CommunicatorOptions to_options(nb::handle deadline, const Where& where) {
  const double seconds = to_number(deadline, where);
  constexpr double kMostSeconds = 1e9;
  if (!(seconds >= 1e-3 && seconds <= kMostSeconds)) {
    throw_value_error(where, "got " + nb::cast<std::string>(nb::str(deadline)) +
                                 ", expected seconds: 0.001 or more");
  }
  return {.deadline = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3))};
}

int to_int(nb::handle object, const Where& where) {
  const std::int64_t value = to_integer(object, where);
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    throw_value_error(where, "got " + std::to_string(value) + ", expected 32 bits");
  }
  return static_cast<int>(value);
}

void make_ranks(Ranks* self, nb::handle group, nb::handle deadline) {
  const CommunicatorOptions options = to_options(deadline, {"Communicator", "deadline"});
  nb::object engine = nb::module_::import_("ladon._engines").attr("engine_for")(group, deadline);
  new (self) Ranks{std::make_shared<PythonCommunicator>(std::move(engine), options)};
}

nb::list py_make_thread_communicators(nb::handle count, nb::handle deadline) {
  const char* const name = "make_thread_communicators";
  nb::list ends;
  for (auto& end : make_thread_communicators(to_int(count, {name, "count"}),
                                             to_options(deadline, {name, "deadline"}))) {
    ends.append(nb::cast(Ranks{std::move(end)}));
  }
  return ends;
}

nb::dict statistics(const Ranks& self) {
  const CommunicatorStatistics& numbers = self.end->statistics();
  nb::dict dict;
  dict["messages_sent"] = numbers.messages_sent;
  dict["bytes_sent"] = numbers.bytes_sent;
  dict["bytes_received"] = numbers.bytes_received;
  dict["control_messages_sent"] = numbers.control_messages_sent;
  dict["control_bytes_sent"] = numbers.control_bytes_sent;
  dict["seconds_waited"] = numbers.seconds_waited;
  return dict;
}

Ranks py_split(const Ranks& self, nb::handle color_object, nb::handle key_object) {
  const int color = to_int(color_object, {"Communicator.split", "color"});
  const int key = to_int(key_object, {"Communicator.split", "key"});
  return without_gil([&] { return Ranks{self.end->split(color, key)}; });
}

/// [size, ...shape], or the shape itself where that has too many dimensions: the library says so.
Dims one_for_each(int size, const Dims& shape) {
  if (shape.rank() >= kMaxRank) return shape;
  std::array<std::int64_t, kMaxRank> sizes{size};
  std::copy(shape.begin(), shape.end(), sizes.begin() + 1);
  return Dims(std::span(sizes.data(), static_cast<std::size_t>(shape.rank()) + 1));
}

Dims without_first(const Dims& shape) {
  if (shape.rank() == 0) return shape;
  return Dims(std::span(shape.begin(), shape.end()).subspan(1));
}

using Collective = void (*)(const Context&, Communicator&, const ConstTensorView&,
                            const TensorView&);

/// A collective of one input and one output, whose shape is shape_of(ranks, input's shape).
template <Collective kFunction, class Shape>
auto collective(const char* name, Shape shape_of) {
  return [name, shape_of](const Ranks& self, nb::handle input_object, const nb::kwargs& kwargs) {
    Keywords keywords(name, kwargs);
    const Array input = required(input_object, keywords.where("input"));
    const BoundContext& context = keywords.context(input.device());
    keywords.finish();
    Tensor output = Tensor::uninitialized(context, input.view().dtype(),
                                          shape_of(self.end->size(), input.view().shape()));
    without_gil([&] { kFunction(context, *self.end, input.view(), output); });
    return to_array(std::move(output), input.framework(), context);
  };
}

std::string describe(const Ranks& self) {
  const auto* const engine = dynamic_cast<const PythonCommunicator*>(self.end.get());
  const std::string kind = engine == nullptr
                               ? "threads"
                               : nb::cast<std::string>(engine->engine().type().attr("__name__"));
  return "<ladon.distributed.Communicator: rank " + std::to_string(self.end->rank()) + " of " +
         std::to_string(self.end->size()) + ", " + kind +
         (self.end->broken().empty() ? "" : ", broken") + ">";
}

}  // namespace

const std::shared_ptr<Communicator>& ranks_in(nb::handle argument, const Where& where) {
  Ranks* ranks = nullptr;
  if (!nb::try_cast(argument, ranks, /*convert=*/false) || ranks == nullptr) {
    throw_type_error(where, argument, "a ladon.distributed.Communicator");
  }
  return ranks->end;
}

void bind_communicator(nb::module_& module) {
  const auto same = [](int /*ranks*/, const Dims& shape) { return shape; };
  const auto reduced = [](int /*ranks*/, const Dims& shape) { return without_first(shape); };
  const auto define = [](auto& made, const char* name, auto function, const char* doc) {
    made.def(name, function, nb::arg("input").none(), nb::arg("kwargs"),
             nb::sig((std::string("def ") + name +
                      "(self, input: Array, *, context: Context | None = None) -> Any")
                         .c_str()),
             doc);
  };
  auto made =
      nb::class_<Ranks>(module, "Communicator",
                        R"(One rank's end of a group of processes or threads that compute together.

Every rank of the group must make one.

Parameters
----------
group : mpi4py.MPI.Comm, torch.distributed.ProcessGroup, ladon.distributed.Engine
    Of MPI a duplicate is used, which lives as long as MPI; of torch.distributed a gloo group of the same ranks.
deadline : float
    Seconds of the longest wait for other ranks.)")
          .def("__init__", &make_ranks, nb::arg("group"), nb::arg("deadline") = 60.0,
               nb::sig("def __init__(self, group: Any, deadline: float = 60.0) -> None"))
          .def_prop_ro("rank", [](const Ranks& self) { return self.end->rank(); })
          .def_prop_ro("size", [](const Ranks& self) { return self.end->size(); })
          .def_prop_ro("deadline",
                       [](const Ranks& self) {
                         return std::chrono::duration<double>(self.end->options().deadline).count();
                       })
          .def_prop_ro(
              "broken", [](const Ranks& self) { return self.end->broken(); },
              "Why nothing goes through this end any more; empty while all is well.")
          .def("statistics", &statistics, nb::sig("def statistics(self) -> dict[str, Any]"),
               "Messages, bytes and seconds waited since reset_statistics(); those of agreement "
               "(control) are counted apart.")
          .def(
              "reset_statistics", [](const Ranks& self) { self.end->reset_statistics(); },
              "Counts from 0 again.")
          .def("split", &py_split, nb::arg("color"), nb::arg("key") = 0,
               nb::sig("def split(self, color: int, key: int = 0) -> Communicator"),
               R"(Divides the ranks into several communicators. Every rank must call it.

Parameters
----------
color : int
    Ranks of the same color are together.
key : int
    They are ordered by it, and then by their rank here.

Returns
-------
Communicator)")
          .def(
              "barrier", [](const Ranks& self) { without_gil([&] { barrier(*self.end); }); },
              "Returns when every rank has called it.")
          .def("__repr__", &describe);
  define(made, "all_gather", collective<&all_gather>("all_gather", &one_for_each),
         "[size, ...]: the input of every rank.");
  define(made, "all_to_all", collective<&all_to_all>("all_to_all", same),
         "From input [size, ...], part i of which is for rank i: the parts that the ranks have for "
         "this one.");
  define(made, "reduce_scatter", collective<&reduce_scatter>("reduce_scatter", reduced),
         "From input [size, ...], part i of which is for rank i: the sum of the parts for this "
         "one, in the order of ranks. f32 or f64.");
  define(made, "all_reduce", collective<&all_reduce>("all_reduce", same),
         "The sum of all ranks' inputs, in their order: the same bits on every rank. f32 or f64.");
  module.def("make_thread_communicators", &py_make_thread_communicators, nb::arg("count"),
             nb::arg("deadline") = 60.0,
             nb::sig("def make_thread_communicators(count: int, deadline: float = 60.0) -> "
                     "list[Communicator]"),
             R"(Communicators for threads of this process.

Parameters
----------
count : int
    Number of ranks.
deadline : float
    Seconds of the longest wait for other ranks.

Returns
-------
list of Communicator
    One for each thread.)");
}

}  // namespace ladon::python
