#include "tokenizer/char_class.h"

#include <algorithm>
#include <memory>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/regex.h"
#include "tokenizer/unicode_class.h"

namespace fathom {
namespace {

// One group per class, one character per match. PCRE2 classifies the characters, so that this
// scanner and the patterns it implements have one source of truth.
const Regex& classifier() {
  static const Regex* const regex = [] {
    const auto in_group = [](std::string inside) { return "([" + inside + "])"; };
    const std::string pattern = in_group("\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{30FF}") + "|" +
                                in_group(*category_class("L") + *category_class("M")) + "|" +
                                in_group(*category_class("N")) + "|" +
                                in_group(*category_class("P") + *category_class("S")) + "|" +
                                in_group("\\r\\n") + "|" + in_group(std::string(space_class()));
    auto compiled = Regex::compile(pattern);
    FATHOM_CHECK(compiled.has_value(), "character classes: pattern {}", compiled.error().message);
    return new Regex(std::move(*compiled));
  }();
  return *regex;
}

constexpr uint8_t kClassOfGroup[] = {0,     kHan, kLetter, kNumber, kPunctuation, kNewline | kSpace,
                                     kSpace};

}  // namespace

const CharClasses& CharClasses::instance() {
  static const CharClasses classes;
  return classes;
}

CharClasses::CharClasses() {
  const uint8_t* block = make_block(0);
  std::copy_n(block, ascii_.size(), ascii_.begin());
  for (int letter = 0; letter < 26; ++letter) {
    ascii_['a' + letter] |= kAsciiLetter;
    ascii_['A' + letter] |= kAsciiLetter;
  }
}

CharClasses::~CharClasses() {
  for (const auto& block : blocks_) delete[] block.load();
}

const uint8_t* CharClasses::make_block(char32_t index) const {
  std::string text;
  std::array<size_t, 257> begin{};
  for (char32_t i = 0; i < 256; ++i) {
    begin[i] = text.size();
    const char32_t code_point = index << 8 | i;
    const bool surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
    append_utf8(text, surrogate ? 0 : code_point);
  }
  begin[256] = text.size();

  auto block = std::make_unique<uint8_t[]>(256);  // 0: no class
  Regex::Scratch scratch;
  size_t from = 0;
  while (const auto match = classifier().find(text, from, scratch)) {
    const auto first = std::lower_bound(begin.begin(), begin.end(), match->begin);
    const auto last = std::lower_bound(begin.begin(), begin.end(), match->end);
    std::fill(block.get() + (first - begin.begin()), block.get() + (last - begin.begin()),
              kClassOfGroup[match->group]);
    from = match->end;
  }
  // Two threads may compute the same block; the first one's is kept.
  const uint8_t* expected = nullptr;
  if (!blocks_[index].compare_exchange_strong(expected, block.get(), std::memory_order_acq_rel)) {
    return expected;
  }
  return block.release();
}

}  // namespace fathom
