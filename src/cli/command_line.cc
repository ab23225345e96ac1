#include "cli/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <optional>

#include "base/log.h"
#include "cli/command.h"
#include "cli/command_text.h"
#include "cli/config_file.h"
#include "cli/environment_report.h"
#include "cli/flag_sources.h"
#include "cli/foreign_flags.h"
#include "cli/help_format.h"
#include "cli/inspect_command.h"
#include "cli/model_flags.h"

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

// External text is printed on a terminal, so line ends and escape sequences in it are made visible.
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

int fail(std::string_view message, int status) { return report_failure(message, status); }

// The innermost selected command.
const CLI::App& chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : chosen_command(*chosen.front());
}

std::string command_path(const CLI::App& command) {
  return command.get_parent() == nullptr
             ? "fathom"
             : command_path(*command.get_parent()) + " " + command.get_name();
}

// The error message for an unexpected argument.
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

// Adds `generate`, which prints the manual page and the shell completions for packaging.
void add_generate_command(CLI::App& app, Action* chosen) {
  auto what = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("generate", "Print the manual page or a shell's completion");
  command->group("");  // hidden from --help
  command->add_option("WHAT", *what, "man, bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"man", "bash", "zsh", "fish"}));
  command->callback([&app, what, chosen] {
    *chosen = [&app, what]() -> Result<int> {
      const auto commands = command_texts(app);
      fmt::print("{}", *what == "man"    ? manual_page(commands)
                       : *what == "bash" ? bash_completion(commands)
                       : *what == "zsh"  ? zsh_completion(commands)
                                         : fish_completion(commands));
      return 0;
    };
  });
}

void describe(CLI::App& app, Action* chosen) {
  app.name("fathom");
  app.description("Fathom serves DeepSeek-family models: V2, V2-Lite, V3, R1, V3.1 and their kin.");
  app.footer(
      "fathom COMMAND --help lists the flags of a command, --help=WORD those about a word. Each "
      "has\n"
      "an environment variable, shown there; the command line wins. Text that was asked for goes "
      "to\n"
      "stdout, everything else to stderr.");
  app.set_version_flag("-v,-V,--version", version_text, "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(0, 1);
  app.formatter(std::make_shared<HelpFormat>());
  add_run_command(app, chosen);
  add_chat_command(app, chosen);
  add_serve_command(app, chosen);
  add_route_command(app, chosen);
  add_eval_command(app, chosen);
  add_bench_command(app, chosen);
  add_inspect_command(app, chosen);
  add_quantize_command(app, chosen);
  add_convert_command(app, chosen);
  add_tokenize_command(app, chosen);
  add_env_command(app, chosen);
  add_generate_command(app, chosen);
}

// Rewords CLI11's message about an invalid value.
std::string bad_value(const CLI::ParseError& problem) {
  std::string text = problem.what();
  // CLI11 reports "Could not convert: --quiet = maybe" for a flag that takes no value.
  constexpr std::string_view kConversion = "Could not convert: --";
  if (!text.starts_with(kConversion)) return text;
  const size_t flag = kConversion.size() - 2;
  const size_t equals = text.find(" = ", flag);
  return equals == std::string::npos
             ? text
             : fmt::format("{} is \"{}\", allowed are true and false",
                           text.substr(flag, equals - flag), text.substr(equals + 3));
}

// Parses the arguments. Returns an exit status if the program should end.
std::optional<int> parse(CLI::App& app, const std::vector<std::string>& arguments,
                         const FlagSources& sources) {
  try {
    // CLI11 consumes the arguments from the end of the vector.
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    return std::nullopt;
  } catch (const CLI::ExtrasError&) {
    return fail(unexpected(app, app.remaining(true).front()), kExitBadInput);
  } catch (const CLI::ArgumentMismatch& problem) {
    // Rewords "--seed: 1 required N missing".
    const std::string text = problem.what();
    return fail(fmt::format("{}{} needs one value", sources.prefix_of(text),
                            text.substr(0, text.find(':'))),
                kExitBadInput);
  } catch (const CLI::ParseError& problem) {
    // --help and --version also throw, with status 0.
    if (problem.get_exit_code() == 0) return app.exit(problem);
    const std::string text = bad_value(problem);
    return fail(sources.prefix_of(text) + text, kExitBadInput);
  }
}

// The value of the command's --config; empty if not given or not a flag of this command.
std::string config_of(const CLI::App& command) {
  const CLI::Option* const option = command.get_option_no_throw("--config");
  return option == nullptr || option->count() == 0 ? "" : option->as<std::string>();
}

// Removes --help=KEYWORD from the arguments and returns KEYWORD.
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

// Prints the flags of a command whose names or descriptions contain the keyword, ignoring case.
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

int run_action(const Action& action, const FlagSources& sources) {
  try {
    const Result<int> status = action();
    if (status) return *status;
    const std::string& message = status.error().message;
    return fail(sources.prefix_of(message) + message, exit_status(status.error().code));
  } catch (const std::bad_alloc&) {
    return fail("out of memory", kExitFailed);
  } catch (const std::exception& problem) {
    return fail(problem.what(), kExitFailed);
  }
}

// Rewrites "fathom help bench serve" to "fathom bench serve --help".
void turn_help_around(std::vector<std::string>* arguments) {
  if (arguments->empty() || arguments->front() != "help") return;
  arguments->erase(arguments->begin());
  arguments->push_back("--help");
}

// The command that the arguments name, as far as known before parsing.
const CLI::App& named_command(const CLI::App& app, const std::vector<std::string>& arguments,
                              size_t* words) {
  const CLI::App* command = &app;
  for (*words = 0; *words < arguments.size(); ++*words) {
    const auto commands = command->get_subcommands(
        [&](const CLI::App* one) { return one->get_name() == arguments[*words]; });
    if (commands.empty()) break;
    command = commands.front();
  }
  return *command;
}

// Makes only the named command read the environment. CLI11 would read variables for all commands,
// and an invalid value would fail commands that lack the flag or override it.
void ignore_variables_of_others(CLI::App& app, const CLI::App& named) {
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    if (command == &named) continue;
    for (CLI::Option* option : command->get_options()) option->envname("");
    ignore_variables_of_others(*command, named);
  }
}

// Whether the command accepts other servers' launch lines (`fathom serve`) or load generators'
// (`fathom bench serve`).
bool takes_launch_lines(const CLI::App& command) { return command.get_name() == "serve"; }

// Translates the launch line. Returns an exit status if it is not accepted.
std::optional<int> translate(const CLI::App& serve, size_t words,
                             std::vector<std::string>* arguments, std::vector<std::string>* notes) {
  const auto flags = arguments->begin() + static_cast<std::ptrdiff_t>(words);
  auto line = translate_launch_line(serve, std::vector<std::string>(flags, arguments->end()));
  if (!line) return fail(line.error().message, kExitBadInput);
  arguments->erase(flags, arguments->end());
  arguments->insert(arguments->end(), line->arguments.begin(), line->arguments.end());
  *notes = std::move(line->notes);
  return std::nullopt;
}

}  // namespace

int report_failure(std::string_view message, int status) {
  // fmt::print would throw if stderr cannot be written.
  try {
    std::fputs(fmt::format("fathom: {}\n", one_line(message)).c_str(), stderr);
  } catch (const std::bad_alloc&) {
    std::fputs("fathom: out of memory\n", stderr);
  }
  return status;
}

void add_inspect_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<ModelFlags>();
  auto json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("inspect", "Show a checkpoint and its memory plan, without loading it");
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
  turn_help_around(&arguments);
  const std::string keyword = take_help_keyword(&arguments);
  CLI::App app;
  Action chosen;
  describe(app, &chosen);
  size_t words = 0;
  const CLI::App& named = named_command(app, arguments, &words);
  std::vector<std::string> notes;
  if (takes_launch_lines(named)) {
    if (const auto status = translate(named, words, &arguments, &notes)) return *status;
  }
  FlagSources sources(named, arguments);
  const std::vector<std::string> misspelt = misspelt_variables(app);
  // `generate` prints the variables of all commands.
  if (named.get_name() != "generate") ignore_variables_of_others(app, named);
  if (const auto status = parse(app, arguments, sources)) return *status;
  if (!keyword.empty()) return print_matching_flags(chosen_command(app), keyword);
  const std::string config = config_of(chosen_command(app));
  CLI::App app_with_config;
  if (!config.empty()) {
    auto file = config_arguments(config, chosen_command(app));
    if (!file) return fail(file.error().message, kExitBadInput);
    // Inserted after the command's name, because the user's arguments may end with "--" and words.
    arguments.insert(arguments.begin() + 1, file->arguments.begin(), file->arguments.end());
    notes.insert(notes.end(), file->notes.begin(), file->notes.end());
    sources.add_file(config, std::move(file->lines));
    describe(app_with_config, &chosen);
    ignore_variables_of_others(app_with_config, named_command(app_with_config, arguments, &words));
    if (const auto status = parse(app_with_config, arguments, sources)) return *status;
  }
  if (!chosen) {
    const CLI::App& command = chosen_command(app);
    const CLI::App* const parent = command.get_parent();
    fmt::print(stderr, "{}", command.help(parent == nullptr ? "" : command_path(*parent)));
    return fail(command_path(command) + " needs a command", kExitBadInput);
  }
  for (const std::string& sentence : misspelt) log_warning("{}", sentence);
  for (const std::string& note : notes) log_warning("{}", note);
  const int status = run_action(chosen, sources);
  if (std::fflush(stdout) != 0 && status == 0) return fail("stdout cannot be written", kExitFailed);
  return status;
}

}  // namespace fathom
