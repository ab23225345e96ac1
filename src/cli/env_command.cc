// `fathom env`: prints the environment for a bug report.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/environment_report.h"

namespace fathom {

void add_env_command(CLI::App& app, Action* chosen) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("env", "Show program, libraries and machine, for a bug report");
  command->add_flag("--json", *as_json, "Print one JSON object");
  command->callback([=] {
    *chosen = [=]() -> Result<int> {
      const json::object report = environment_report();
      fmt::print("{}", *as_json ? json::serialize(report) + "\n" : environment_text(report));
      return 0;
    };
  });
}

}  // namespace fathom
