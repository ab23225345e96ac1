// The file of --config: YAML with one flag per line.
//
//   max-num-seqs: 64                  # named like the long flag, with - or _
//   served_model_name: [tiny, main]   # a list for flags that may be repeated
//   strict: true
//
// The command line takes precedence over the environment, which takes precedence over the file.
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
  int line = 0;  // in the file, from 1
};

// Reads the file's entries, in order. Errors name file and line but no values, since some are
// secrets.
Result<std::vector<ConfigEntry>> read_config_file(const std::string& path);

struct ConfigArguments {
  std::vector<std::string> arguments;  // "--flag=value"
  std::vector<std::string> notes;      // about flags of other servers that were dropped
  std::map<std::string, int> lines;    // the flags' lines, by first long name
};

// The arguments that the file adds to a command line parsed into `command`: flags set neither there
// nor in the environment. Flags of other servers are translated (foreign_flags.h). An unknown key
// is an error that names the nearest flag.
Result<ConfigArguments> config_arguments(const std::string& path, const CLI::App& command);

}  // namespace fathom
