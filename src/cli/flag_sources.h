// Where the value of a flag came from: the command line, the file of --config, or the environment.
// A message about a value names that place, so that it is looked for there.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace fathom {

class FlagSources {
 public:
  // `typed`: the arguments of the command line.
  FlagSources(const CLI::App& command, std::vector<std::string> typed);

  // `lines`: of the file, by the flags' first long names without dashes.
  void add_file(const std::string& path, std::map<std::string, int> lines);

  // "serving.yaml:3: " or "FATHOM_PORT: " for a message that begins with a flag, "--port is …";
  // empty for one that was typed, and for other messages.
  std::string prefix_of(std::string_view message) const;

 private:
  const CLI::App& command_;
  std::vector<std::string> typed_;
  std::string path_;
  std::map<std::string, int> lines_;
};

// A sentence for each variable FATHOM_… that is set, is no flag's of `app` or of its commands, and
// looks like one that is.
std::vector<std::string> misspelt_variables(const CLI::App& app);

}  // namespace fathom
