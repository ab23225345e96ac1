#include "tokenizer/detokenizer.h"

#include <utility>

#include "base/utf8.h"

namespace fathom {

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(tokenizer), skip_special_(skip_special) {}

std::string IncrementalDetokenizer::push(int32_t id) {
  if (skip_special_ && tokenizer_.is_special(id)) return {};
  held_ += tokenizer_.token_bytes(id);
  const size_t complete = complete_utf8_prefix(held_);
  std::string text = replace_ill_formed(std::string_view(held_).substr(0, complete));
  held_.erase(0, complete);
  return text;
}

std::string IncrementalDetokenizer::flush() { return replace_ill_formed(std::exchange(held_, {})); }

}  // namespace fathom
