// `fathom run MODEL PROMPT`: completes one prompt.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "chat/prompt_ids.h"
#include "chat/python_json.h"
#include "cli/answer.h"
#include "cli/answer_printer.h"
#include "cli/command.h"
#include "cli/grammar_flags.h"
#include "cli/loaded_engine.h"
#include "cli/node_engine.h"
#include "cli/sampling_flags.h"

namespace fathom {
namespace {

constexpr size_t kMaxPromptBytes = 32 << 20;

struct RunFlags {
  ModelFlags model;
  SamplingFlags sampling;
  GrammarFlags grammar;
  std::string prompt_positional, prompt_flag, system;
  std::vector<int32_t> ids;
  bool raw = false, thinking = false, json = false, prompt_logprobs = false;
  std::optional<int64_t> logprobs;
  int64_t choices = 1;
};

struct RunPrompt {
  std::vector<int32_t> ids;
  std::optional<ChatFormat> format;  // none: ids or raw text were given
  bool opens_reasoning = false;
};

Result<std::string> read_stdin() {
  std::string text;
  char block[1 << 16];
  while (const size_t read = std::fread(block, 1, sizeof block, stdin)) {
    text.append(block, read);
    if (text.size() > kMaxPromptBytes) {
      return error(Code::kTooLarge, "the prompt on stdin is longer than {} bytes", kMaxPromptBytes);
    }
  }
  // Drops the line end that `echo` and editors append.
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

// The prompt of a command line with one word: the word is a model if a prompt is on stdin,
// otherwise it is the prompt.
Result<std::string> prompt_text(RunFlags& flags) {
  const std::string& given =
      flags.prompt_flag.empty() ? flags.prompt_positional : flags.prompt_flag;
  if (!given.empty() && given != "-") return given;
  const bool may_be_prompt = given.empty() && is_no_model(flags.model.model);
  std::string text;
  if (given.empty() && isatty(STDIN_FILENO) == 1) {
    if (!may_be_prompt) {
      return invalid("no prompt: fathom run MODEL \"prompt\", or a text on stdin, or fathom chat");
    }
  } else {
    FATHOM_TRY(text, read_stdin());
    if (text.empty() && !may_be_prompt) return invalid("the prompt on stdin is empty");
  }
  if (text.empty()) take_word_for_text(&flags.model, &text);
  return text;
}

Result<RunPrompt> make_prompt(const RunFlags& flags, const std::string& text,
                              const LoadedEngine& loaded) {
  RunPrompt prompt;
  if (!flags.ids.empty()) {
    prompt.ids = flags.ids;
    return prompt;
  }
  const Tokenizer& tokenizer = *loaded.tokenizer;
  if (flags.raw) {
    prompt.ids = tokenizer.encode(text, tokenizer.add_bos_by_default());
    return prompt;
  }
  if (!loaded.chat_format) {
    return with_context(
        "the chat format is not known (--chat-format names one, --raw does "
        "without): ",
        loaded.chat_format.error());
  }
  prompt.format = *loaded.chat_format;
  Conversation conversation;
  conversation.thinking = flags.thinking;
  if (!flags.system.empty()) {
    conversation.messages.push_back(plain_message(Role::kSystem, flags.system));
  }
  conversation.messages.push_back(plain_message(Role::kUser, text));
  FATHOM_TRY(const Prompt rendered, render(*prompt.format, conversation));
  prompt.opens_reasoning = rendered.opens_reasoning;
  prompt.ids = encode_prompt(tokenizer, rendered);
  return prompt;
}

Result<> check_together(const RunFlags& flags) {
  const bool has_text = !flags.prompt_flag.empty() || !flags.prompt_positional.empty();
  if (!flags.prompt_flag.empty() && !flags.prompt_positional.empty()) {
    return invalid("the prompt is given twice, as an argument and as --prompt");
  }
  if (!flags.ids.empty() && has_text) return invalid("--ids and a prompt exclude each other");
  if (!flags.ids.empty() && (flags.raw || flags.thinking || !flags.system.empty())) {
    return invalid("--ids is the whole prompt: --raw, --thinking and --system do not apply");
  }
  if (flags.raw && (flags.thinking || !flags.system.empty())) {
    return invalid("--raw sends the text without a chat format: --thinking and --system need one");
  }
  return {};
}

// On a terminal several choices would be interleaved, so each is printed at the end.
void print_choices(const std::vector<Answer>& answers, const RunPrompt& prompt) {
  for (size_t i = 0; i < answers.size(); ++i) {
    fmt::print("[{}] ", i);
    AnswerPrinter printer(stdout, prompt.format, prompt.opens_reasoning, true);
    printer.push(answers[i].text);
    printer.finish();
  }
}

Result<int> run(RunFlags flags) {
  FATHOM_RETURN_IF_ERROR(check_together(flags));
  FATHOM_TRY(const std::optional<GrammarSpec> spec, grammar_spec(flags.grammar));
  // Before loading the model, so that a missing prompt is reported at once.
  std::string text;
  if (flags.ids.empty()) {
    FATHOM_TRY(text, prompt_text(flags));
  }
  EngineNeeds needs;
  needs.num_seqs = flags.choices;
  needs.prompt_logprobs = flags.prompt_logprobs;
  needs.needs_tokenizer = flags.ids.empty() || spec.has_value();
  FATHOM_TRY(const LoadedEngine loaded, load_engine(flags.model, needs));
  FATHOM_TRY(const RunPrompt prompt, make_prompt(flags, text, loaded));

  Request request;
  request.prompt_ids = prompt.ids;
  FATHOM_TRY(
      request.sampling,
      sampling_params(flags.sampling, loaded.checkpoint.generation_defaults(), flags.model.seed));
  request.sampling.n = static_cast<int>(flags.choices);
  request.sampling.logprobs = static_cast<int>(flags.logprobs.value_or(-1));
  // --prompt-logprobs requests as many alternatives as --logprobs.
  if (flags.prompt_logprobs) {
    request.sampling.prompt_logprobs = static_cast<int>(flags.logprobs.value_or(0));
  }
  if (spec) {
    FATHOM_RETURN_IF_ERROR(add_grammar(*spec, loaded.tokenizer,
                                       loaded.checkpoint.config().vocab_size,
                                       prompt.opens_reasoning, request));
  }
  const SamplingParams sampling = request.sampling;

  const bool streams = !flags.json && flags.choices == 1;
  // A pipe gets the content only, without reasoning.
  AnswerPrinter printer(stdout, prompt.format, prompt.opens_reasoning, isatty(STDOUT_FILENO) == 1);
  const InterruptWatch watch;
  FATHOM_TRY(const auto answers,
             generate(*loaded.engine, std::move(request), [&](const Event& event) {
               if (streams) printer.push(event.text);
             }));
  if (flags.json) {
    fmt::print("{}\n", to_python_json(answers_json(prompt.ids, answers, sampling)));
  } else {
    if (streams) {
      printer.finish();
    } else {
      print_choices(answers, prompt);
    }
    const Style style(has_color(stderr));
    fmt::print(stderr, "{}{}{}\n", style.dim, speed_line(answers.front()), style.reset);
  }
  return InterruptWatch::interrupted() ? kInterruptedExit : 0;
}

}  // namespace

void add_run_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* command = app.add_subcommand("run", "Answer one prompt");
  command->footer(
      "The prompt is the second argument, --prompt, or stdin. A single argument is the prompt for\n"
      "the bundled model if it contains white space, or names no model and stdin is empty.\n"
      "--json prints one object with prompt_ids, ids, text, logprobs, prompt_logprobs,\n"
      "finish_reason, usage and timings; with --choices N those of the first answer, and all of\n"
      "them under \"choices\".\n"
      "Exit status: 0 answered, 1 failed, 2 bad flags or model files, 130 stopped by Ctrl-C.");
  add_model_positional(*command, &flags->model);
  command->add_option("PROMPT", flags->prompt_positional, "What to answer; - reads stdin")
      ->type_name("");
  FlagGroup prompt(*command, "Prompt");
  prompt.text("-p,--prompt", &flags->prompt_flag, "TEXT", "The prompt, in place of PROMPT");
  prompt.text("--system", &flags->system, "TEXT", "System message");
  prompt.toggle("--thinking", &flags->thinking, "Let the model reason before it answers");
  prompt.toggle("--raw", &flags->raw, "Send the text as it is, without the chat format");
  prompt.token_ids("--ids", &flags->ids, "Use these token ids as the prompt");
  FlagGroup output(*command, "Output");
  output.toggle("--json", &flags->json, "Print one JSON object instead of the text");
  output.count("--logprobs", &flags->logprobs, 0, kMaxTopLogprobs,
               "With --json: each token's log-probability and this many alternatives", "none");
  output.toggle("--prompt-logprobs", &flags->prompt_logprobs,
                "With --json: the same for the prompt's tokens");
  output.count("--choices,--n", &flags->choices, 1, kMaxChoices,
               "Independent answers to the prompt");
  add_grammar_flags(*command, &flags->grammar);
  add_sampling_flags(*command, &flags->sampling);
  add_model_flags(*command, &flags->model);
  command->callback([flags, chosen] {
    take_text_for_model(&flags->model, &flags->prompt_positional);
    *chosen = [flags] { return lead_or_follow(flags->model, [&] { return run(*flags); }); };
  });
}

}  // namespace fathom
