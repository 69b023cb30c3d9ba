// What the user says about a picture of weights: the tokens' texts, and which heads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ladon::cli {

/// A JSON file with an array of strings, or "-" for standard input. Control characters become
/// visible. Throws Failure; `option` begins the message.
std::vector<std::string> read_token_texts(std::string_view option, const std::string& path);

/// "0,3,5-7" as numbers, each below `count`, in the order given. Throws UsageError.
std::vector<std::int64_t> parse_numbers(std::string_view text, std::int64_t count);

}  // namespace ladon::cli
