// attention(), its backward, the score matrix, and the merge of parts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "module.h"

namespace ladon::python {
namespace {

constexpr Names<ScoreStage, 5> kStages{{{"scaled", ScoreStage::kScaled},
                                        {"softcapped", ScoreStage::kSoftcapped},
                                        {"masked", ScoreStage::kMasked},
                                        {"probability", ScoreStage::kProbability},
                                        {"dropped", ScoreStage::kDropped}}};

nb::object py_attention(nb::handle q_object, nb::handle k_object, nb::handle v_object,
                        const nb::kwargs& kwargs) {
  Keywords keywords("attention", kwargs);
  const Array q = required(q_object, keywords.where("q"));
  const Array k = required(k_object, keywords.where("k"));
  const Array v = required(v_object, keywords.where("v"));
  AttentionArguments arguments;
  arguments.read(keywords);
  AttentionOutputs outputs(keywords);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  outputs.allocate(context, q.view(), v.view().rank() == 4 ? v.view().size(3) : 0);
  without_gil([&] {
    attention(context, q.view(), k.view(), v.view(), arguments.options, outputs.out(),
              outputs.lse());
  });
  return outputs.give(q.framework(), context);
}

nb::object py_attention_backward(nb::handle q_object, nb::handle k_object, nb::handle v_object,
                                 nb::handle out_object, nb::handle lse_object,
                                 nb::handle dout_object, const nb::kwargs& kwargs) {
  Keywords keywords("attention_backward", kwargs);
  const Array q = required(q_object, keywords.where("q"));
  const Array k = required(k_object, keywords.where("k"));
  const Array v = required(v_object, keywords.where("v"));
  const Array out = required(out_object, keywords.where("out"));
  const Array lse = required(lse_object, keywords.where("lse"));
  const Array dout = required(dout_object, keywords.where("dout"));
  Array dlse;
  keywords.read("dlse", dlse);
  AttentionArguments arguments;
  arguments.read(keywords);
  GradientOutputs gradients(keywords, q, k, v, arguments);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  gradients.allocate(context);
  without_gil([&] {
    attention_backward(
        context, q.view(), k.view(), v.view(), arguments.options,
        {.out = out.view(), .lse = lse.view(), .dout = dout.view(), .dlse = dlse.view()},
        gradients.views());
  });
  return gradients.give(q.framework(), context);
}

nb::object py_attention_weights(nb::handle q_object, nb::handle k_object,
                                const nb::kwargs& kwargs) {
  Keywords keywords("attention_weights", kwargs);
  const Array q = required(q_object, keywords.where("q"));
  const Array k = required(k_object, keywords.where("k"));
  AttentionArguments arguments;
  arguments.read(keywords);
  ScoreStage stage = ScoreStage::kProbability;
  keywords.read("stage", stage, kStages);
  std::optional<DType> dtype;
  keywords.read("dtype", dtype);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  const ConstTensorView queries = q.view();
  const ConstTensorView keys = k.view();
  Dims shape{0, 0, 0, 0};
  if (queries.rank() == 4 && keys.rank() == 4) {
    shape = Dims{queries.size(0), queries.size(2), queries.size(1), keys.size(1)};
  }
  Tensor weights =
      Tensor::uninitialized(context, dtype.value_or(float_or_f32(queries.dtype())), shape);
  without_gil(
      [&] { attention_weights(context, queries, keys, arguments.options, weights, stage); });
  return to_array(std::move(weights), q.framework(), context);
}

std::vector<Array> read_list(nb::handle object, const Where& where) {
  if (!nb::isinstance<nb::list>(object) && !nb::isinstance<nb::tuple>(object)) {
    throw_type_error(where, object, "a list of arrays");
  }
  std::vector<Array> arrays;
  for (const nb::handle item : object) arrays.push_back(required(item, where));
  return arrays;
}

nb::object py_merge_attention(nb::handle outs_object, nb::handle lses_object,
                              const nb::kwargs& kwargs) {
  Keywords keywords("merge_attention", kwargs);
  const std::vector<Array> outs = read_list(outs_object, keywords.where("outs"));
  const std::vector<Array> lses = read_list(lses_object, keywords.where("lses"));
  if (outs.empty()) throw_value_error(keywords.where("outs"), "got no parts, expected some");
  Array sinks;
  keywords.read_numbers("sinks", sinks);
  AttentionOutputs outputs(keywords);
  const BoundContext& context = keywords.context(outs[0].device());
  keywords.finish();
  sinks.follow(context);
  const ConstTensorView first = outs[0].view();
  outputs.allocate(context, first, first.rank() == 4 ? first.size(3) : 0);
  std::vector<ConstTensorView> out_views;
  std::vector<ConstTensorView> lse_views;
  out_views.reserve(outs.size());
  lse_views.reserve(lses.size());
  for (const Array& out : outs) out_views.push_back(out.view());
  for (const Array& lse : lses) lse_views.push_back(lse.view());
  without_gil([&] {
    merge_attention(context, out_views, lse_views, outputs.out(), outputs.lse(), sinks.view());
  });
  return outputs.give(outs[0].framework(), context);
}

}  // namespace

void bind_attention(nb::module_& module) {
  const auto define = [&](auto function, const char* name, const std::string& signature,
                          const char* doc, auto... names) {
    module.def(name, function, names..., nb::arg("kwargs"), nb::sig(signature.c_str()), doc);
  };
  const std::string options = kAttentionOptions;
  define(&py_attention, "attention",
         "def attention(q: Array, k: Array, v: Array, *, " + options +
             ", out: Array | None = None, return_lse: bool = False, context: Context | None = "
             "None) -> Any",
         R"(Attention: softmax(scale * q.k + ...) times v.

MHA, GQA and MQA differ only in num_kv_heads. Inputs are not copied, and no score matrix is stored.

Parameters
----------
q : array [batch, query_len, num_heads, head_dim]
k : array [batch, kv_len, num_kv_heads, head_dim]
    num_heads is a multiple of num_kv_heads. Any strides, but the last must be 1.
v : array [batch, kv_len, num_kv_heads, value_dim]
causal : bool
    A query sees no key past its own position.
scale : float, optional
    Factor of the scores; 1 / sqrt(head_dim) unless given.
alignment : {"bottom_right", "top_left"}
    Whether the last query has the position of the last key, as with a cache, or the first that of the first.
position_offset : int, optional
    The position of query 0 among the keys, in place of an alignment.
window_left, window_right : int, optional
    How far a query sees around its position.
mask : bool array, optional
    True where a query may look. [batch, num_heads, query_len, kv_len], any of them 1; leading ones
    may be left out.
bias : array, optional
    Added to the scores; shaped like mask.
kv_lengths : sequence of int, optional
    The number of keys in each sequence of a padded batch.
query_offsets, kv_offsets : sequence of int, optional
    Where packed sequences begin and end; the batch dimension is then 1.
softcap : float
    Scores become c * tanh(score / c); 0 is off.
alibi_slopes, sinks : array or sequence of float, optional
    One for each query head.
dropout : float
    Probability with which a weight is dropped.
dropout_seed : int
    Of the random numbers: the same seed drops the same weights.
dropout_first_sequence, dropout_first_head, dropout_first_query, dropout_first_key : int
    Where this call begins in a larger one, whose random numbers it then draws.
out : array, optional
    Takes the result, and is returned.
return_lse : bool
    Return the log-sum-exp too.
context : Context, optional
    Device, threads and kernels; where the arrays are unless given.

Returns
-------
out : array [batch, query_len, num_heads, value_dim]
    A torch tensor for torch inputs, a NumPy array otherwise.
lse : array [batch, num_heads, query_len]
    With return_lse: the natural log of the softmax's denominator.

Examples
--------
>>> q = np.ones((1, 4, 8, 16), np.float32)
>>> k = v = np.ones((1, 4, 2, 16), np.float32)  # two KV heads for eight query heads
>>> ladon.attention(q, k, v, causal=True).shape
(1, 4, 8, 16))",
         nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none());
  define(&py_attention_backward, "attention_backward",
         "def attention_backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: "
         "Array, *, dlse: Array | None = None, " +
             options +
             ", wanted: Sequence[GradientName] = ('dq', 'dk', 'dv', 'dbias', 'dsinks'), dq: Array "
             "| None = "
             "None, dk: Array | None = None, dv: Array | None = None, dbias: Array | None = None, "
             "dsinks: Array | None = None, context: Context | None = None) -> AttentionGradients",
         R"(The gradients of attention(), given what it returned and the gradient of that.

The options must be those of the forward call.

Parameters
----------
q, k, v : array
    The inputs of the forward call.
out, lse : array
    What it returned, with return_lse.
dout : array
    The gradient of out.
dlse : array, optional
    The gradient of lse, where it was used. All other options are those of attention().
wanted : sequence of {"dq", "dk", "dv", "dbias", "dsinks"}
    The gradients to compute.
dq, dk, dv, dbias, dsinks : array, optional
    Arrays that take a gradient, which is then wanted.

Returns
-------
AttentionGradients
    dq, dk, dv, dbias and dsinks; None for those that are not wanted and those whose input is absent.)",
         nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("out").none(),
         nb::arg("lse").none(), nb::arg("dout").none());
  define(&py_attention_weights, "attention_weights",
         "def attention_weights(q: Array, k: Array, *, stage: ScoreStage = 'probability', dtype: "
         "DTypeLike | None = None, " +
             options + ", context: Context | None = None) -> Any",
         R"(The score matrix, for inspection.

Parameters
----------
q, k : array
    As attention() takes them. All other options are those of attention(), but packed batches are refused.
stage : {"scaled", "softcapped", "masked", "probability", "dropped"}
    The last step that is computed.
dtype : optional
    Of the result; that of q unless given.

Returns
-------
array [batch, num_heads, query_len, kv_len]
    The one result of Ladon whose memory grows with query_len * kv_len.)",
         nb::arg("q").none(), nb::arg("k").none());
  define(&py_merge_attention, "merge_attention",
         "def merge_attention(outs: Sequence[Array], lses: Sequence[Array], *, sinks: Array | "
         "Sequence[float] | None = None, out: Array | None = None, return_lse: bool = False, "
         "context: Context | None = None) -> Any",
         R"(Merges attention over parts of the keys into attention over all of them.

Parameters
----------
outs, lses : sequence of array
    What ``attention(..., return_lse=True)`` gave for each part.
sinks : array or sequence of float, optional
    One for each query head. Give them here and not to the parts.
out : array, optional
    Takes the result.
return_lse : bool
    Return the merged log-sum-exp too.
context : Context, optional
    Device, threads and kernels; where the arrays are unless given.

Returns
-------
out : array
lse : array
    With return_lse.)",
         nb::arg("outs").none(), nb::arg("lses").none());
}

}  // namespace ladon::python
