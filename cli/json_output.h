// What --json prints. docs/cli_schema.json describes every document.
#pragma once

#include <nlohmann/json.hpp>

namespace ladon::cli {

/// Fields stay in the order in which they were set.
using Json = nlohmann::ordered_json;

/// {"ladon": version, "command": command}: how every document begins.
Json json_document(const char* command);
/// One document on stdout.
void print_json(const Json& document);

}  // namespace ladon::cli
