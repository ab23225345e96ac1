// The program's commands and flags as data: what the manual page and the shells' completions are
// made of, so that there is no second list of flags.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace fathom {

struct FlagText {
  std::vector<std::string> names;  // "--threads", "-t", long ones first
  std::string kind;                // "N", "FILE"; empty: takes no value
  std::string help, fallback, variable, heading;
  std::vector<std::string> choices;  // all values that are allowed; empty: others
  bool repeats = false;
};

struct CommandText {
  std::string path;  // "bench serve"; empty: the program itself
  std::string help, footer;
  std::vector<std::string> words;  // "MODEL", "PROMPT"
  std::vector<FlagText> flags;     // in the order of --help
};

// The program first, then its commands in the order of --help; those of `bench` stand for it.
// Commands that --help does not show are left out.
std::vector<CommandText> command_texts(const CLI::App& app);

std::string manual_page(const std::vector<CommandText>& commands);  // fathom(1), troff
std::string bash_completion(const std::vector<CommandText>& commands);
std::string zsh_completion(const std::vector<CommandText>& commands);
std::string fish_completion(const std::vector<CommandText>& commands);

}  // namespace fathom
