// ladon plan: what a model's KV cache needs, as the model keeps it and as it would in other ways.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "cache_plan.h"
#include "commands.h"
#include "failure.h"
#include "json_output.h"
#include "model_shape.h"
#include "rank_plan.h"
#include "text_table.h"
#include "units.h"

namespace ladon::cli {
namespace {

constexpr std::size_t kLineWidth = 78;

/// One line of the answer.
struct PlanRow {
  CacheVariant variant;
  std::int64_t bytes_per_token = 0;  // of all layers, windows or not
  std::int64_t bytes = 0;
  double reduction = 0;  // against MHA that drops nothing, in bytes
  std::optional<std::int64_t> fits_context{};
  std::optional<std::int64_t> fits_batch{};
};

std::int64_t weight_bytes(const ModelShape& model, const PlanOptions& options) {
  return options.weights.value_or(model.weight_bytes);
}

/// What --memory leaves to the cache.
std::int64_t cache_memory(const ModelShape& model, const PlanOptions& options) {
  return std::max<std::int64_t>(0, *options.memory - weight_bytes(model, options));
}

std::vector<PlanRow> plan_rows(const ModelShape& model, const PlanOptions& options) {
  const CacheRequest request{options.context, options.batch, options.dtype};
  const auto mha = static_cast<double>(cache_bytes(model, {.kind = "MHA"}, request));
  std::vector<PlanRow> rows;
  for (const CacheVariant& variant : cache_variants(model)) {
    PlanRow row{.variant = variant};
    row.bytes_per_token =
        cache_bytes(model, variant, {.context = 1, .batch = 1, .dtype = options.dtype});
    row.bytes = cache_bytes(model, variant, request);
    row.reduction = 1 - static_cast<double>(row.bytes) / mha;
    if (options.memory) {
      const std::int64_t memory = cache_memory(model, options);
      row.fits_context = most_context(model, variant, request, memory);
      row.fits_batch = most_batch(model, variant, request, memory);
    }
    rows.push_back(row);
  }
  return rows;
}

std::string details_of(const CacheVariant& variant) {
  if (variant.kv_rank != 0) {
    return "latent " + std::to_string(variant.kv_rank) + " + " + std::to_string(variant.rope_dim);
  }
  if (variant.kind == "GQA") return std::to_string(variant.num_kv_heads) + " KV heads";
  return variant.kind == "MQA" ? "1 KV head" : "";
}

std::string fit_text(const std::optional<std::int64_t>& most) {
  return most ? format_count(*most) : "any";
}

std::string request_text(const PlanOptions& options) {
  return "context " + format_count(options.context) + ", batch " + format_count(options.batch) +
         ", " + name_of(options.dtype);
}

std::string window_text(const ModelShape& model) {
  std::int64_t limited = 0;
  std::int64_t window = 0;
  for (const std::int64_t one : model.windows) {
    if (one == 0) continue;
    ++limited;
    window = one;
  }
  if (limited == 0) return {};
  return "; a window of " + format_count(window) + " keys in " + std::to_string(limited) +
         (limited == 1 ? " layer" : " layers");
}

/// What a reader might stumble over.
std::vector<std::string> notes_of(const ModelShape& model, const PlanOptions& options) {
  std::vector<std::string> notes;
  if (model.max_context > 0 && options.context > model.max_context) {
    notes.push_back("warning: the model supports " + format_count(model.max_context) +
                    " tokens, not " + format_count(options.context));
  }
  if (model.has_windows()) {
    notes.emplace_back(
        "windows: the model's own row drops keys outside the windows;\n"
        "the other rows keep every token");
  }
  if (!model.loadable) {
    notes.push_back(
        "the family " + model.name +
        " is not supported by Ladon;\nthe figures come from the usual fields of its config");
  }
  return notes;
}

/// How --memory is divided, or why the weights are not in it.
std::string memory_text(const ModelShape& model, const PlanOptions& options) {
  const std::int64_t weights = weight_bytes(model, options);
  const std::string all = format_bytes(*options.memory);
  if (weights == 0) {
    return "in " + all +
           (options.weights
                ? ", all for the cache"
                : "; weights are not counted: the config does not tell their size, but\n"
                  "--weights SIZE can");
  }
  if (cache_memory(model, options) == 0) {
    return "nothing fits: the weights alone are " + format_bytes(weights) + " of " + all;
  }
  return "in " + format_bytes(cache_memory(model, options)) + " of " + all +
         ", next to weights of " + format_bytes(weights);
}

void print_model(const ModelShape& model, const PlanOptions& options) {
  const std::vector<PlanRow> rows = plan_rows(model, options);  // may throw: before the first line
  const std::string heads = std::to_string(model.num_layers()) + " layers, " +
                            std::to_string(model.num_heads) + " heads of " +
                            std::to_string(model.head_dim) + window_text(model);
  std::printf("%s:%c%s\n", model.title.c_str(),
              model.title.size() + heads.size() > kLineWidth ? '\n' : ' ', heads.c_str());
  std::printf("KV cache at %s\n\n", request_text(options).c_str());
  std::vector<Column> columns{{"cache", Align::kLeft},
                              {"", Align::kLeft, /*brief=*/false},
                              {"bytes/token"},
                              {"total"},
                              {"less than MHA", Align::kRight, /*brief=*/false}};
  if (options.memory) {
    columns.push_back({"most context"});
    columns.push_back({"most batch"});
  }
  columns.push_back({"", Align::kLeft});
  TextTable table(columns);
  for (const PlanRow& row : plan_rows(model, options)) {
    std::vector<std::string> cells{std::string(row.variant.kind), details_of(row.variant),
                                   format_count(row.bytes_per_token), format_bytes(row.bytes),
                                   row.reduction == 0 ? "" : format_percent(row.reduction)};
    if (options.memory) {
      cells.push_back(fit_text(row.fits_context));
      cells.push_back(fit_text(row.fits_batch));
    }
    cells.emplace_back(row.variant.own ? "<- the model" : "");
    table.add(cells, row.variant.own ? LineStyle::kBold : LineStyle::kPlain);
  }
  std::fputs(table.text().c_str(), stdout);
  if (options.memory) {
    std::printf("\nmost context: at batch %s; most batch: at context %s;\n%s\n",
                format_count(options.batch).c_str(), format_count(options.context).c_str(),
                memory_text(model, options).c_str());
  }
  for (const std::string& note : notes_of(model, options)) std::printf("\n%s\n", note.c_str());
}

std::vector<RankScheme> schemes_of(const ModelShape& model, const PlanOptions& options,
                                   const Link& link) {
  return rank_schemes(model, {options.context, options.batch, options.dtype}, options.ranks, link);
}

std::int64_t whole_bytes(double bytes) {
  constexpr double kMost = 9e18;
  if (bytes > kMost) throw Failure("plan: the bytes that ranks send overflow 64 bits");
  return static_cast<std::int64_t>(std::llround(bytes));
}

/// What --ranks would hold and send.
void print_ranks(const ModelShape& model, const PlanOptions& options, const Link& link) {
  TextTable table({{"phase", Align::kLeft},
                   {"split by", Align::kLeft},
                   {"cache"},
                   {"sent"},
                   {"time"},
                   {"", Align::kLeft}});
  for (const RankScheme& scheme : schemes_of(model, options, link)) {
    if (!scheme.refused.empty()) {
      table.add({std::string(scheme.phase), std::string(scheme.name), "", "", "", scheme.refused});
      continue;
    }
    table.add({std::string(scheme.phase), std::string(scheme.name),
               format_bytes(scheme.cache_bytes), format_bytes(whole_bytes(scheme.sent)),
               format_time(scheme.seconds), scheme.least ? "<- least" : ""},
              scheme.least ? LineStyle::kBold : LineStyle::kPlain);
  }
  std::printf("\n%s ranks over %s (%s, %s/s), for each rank:\n\n%s\n",
              format_count(options.ranks).c_str(), link.name.c_str(),
              format_time(link.latency).c_str(), format_bytes(whole_bytes(link.bandwidth)).c_str(),
              table.text().c_str());
  std::printf(
      "decode: one token of each sequence; prefill: the whole context;\n"
      "both through all layers.\n"
      "Times are for the messages alone; computation can hide some of them.\n");
}

/// Every preset as it is.
void print_overview(const PlanOptions& options) {
  std::vector<Column> columns{{"model", Align::kLeft},
                              {"layers", Align::kRight, /*brief=*/false},
                              {"heads", Align::kRight, /*brief=*/false},
                              {"cache"},
                              {"bytes/token"},
                              {"total"}};
  if (options.memory) {
    columns.push_back({"most context"});
    columns.push_back({"most batch"});
  }
  TextTable table(columns);
  for (const ModelShape& model : model_presets()) {
    for (const PlanRow& row : plan_rows(model, options)) {
      if (!row.variant.own) continue;
      std::vector<std::string> cells{model.name,
                                     std::to_string(model.num_layers()),
                                     std::to_string(model.num_heads),
                                     std::string(row.variant.kind),
                                     format_count(row.bytes_per_token),
                                     format_bytes(row.bytes)};
      if (options.memory) {
        cells.push_back(fit_text(row.fits_context));
        cells.push_back(fit_text(row.fits_batch));
      }
      table.add(cells);
    }
  }
  std::printf("KV caches at %s%s. One of them in detail: --model NAME\n\n",
              request_text(options).c_str(), options.memory ? ", next to the weights" : "");
  std::fputs(table.text().c_str(), stdout);
  std::string shorter;
  for (const ModelShape& model : model_presets()) {
    if (model.max_context == 0 || options.context <= model.max_context) continue;
    shorter += (shorter.empty() ? "" : ", ") + std::string(model.name) + " " +
               format_count(model.max_context);
  }
  if (shorter.empty()) return;
  const std::string warning = "warning: some models support fewer tokens: " + shorter;
  std::printf("\n%s\n", wrap_words(warning, 0, 0, kLineWidth).c_str());
}

Json model_json(const ModelShape& model, const PlanOptions& options) {
  Json json;
  json["name"] = model.name;
  json["title"] = model.title;
  json["kind"] = model.kind();
  json["num_layers"] = model.num_layers();
  json["embed_dim"] = model.embed_dim;
  json["num_heads"] = model.num_heads;
  json["head_dim"] = model.head_dim;
  json["windows"] = model.windows;
  json["loadable"] = model.loadable;
  if (model.max_context > 0) json["max_context"] = model.max_context;
  if (const std::int64_t weights = weight_bytes(model, options); weights > 0) {
    json["weight_bytes"] = weights;
  }
  json["notes"] = notes_of(model, options);
  json["caches"] = Json::array();
  for (const PlanRow& row : plan_rows(model, options)) {
    Json cache{{"kind", row.variant.kind},
               {"own", row.variant.own},
               {"details", details_of(row.variant)},
               {"bytes_per_token", row.bytes_per_token},
               {"bytes", row.bytes},
               {"reduction", row.reduction}};
    if (options.memory) {
      cache["most_context"] = row.fits_context ? Json(*row.fits_context) : Json();
      cache["most_batch"] = row.fits_batch ? Json(*row.fits_batch) : Json();
    }
    json["caches"].push_back(cache);
  }
  return json;
}

Json ranks_json(const ModelShape& model, const PlanOptions& options, const Link& link) {
  Json json{{"count", options.ranks},
            {"link", link.name},
            {"latency", link.latency},
            {"bandwidth", link.bandwidth},
            {"schemes", Json::array()}};
  for (const RankScheme& scheme : schemes_of(model, options, link)) {
    Json one{{"phase", scheme.phase}, {"name", scheme.name}};
    if (scheme.refused.empty()) {
      one["cache_bytes"] = scheme.cache_bytes;
      one["sent_bytes"] = whole_bytes(scheme.sent);
      one["seconds"] = scheme.seconds;
      one["least"] = scheme.least;
    } else {
      one["refused"] = scheme.refused;
    }
    json["schemes"].push_back(one);
  }
  return json;
}

}  // namespace

int run_plan(const PlanOptions& options) {
  const bool all = options.model.empty() && options.config.empty();
  const bool has_ranks = options.ranks > 1;
  if (has_ranks && all) throw UsageError("--ranks: needs one model, by --model or --config");
  const Link link = parse_link(options.link);
  std::vector<ModelShape> models;
  if (!options.config.empty()) {
    models.push_back(model_from_config(options.config, options.ignored_fields));
  } else if (!all) {
    models.push_back(model_preset(options.model));
  } else {
    models.assign(model_presets().begin(), model_presets().end());
  }
  if (options.json) {
    Json document = json_document("plan");
    document["context"] = options.context;
    document["batch"] = options.batch;
    document["dtype"] = name_of(options.dtype);
    if (options.memory) document["memory"] = *options.memory;
    document["models"] = Json::array();
    for (const ModelShape& model : models) {
      document["models"].push_back(model_json(model, options));
    }
    if (has_ranks) document["ranks"] = ranks_json(models.front(), options, link);
    print_json(document);
  } else if (all) {
    print_overview(options);
  } else {
    const std::vector<RankScheme> schemes = schemes_of(models.front(), options, link);
    for (const RankScheme& scheme : schemes) whole_bytes(scheme.sent);  // may throw
    print_model(models.front(), options);
    if (has_ranks) print_ranks(models.front(), options, link);
  }
  return kExitGood;
}

}  // namespace ladon::cli
