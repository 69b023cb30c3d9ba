// JSON out of files that are not trusted, as a stream of events.
//
// The parser keeps no tree and does not call itself, so neither depth nor size of the text can
// exhaust the stack, and memory is what the receiver keeps. Each receiver accepts just the shape of
// document that it wants and throws Error on anything else. Include in .cpp files alone: the JSON
// library is not part of what Ladon installs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "io/file.h"

namespace ladon::io {

/// Values by their kind; a receiver overrides what its document may hold. The rest is refused by
/// unexpected().
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit JsonEvents(const InputFile& file) : file_(file) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return unexpected(std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    return unexpected(std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected("the number " + in_quotes(text));
  }
  bool string(string_t& value) override { return unexpected("the text " + in_quotes(value)); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool start_object(std::size_t) override { return unexpected("an object"); }
  bool start_array(std::size_t) override { return unexpected("an array"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    file_.refuse("got invalid JSON or UTF-8 at byte " + std::to_string(position) + " of the " +
                 std::string(document()) + ", expected a JSON object");
  }

 protected:
  ~JsonEvents() override = default;
  /// What messages call the text: "header".
  virtual std::string_view document() const = 0;
  /// Throws.
  virtual bool unexpected(const std::string& got) = 0;
  const InputFile& file() const noexcept { return file_; }

 private:
  const InputFile& file_;
};

/// Sends the events of a text that must be one object. `name` is what messages call it.
template <class Receiver>
void parse_json_object(const InputFile& file, std::string_view text, std::string_view name,
                       Receiver& receiver) {
  // The parser would skip a byte order mark, and would take a zero byte for the end of the text.
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos || text[first] != '{' ||
      text.find('\0') != std::string_view::npos) {
    file.refuse(std::string(name) +
                ": got text that is not a JSON object, expected one that begins with '{'");
  }
  nlohmann::json::sax_parse(text.begin(), text.end(), &receiver);
}

}  // namespace ladon::io
