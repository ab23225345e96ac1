// The interface of commands: each adds itself to the command line, and the selected one runs.
#pragma once

#include <functional>

#include "base/status.h"

namespace CLI {
class App;
}

namespace fathom {

// Runs the command after all flags are parsed. Returns the exit status, normally 0. Errors are
// printed as one line on stderr.
using Action = std::function<Result<int>()>;

// Each adds its subcommand, which sets `chosen` when the user selects it.
void add_run_command(CLI::App& app, Action* chosen);
void add_chat_command(CLI::App& app, Action* chosen);
void add_tokenize_command(CLI::App& app, Action* chosen);
void add_inspect_command(CLI::App& app, Action* chosen);
void add_eval_command(CLI::App& app, Action* chosen);
void add_serve_command(CLI::App& app, Action* chosen);
void add_route_command(CLI::App& app, Action* chosen);
void add_bench_command(CLI::App& app, Action* chosen);
void add_quantize_command(CLI::App& app, Action* chosen);
void add_convert_command(CLI::App& app, Action* chosen);
void add_env_command(CLI::App& app, Action* chosen);

}  // namespace fathom
