#include "plot/weights_page.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "plot/base64.h"
#include "plot/weights_page_script.h"

namespace ladon::cli {
namespace {

/// One head: a byte for each cell that can be seen, row by row.
std::string bytes_of_head(const ConstTensorView& head, const HeatMapText& text, double largest) {
  const std::int64_t kv_len = head.size(1);
  const auto* weights = head.data_as<float>();
  std::string bytes;
  for (std::int64_t i = 0; i < head.size(0); ++i) {
    for (std::int64_t j = 0; j < kv_len; ++j) {
      if (text.is_masked(i, j)) continue;
      const double part = std::max(0.0, static_cast<double>(weights[i * kv_len + j])) / largest;
      bytes += static_cast<char>(
          static_cast<unsigned char>(std::lround(255 * std::sqrt(std::min(1.0, part)))));
    }
  }
  return bytes;
}

}  // namespace

std::string weights_page(const ConstTensorView& weights, const HeatMapText& text) {
  float most = 0;
  const auto* elements = weights.data_as<float>();
  for (std::int64_t i = 0; i < weights.num_elements(); ++i) most = std::max(most, elements[i]);
  const double largest = most > 0 ? static_cast<double>(most) : 1;
  nlohmann::json data{{"title", text.title},     {"subtitle", text.subtitle},
                      {"rows", weights.size(1)}, {"columns", weights.size(2)},
                      {"causal", text.causal},   {"window", text.window},
                      {"largest", largest},      {"tokens", text.tokens},
                      {"heads", text.heads},     {"maps", nlohmann::json::array()}};
  for (std::int64_t head = 0; head < weights.size(0); ++head) {
    data["maps"].push_back(base64(bytes_of_head(weights.select(0, head), text, largest)));
  }
  // The tokens' texts may hold anything: nothing in them may end the script or break UTF-8.
  std::string json = data.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  for (std::size_t at = json.find('<'); at != std::string::npos; at = json.find('<', at)) {
    json.replace(at, 1, "\\u003c");
  }
  std::string page(kWeightsPageBegin);
  page.append("<script type=\"application/json\" id=\"data\">").append(json).append("</script>\n");
  return page.append(kWeightsPageEnd);
}

}  // namespace ladon::cli
