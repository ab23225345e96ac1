// `fathom chat MODEL`: a conversation at the terminal, or line by line from a pipe.
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "cli/chat_session.h"
#include "cli/command.h"
#include "cli/line_reader.h"
#include "cli/node_engine.h"
#include "cli/sampling_flags.h"
#include "cli/terminal.h"

namespace fathom {
namespace {

constexpr const char* kHelp =
    "/reset         forget what was said        /save FILE        write the conversation as JSON\n"
    "/system TEXT   set the system message      /thinking on|off  let the model reason first\n"
    "/stats         tokens and speed            /help             this\n"
    "/exit          leave (also Ctrl-D)         \"\"\"              begins and ends several lines\n"
    "Ctrl-C stops an answer; at an empty prompt, twice, it leaves.\n";
constexpr std::string_view kQuotes = "\"\"\"";

struct ChatFlags {
  ModelFlags model;
  SamplingFlags sampling;
  std::string system;
  bool thinking = false;
};

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  const size_t last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

// Passes input to the session. Messages go to stderr, completions to stdout.
class ChatLoop {
 public:
  ChatLoop(ChatSession& session, LineReader& reader)
      : session_(session), reader_(reader), style_(has_color(stderr)) {}

  Result<int> run() {
    const InterruptWatch watch;
    if (reader_.is_terminal()) note("/help lists the commands, Ctrl-D leaves");
    for (bool interrupted_before = false;;) {
      InterruptWatch::clear();
      const LineReader::Line line = read_message();
      if (line.outcome == LineReader::Outcome::kEnd) break;
      if (line.outcome == LineReader::Outcome::kInterrupt) {
        if (interrupted_before || !reader_.is_terminal()) return kInterruptedExit;
        interrupted_before = true;
        note("Ctrl-C once more leaves");
        continue;
      }
      interrupted_before = false;
      if (trimmed(line.text).empty()) continue;
      const bool goes_on = line.text.starts_with('/') ? command(line.text) : say(line.text);
      if (!goes_on) break;
    }
    // A failed line from a pipe sets the exit status.
    return failed_ && !reader_.is_terminal() ? 1 : 0;
  }

 private:
  // Reads a line, or all lines between two """.
  LineReader::Line read_message() {
    LineReader::Line line = reader_.read("> ");
    if (line.outcome != LineReader::Outcome::kLine) return line;
    if (!line.text.starts_with(kQuotes)) {
      reader_.remember(line.text);
      return line;
    }
    std::string text = line.text.substr(kQuotes.size());
    while (!text.ends_with(kQuotes)) {
      const LineReader::Line more = reader_.read("… ");
      if (more.outcome == LineReader::Outcome::kInterrupt) return more;
      if (more.outcome == LineReader::Outcome::kEnd) return {LineReader::Outcome::kLine, text};
      text += (text.empty() ? "" : "\n") + more.text;
    }
    text.resize(text.size() - kQuotes.size());
    if (text.ends_with('\n')) text.pop_back();
    return {LineReader::Outcome::kLine, text};
  }

  bool say(const std::string& text) {
    report(session_.say(text, stdout));
    if (InterruptWatch::interrupted()) note("stopped");
    return true;
  }

  // Runs a command. Returns false if the loop should end.
  bool command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = trimmed(line.substr(0, space));
    const std::string argument = space == std::string::npos ? "" : trimmed(line.substr(space));
    if (name == "/exit" || name == "/quit" || name == "/bye") return false;
    if (name == "/reset") {
      session_.reset();
      note("forgotten");
    } else if (name == "/system") {
      session_.set_system(argument);
      note(argument.empty() ? "no system message" : "system message set");
    } else if (name == "/save") {
      if (argument.empty()) {
        report(invalid("/save needs a file name"));
      } else if (report(session_.save(argument))) {
        note("saved to " + argument);
      }
    } else if (name == "/thinking" && (argument == "on" || argument == "off")) {
      session_.set_thinking(argument == "on");
      note("thinking is " + argument);
    } else if (name == "/stats") {
      fmt::print(stderr, "{}{}{}\n", style_.dim, session_.stats(), style_.reset);
    } else if (name == "/help") {
      fmt::print(stderr, "{}", kHelp);
    } else {
      const auto nearest = nearest_word(name, {"/reset", "/system", "/save", "/stats", "/help",
                                               "/exit", "/thinking on", "/thinking off"});
      report(invalid("there is no command {}; {}", line,
                     nearest ? "did you mean " + *nearest + "?" : "/help lists them"));
    }
    return true;
  }

  bool report(const Result<>& result) {
    if (result) return true;
    failed_ = true;
    fmt::print(stderr, "fathom: {}\n", result.error().message);
    return false;
  }

  void note(const std::string& text) {
    if (reader_.is_terminal()) fmt::print(stderr, "{}{}{}\n", style_.dim, text, style_.reset);
  }

  ChatSession& session_;
  LineReader& reader_;
  const Style style_;
  bool failed_ = false;
};

Result<int> chat(const ChatFlags& flags) {
  FATHOM_TRY(const LoadedEngine loaded, load_engine(flags.model, {}));
  if (!loaded.chat_format) {
    return with_context("the chat format is not known (--chat-format names one): ",
                        loaded.chat_format.error());
  }
  ChatOptions options;
  FATHOM_TRY(
      options.sampling,
      sampling_params(flags.sampling, loaded.checkpoint.generation_defaults(), flags.model.seed));
  options.system = flags.system;
  options.thinking = flags.thinking;
  options.show_reasoning = isatty(STDOUT_FILENO) == 1;
  ChatSession session(*loaded.engine, *loaded.tokenizer, *loaded.chat_format, options);
  LineReader reader;
  return ChatLoop(session, reader).run();
}

}  // namespace

void add_chat_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* command = app.add_subcommand("chat", "Talk with the model");
  command->footer(std::string("In a conversation:\n") + kHelp);
  add_model_positional(*command, &flags->model);
  FlagGroup prompt(*command, "Prompt");
  prompt.text("--system", &flags->system, "TEXT", "System message");
  prompt.toggle("--thinking", &flags->thinking, "Let the model reason before it answers");
  add_sampling_flags(*command, &flags->sampling);
  add_model_flags(*command, &flags->model);
  command->callback([flags, chosen] {
    *chosen = [flags] { return lead_or_follow(flags->model, [&] { return chat(*flags); }); };
  });
}

}  // namespace fathom
