// The library's options as keyword arguments and as dicts.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "arrays.h"
#include "keywords.h"
#include "ladon/attention.h"
#include "ladon/attention_layer.h"
#include "ladon/checkpoint.h"
#include "ladon/kv_cache.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/rope.h"

namespace ladon::python {

/// AttentionOptions and all that they point to.
struct AttentionArguments {
  AttentionOptions options;
  Array mask, bias, alibi_slopes, sinks;
  std::vector<std::int64_t> kv_lengths, query_offsets, kv_offsets;

  AttentionArguments() = default;
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;
  void read(Keywords& keywords);
  /// Lists of numbers go where the call runs.
  void follow(const Context& context);
};

/// RopePositions from None, a number (the first position) or an array of positions.
struct PositionArgument {
  RopePositions positions;
  std::vector<std::int64_t> list;

  PositionArgument() = default;
  PositionArgument(const PositionArgument&) = delete;
  PositionArgument& operator=(const PositionArgument&) = delete;
  void read(Keywords& keywords, const char* name);
};

/// layout, rotary_dim, base and scaling (a dict).
void read_rope(Keywords& keywords, RopeOptions& options);
/// The same from one dict, over `options` as they are.
RopeOptions to_rope(nb::handle object, const Where& where, RopeOptions options);
nb::dict rope_dict(const RopeOptions& options);

MultiHeadAttentionOptions to_multi_head_options(Keywords& keywords);
nb::dict options_dict(const MultiHeadAttentionOptions& options);
LatentAttentionOptions to_latent_options(Keywords& keywords);
nb::dict options_dict(const LatentAttentionOptions& options);

/// How a layer is loaded: dtype, ignored_fields, rope_context.
LoadOptions to_load_options(Keywords& keywords);

void read_cache_options(Keywords& keywords, KvCacheOptions& options);
/// With the device where it is not the CPU.
nb::dict options_dict(const KvCacheOptions& options, DeviceId device);

/// LayerCall and CachedCall, and all that they point to.
struct LayerArguments {
  std::optional<bool> causal;
  Array mask, bias, query;
  std::vector<std::int64_t> kv_lengths, new_lengths;
  PositionArgument query_positions, key_positions;
  std::uint64_t dropout_seed = 0;

  void read(Keywords& keywords);
  LayerCall call() const;
  CachedCall cached_call() const;
  /// Throws for arguments that the other kind of call alone takes.
  void refuse(const Keywords& keywords, bool cached) const;
};

}  // namespace ladon::python
