#include "rank_plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "failure.h"
#include "ladon/kv_format.h"
#include "ladon/spread_cache.h"

namespace ladon::cli {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

/// A positive number with one of these units.
double parse_quantity(std::string_view text, std::span<const Unit> units, std::string_view what) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && std::isfinite(value) && value > 0) {
    const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
    for (const Unit& known : units) {
      if (known.name == unit) return value * known.factor;
    }
  }
  throw UsageError("--link: got \"" + std::string(text) + "\", expected " + std::string(what));
}

std::string why_heads_do_not_divide(const ModelShape& model, std::int64_t ranks) {
  if (model.num_heads % ranks != 0) {
    return std::to_string(model.num_heads) + " heads are not a multiple of the ranks";
  }
  const std::int64_t kv_heads = model.num_kv_heads;
  if (kv_heads != 0 && kv_heads % ranks != 0 && ranks % kv_heads != 0) {
    return std::to_string(kv_heads) + " KV heads are neither a multiple nor a divisor of the ranks";
  }
  return {};
}

CacheVariant own_variant(const ModelShape& model) {
  for (const CacheVariant& variant : cache_variants(model)) {
    if (variant.own) return variant;
  }
  throw Failure("plan: the model has no cache");
}

}  // namespace

Link parse_link(std::string_view text) {
  std::string names;
  for (const Link& link : bench::known_links()) {
    if (link.name == text) return link;
    names += link.name + ", ";
  }
  const std::size_t comma = text.find(',');
  if (comma == std::string_view::npos) {
    throw UsageError("--link: got \"" + std::string(text) + "\", expected one of " + names +
                     "or LATENCY,BANDWIDTH such as 30us,1.2GB/s");
  }
  constexpr Unit kTimes[] = {{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}};
  constexpr Unit kRates[] = {{"B/s", 1}, {"kB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}};
  return {
      .name = std::string(text),
      .latency = parse_quantity(text.substr(0, comma), kTimes, "a latency such as 30us"),
      .bandwidth = parse_quantity(text.substr(comma + 1), kRates, "a bandwidth such as 1.2GB/s")};
}

std::vector<RankScheme> rank_schemes(const ModelShape& model, const CacheRequest& request,
                                     std::int64_t ranks, const Link& link) {
  const bool latent = model.kv_rank != 0;
  const CacheVariant variant = own_variant(model);
  const std::int64_t whole_cache = cache_bytes(model, variant, request);
  // Of a latent model ranks that share tokens gather latents, whatever its heads.
  const auto as_double = [](std::int64_t value) { return static_cast<double>(value); };
  const bench::RankSizes s{
      .heads = as_double(model.num_heads),
      .kv_heads = as_double(latent ? model.num_heads : model.num_kv_heads),
      .head_dim = as_double(model.head_dim),
      .value_dim = as_double(model.value_dim),
      .tokens = as_double(request.context) * as_double(request.batch),
      .batch = as_double(request.batch),
      .ranks = as_double(ranks),
      .element = as_double(
          needs_scale(request.dtype) ? 2 : static_cast<std::int64_t>(size_of(request.dtype)))};
  std::vector<RankScheme> schemes;
  // `steps` collectives in each layer, of which each takes a latency for every other rank, and so
  // do the rounds of agreement.
  const auto add = [&](RankScheme scheme, double sent, double steps, std::int64_t cache) {
    if (scheme.refused.empty()) {
      const double layers = as_double(model.num_layers());
      scheme.cache_bytes = cache;
      scheme.sent = layers * sent;
      const double rounds = steps + bench::kAgreementRounds;
      scheme.seconds = link.seconds(layers * rounds * (s.ranks - 1), scheme.sent);
    }
    schemes.push_back(std::move(scheme));
  };
  const std::string refused = why_heads_do_not_divide(model, ranks);
  const std::int64_t by_heads = latent ? whole_cache
                                       : whole_cache / model.num_kv_heads *
                                             std::max<std::int64_t>(1, model.num_kv_heads / ranks);
  // A spread cache keeps every token; rank 0 has most of them.
  CacheVariant spread = variant;
  spread.own = false;
  CacheRequest most = request;
  most.context = SpreadKvCache::keys_of(0, static_cast<int>(ranks), request.context);
  const std::int64_t by_sequence = cache_bytes(model, spread, most);
  const double embed_dim = as_double(model.embed_dim);

  add({.phase = "decode", .name = "heads", .refused = refused},
      bench::sent_by_heads(s, s.batch, embed_dim), 2, by_heads);
  if (latent) {
    add({.phase = "decode", .name = "sequence", .refused = refused},
        bench::sent_by_latents(s, as_double(model.kv_rank), as_double(model.rope_dim), embed_dim),
        4, by_sequence);
  } else {
    add({.phase = "decode", .name = "sequence"},
        bench::sent_by_sequence(s, as_double(model.value_dim)), 2, by_sequence);
  }
  add({.phase = "prefill", .name = "heads", .refused = refused},
      bench::sent_by_heads(s, s.tokens, embed_dim), 2, by_heads);
  const auto tokens_of = whole_cache / ranks;
  bench::RankSizes gathered = s;
  if (latent) {
    gathered.kv_heads = 1;
    gathered.head_dim = as_double(model.kv_rank + model.rope_dim);
    gathered.value_dim = 0;
  }
  const std::string latents_alone = latent ? "latents are gathered" : "";
  add({.phase = "prefill", .name = "all-gather"}, bench::sent_by_gather(gathered), 1, tokens_of);
  add({.phase = "prefill", .name = "ring", .refused = latents_alone}, bench::sent_by_gather(s), 1,
      tokens_of);
  add({.phase = "prefill", .name = "ulysses", .refused = latent ? latents_alone : refused},
      bench::sent_by_exchange(s), 2, tokens_of);
  for (const std::string_view phase : {"decode", "prefill"}) {
    RankScheme* best = nullptr;
    for (RankScheme& scheme : schemes) {
      if (scheme.phase != phase || !scheme.refused.empty()) continue;
      if (best == nullptr || scheme.seconds < best->seconds) best = &scheme;
    }
    if (best != nullptr) best->least = true;
  }
  return schemes;
}

}  // namespace ladon::cli
