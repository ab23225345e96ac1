// Each completion script is a table of the commands' flags and a few lines of shell code that look
// it up.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/command_text.h"

namespace fathom {
namespace {

// Quotes text with single quotes.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) {
    result += c == '\'' ? std::string("'\\''") : std::string(1, c == '\n' ? ' ' : c);
  }
  return result + "'";
}

bool is_folder(const FlagText& flag) { return flag.kind == "DIR"; }
bool is_file(const FlagText& flag) { return flag.kind.starts_with("FILE"); }

std::string function_name(const std::string& path) {
  std::string name = "_fathom";
  if (!path.empty()) name += "_" + path;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

// The first words of all commands: "run chat serve … bench …".
std::vector<std::string> first_words(const std::vector<CommandText>& commands) {
  std::vector<std::string> words;
  for (const CommandText& command : commands) {
    const std::string word = command.path.substr(0, command.path.find(' '));
    if (!word.empty() && (words.empty() || words.back() != word)) words.push_back(word);
  }
  return words;
}

// The words that may follow `first`, for example the subcommands of `bench`.
std::vector<std::string> second_words(const std::vector<CommandText>& commands,
                                      const std::string& first) {
  std::vector<std::string> words;
  for (const CommandText& command : commands) {
    if (command.path.starts_with(first + " ")) {
      words.push_back(command.path.substr(first.size() + 1));
    }
  }
  return words;
}

std::string help_of(const std::vector<CommandText>& commands, const std::string& path) {
  for (const CommandText& command : commands) {
    if (command.path == path) return command.help;
  }
  return "Measure speed";
}

// The one-line description that a shell shows beside a name.
std::string short_help(const std::string& help) {
  constexpr size_t kLongest = 70;
  if (help.size() <= kLongest) return help;
  return help.substr(0, help.rfind(' ', kLongest));
}

// The same without characters that are special in zsh's specifications.
std::string zsh_help(const std::string& help) {
  std::string text;
  for (const char c : short_help(help)) text += c == '[' || c == ']' || c == ':' ? ' ' : c;
  return text;
}

}  // namespace

std::string bash_completion(const std::vector<CommandText>& commands) {
  std::string cases, values;
  for (const CommandText& command : commands) {
    std::vector<std::string> names;
    for (const FlagText& flag : command.flags) {
      names.insert(names.end(), flag.names.begin(), flag.names.end());
      if (flag.kind.empty()) continue;
      const std::string action =
          is_folder(flag) ? "COMPREPLY=($(compgen -d -- \"$current\"))"
          : is_file(flag) ? "COMPREPLY=($(compgen -f -- \"$current\"))"
          : flag.choices.empty()
              ? ":"
              : fmt::format("COMPREPLY=($(compgen -W {} -- \"$current\"))",
                            quoted(fmt::format("{}", fmt::join(flag.choices, " "))));
      for (const std::string& name : flag.names) {
        values += fmt::format("    {}) {}; return ;;\n", quoted(command.path + " " + name), action);
      }
    }
    cases += fmt::format("    {}) flags={} ;;\n", quoted(command.path),
                         quoted(fmt::format("{}", fmt::join(names, " "))));
  }
  return fmt::format(
      "# Completion of fathom's commands and flags for bash. Made by `fathom generate bash`.\n"
      "_fathom() {{\n"
      "  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}\n"
      "  local command= words= flags= word\n"
      "  for word in \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n"
      "    case \"$command $word\" in\n"
      "{}"
      "      *) break ;;\n"
      "    esac\n"
      "  done\n"
      "  case \"$command\" in\n"
      "    '') words={} ;;\n"
      "{}"
      "  esac\n"
      "  case \"$command $previous\" in\n"
      "{}"
      "  esac\n"
      "  case \"$command\" in\n"
      "{}"
      "  esac\n"
      "  if [[ $current == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$flags\" -- \"$current\"))\n"
      "  elif [[ -n $words ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$current\"))\n"
      "  fi\n"
      "}}\n"
      "complete -o filenames -F _fathom fathom\n",
      [&] {
        std::string text;
        for (const std::string& first : first_words(commands)) {
          text += fmt::format("      {}) command={} ;;\n", quoted(" " + first), first);
          for (const std::string& second : second_words(commands, first)) {
            text += fmt::format("      {}) command={} ;;\n", quoted(first + " " + second),
                                quoted(first + " " + second));
          }
        }
        return text;
      }(),
      quoted(fmt::format("{}", fmt::join(first_words(commands), " "))),
      [&] {
        std::string text;
        for (const std::string& first : first_words(commands)) {
          const auto second = second_words(commands, first);
          if (second.empty()) continue;
          text += fmt::format("    {}) words={} ;;\n", first,
                              quoted(fmt::format("{}", fmt::join(second, " "))));
        }
        return text;
      }(),
      values, cases);
}

std::string zsh_completion(const std::vector<CommandText>& commands) {
  std::string text =
      "#compdef fathom\n"
      "# Completion of fathom's commands and flags for zsh. Made by `fathom generate zsh`.\n";
  for (const CommandText& command : commands) {
    if (command.path.empty()) continue;
    text += function_name(command.path) + "() {\n  _arguments -S";
    for (const FlagText& flag : command.flags) {
      const std::string value =
          flag.kind.empty()
              ? ""
              : fmt::format(":{}:{}", flag.kind == "…" ? "value" : zsh_help(flag.kind),
                            is_folder(flag) ? "_files -/"
                            : is_file(flag) ? "_files"
                            : flag.choices.empty()
                                ? " "
                                : fmt::format("({})", fmt::join(flag.choices, " ")));
      for (const std::string& name : flag.names) {
        text += " \\\n    " + quoted(fmt::format("{}{}[{}]{}", flag.repeats ? "*" : "", name,
                                                 zsh_help(flag.help), value));
      }
    }
    text += " \\\n    '*:file:_files'\n}\n";
  }
  const auto menu = [&](const std::string& first, const std::vector<std::string>& words) {
    std::string lines = function_name(first) + "() {\n  local -a commands=(";
    for (const std::string& word : words) {
      const std::string path = first.empty() ? word : first + " " + word;
      lines += "\n    " + quoted(word + ":" + zsh_help(help_of(commands, path)));
    }
    lines +=
        "\n  )\n"
        "  if (( CURRENT == 2 )); then\n"
        "    _describe command commands\n"
        "  else\n"
        "    shift words; (( CURRENT-- ))\n" +
        fmt::format("    (( $+functions[{0}_$words[1]] )) && {0}_$words[1]\n",
                    function_name(first)) +
        "  fi\n}\n";
    return lines;
  };
  for (const std::string& first : first_words(commands)) {
    const auto second = second_words(commands, first);
    if (!second.empty()) text += menu(first, second);
  }
  return text + menu("", first_words(commands)) + "_fathom \"$@\"\n";
}

std::string fish_completion(const std::vector<CommandText>& commands) {
  std::string text =
      "# Completion of fathom's commands and flags for fish. Made by `fathom generate fish`.\n"
      "function __fathom_is\n"
      "    set -l words (commandline -opc)[2..]\n"
      "    test \"$words[1..\"(count $argv)\"]\" = \"$argv\"\n"
      "end\n"
      "function __fathom_has_only\n"
      "    set -l words (commandline -opc)[2..]\n"
      "    test \"$words\" = \"$argv\"\n"
      "end\n";
  for (const std::string& first : first_words(commands)) {
    text += fmt::format("complete -c fathom -f -n __fathom_has_only -a {} -d {}\n", first,
                        quoted(short_help(help_of(commands, first))));
    for (const std::string& second : second_words(commands, first)) {
      text += fmt::format("complete -c fathom -f -n '__fathom_has_only {}' -a {} -d {}\n", first,
                          second, quoted(short_help(help_of(commands, first + " " + second))));
    }
  }
  for (const CommandText& command : commands) {
    for (const FlagText& flag : command.flags) {
      text += fmt::format("complete -c fathom -n {}", command.path.empty()
                                                          ? "__fathom_has_only"
                                                          : quoted("__fathom_is " + command.path));
      for (const std::string& name : flag.names) {
        text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (is_folder(flag)) {
        text += " -x -a '(__fish_complete_directories)'";
      } else if (is_file(flag)) {
        text += " -r -F";
      } else if (!flag.choices.empty()) {
        text += " -x -a " + quoted(fmt::format("{}", fmt::join(flag.choices, " ")));
      } else if (!flag.kind.empty()) {
        text += " -x";
      }
      text += " -d " + quoted(short_help(flag.help)) + "\n";
    }
  }
  return text;
}

}  // namespace fathom
