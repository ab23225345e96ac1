// Random completions for JSON schemas, for schema_differential_test.py. Reads one schema per line
// and writes, as one line of JSON, the compiler's result and completions by a model that chooses at
// random.
//
//   schema_answers MODEL ANSWERS SEED < schemas
//   {"refused": "why"} or {"answers": ["text", …], "unfinished": n, "stuck": n, "markup": n}
//
// A completion is a random walk over the tokens that the mask allows. Half of the walks choose
// white space whenever they can, which must not keep them from ending. All walks prefer tokens that
// close what is open, because a random string rarely ends.
#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <random>
#include <string>

#include "base/check.h"
#include "base/json.h"
#include "grammar/grammar_compiler.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

constexpr int kMaxTokens = 600;

struct Tokens {
  explicit Tokens(const Tokenizer& tokenizer) {
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
      const std::string text(tokenizer.token_bytes(id));
      if (tokenizer.is_added(id)) added.push_back(id);
      const bool white = !text.empty() && text.find_first_not_of(" \n\t\r") == std::string::npos;
      if (white) white_space.push_back(id);
      if (text == "\"" || text == "}" || text == "]") closing.push_back(id);
    }
  }
  std::vector<int32_t> added, white_space, closing;
};

bool is_set(std::span<const uint32_t> mask, int32_t id) {
  const auto word = static_cast<size_t>(id / 32);
  return word < mask.size() && (mask[word] >> id % 32 & 1) != 0;
}

struct Walk {
  std::string text;
  bool is_whole = false, is_stuck = false;
  int markup = 0;  // number of times a marker was allowed
};

Walk walk(const CompiledGrammar& grammar, const Tokenizer& tokenizer, const Tokens& tokens,
          bool likes_white_space, std::mt19937_64& random) {
  Walk result;
  const auto state = grammar.start(std::nullopt);
  std::vector<int32_t> ids, choices;
  const auto allowed_of = [&](std::span<const uint32_t> mask, const std::vector<int32_t>& wanted) {
    choices.clear();
    for (const int32_t id : wanted) {
      if (is_set(mask, id)) choices.push_back(id);
    }
    return !choices.empty();
  };
  for (int step = 0; step < kMaxTokens; ++step) {
    if (state->can_end() && random() % 2 == 0) break;
    const auto mask = state->allowed();
    if (allowed_of(mask, tokens.added)) ++result.markup;
    // The longer the text, the more it prefers to end.
    const bool closes = random() % 100 < static_cast<uint64_t>(25 + step / 4);
    const bool chosen =
        (closes && allowed_of(mask, tokens.closing)) ||
        (likes_white_space && random() % 10 < 7 && allowed_of(mask, tokens.white_space));
    if (!chosen) {
      choices.clear();
      for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        // Begins a possible surrogate, which is not valid UTF-8.
        if (is_set(mask, id) && tokenizer.token_bytes(id) != "\xED") choices.push_back(id);
      }
    }
    if (choices.empty()) {
      result.is_stuck = !state->can_end();
      break;
    }
    const int32_t id = choices[random() % choices.size()];
    FATHOM_CHECK(state->accept(id), "token {} is allowed and not accepted", id);
    ids.push_back(id);
  }
  result.is_whole = state->can_end();
  result.text = tokenizer.decode(ids);
  return result;
}

int run(const char* model, int answers, uint64_t seed) {
  std::shared_ptr<const Tokenizer> tokenizer = std::move(*Tokenizer::load(model));
  const Tokens tokens(*tokenizer);
  GrammarCompiler compiler(tokenizer, tokenizer->vocab_size(),
                           {.deadline = GrammarCompilerOptions::kPatient});
  std::mt19937_64 random(seed);
  for (std::string line; std::getline(std::cin, line);) {
    json::object out;
    const auto grammar = compiler.compile({GrammarSpec::Kind::kJsonSchema, line});
    if (!grammar) {
      out["refused"] = grammar.error().message;
    } else {
      json::array texts;
      int unfinished = 0, stuck = 0, markup = 0;
      for (int i = 0; i < answers; ++i) {
        const Walk one = walk(**grammar, *tokenizer, tokens, i % 2 == 1, random);
        if (one.is_whole) texts.emplace_back(one.text);
        stuck += one.is_stuck;
        unfinished += !one.is_whole && !one.is_stuck;
        markup += one.markup;
      }
      out["answers"] = std::move(texts);
      out["unfinished"] = unfinished;
      out["stuck"] = stuck;
      out["markup"] = markup;
    }
    fmt::print("{}\n", json::serialize(out));
  }
  return 0;
}

}  // namespace
}  // namespace fathom

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: schema_answers MODEL ANSWERS SEED < schemas\n", stderr);
    return 2;
  }
  return fathom::run(argv[1], std::stoi(argv[2]), std::stoull(argv[3]));
}
