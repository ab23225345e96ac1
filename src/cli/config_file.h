// A file of flags for --config: YAML, one flag a line.
//
//   max-num-seqs: 64                  # named like the long flag, with - or _
//   served_model_name: [tiny, main]   # a list for flags that may be given several times
//   strict: true
//
// The command line wins over the environment, which wins over the file.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/status.h"

namespace CLI {
class App;
}

namespace fathom {

struct ConfigEntry {
  std::string flag;  // "max-num-seqs"
  std::vector<std::string> values;
  bool is_list = false;
  int line = 0;  // of the file, from 1
};

// What the file says, in its order. Errors name file and line; values are not in them, some are
// keys.
Result<std::vector<ConfigEntry>> read_config_file(const std::string& path);

struct ConfigArguments {
  std::vector<std::string> arguments;  // "--flag=value"
  std::vector<std::string> notes;      // on flags of other servers that were left out
  std::map<std::string, int> lines;    // where flags stand, by their first long names
};

// What the file adds to a command line that has been parsed into `command`: all that neither the
// command line nor the environment has set. Flags of other servers are translated
// (foreign_flags.h). A key that is no flag is an error which names the nearest one.
Result<ConfigArguments> config_arguments(const std::string& path, const CLI::App& command);

}  // namespace fathom
