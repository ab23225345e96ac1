// A rendered prompt in segments that distinguish markup from text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fathom {

// Markup segments contain only special tokens written by the chat format. All else is text: what
// users, tools and models wrote, and the format's own plain words. Special tokens are recognized in
// markup only, so a "<｜User｜>" typed by a user is encoded as nine ordinary characters. Without
// such input, the token ids equal those of the whole text encoded at once, because an encoder
// splits at special tokens first.
struct PromptSegment {
  std::string text;
  bool is_markup = false;

  bool operator==(const PromptSegment&) const = default;
};

struct Prompt {
  std::vector<PromptSegment> segments;  // non-empty; adjacent ones differ in kind
  bool opens_reasoning = false;         // the completion begins inside reasoning
  bool continues_answer = false;        // the completion continues the client's text

  std::string text() const;  // equals the output of the model's chat template
};

// Builds a prompt.
class PromptWriter {
 public:
  // Appends the format's own words; special tokens in them become markup.
  void fixed(std::string_view words);
  // Appends any other text, which is never markup.
  void text(std::string_view words);

  Prompt finish() &&;

 private:
  void append(std::string_view words, bool is_markup);

  std::vector<PromptSegment> segments_;
};

}  // namespace fathom
