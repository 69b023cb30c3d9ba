// SpreadKvCache: the keys of each sequence over all ranks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "communicator_objects.h"
#include "ladon/paged_kv_cache.h"
#include "module.h"
#include "objects.h"
#include "spread_objects.h"

namespace ladon::python {
namespace {

SpreadCache* make_contiguous(nb::handle communicator, const nb::kwargs& kwargs) {
  Keywords keywords("SpreadKvCache.contiguous", kwargs);
  const auto ranks = ranks_in(communicator, keywords.where("communicator"));
  KvCacheOptions options;
  DeviceId device;
  std::int64_t capacity = 0;
  read_cache_options(keywords, options);
  keywords.read("device", device);
  keywords.read("capacity", capacity);
  keywords.finish();
  return new SpreadCache(ranks, KvCache::contiguous(context_of(device), options, capacity));
}

SpreadCache* make_paged(nb::handle communicator, nb::handle pool_object, nb::handle batch) {
  const char* const name = "SpreadKvCache.paged";
  const auto ranks = ranks_in(communicator, {name, "communicator"});
  std::shared_ptr<PagePool> pool;
  if (!nb::try_cast(pool_object, pool, false) || pool == nullptr) {
    throw_type_error({name, "pool"}, pool_object, "a ladon.PagePool");
  }
  return new SpreadCache(ranks, KvCache::paged(pool, to_integer(batch, {name, "batch"})));
}

void append(SpreadCache& self, nb::handle k_object, nb::handle v_object,
            nb::handle lengths_object) {
  const char* const name = "SpreadKvCache.append";
  const Array k = required(k_object, {name, "k"});
  const Array v = Array::input(v_object, {name, "v"});
  std::vector<std::int64_t> lengths;
  if (!lengths_object.is_none()) lengths = to_integers(lengths_object, {name, "new_lengths"});
  const BoundContext& context = context_of(self.cache.local().device());
  changing(self, [&] { self.cache.append(context, k.view(), v.view(), lengths); });
}

/// What attention() and append_and_attend() read alike.
struct Call {
  Array q;
  AttentionArguments arguments;
  AttentionOutputs outputs;
  SpreadAttentionOptions spread;
  const BoundContext& context;

  Call(Keywords& keywords, nb::handle q_object, const SpreadCache& self)
      : q(required(q_object, keywords.where("q"))),
        outputs(keywords),
        context(keywords.context(q.device())) {
    arguments.read(keywords);
    keywords.read("reproducible", spread.reproducible);
    keywords.finish();
    arguments.follow(context);
    outputs.allocate(context, q.view(), self.cache.options().value_dim);
  }
};

nb::object attend(const SpreadCache& self, nb::handle q, const nb::kwargs& kwargs) {
  Keywords keywords("SpreadKvCache.attention", kwargs);
  Call call(keywords, q, self);
  reading(self, [&] {
    spread_attention(call.context, self.cache, call.q.view(), call.arguments.options,
                     call.outputs.out(), call.outputs.lse(), call.spread);
  });
  return call.outputs.give(call.q.framework(), call.context);
}

nb::object append_and_attend_to(SpreadCache& self, nb::handle q, nb::handle k_object,
                                nb::handle v_object, const nb::kwargs& kwargs) {
  Keywords keywords("SpreadKvCache.append_and_attend", kwargs);
  const Array k = required(k_object, keywords.where("k"));
  const Array v = Array::input(v_object, keywords.where("v"));
  Call call(keywords, q, self);
  changing(self, [&] {
    append_and_attend(call.context, self.cache, call.q.view(), k.view(), v.view(),
                      call.arguments.options, call.outputs.out(), call.outputs.lse(), call.spread);
  });
  return call.outputs.give(call.q.framework(), call.context);
}

std::string describe(const SpreadCache& self) {
  return reading(self, [&] {
    return "<ladon.distributed.SpreadKvCache: " + std::string(self.cache.local().kind()) +
           ", batch " + std::to_string(self.cache.batch()) + ", " +
           std::to_string(self.cache.local().bytes_used()) + " bytes used on rank " +
           std::to_string(self.communicator->rank()) + " of " +
           std::to_string(self.communicator->size()) + ">";
  });
}

}  // namespace

void bind_spread_cache(nb::module_& module) {
  const std::string attention =
      std::string(kAttentionOptions) +
      ", reproducible: bool = False, out: Array | None = None, return_lse: bool = False, context: "
      "Context | None = None) -> Any";
  nb::class_<SpreadCache>(
      module, "SpreadKvCache",
      "A KV cache for sequences that are longer than one rank's memory: splits of 512 keys go to "
      "the ranks in turn. All ranks pass the same arguments, and get the same results.")
      .def_static("contiguous", &make_contiguous, nb::arg("communicator"), nb::arg("kwargs"),
                  nb::sig("def contiguous(communicator: Communicator, *, num_kv_heads: int, "
                          "head_dim: int, batch: int = 1, value_dim: int = 0, values_in_keys: bool "
                          "= False, num_heads: int = 0, mha_dim: int = 0, dtype: DTypeLike = "
                          "'f32', device: DeviceLike = 'cpu', capacity: int = 0) -> SpreadKvCache"),
                  R"(A cache whose part on each rank is a KvCache.contiguous().

Parameters
----------
communicator : Communicator
num_kv_heads, head_dim, batch, value_dim, values_in_keys, num_heads, mha_dim, dtype, device : optional
    As KvCache.contiguous() takes them.
capacity : int
    Counts the keys of this rank alone.

Returns
-------
SpreadKvCache)")
      .def_static("paged", &make_paged, nb::arg("communicator"), nb::arg("pool").none(),
                  nb::arg("batch") = 1,
                  nb::sig("def paged(communicator: Communicator, pool: PagePool, batch: int = 1) "
                          "-> SpreadKvCache"),
                  R"(A cache whose part on each rank is in pages of a pool.

Parameters
----------
communicator : Communicator
pool : PagePool
    Of this rank; 512 is a multiple of its page size.
batch : int
    Number of sequences.

Returns
-------
SpreadKvCache)")
      .def("append", &append, nb::arg("k").none(), nb::arg("v").none() = nb::none(),
           nb::arg("new_lengths").none() = nb::none(),
           nb::sig("def append(self, k: Array, v: Array | None = None, new_lengths: IntegersLike | "
                   "None = None) -> None"),
           R"(Appends new tokens: all or nothing, on all ranks.

Parameters
----------
k, v, new_lengths : optional
    As KvCache.append() takes them.)")
      .def("attention", &attend, nb::arg("q").none(), nb::arg("kwargs"),
           nb::sig(("def attention(self, q: Array, *, " + attention).c_str()),
           R"(attention() of queries, the newest tokens, over the keys of all ranks.

Parameters
----------
q : array [batch, query_len, num_heads, head_dim]
    All other options are those of attention().
reproducible : bool
    The same bits for any number of ranks.

Returns
-------
array
    As attention().)")
      .def("append_and_attend", &append_and_attend_to, nb::arg("q").none(), nb::arg("k").none(),
           nb::arg("v").none() = nb::none(), nb::arg("kwargs"),
           nb::sig(("def append_and_attend(self, q: Array, k: Array, v: Array | None = None, *, " +
                    attention)
                       .c_str()),
           R"(append() and attention() as one call: if it raises, no rank's cache has changed.

Parameters
----------
q, k, v : array
    As attention() and append() take them.
reproducible : bool
    The same bits for any number of ranks.

Returns
-------
array
    As attention().)")
      .def(
          "truncate",
          [](SpreadCache& self, nb::handle sequence, nb::handle length) {
            const std::int64_t index = to_integer(sequence, {"SpreadKvCache.truncate", "sequence"});
            const std::int64_t end = to_integer(length, {"SpreadKvCache.truncate", "length"});
            changing(self, [&] { self.cache.truncate(index, end); });
          },
          nb::arg("sequence"), nb::arg("length"),
          nb::sig("def truncate(self, sequence: int, length: int) -> None"),
          R"(Removes the last tokens of a sequence. Every rank must call it.

Parameters
----------
sequence : int
length : int
    The tokens that are kept.)")
      .def(
          "reset", [](SpreadCache& self) { changing(self, [&] { self.cache.reset(); }); },
          "Forgets everything. Every rank must call it.")
      .def(
          "length",
          [](const SpreadCache& self, nb::handle sequence) {
            const std::int64_t index = to_integer(sequence, {"SpreadKvCache.length", "sequence"});
            return reading(self, [&] { return self.cache.length(index); });
          },
          nb::arg("sequence") = 0, nb::sig("def length(self, sequence: int = 0) -> int"),
          "Keys of a sequence on all ranks.")
      .def(
          "local_length",
          [](const SpreadCache& self, nb::handle sequence) {
            const std::int64_t index =
                to_integer(sequence, {"SpreadKvCache.local_length", "sequence"});
            return reading(self, [&] { return self.cache.local().length(index); });
          },
          nb::arg("sequence") = 0, nb::sig("def local_length(self, sequence: int = 0) -> int"),
          "Those of them that this rank has.")
      .def_prop_ro("batch", [](const SpreadCache& self) { return self.cache.batch(); })
      .def_prop_ro(
          "communicator", [](const SpreadCache& self) { return Ranks{self.communicator}; },
          nb::sig("def communicator(self) -> Communicator"))
      .def_prop_ro(
          "bytes_used",
          [](const SpreadCache& self) {
            return reading(self, [&] { return self.cache.local().bytes_used(); });
          },
          "Of this rank.")
      .def("__repr__", &describe);
}

}  // namespace ladon::python
