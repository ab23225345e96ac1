// Splits text into the pieces that byte-pair merges never cross, as tokenizer.json's
// "pre_tokenizer" specifies: a sequence of splits, each applied inside the pieces of the one
// before.
//
// Supported: Split (a Regex or a String, behavior Isolated), Digits, ByteLevel (with and without
// its own pattern) and Sequence of these. Anything else is refused by name. Immutable; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "tokenizer/regex.h"
#include "tokenizer/v3_scanner.h"

namespace fathom {

class PreTokenizer {
 public:
  // `config` is the field's value. With allow_scanner false, known patterns use the general path
  // too, for tests that compare the two.
  static Result<PreTokenizer> from_json(const json::value& config, std::string_view source,
                                        bool allow_scanner = true);

  // Kimi K2's and Moonlight's, whose pattern stands in their tokenizer's code.
  static PreTokenizer kimi();

  // `text` must be well-formed UTF-8.
  void split(std::string_view text, const PieceSink& sink) const;

  bool uses_scanner() const { return is_v3_; }

 private:
  // What splits a piece: the regex; or, without one, trailing white space (\s+$), for which a regex
  // search would take quadratic time.
  struct Stage {
    std::optional<Regex> regex;
  };
  struct Built {
    std::vector<Stage> stages;
    std::vector<std::string> patterns;  // patterns of the Splits, for recognizing known sequences
    bool has_byte_level = false;
  };

  static Result<> add(const json::value& config, const std::string& where, int depth, Built& built);
  static Result<> add_split(const JsonFields& fields, const std::string& where, Built& built);
  static Result<> add_pattern(std::string_view pattern, const std::string& where, Built& built);
  static void add_own(const std::string& pcre2_pattern, Built& built);
  void split_piece(std::string_view piece, size_t stage, Regex::Scratch& scratch,
                   const PieceSink& sink) const;
  void split_trailing_space(std::string_view piece, size_t stage, Regex::Scratch& scratch,
                            const PieceSink& sink) const;

  std::vector<Stage> stages_;
  bool is_v3_ = false;
};

}  // namespace fathom
