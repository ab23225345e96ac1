// A rendered prompt in pieces that say who wrote them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fathom {

// Markup is special tokens that the chat format wrote, and nothing else; text is the rest: what
// users, tools and models wrote and the format's own plain words. Encoded with special tokens
// recognised in markup only, a "<｜User｜>" typed by a user stays nine ordinary characters. Without
// such typing the token ids equal those of the whole text encoded at once, because an encoder cuts
// at special tokens first.
struct PromptSegment {
  std::string text;
  bool is_markup = false;

  bool operator==(const PromptSegment&) const = default;
};

struct Prompt {
  std::vector<PromptSegment> segments;  // never two of one kind in a row, never empty ones
  bool opens_reasoning = false;         // the answer begins inside reasoning
  bool continues_answer = false;        // it begins behind text that the client gave

  std::string text() const;  // byte for byte what the model's chat template gives
};

// Puts a prompt together.
class PromptWriter {
 public:
  // The format's own words; special tokens in them become markup.
  void fixed(std::string_view words);
  // Anything else; stays text whatever it contains.
  void text(std::string_view words);

  Prompt finish() &&;

 private:
  void append(std::string_view words, bool is_markup);

  std::vector<PromptSegment> segments_;
};

}  // namespace fathom
