// KvCache and PagePool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <filesystem>
#include <string>

#include "attention_call.h"
#include "docstrings.h"
#include "ladon/kv_cache.h"
#include "ladon/paged_kv_cache.h"
#include "module.h"
#include "objects.h"

namespace ladon::python {
namespace {

using Path = std::filesystem::path;

Cache* make_contiguous(const nb::kwargs& kwargs) {
  Keywords keywords("KvCache.contiguous", kwargs);
  KvCacheOptions options;
  DeviceId device;
  std::int64_t capacity = 0;
  read_cache_options(keywords, options);
  keywords.read("device", device);
  keywords.read("capacity", capacity);
  keywords.finish();
  return new Cache(KvCache::contiguous(context_of(device), options, capacity), capacity);
}

Cache* make_window(const nb::kwargs& kwargs) {
  Keywords keywords("KvCache.window", kwargs);
  KvCacheOptions options;
  DeviceId device;
  std::int64_t window_left = -1;
  std::int64_t spare = 0;
  read_cache_options(keywords, options);
  keywords.read("device", device);
  keywords.read("window_left", window_left);
  keywords.read("spare", spare);
  keywords.finish();
  return new Cache(KvCache::window(context_of(device), options, window_left, spare), 0, spare);
}

Cache* make_paged(nb::handle pool_object, nb::handle batch_object) {
  std::shared_ptr<PagePool> pool;
  if (!nb::try_cast(pool_object, pool, false) || pool == nullptr) {
    throw_type_error({"KvCache.paged", "pool"}, pool_object, "a ladon.PagePool");
  }
  return new Cache(KvCache::paged(pool, to_integer(batch_object, {"KvCache.paged", "batch"})));
}

void append(Cache& self, nb::handle k_object, nb::handle v_object, nb::handle lengths_object) {
  const Array k = required(k_object, {"KvCache.append", "k"});
  const Array v = Array::input(v_object, {"KvCache.append", "v"});
  std::vector<std::int64_t> lengths;
  if (!lengths_object.is_none()) {
    lengths = to_integers(lengths_object, {"KvCache.append", "new_lengths"});
  }
  const BoundContext& context = context_of(self.cache.device());
  changing(self, [&] { self.cache.append(context, k.view(), v.view(), lengths); });
}

nb::object cache_attention(const Cache& self, nb::handle q_object, const nb::kwargs& kwargs) {
  Keywords keywords("KvCache.attention", kwargs);
  const Array q = required(q_object, keywords.where("q"));
  AttentionArguments arguments;
  arguments.read(keywords);
  AttentionOutputs outputs(keywords);
  const BoundContext& context = keywords.context(q.device());
  keywords.finish();
  arguments.follow(context);
  // What a cache holds for a token never changes, so this needs no lock.
  outputs.allocate(context, q.view(), self.cache.options().value_dim);
  reading(self, [&] {
    attention(context, q.view(), self.cache.view(), arguments.options, outputs.out(),
              outputs.lse());
  });
  return outputs.give(q.framework(), context);
}

void reorder(Cache& self, nb::handle from_object) {
  const std::vector<std::int64_t> from = to_integers(from_object, {"KvCache.reorder", "from_"});
  const BoundContext& context = context_of(self.cache.device());
  changing(self, [&] { self.cache.reorder(context, from); });
}

void reset(Cache& self, nb::handle sequence) {
  if (sequence.is_none()) return changing(self, [&] { self.cache.reset(); });
  const std::int64_t index = to_integer(sequence, {"KvCache.reset", "sequence"});
  changing(self, [&] { self.cache.reset(index); });
}

nb::dict pool_statistics(const PagePool& pool) {
  const PagePool::Statistics numbers = without_gil([&] { return pool.statistics(); });
  nb::dict dict;
  dict["num_pages"] = numbers.num_pages;
  dict["free_pages"] = numbers.free_pages;
  dict["kept_pages"] = numbers.kept_pages;
  dict["used_pages"] = numbers.used_pages;
  dict["shared_pages"] = numbers.shared_pages;
  dict["published_pages"] = numbers.published_pages;
  dict["page_bytes"] = numbers.page_bytes;
  dict["bytes"] = numbers.bytes;
  dict["prefix_lookups"] = numbers.prefix_lookups;
  dict["prefix_tokens_found"] = numbers.prefix_tokens_found;
  dict["evictions"] = numbers.evictions;
  return dict;
}

void make_pool(PagePool* self, const nb::kwargs& kwargs) {
  Keywords keywords("PagePool", kwargs);
  KvCacheOptions options;
  DeviceId device;
  std::int64_t page_size = 0;
  std::int64_t num_pages = 0;
  read_cache_options(keywords, options);
  keywords.read("device", device);
  keywords.read("page_size", page_size);
  keywords.read("num_pages", num_pages);
  keywords.finish();
  new (self) PagePool(context_of(device), options, page_size, num_pages);
}

/// A number that the cache tells about itself.
template <class Member>
auto number(Member member) {
  return
      [member](const Cache& self) { return reading(self, [&] { return (self.cache.*member)(); }); };
}

/// A number about one of its sequences.
template <class Member>
auto number_of_sequence(Member member, const char* name) {
  return [member, name](const Cache& self, nb::handle sequence) {
    const std::int64_t index = to_integer(sequence, {name, "sequence"});
    return reading(self, [&] { return (self.cache.*member)(index); });
  };
}

std::int64_t prefix(Cache& self, nb::handle sequence, nb::handle token_ids, bool adopt) {
  const char* const name = adopt ? "KvCache.adopt_prefix" : "KvCache.publish_prefix";
  const std::int64_t index = to_integer(sequence, {name, "sequence"});
  const std::vector<std::int64_t> ids = to_integers(token_ids, {name, "token_ids"});
  return changing(self, [&]() -> std::int64_t {
    if (adopt) return self.cache.adopt_prefix(index, ids);
    self.cache.publish_prefix(index, ids);
    return 0;
  });
}

/// Keys or values of a sequence as a separate array.
nb::object read_back(const Cache& self, nb::handle sequence, nb::handle dtype, nb::handle framework,
                     bool keys) {
  const char* const name = keys ? "KvCache.keys" : "KvCache.values";
  const std::int64_t index = to_integer(sequence, {name, "sequence"});
  std::optional<DType> wanted;
  if (!dtype.is_none()) wanted = to_dtype(dtype, {name, "dtype"});
  const Framework kind = to_framework(framework, {name, "framework"});
  const BoundContext& context = context_of(self.cache.device());
  Tensor read = reading(self, [&] {
    return keys ? self.cache.keys(context, index, wanted)
                : self.cache.values(context, index, wanted);
  });
  return to_array(std::move(read), kind, context);
}

Cache* fork(const Cache& self) {
  const BoundContext& context = context_of(self.cache.device());
  return new Cache(reading(self, [&] { return self.cache.fork(context); }), self.capacity,
                   self.spare);
}

std::string describe_pool(const PagePool& self) {
  const PagePool::Statistics numbers = without_gil([&] { return self.statistics(); });
  return "<ladon.PagePool: " + std::to_string(numbers.num_pages) + " pages of " +
         std::to_string(self.page_size()) + " tokens, " + std::to_string(numbers.free_pages) +
         " free, " + std::to_string(numbers.bytes) + " bytes>";
}

std::string describe(const Cache& self) {
  return reading(self, [&] {
    const KvCacheOptions& options = self.cache.options();
    return "<ladon.KvCache: " + std::string(self.cache.kind()) + ", " +
           name_of(options.format.dtype) + ", batch " + std::to_string(options.batch) + ", " +
           std::to_string(self.cache.bytes_used()) + " bytes used>";
  });
}

void bind_pool(nb::module_& module) {
  nb::class_<PagePool>(module, "PagePool", doc::kPagePool.c_str())
      .def("__init__", &make_pool, nb::arg("kwargs"),
           nb::sig("def __init__(self, *, num_kv_heads: int, head_dim: int, page_size: int, "
                   "num_pages: int, value_dim: int = 0, values_in_keys: bool = False, num_heads: "
                   "int = 0, mha_dim: int = 0, dtype: DTypeLike = 'f32', batch: int = 1, device: "
                   "DeviceLike = 'cpu') -> None"))
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("num_pages", &PagePool::num_pages)
      .def_prop_ro(
          "options",
          [](const PagePool& self) { return options_dict(self.options(), self.device()); },
          nb::sig("def options(self) -> dict[str, Any]"))
      .def("statistics", &pool_statistics, nb::sig("def statistics(self) -> dict[str, int]"),
           "Pages (free, kept, used, shared, published), bytes, and how prefixes were found.")
      .def("forget_prefixes", &PagePool::forget_prefixes, nb::call_guard<nb::gil_scoped_release>(),
           "Frees the published pages that have no owner.")
      .def("__repr__", &describe_pool);
}

}  // namespace

void bind_caches(nb::module_& module) {
  bind_pool(module);
  const std::string options =
      "num_kv_heads: int, head_dim: int, batch: int = 1, value_dim: int = 0, values_in_keys: bool "
      "= False, num_heads: int = 0, mha_dim: int = 0, dtype: DTypeLike = 'f32', device: DeviceLike "
      "= 'cpu'";
  nb::class_<Cache>(module, "KvCache",
                    "Keys and values of past tokens: contiguous, a sliding window, or pages of a "
                    "PagePool.")
      .def("__init__",
           [](Cache*, const nb::args&, const nb::kwargs&) {
             throw nb::type_error(
                 "KvCache: use KvCache.contiguous(), KvCache.window() or KvCache.paged(), with "
                 "**layer.cache_options() for a layer");
           })
      .def_static(
          "contiguous", &make_contiguous, nb::arg("kwargs"),
          nb::sig(("def contiguous(*, " + options + ", capacity: int = 0) -> KvCache").c_str()),
          doc::kContiguous.c_str())
      .def_static(
          "window", &make_window, nb::arg("kwargs"),
          nb::sig(("def window(*, " + options + ", window_left: int, spare: int = 0) -> KvCache")
                      .c_str()),
          doc::kWindow.c_str())
      .def_static("paged", &make_paged, nb::arg("pool").none(), nb::arg("batch") = 1,
                  nb::sig("def paged(pool: PagePool, batch: int = 1) -> KvCache"), doc::kPaged)
      .def("append", &append, nb::arg("k").none(), nb::arg("v").none() = nb::none(),
           nb::arg("new_lengths").none() = nb::none(),
           nb::sig("def append(self, k: Array, v: Array | None = None, new_lengths: IntegersLike | "
                   "None = None) -> None"),
           doc::kAppend)
      .def("attention", &cache_attention, nb::arg("q").none(), nb::arg("kwargs"),
           nb::sig(("def attention(self, q: Array, *, " + std::string(kAttentionOptions) +
                    ", out: Array | None = None, return_lse: bool = False, context: Context | None "
                    "= None) -> Any")
                       .c_str()),
           doc::kCacheAttention)
      .def(
          "truncate",
          [](Cache& self, nb::handle sequence, nb::handle length) {
            const std::int64_t index = to_integer(sequence, {"KvCache.truncate", "sequence"});
            const std::int64_t end = to_integer(length, {"KvCache.truncate", "length"});
            changing(self, [&] { self.cache.truncate(index, end); });
          },
          nb::arg("sequence"), nb::arg("length"),
          nb::sig("def truncate(self, sequence: int, length: int) -> None"), doc::kTruncate)
      .def("reset", &reset, nb::arg("sequence").none() = nb::none(),
           nb::sig("def reset(self, sequence: int | None = None) -> None"),
           "Forgets a sequence, or everything.")
      .def("reorder", &reorder, nb::arg("from_"),
           nb::sig("def reorder(self, from_: IntegersLike) -> None"),
           "Sequence b becomes a copy of sequence from_[b] (beam search).")
      .def(
          "reserve",
          [](Cache& self, nb::handle length) {
            const std::int64_t tokens = to_integer(length, {"KvCache.reserve", "length"});
            const BoundContext& context = context_of(self.cache.device());
            changing(self, [&] { self.cache.reserve(context, tokens); });
          },
          nb::arg("length"), nb::sig("def reserve(self, length: int) -> None"),
          "Allocates beforehand for this many tokens of each sequence.")
      .def(
          "fork", [](const Cache& self) { return fork(self); },
          "An independent cache with the same content, which shares memory until it differs.")
      .def(
          "save",
          [](const Cache& self, const Path& path) {
            const BoundContext& context = context_of(self.cache.device());
            reading(self, [&] { self.cache.save(context, path); });
          },
          nb::arg("path"), nb::sig("def save(self, path: str | os.PathLike[str]) -> None"),
          "Writes a file, whole or not at all.")
      .def(
          "load",
          [](Cache& self, const Path& path) {
            const BoundContext& context = context_of(self.cache.device());
            changing(self, [&] { self.cache.load(context, path); });
          },
          nb::arg("path"), nb::sig("def load(self, path: str | os.PathLike[str]) -> None"),
          "Replaces the content by what a cache of any kind with the same options has saved.")
      .def(
          "publish_prefix",
          [](Cache& self, nb::handle sequence, nb::handle ids) {
            prefix(self, sequence, ids, false);
          },
          nb::arg("sequence"), nb::arg("token_ids"),
          nb::sig("def publish_prefix(self, sequence: int, token_ids: IntegersLike) -> None"),
          doc::kPublishPrefix)
      .def(
          "adopt_prefix",
          [](Cache& self, nb::handle sequence, nb::handle ids) {
            return prefix(self, sequence, ids, true);
          },
          nb::arg("sequence"), nb::arg("token_ids"),
          nb::sig("def adopt_prefix(self, sequence: int, token_ids: IntegersLike) -> int"),
          doc::kAdoptPrefix)
      .def("length", number_of_sequence(&KvCache::length, "KvCache.length"),
           nb::arg("sequence") = 0, nb::sig("def length(self, sequence: int = 0) -> int"),
           "Tokens that the sequence has seen: the position of its next one.")
      .def("held", number_of_sequence(&KvCache::held, "KvCache.held"), nb::arg("sequence") = 0,
           nb::sig("def held(self, sequence: int = 0) -> int"),
           "Keys of it that can be read: all of them, but for a window.")
      .def(
          "keys",
          [](const Cache& self, nb::handle sequence, nb::handle dtype, nb::handle framework) {
            return read_back(self, sequence, dtype, framework, true);
          },
          nb::arg("sequence") = 0, nb::arg("dtype").none() = nb::none(),
          nb::arg("framework") = "numpy",
          nb::sig("def keys(self, sequence: int = 0, dtype: DTypeLike | None = None, framework: "
                  "Framework = 'numpy') -> Any"),
          doc::kKeys)
      .def(
          "values",
          [](const Cache& self, nb::handle sequence, nb::handle dtype, nb::handle framework) {
            return read_back(self, sequence, dtype, framework, false);
          },
          nb::arg("sequence") = 0, nb::arg("dtype").none() = nb::none(),
          nb::arg("framework") = "numpy",
          nb::sig("def values(self, sequence: int = 0, dtype: DTypeLike | None = None, "
                  "framework: Framework = 'numpy') -> Any"),
          doc::kValues)
      .def_prop_ro("kind", [](const Cache& self) { return std::string(self.cache.kind()); })
      .def_prop_ro("device", [](const Cache& self) { return self.cache.device().to_string(); })
      .def_prop_ro(
          "options",
          [](const Cache& self) {
            return options_dict(reading(self, [&] { return self.cache.options(); }),
                                self.cache.device());
          },
          nb::sig("def options(self) -> dict[str, Any]"))
      .def_prop_ro("batch", number(&KvCache::batch))
      .def_prop_ro("window_left", number(&KvCache::window_left))
      .def_ro("capacity", &Cache::capacity,
              "Of a contiguous cache that was given one; 0: it grows.")
      .def_ro("spare", &Cache::spare, "Of a window: the older keys that it keeps as well.")
      .def(
          "__deepcopy__", [](const Cache& self, nb::handle /*memo*/) { return fork(self); },
          nb::arg("memo").none(), nb::sig("def __deepcopy__(self, memo: Any) -> KvCache"))
      .def(
          "__reduce__",
          [](nb::handle_t<Cache> self) {
            return nb::module_::import_("ladon._state").attr("reduce_cache")(self);
          },
          nb::sig("def __reduce__(self) -> Any"))
      .def_prop_ro("elements_used", number(&KvCache::elements_used))
      .def_prop_ro("bytes_used", number(&KvCache::bytes_used))
      .def_prop_ro("bytes_reserved", number(&KvCache::bytes_reserved))
      .def_prop_ro("mha_elements", number(&KvCache::mha_elements))
      .def_prop_ro("mha_bytes", number(&KvCache::mha_bytes))
      .def_prop_ro("reduction", number(&KvCache::reduction))
      .def("__repr__", &describe);
}

}  // namespace ladon::python
