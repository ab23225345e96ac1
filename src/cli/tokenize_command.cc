// `fathom tokenize MODEL TEXT`: shows the tokens of a text.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iterator>

#include "base/utf8.h"
#include "chat/python_json.h"
#include "checkpoint/hub_cache.h"
#include "cli/command.h"
#include "cli/model_flags.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

constexpr int64_t kMaxTextBytes = 256 << 20;

struct TokenizeFlags {
  ModelFlags model;
  std::string text, file;
  bool decode = false, json = false, no_special = false, add_bos = false, count = false;
};

Result<std::string> input_text(TokenizeFlags& flags) {
  if (!flags.file.empty()) return read_text_file(flags.file, kMaxTextBytes);
  if (!flags.text.empty() && flags.text != "-") return flags.text;
  const bool may_be_text = flags.text.empty() && is_no_model(flags.model.model);
  if (flags.text.empty() && isatty(STDIN_FILENO) == 1) {
    if (!may_be_text) {
      return invalid("no text: fathom tokenize MODEL \"text\", or --file, or a text on stdin");
    }
    take_word_for_text(&flags.model, &flags.text);
    return flags.text;
  }
  std::string text;
  char block[1 << 16];
  while (const size_t read = std::fread(block, 1, sizeof block, stdin)) {
    text.append(block, read);
    if (text.size() > static_cast<size_t>(kMaxTextBytes)) {
      return error(Code::kTooLarge, "the text on stdin is longer than {} bytes", kMaxTextBytes);
    }
  }
  if (text.empty() && may_be_text) take_word_for_text(&flags.model, &text);
  return text;
}

// A printable form of a token: control characters are escaped as in JSON, bytes that are not a
// complete character as \xC3.
std::string visible(std::string_view bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Char c = decode_utf8(bytes, at);
    const std::string_view part = bytes.substr(at, static_cast<size_t>(c.length));
    at += part.size();
    if (c.valid) {
      append_json_escaped(text, part);
    } else {
      text += fmt::format("\\x{:02X}", static_cast<unsigned char>(part.front()));
    }
  }
  return text;
}

void print_tokens(const TokenizeFlags& flags, const Tokenizer& tokenizer,
                  const std::vector<int32_t>& ids) {
  if (flags.count) {
    fmt::print("{}\n", ids.size());
  } else if (flags.json) {
    json::array pieces;
    for (const int32_t id : ids)
      pieces.push_back(json::value(replace_ill_formed(tokenizer.token_bytes(id))));
    const json::object object{{"ids", json::value_from(ids)}, {"pieces", std::move(pieces)}};
    fmt::print("{}\n", to_python_json(object));
  } else {
    for (const int32_t id : ids) fmt::print("{:>7}  {}\n", id, visible(tokenizer.token_bytes(id)));
  }
}

Result<int> tokenize(TokenizeFlags flags) {
  FATHOM_TRY(const std::string text, input_text(flags));
  FATHOM_TRY(const std::string model, resolve_model_flag(flags.model));
  FATHOM_TRY(const std::string directory, resolve_model(model));
  FATHOM_TRY(const auto tokenizer, Tokenizer::load(directory));
  if (!flags.decode) {
    std::vector<int32_t> ids =
        flags.no_special ? tokenizer->encode_ordinary(text) : tokenizer->encode(text);
    if (flags.add_bos && tokenizer->bos_id()) ids.insert(ids.begin(), *tokenizer->bos_id());
    print_tokens(flags, *tokenizer, ids);
    return 0;
  }
  const auto ids = parse_token_list(text);
  if (!ids) return with_context("--decode: ", ids.error());
  for (const int32_t id : *ids) {
    if (id >= tokenizer->vocab_size()) {
      return invalid("--decode: id {} is outside the vocabulary of {}", id,
                     tokenizer->vocab_size());
    }
  }
  const std::string decoded = tokenizer->decode(*ids, flags.no_special);
  if (flags.json) {
    fmt::print("{}\n", to_python_json(json::object{{"text", decoded}}));
  } else {
    fmt::print("{}\n", decoded);
  }
  return 0;
}

}  // namespace

void add_tokenize_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* command = app.add_subcommand("tokenize", "Convert text to token ids, and back");
  add_model_positional(*command, &flags->model);
  command->add_option("TEXT", flags->text, "Text, or with --decode ids as in 1,2,3; - reads stdin")
      ->type_name("");
  FlagGroup group(*command, "Tokenizer");
  group.text("-f,--file", &flags->file, "FILE", "Read the text from a file, to its last byte");
  group.toggle("--decode", &flags->decode, "From ids to text");
  group.toggle("--no-special", &flags->no_special,
               "Special tokens in the text are plain text; with --decode leave them out");
  group.toggle("--add-bos", &flags->add_bos, "Begin with the begin-of-sequence token");
  group.toggle("--count", &flags->count, "Print only how many tokens there are");
  group.toggle("--json", &flags->json, "Print one JSON object: ids and pieces, or text");
  command->callback([flags, chosen] {
    take_text_for_model(&flags->model, &flags->text);
    *chosen = [flags] { return tokenize(*flags); };
  });
}

}  // namespace fathom
