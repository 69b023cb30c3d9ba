// attention() over ranks that each hold some of the tokens.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "communicator_objects.h"
#include "ladon/context_parallel.h"
#include "module.h"

namespace ladon::python {
namespace {

using RangeLists = std::vector<std::vector<TokenRange>>;

constexpr Names<ContextScheme, 4> kSchemes{{{"auto", ContextScheme::kAuto},
                                            {"all_gather", ContextScheme::kAllGather},
                                            {"ring", ContextScheme::kRing},
                                            {"ulysses", ContextScheme::kUlysses}}};

nb::list to_lists(const RangeLists& ranges) {
  nb::list lists;
  for (const std::vector<TokenRange>& own : ranges) {
    nb::list list;
    for (const TokenRange& range : own) list.append(nb::make_tuple(range.begin, range.end));
    lists.append(list);
  }
  return lists;
}

RangeLists to_ranges(nb::handle lists, const Where& where) {
  RangeLists all;
  try {
    for (const nb::handle list : lists) {
      std::vector<TokenRange>& own = all.emplace_back();
      for (const nb::handle range : list) {
        if (nb::len(range) != 2) throw_value_error(where, "got a range that is not (begin, end)");
        own.push_back({to_integer(range[0], where), to_integer(range[1], where)});
      }
    }
  } catch (const nb::python_error&) {
    throw_type_error(where, lists, "lists of (begin, end), one for each rank");
  }
  return all;
}

nb::object py_plan_context(nb::handle ranks_object, nb::handle query_len_object,
                           nb::handle kv_len_object, const nb::kwargs& kwargs) {
  Keywords keywords("plan_context", kwargs);
  const std::int64_t ranks = to_integer(ranks_object, keywords.where("ranks"));
  const std::int64_t query_len = to_integer(query_len_object, keywords.where("query_len"));
  const std::int64_t kv_len = to_integer(kv_len_object, keywords.where("kv_len"));
  if (ranks < 1 || ranks > 1'000'000) {
    throw_value_error(keywords.where("ranks"),
                      "got " + std::to_string(ranks) + ", expected 1 to 1000000");
  }
  ContextPlan settings;
  keywords.read("scheme", settings.scheme, kSchemes);
  keywords.read("kv_heads_at_once", settings.kv_heads_at_once);
  AttentionArguments arguments;
  arguments.read(keywords);
  keywords.finish();
  const ContextPlan plan = without_gil(
      [&] { return plan_context(static_cast<int>(ranks), query_len, kv_len, arguments.options); });
  const std::string_view scheme = name_in(kSchemes, settings.scheme);
  return nb::module_::import_("ladon._types")
      .attr("ContextPlan")(to_lists(plan.queries), to_lists(plan.keys),
                           nb::str(scheme.data(), scheme.size()), settings.kv_heads_at_once);
}

nb::object py_context_parallel_attention(nb::handle communicator, nb::handle q_object,
                                         nb::handle k_object, nb::handle v_object,
                                         const nb::kwargs& kwargs) {
  Keywords keywords("context_parallel_attention", kwargs);
  const auto ranks = ranks_in(communicator, keywords.where("communicator"));
  const Array q = required(q_object, keywords.where("q"));
  const Array k = required(k_object, keywords.where("k"));
  const Array v = required(v_object, keywords.where("v"));
  const ContextPlan plan = to_plan(keywords);
  AttentionArguments arguments;
  arguments.read(keywords);
  AttentionOutputs outputs(keywords);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  outputs.allocate(context, q.view(), v.view().rank() == 4 ? v.view().size(3) : 0);
  without_gil([&] {
    context_parallel_attention(context, *ranks, q.view(), k.view(), v.view(), arguments.options,
                               plan, outputs.out(), outputs.lse());
  });
  return outputs.give(q.framework(), context);
}

nb::object py_context_parallel_attention_backward(nb::handle communicator, nb::handle q_object,
                                                  nb::handle k_object, nb::handle v_object,
                                                  nb::handle out_object, nb::handle lse_object,
                                                  nb::handle dout_object,
                                                  const nb::kwargs& kwargs) {
  Keywords keywords("context_parallel_attention_backward", kwargs);
  const auto ranks = ranks_in(communicator, keywords.where("communicator"));
  const Array q = required(q_object, keywords.where("q"));
  const Array k = required(k_object, keywords.where("k"));
  const Array v = required(v_object, keywords.where("v"));
  const Array out = required(out_object, keywords.where("out"));
  const Array lse = required(lse_object, keywords.where("lse"));
  const Array dout = required(dout_object, keywords.where("dout"));
  Array dlse;
  keywords.read("dlse", dlse);
  const ContextPlan plan = to_plan(keywords);
  AttentionArguments arguments;
  arguments.read(keywords);
  GradientOutputs gradients(keywords, q, k, v, arguments);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  gradients.allocate(context);
  without_gil([&] {
    context_parallel_attention_backward(
        context, *ranks, q.view(), k.view(), v.view(), arguments.options, plan,
        {.out = out.view(), .lse = lse.view(), .dout = dout.view(), .dlse = dlse.view()},
        gradients.views());
  });
  return gradients.give(q.framework(), context);
}

}  // namespace

ContextPlan to_plan(Keywords& keywords) {
  const Where where = keywords.where("plan");
  const nb::handle object = keywords.take("plan");
  const auto field = [&](const char* name) {
    if (!object.is_valid() || !nb::hasattr(object, name)) {
      throw_type_error(where, object.is_valid() ? object : nb::none(),
                       "a ladon.distributed.ContextPlan");
    }
    return nb::object(object.attr(name));
  };
  ContextPlan plan{.queries = to_ranges(field("queries"), where),
                   .keys = to_ranges(field("keys"), where)};
  nb::dict rest;
  rest["scheme"] = field("scheme");
  rest["kv_heads_at_once"] = field("kv_heads_at_once");
  Keywords fields(keywords.operation(), rest);
  fields.read("scheme", plan.scheme, kSchemes);
  fields.read("kv_heads_at_once", plan.kv_heads_at_once);
  return plan;
}

void bind_context_parallel(nb::module_& module) {
  const std::string options = kAttentionOptions;
  module.def(
      "plan_context", &py_plan_context, nb::arg("ranks"), nb::arg("query_len"), nb::arg("kv_len"),
      nb::arg("kwargs"),
      nb::sig(("def plan_context(ranks: int, query_len: int, kv_len: int, *, scheme: ContextScheme "
               "= 'auto', kv_heads_at_once: int = 0, " +
               options + ") -> ContextPlan")
                  .c_str()),
      R"(Decides who owns which tokens, so that ranks have about the same work.

With a causal mask each rank has an early and a late part. The other options are those of attention(); every rank makes the same
plan from the same options.

Parameters
----------
ranks : int
query_len, kv_len : int
    Tokens of all ranks.
scheme : {"auto", "all_gather", "ring", "ulysses"}
    How ranks exchange keys and values; "auto" takes what sends fewer bytes.
kv_heads_at_once : int
    KV heads that "all_gather" holds at once; 0 chooses.

Returns
-------
ContextPlan)");
  module.def(
      "context_parallel_attention", &py_context_parallel_attention, nb::arg("communicator"),
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("kwargs"),
      nb::sig(("def context_parallel_attention(communicator: Communicator, q: Array, k: Array, v: "
               "Array, *, plan: ContextPlan, " +
               options +
               ", out: Array | None = None, return_lse: bool = False, context: Context | None = "
               "None) -> Any")
                  .c_str()),
      R"(attention() over ranks that each hold some of the tokens.

q, k, v and the result are this rank's tokens, in the order of its ranges in the plan (take_tokens() picks them). Options are
those of the whole problem, and mask and bias have the whole's shape. The result has the bits of attention() in one
process, but for the scheme "ring".

Parameters
----------
communicator : Communicator
q, k, v : array
    This rank's tokens.
plan : ContextPlan
    From plan_context().
out, return_lse, context : optional
    As attention() takes them.

Returns
-------
array
    As attention().)");
  module.def(
      "context_parallel_attention_backward", &py_context_parallel_attention_backward,
      nb::arg("communicator"), nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
      nb::arg("out").none(), nb::arg("lse").none(), nb::arg("dout").none(), nb::arg("kwargs"),
      nb::sig(("def context_parallel_attention_backward(communicator: Communicator, q: Array, k: "
               "Array, v: Array, out: Array, lse: Array, dout: Array, *, plan: ContextPlan, dlse: "
               "Array | None = None, " +
               options +
               ", wanted: Sequence[GradientName] = ('dq', 'dk', 'dv', 'dbias', 'dsinks'), dq: "
               "Array | None = None, dk: Array | None = None, dv: Array | None = None, dbias: "
               "Array | None = None, dsinks: Array | None = None, context: Context | None = None) "
               "-> AttentionGradients")
                  .c_str()),
      R"(attention_backward() over ranks that each hold some of the tokens.

The other options are those of attention(), for the whole problem.

Parameters
----------
communicator : Communicator
q, k, v, out, lse, dout, dlse : array
    This rank's tokens.
plan : ContextPlan
    That of the forward call.
wanted, dq, dk, dv, dbias, dsinks : optional
    As attention_backward() takes them; a gradient is wanted on all ranks or on none.

Returns
-------
AttentionGradients
    This rank's part of dq, dk and dv, and all of dbias and dsinks.)");
}

}  // namespace ladon::python
