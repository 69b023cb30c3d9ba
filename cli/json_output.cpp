#include "json_output.h"

#include <cstdio>
#include <string>

#include "ladon/version.h"

namespace ladon::cli {

Json json_document(const char* command) {
  Json document;
  document["ladon"] = version();
  document["command"] = command;
  return document;
}

void print_json(const Json& document) {
  // Paths may hold bytes that are not UTF-8: they are replaced, because an exception would not
  // help.
  const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  std::fputs(text.c_str(), stdout);
}

}  // namespace ladon::cli
