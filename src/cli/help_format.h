// The layout of --help for a terminal of 100 columns: flags on the left, wrapped descriptions on
// the right, with default and environment variable at the end.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace fathom {

class HelpFormat : public CLI::Formatter {
 public:
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace fathom
