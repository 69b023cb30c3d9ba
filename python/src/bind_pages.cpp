// attention() over pages that another engine owns.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "ladon/error.h"
#include "ladon/kv_cache_view.h"
#include "module.h"

namespace ladon::python {
namespace {

/// Pages as slots: their strides, and how many there are.
struct Slots {
  std::int64_t count = 0;
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
};

/// Of an array [num_pages, page_size, num_kv_heads, ...] of that rank.
Slots slots_of(const ConstTensorView& view, int rank, const Where& where) {
  if (view.rank() != rank) {
    throw_value_error(where, "got " + view.shape().to_string() +
                                 ", expected [num_pages, page_size, num_kv_heads" +
                                 (rank == 4 ? ", dim]" : "]"));
  }
  if (rank == 4 && view.size(3) > 1 && view.stride(3) != 1) {
    throw_value_error(where,
                      "got a last stride of " + std::to_string(view.stride(3)) + ", expected 1");
  }
  const std::int64_t pages = view.size(0);
  const std::int64_t page_size = view.size(1);
  const std::int64_t step = page_size == 1 && pages > 1 ? view.stride(0) : view.stride(1);
  if (pages > 1 && page_size > 1 && view.stride(0) != page_size * step) {
    throw_value_error(where, "got pages with a gap behind them, expected page " +
                                 std::to_string(page_size) + " slots after page");
  }
  return {pages * page_size, step, view.stride(2)};
}

/// The page tables of all sequences, one list of pages each.
std::vector<std::vector<std::int32_t>> to_tables(nb::handle object, const Where& where) {
  std::vector<std::vector<std::int32_t>> tables;
  for (const nb::handle row : object) {
    std::vector<std::int32_t>& table = tables.emplace_back();
    for (const std::int64_t page : to_integers(row, where)) {
      if (page < std::numeric_limits<std::int32_t>::min() ||
          page > std::numeric_limits<std::int32_t>::max()) {
        throw_value_error(where, "got page " + std::to_string(page) + ", expected one that exists");
      }
      table.push_back(static_cast<std::int32_t>(page));
    }
  }
  return tables;
}

/// A KvCacheView and all that it points to.
struct Pages {
  Array k, v, k_scales, v_scales;
  std::vector<std::vector<std::int32_t>> tables;
  std::vector<KvSequenceView> sequences;
  KvCacheView view;

  Pages(nb::handle k_object, nb::handle v_object, nb::handle tables_object,
        nb::handle lengths_object, Keywords& keywords)
      : k(required(k_object, keywords.where("k"))),
        v(required(v_object, keywords.where("v"))),
        tables(to_tables(tables_object, keywords.where("page_tables"))) {
    keywords.read("k_scales", k_scales);
    keywords.read("v_scales", v_scales);
    const Slots keys = slots_of(k.view(), 4, keywords.where("k"));
    const Slots values = slots_of(v.view(), 4, keywords.where("v"));
    expect_like_k(v.view(), keywords.where("v"));
    view.format = k.view().dtype();
    view.device = k.device();
    view.num_kv_heads = k.view().size(2);
    view.head_dim = k.view().size(3);
    view.value_dim = v.view().size(3);
    view.num_slots = keys.count;
    view.k = k.view().data();
    view.v = v.view().data();
    view.k_slot_stride = keys.slot_stride;
    view.k_head_stride = keys.head_stride;
    view.v_slot_stride = values.slot_stride;
    view.v_head_stride = values.head_stride;
    view.page_size = k.view().size(1);
    if (view.page_size < 1) throw_value_error(keywords.where("k"), "got pages of 0 slots");
    set_scales(keywords);
    set_sequences(to_integers(lengths_object, keywords.where("lengths")), keywords);
  }

 private:
  void expect_like_k(const ConstTensorView& other, const Where& where) const {
    const ConstTensorView keys = k.view();
    if (other.dtype() == keys.dtype() && other.size(0) == keys.size(0) &&
        other.size(1) == keys.size(1) && other.size(2) == keys.size(2)) {
      return;
    }
    throw_value_error(where, "got " + other.shape().to_string() + " of " + name_of(other.dtype()) +
                                 ", expected pages like k's " + keys.shape().to_string() + " of " +
                                 name_of(keys.dtype()));
  }

  void set_scales(const Keywords& keywords) {
    if (k_scales.absent() && v_scales.absent()) return;
    const auto scales = [&](const Array& array, const char* name, Slots& slots) {
      if (array.absent() || array.view().dtype() != DType::kF32) {
        throw_value_error(keywords.where(name), "expected an f32 array like the other scales");
      }
      slots = slots_of(array.view(), 3, keywords.where(name));
      if (slots.count != view.num_slots || array.view().size(2) != view.num_kv_heads) {
        throw_value_error(keywords.where(name), "got " + array.view().shape().to_string() +
                                                    ", expected a scale per slot and head");
      }
      return static_cast<const float*>(array.view().data());
    };
    Slots of_keys;
    Slots of_values;
    view.k_scales = scales(k_scales, "k_scales", of_keys);
    view.v_scales = scales(v_scales, "v_scales", of_values);
    if (of_keys.slot_stride != of_values.slot_stride ||
        of_keys.head_stride != of_values.head_stride) {
      throw_value_error(keywords.where("v_scales"), "expected the strides of k_scales");
    }
    view.scale_slot_stride = of_keys.slot_stride;
    view.scale_head_stride = of_keys.head_stride;
  }

  void set_sequences(const std::vector<std::int64_t>& lengths, const Keywords& keywords) {
    if (lengths.size() != tables.size()) {
      throw_value_error(keywords.where("lengths"),
                        "got " + std::to_string(lengths.size()) + " lengths, expected " +
                            std::to_string(tables.size()) + ": one for each page table");
    }
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto pages = static_cast<std::int64_t>(tables[i].size());
      if (lengths[i] < 0 || (lengths[i] + view.page_size - 1) / view.page_size > pages) {
        throw_value_error(keywords.where("lengths"),
                          "got " + std::to_string(lengths[i]) + " tokens of sequence " +
                              std::to_string(i) + ", expected 0 to " +
                              std::to_string(pages * view.page_size) + ": what its pages hold");
      }
      sequences.push_back({.length = lengths[i], .pages = tables[i].data()});
    }
    view.sequences = sequences;
  }
};

nb::object paged_attention(nb::handle q_object, nb::handle k, nb::handle v, nb::handle tables,
                           nb::handle lengths, const nb::kwargs& kwargs) {
  Keywords keywords("paged_attention", kwargs);
  const Array q = required(q_object, keywords.where("q"));
  const Pages pages(k, v, tables, lengths, keywords);
  AttentionArguments arguments;
  arguments.read(keywords);
  AttentionOutputs outputs(keywords);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  outputs.allocate(context, q.view(), pages.view.value_dim);
  without_gil([&] {
    try {
      attention(context, q.view(), pages.view, arguments.options, outputs.out(), outputs.lse());
    } catch (const Error& error) {
      const std::string message = error.what();
      throw Error(error.code(), message.starts_with("attention: ") ? "paged_" + message : message);
    }
  });
  return outputs.give(q.framework(), context);
}

}  // namespace

void bind_pages(nb::module_& module) {
  module.def("paged_attention", &paged_attention, nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("page_tables"), nb::arg("lengths"), nb::arg("kwargs"),
             nb::sig(("def paged_attention(q: Array, k: Array, v: Array, page_tables: "
                      "Sequence[IntegersLike], lengths: IntegersLike, *, k_scales: Array | None = "
                      "None, v_scales: Array | None = None, " +
                      std::string(kAttentionOptions) +
                      ", out: Array | None = None, return_lse: bool = False, context: Context | "
                      "None = None) -> Any")
                         .c_str()),
             R"(attention() over pages that an engine of your own manages: nothing is copied.

Parameters
----------
q : array [batch, query_len, num_heads, head_dim]
    The newest tokens of each sequence.
k : array [num_pages, page_size, num_kv_heads, head_dim]
    All pages.
v : array [num_pages, page_size, num_kv_heads, value_dim]
page_tables : sequence of sequence of int
    The pages of each sequence, in order.
lengths : sequence of int
    How many tokens they hold.
k_scales, v_scales : array [num_pages, page_size, num_kv_heads], optional
    Of int8 and fp8 pages, in f32. All other options are those of attention().

Returns
-------
array
    As attention().)");
}

}  // namespace ladon::python
