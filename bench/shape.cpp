#include "shape.h"

#include "ladon/kv_format.h"

namespace ladon::bench {
namespace {

std::string cache_name(const Shape& shape) {
  const std::string storage = name_of(shape.storage);
  switch (shape.source) {
    case Source::kContiguous: return ", contiguous " + storage;
    case Source::kPaged: return ", paged " + storage;
    case Source::kSharedPrefix: return ", shared prefix " + storage;
    case Source::kTensors:
    case Source::kLatent: break;
  }
  return {};
}

std::string rule_name(Rule rule) {
  switch (rule) {
    case Rule::kNone: break;
    case Rule::kSoftcap: return ", softcap";
    case Rule::kAlibi: return ", ALiBi";
    case Rule::kMask: return ", mask";
    case Rule::kBias: return ", bias";
    case Rule::kDropout: return ", dropout";
  }
  return {};
}

}  // namespace

std::string Shape::name() const {
  const auto text = [](std::int64_t value) { return std::to_string(value); };
  const std::string dtype_name = name_of(dtype);
  const std::string heads = " B" + text(batch) + " H" + text(num_heads);
  const std::string keys = " S" + text(kv_len);
  if (source == Source::kLatent) {
    return dtype_name + " MLA decode" + heads + keys + " latent " + text(values()) + "+" +
           text(head_dim - values());
  }
  const std::string grouped = num_heads == num_kv_heads ? "" : "/" + text(num_kv_heads);
  const std::string dims =
      values() == head_dim ? text(head_dim) : text(head_dim) + "/" + text(values());
  const std::string tail = keys + " D" + dims;
  if (query_len == 1) {
    return dtype_name + " decode" + heads + "/" + text(num_kv_heads) + tail + cache_name(*this);
  }
  return dtype_name + (pass == Pass::kForward ? " forward" : " backward") + heads + grouped + tail +
         (causal ? " causal" : " full") + rule_name(rule);
}

std::int64_t Shape::stored_tokens() const {
  if (source != Source::kSharedPrefix) return batch * kv_len;
  return kv_len - kOwnTokens + batch * kOwnTokens;
}

double Shape::flops() const {
  const double scores = static_cast<double>(batch * num_heads) * static_cast<double>(query_len) *
                        static_cast<double>(kv_len);
  // Of queries and keys: the scores; backward dq and dk too. Of values: out; backward dv and the
  // gradient of the weights.
  const bool forward = pass == Pass::kForward;
  const double per_score = (forward ? 2.0 : 6.0) * static_cast<double>(head_dim) +
                           (forward ? 2.0 : 4.0) * static_cast<double>(values());
  return scores * per_score * (causal ? 0.5 : 1.0);
}

double Shape::kv_bytes() const {
  const DType held = source == Source::kTensors ? dtype : storage;
  const std::int64_t elements = source == Source::kLatent ? head_dim : head_dim + values();
  const double scales = needs_scale(held) ? 2 * sizeof(float) : 0;
  const double row = static_cast<double>(elements) * static_cast<double>(size_of(held)) + scales;
  return static_cast<double>(stored_tokens() * num_kv_heads) * row;
}

}  // namespace ladon::bench
