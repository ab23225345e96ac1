#include "cli/command_line.h"

#include <fmt/format.h>

#include <exception>
#include <new>

#include "cli/command.h"
#include "cli/help_format.h"
#include "cli/inspect_command.h"
#include "cli/model_flags.h"
#include "device/cpu/isa.h"

namespace fathom {
namespace {

int exit_status(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
    case Code::kNotFound:
    case Code::kTooLarge:
      return kExitBadInput;
    default:
      return kExitFailed;
  }
}

// Text from outside goes to a terminal here: line ends and escape sequences in it are shown, not
// obeyed.
std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      line += c == '\n' ? std::string("\\n") : fmt::format("\\x{:02x}", byte);
    } else {
      line += c;
    }
  }
  return line;
}

int fail(std::string_view message, int status) {
  fmt::print(stderr, "fathom: {}\n", one_line(message));
  return status;
}

// The innermost command that was named.
const CLI::App& chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : chosen_command(*chosen.front());
}

std::string command_path(const CLI::App& command) {
  return command.get_parent() == nullptr
             ? "fathom"
             : command_path(*command.get_parent()) + " " + command.get_name();
}

// What is said about an argument that no command expects.
std::string unexpected(const CLI::App& app, const std::string& word) {
  const CLI::App& command = chosen_command(app);
  std::vector<std::string> candidates;
  const bool is_flag = word.starts_with("-");
  const std::string name = word.substr(0, word.find('='));
  if (is_flag) {
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& flag : option->get_lnames()) candidates.push_back("--" + flag);
    }
  } else {
    for (const CLI::App* other : command.get_subcommands([](const CLI::App*) { return true; })) {
      candidates.push_back(other->get_name());
    }
  }
  const bool is_command = !is_flag && !candidates.empty();
  std::string message = fmt::format("{} {} \"{}\"", command_path(command),
                                    is_flag      ? "has no flag"
                                    : is_command ? "has no command"
                                                 : "does not expect",
                                    name);
  if (const auto nearest = nearest_word(name, candidates)) {
    message += fmt::format("; did you mean {}?", *nearest);
  } else if (!is_flag && !is_command) {
    message += "; a prompt of several words needs quotes";
  } else {
    message += fmt::format("; {} --help lists all", command_path(command));
  }
  return message;
}

std::string version_text() {
  return fmt::format("fathom {} (CPU, {})", FATHOM_VERSION, name_of(cpu_isa()));
}

void describe(CLI::App& app, Action* chosen) {
  app.name("fathom");
  app.description("Fathom serves DeepSeek-family models: V2, V2-Lite, V3, R1, V3.1 and their kin.");
  app.footer(
      "Every flag of a command also has an environment variable, shown in its --help; the command\n"
      "line wins. Text that was asked for goes to stdout, everything else to stderr.");
  app.set_version_flag("--version", version_text);
  app.require_subcommand(0, 1);
  app.formatter(std::make_shared<HelpFormat>());
  add_run_command(app, chosen);
  add_chat_command(app, chosen);
  add_serve_command(app, chosen);
  add_eval_command(app, chosen);
  add_bench_command(app, chosen);
  add_inspect_command(app, chosen);
  add_tokenize_command(app, chosen);
}

int run_action(const Action& action) {
  try {
    const Result<int> status = action();
    return status ? *status : fail(status.error().message, exit_status(status.error().code));
  } catch (const std::bad_alloc&) {
    return fail("out of memory", kExitFailed);
  } catch (const std::exception& problem) {
    return fail(problem.what(), kExitFailed);
  }
}

}  // namespace

void add_inspect_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<ModelFlags>();
  auto json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("inspect", "What a checkpoint is and what it needs, without loading it");
  add_model_positional(*command, flags.get());
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback([=] {
    *chosen = [=]() -> Result<int> {
      FATHOM_TRY(const std::string model, resolve_model_flag(*flags));
      FATHOM_RETURN_IF_ERROR(inspect(model, *json, stdout));
      return 0;
    };
  });
}

int run_command_line(int argc, const char* const* argv) {
  CLI::App app;
  Action chosen;
  describe(app, &chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    return fail(unexpected(app, app.remaining(true).front()), kExitBadInput);
  } catch (const CLI::ArgumentMismatch& problem) {
    // "--seed: 1 required N missing", in our words.
    const std::string text = problem.what();
    return fail(fmt::format("{} needs one value", text.substr(0, text.find(':'))), kExitBadInput);
  } catch (const CLI::ParseError& problem) {
    // --help and --version arrive here too, with status 0.
    if (problem.get_exit_code() == 0) return app.exit(problem);
    return fail(problem.what(), kExitBadInput);
  }
  if (!chosen) {
    const CLI::App& command = chosen_command(app);
    fmt::print(stderr, "{}", command.help());
    return fail(command_path(command) + " needs a command", kExitBadInput);
  }
  const int status = run_action(chosen);
  if (std::fflush(stdout) != 0 && status == 0) return fail("stdout cannot be written", kExitFailed);
  return status;
}

}  // namespace fathom
