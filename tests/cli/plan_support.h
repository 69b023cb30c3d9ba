// What the tests of `ladon plan` share.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace ladon::test {

using Json = nlohmann::json;

inline constexpr std::int64_t kGiB = std::int64_t{1} << 30;
inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// The caches of the one model in the document, by their kind.
inline std::map<std::string, Json> caches_of(const Json& document) {
  std::map<std::string, Json> caches;
  for (const Json& cache : document.at("models").at(0).at("caches")) {
    caches[cache.at("kind").get<std::string>()] = cache;
  }
  return caches;
}

}  // namespace ladon::test
