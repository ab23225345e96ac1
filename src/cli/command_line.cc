#include "cli/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <optional>

#include "cli/command.h"
#include "cli/config_file.h"
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
  // Not fmt::print: it throws where stderr cannot be written.
  std::fputs(fmt::format("fathom: {}\n", one_line(message)).c_str(), stderr);
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
  add_quantize_command(app, chosen);
  add_tokenize_command(app, chosen);
  add_env_command(app, chosen);
}

// Reads the arguments; the exit status if that is the end of it. `origin` begins the message about
// a bad value: where it came from.
std::optional<int> parse(CLI::App& app, const std::vector<std::string>& arguments,
                         const std::string& origin) {
  try {
    // CLI11 takes them in the order in which it takes them off the end.
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    return std::nullopt;
  } catch (const CLI::ExtrasError&) {
    return fail(unexpected(app, app.remaining(true).front()), kExitBadInput);
  } catch (const CLI::ArgumentMismatch& problem) {
    // "--seed: 1 required N missing", in our words.
    const std::string text = problem.what();
    return fail(fmt::format("{}{} needs one value", origin, text.substr(0, text.find(':'))),
                kExitBadInput);
  } catch (const CLI::ParseError& problem) {
    // --help and --version arrive here too, with status 0.
    if (problem.get_exit_code() == 0) return app.exit(problem);
    return fail(origin + problem.what(), kExitBadInput);
  }
}

// The value of the command's --config; empty: none, or no such flag.
std::string config_of(const CLI::App& command) {
  const CLI::Option* const option = command.get_option_no_throw("--config");
  return option == nullptr || option->count() == 0 ? "" : option->as<std::string>();
}

// The KEYWORD of --help=KEYWORD, which is taken out of the arguments.
std::string take_help_keyword(std::vector<std::string>* arguments) {
  constexpr std::string_view kFlag = "--help=";
  const auto found = std::find_if(arguments->begin(), arguments->end(), [&](const auto& argument) {
    return argument.starts_with(kFlag) && argument.size() > kFlag.size();
  });
  if (found == arguments->end()) return "";
  std::string keyword = found->substr(kFlag.size());
  arguments->erase(found);
  return keyword;
}

// The flags of a command whose names or descriptions have the keyword, in any case of letters.
int print_matching_flags(const CLI::App& command, const std::string& keyword) {
  const std::string wanted = CLI::detail::to_lower(keyword);
  bool any = false;
  for (const CLI::Option* option : command.get_options()) {
    const std::string text = HelpFormat().make_option(option, false);
    if (CLI::detail::to_lower(option->get_name(false, true) + option->get_description())
            .find(wanted) == std::string::npos) {
      continue;
    }
    fmt::print("{}", text);
    any = true;
  }
  if (any) return 0;
  return fail(fmt::format("{} has no flag about \"{}\"", command_path(command), keyword),
              kExitBadInput);
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
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string keyword = take_help_keyword(&arguments);
  CLI::App app;
  Action chosen;
  describe(app, &chosen);
  if (const auto status = parse(app, arguments, "")) return *status;
  if (!keyword.empty()) return print_matching_flags(chosen_command(app), keyword);
  const std::string config = config_of(chosen_command(app));
  CLI::App app_with_config;
  if (!config.empty()) {
    const auto more = config_arguments(config, chosen_command(app));
    if (!more) return fail(more.error().message, kExitBadInput);
    // After the command's name; what the user has typed may end in "--" and words.
    arguments.insert(arguments.begin() + 1, more->begin(), more->end());
    describe(app_with_config, &chosen);
    if (const auto status = parse(app_with_config, arguments, config + ": ")) return *status;
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
