// Records where each flag's value came from: the command line, the --config file, or the
// environment. Error messages name that place.
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
  // `typed` are the arguments of the command line.
  FlagSources(const CLI::App& command, std::vector<std::string> typed);

  // `lines` are the file's line numbers, by the flags' first long names without dashes.
  void add_file(const std::string& path, std::map<std::string, int> lines);

  // The prefix for a message that begins with a flag ("--port is …"): "serving.yaml:3: " or
  // "FATHOM_PORT: "; empty for a flag given on the command line, and for other messages.
  std::string prefix_of(std::string_view message) const;

 private:
  const CLI::App& command_;
  std::vector<std::string> typed_;
  std::string path_;
  std::map<std::string, int> lines_;
};

// One sentence for each environment variable FATHOM_… that belongs to no flag of `app` or its
// commands but resembles one that does.
std::vector<std::string> misspelt_variables(const CLI::App& app);

}  // namespace fathom
