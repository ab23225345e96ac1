// The program's commands and flags as data, from which the manual page and the shell completions
// are generated.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace fathom {

struct FlagText {
  std::vector<std::string> names;  // long names first: "--threads", "-t"
  std::string kind;                // "N", "FILE"; empty: takes no value
  std::string help, fallback, variable, heading;
  std::vector<std::string> choices;  // all allowed values; empty: not restricted
  bool repeats = false;
};

struct CommandText {
  std::string path;  // "bench serve"; empty: the program itself
  std::string help, footer;
  std::vector<std::string> words;  // positionals: "MODEL", "PROMPT"
  std::vector<FlagText> flags;     // in the order of --help
};

// The program first, then its commands in the order of --help; `bench` is represented by its
// subcommands. Commands hidden from --help are omitted.
std::vector<CommandText> command_texts(const CLI::App& app);

std::string manual_page(const std::vector<CommandText>& commands);  // fathom(1), troff
std::string bash_completion(const std::vector<CommandText>& commands);
std::string zsh_completion(const std::vector<CommandText>& commands);
std::string fish_completion(const std::vector<CommandText>& commands);

}  // namespace fathom
