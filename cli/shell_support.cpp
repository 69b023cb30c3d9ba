#include "shell_support.h"

#include <array>
#include <string_view>

#include "failure.h"
#include "ladon/version.h"
#include "names.h"

namespace ladon::cli {
namespace {

using Subcommands = std::vector<SubcommandDescription>;

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

bool is_file(const OptionDescription& option) {
  return option.type.starts_with("FILE") || option.type == "FOLDER" || option.type == "PATH" ||
         option.type == "PYTHON";
}

/// The subcommands without options: name, description.
constexpr std::array<std::array<std::string_view, 2>, 3> kOthers{
    {{"help", "Explain a subcommand"},
     {"completion", "Print completions for a shell"},
     {"manual", "Print the manual page"}}};
constexpr std::string_view kShells = "bash zsh fish";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::string bash(const Subcommands& subcommands) {
  std::string names;
  std::string cases;
  for (const SubcommandDescription& sub : subcommands) {
    names += sub.name + " ";
    std::string options;
    std::string values;
    for (const OptionDescription& option : sub.options) {
      options += (options.empty() ? "" : " ") + option.name;
      if (!option.choices.empty()) {
        values += "        " + option.name + ") words=\"" + joined(option.choices) + "\" ;;\n";
      } else if (is_file(option)) {
        values +=
            "        " + option.name + ") COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n";
      } else if (!option.type.empty()) {
        values += "        " + option.name + ") return ;;\n";
      }
    }
    cases.append("    ").append(sub.name).append(")\n      words=\"").append(options);
    cases.append("\"\n      case $before in\n").append(values).append("      esac ;;\n");
  }
  return "# bash completion of ladon\n_ladon() {\n  local word=${COMP_WORDS[COMP_CWORD]}\n"
         "  local before=${COMP_WORDS[COMP_CWORD-1]} words\n  COMPREPLY=()\n"
         "  case ${COMP_WORDS[1]} in\n" +
         cases + "    completion) words=\"" + std::string(kShells) + "\" ;;\n    help) words=\"" +
         names + "\" ;;\n    *) words=\"" + names +
         "completion manual help --help --version\" ;;\n  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\n"
         "complete -o filenames -F _ladon ladon\n";
}

std::string zsh(const Subcommands& subcommands) {
  const auto quoted = [](std::string text) {
    text = replaced(std::move(text), "'", "'\\''");
    text = replaced(std::move(text), "[", "(");
    return replaced(replaced(std::move(text), "]", ")"), ":", "\\:");
  };
  std::string names;
  std::string cases;
  for (const SubcommandDescription& sub : subcommands) {
    names += "    '" + sub.name + ":" + quoted(sub.help) + "'\n";
    cases += "    " + sub.name + ") _arguments";
    for (const OptionDescription& option : sub.options) {
      cases += " \\\n      '" + option.name + "[" + quoted(option.help) + "]";
      if (!option.choices.empty()) {
        cases += ":" + quoted(option.type) + ":(" + joined(option.choices) + ")";
      } else if (!option.type.empty()) {
        cases += ":" + quoted(option.type) + ":" + (is_file(option) ? "_files" : "");
      }
      cases += "'";
    }
    cases += " ;;\n";
  }
  for (const auto& [name, help] : kOthers) {
    names += "    '" + std::string(name) + ":" + std::string(help) + "'\n";
  }
  return "#compdef ladon\n_ladon() {\n  local -a names\n  names=(\n" + names +
         "  )\n  if ((CURRENT == 2)); then\n    _describe 'subcommand' names\n    return\n  fi\n"
         "  local chosen=$words[2]\n  shift words\n  ((CURRENT--))\n  case $chosen in\n" +
         cases + "    completion) _arguments '1:shell:(" + std::string(kShells) +
         ")' ;;\n    help) _describe 'subcommand' names ;;\n  esac\n}\n_ladon \"$@\"\n";
}

std::string fish(const Subcommands& subcommands) {
  const auto quoted = [](std::string text) {
    return "'" + replaced(replaced(std::move(text), "\\", "\\\\"), "'", "\\'") + "'";
  };
  std::string text =
      "# fish completion of ladon\ncomplete -c ladon -f\n"
      "complete -c ladon -n __fish_use_subcommand -l help -d 'Print the help'\n"
      "complete -c ladon -n __fish_use_subcommand -s V -l version -d 'Print the version'\n";
  for (const auto& [name, help] : kOthers) {
    text += "complete -c ladon -n __fish_use_subcommand -f -a " + std::string(name) + " -d " +
            quoted(std::string(help)) + "\n";
  }
  text += "complete -c ladon -n '__fish_seen_subcommand_from completion' -f -a " +
          quoted(std::string(kShells)) + "\n";
  for (const SubcommandDescription& sub : subcommands) {
    text += "complete -c ladon -n __fish_use_subcommand -f -a " + sub.name + " -d " +
            quoted(sub.help) + "\n";
    text += "complete -c ladon -n '__fish_seen_subcommand_from help' -f -a " + sub.name + " -d " +
            quoted(sub.help) + "\n";
    for (const OptionDescription& option : sub.options) {
      text += "complete -c ladon -n '__fish_seen_subcommand_from " + sub.name + "' -l " +
              option.name.substr(2) + " -d " + quoted(option.help);
      if (!option.choices.empty()) {
        text += " -x -a " + quoted(joined(option.choices));
      } else if (!option.type.empty()) {
        text += is_file(option) ? " -r -F" : " -x";
      }
      text += "\n";
    }
  }
  return text;
}

/// Text that man leaves as it is.
std::string plain(std::string text) {
  text = replaced(replaced(std::move(text), "\\", "\\e"), "-", "\\-");
  return text.starts_with('.') || text.starts_with('\'') ? "\\&" + text : text;
}

}  // namespace

std::string completion_script(std::string_view shell, const Subcommands& subcommands) {
  if (shell == "bash") return bash(subcommands);
  if (shell == "zsh") return zsh(subcommands);
  if (shell == "fish") return fish(subcommands);
  if (shell.empty())
    throw UsageError("completion: no shell is named; there are bash, zsh and fish");
  throw UsageError("no shell '" + std::string(shell) + "'" +
                   did_you_mean(shell, {"bash", "zsh", "fish"}) + "; there are bash, zsh and fish");
}

std::string manual_page(std::string_view description, std::string_view footer,
                        const Subcommands& subcommands) {
  std::string page = ".TH LADON 1 \"\" \"ladon " + std::string(version()) +
                     "\" \"User Commands\"\n.SH NAME\nladon \\- attention on this machine\n"
                     ".SH SYNOPSIS\n.B ladon\n.I SUBCOMMAND\n[options]\n.SH DESCRIPTION\n" +
                     plain(std::string(description)) + "\n";
  for (const SubcommandDescription& sub : subcommands) {
    std::string title = sub.name;
    for (char& letter : title) letter = static_cast<char>(letter - 'a' + 'A');
    page += ".SH " + title + "\n" + plain(sub.help) + "\n";
    for (const OptionDescription& option : sub.options) {
      page += ".TP\n\\fB" + plain(option.name) + "\\fR";
      if (!option.type.empty()) page += " \\fI" + plain(option.type) + "\\fR";
      page += "\n";
      page += plain(option.help) + "\n";
    }
  }
  return page + ".SH NOTES\n" + plain(std::string(footer)) + "\n";
}

}  // namespace ladon::cli
