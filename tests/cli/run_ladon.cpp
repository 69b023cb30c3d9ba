#include "cli/run_ladon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <set>
#include <stdexcept>

namespace ladon::test {
namespace {

using Json = nlohmann::json;

struct Pipe {
  Pipe() {
    if (::pipe(ends.data()) != 0) throw std::runtime_error("no pipe");
  }
  std::array<int, 2> ends{};
};

[[noreturn]] void become_ladon(const LadonRun& run, const Pipe& out, const Pipe& err) {
  int out_end = out.ends[1];
  if (run.out_path) out_end = ::open(run.out_path->c_str(), O_WRONLY | O_CREAT, 0666);
  ::dup2(out_end, STDOUT_FILENO);
  if (run.in_path) ::dup2(::open(run.in_path->c_str(), O_RDONLY), STDIN_FILENO);
  ::dup2(err.ends[1], STDERR_FILENO);
  for (const int end : {out.ends[0], out.ends[1], err.ends[0], err.ends[1]}) ::close(end);
  if (run.file_size_limit) {
    const rlimit limit{*run.file_size_limit, *run.file_size_limit};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  std::vector<char*> arguments;
  std::string program = LADON_PROGRAM;
  arguments.push_back(program.data());
  std::vector<std::string> copies = run.arguments;
  for (std::string& argument : copies) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  std::vector<std::string> settings = run.environment;
  for (std::string& setting : settings) ::putenv(setting.data());
  ::execv(program.c_str(), arguments.data());
  _exit(127);
}

/// Reads both pipes to their ends, and sends the signal when its time has come.
void listen(const LadonRun& run, pid_t child, const Pipe& out, const Pipe& err, Outcome& outcome) {
  const auto begin = std::chrono::steady_clock::now();
  bool sent = run.signal == 0;
  std::array<pollfd, 2> open{{{out.ends[0], POLLIN, 0}, {err.ends[0], POLLIN, 0}}};
  const std::array<std::string*, 2> texts{&outcome.out, &outcome.err};
  while (open[0].fd >= 0 || open[1].fd >= 0) {
    ::poll(open.data(), open.size(), 20);
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (!sent && waited > std::chrono::milliseconds(run.signal_after)) {
      ::kill(child, run.signal);
      sent = true;
    }
    for (std::size_t i = 0; i < open.size(); ++i) {
      if (open[i].fd < 0 || open[i].revents == 0) continue;
      std::array<char, 4096> buffer{};
      const ssize_t size = ::read(open[i].fd, buffer.data(), buffer.size());
      if (size > 0) {
        texts[i]->append(buffer.data(), static_cast<std::size_t>(size));
      } else {
        ::close(open[i].fd);
        open[i].fd = -1;
      }
    }
  }
}

bool has_type(const Json& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "integer") return value.is_number_integer();
  if (type == "number") return value.is_number();
  return false;
}

std::string type_fault(const Json& types, const Json& value, const std::string& where) {
  for (const Json& type : types.is_array() ? types : Json::array({types})) {
    if (has_type(value, type.get<std::string>())) return {};
  }
  return where + " is not of type " + types.dump() + ": " + value.dump();
}

std::string object_fault(const Json& root, const Json& schema, const Json& value,
                         const std::string& where) {
  for (const Json& name : schema.value("required", Json::array())) {
    if (!value.contains(name.get<std::string>())) return where + " lacks " + name.dump();
  }
  const Json properties = schema.value("properties", Json::object());
  for (const auto& [name, part] : value.items()) {
    if (properties.contains(name)) {
      const std::string fault = schema_fault(root, properties.at(name), part, where + "." + name);
      if (!fault.empty()) return fault;
    } else if (!schema.value("additionalProperties", true)) {
      return where + " has " + name + ", which the schema does not know";
    }
  }
  return {};
}

}  // namespace

Outcome run_ladon(const LadonRun& run) {
  const Pipe out;
  const Pipe err;
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("no child");
  if (child == 0) become_ladon(run, out, err);
  ::close(out.ends[1]);
  ::close(err.ends[1]);
  Outcome outcome;
  listen(run, child, out, err, outcome);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) outcome.status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  return outcome;
}

std::string complaint_of(const LadonRun& run, int status) {
  const Outcome outcome = run_ladon(run);
  EXPECT_EQ(outcome.status, status) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  const std::string start = "ladon: ";
  EXPECT_TRUE(outcome.err.starts_with(start)) << outcome.err;
  EXPECT_TRUE(outcome.err.find('\n') + 1 == outcome.err.size()) << "not one line: " << outcome.err;
  if (outcome.err.size() <= start.size()) return {};
  return outcome.err.substr(start.size(), outcome.err.size() - start.size() - 1);
}

Json document_of(std::vector<std::string> arguments, int status, const std::string& definition) {
  arguments.emplace_back("--json");
  const Outcome outcome = run_ladon(arguments);
  EXPECT_EQ(outcome.status, status) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  const Json document = Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(document.is_discarded()) << outcome.out;
  if (!document.is_object()) return Json::object();
  std::ifstream file(LADON_SOURCE_DIR "/docs/cli_schema.json");
  const Json schema = Json::parse(file);
  EXPECT_EQ(document.value("command", ""), arguments.front());
  const std::string& name = definition.empty() ? arguments.front() : definition;
  EXPECT_EQ(schema_fault(schema, schema.at("definitions").at(name), document), "");
  return document;
}

std::string schema_fault(const Json& root, const Json& schema, const Json& value,
                         const std::string& where) {
  static const std::set<std::string> known{
      "$ref",     "type",       "const", "enum",    "minimum",     "required",
      "minItems", "properties", "items", "maximum", "description", "additionalProperties"};
  for (const auto& [keyword, part] : schema.items()) {
    if (!known.contains(keyword)) return where + ": the checker does not know " + keyword;
  }
  if (schema.contains("$ref")) {
    const std::string path = schema.at("$ref").get<std::string>().substr(1);
    return schema_fault(root, root.at(Json::json_pointer(path)), value, where);
  }
  if (schema.contains("type")) {
    if (std::string fault = type_fault(schema.at("type"), value, where); !fault.empty()) {
      return fault;
    }
  }
  if (schema.contains("const") && value != schema.at("const")) {
    return where + " is " + value.dump() + ", not " + schema.at("const").dump();
  }
  if (schema.contains("enum")) {
    bool found = false;
    for (const Json& choice : schema.at("enum")) found = found || choice == value;
    if (!found) return where + " is " + value.dump() + ", none of " + schema.at("enum").dump();
  }
  if (value.is_number() && schema.contains("minimum") && value < schema.at("minimum")) {
    return where + " is too small: " + value.dump();
  }
  if (value.is_array()) {
    if (value.size() < schema.value("minItems", 0U)) return where + " is too short";
    for (std::size_t i = 0; schema.contains("items") && i < value.size(); ++i) {
      const std::string fault =
          schema_fault(root, schema.at("items"), value[i], where + "[" + std::to_string(i) + "]");
      if (!fault.empty()) return fault;
    }
  }
  return value.is_object() ? object_fault(root, schema, value, where) : std::string();
}

}  // namespace ladon::test
