// A command adds itself to the command line; the one that was chosen then runs.
#pragma once

#include <functional>

#include "base/status.h"

namespace CLI {
class App;
}

namespace fathom {

// Does the work after all flags have been read. Returns the exit status: 0 unless the work itself
// says otherwise (an interrupt). Errors become one line on stderr.
using Action = std::function<Result<int>()>;

// Each adds its subcommand and sets `chosen` when the user has named it.
void add_run_command(CLI::App& app, Action* chosen);
void add_chat_command(CLI::App& app, Action* chosen);
void add_tokenize_command(CLI::App& app, Action* chosen);
void add_inspect_command(CLI::App& app, Action* chosen);
void add_eval_command(CLI::App& app, Action* chosen);
void add_serve_command(CLI::App& app, Action* chosen);
void add_bench_command(CLI::App& app, Action* chosen);
void add_quantize_command(CLI::App& app, Action* chosen);
void add_env_command(CLI::App& app, Action* chosen);

}  // namespace fathom
