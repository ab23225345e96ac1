// Conversations in every chat format: what people, tools and models wrote never becomes markup, and
// a chat template from a stranger is recognised or refused.
//
// Input: format (one more than there are: a chat template to recognise), flags (1: thinking, 2: no
// generation prompt), then the conversation as JSON or the template.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "base/utf8.h"
#include "chat/format.h"

namespace fathom {
namespace {

constexpr int kFormats = static_cast<int>(ChatFormat::kFathomTiny) + 1;
constexpr char kHarmless = '\x7F';  // stands in JSON strings as it is, and in no special token

void check_prompt(const Prompt& prompt) {
  for (size_t i = 0; i < prompt.segments.size(); ++i) {
    const PromptSegment& segment = prompt.segments[i];
    FATHOM_CHECK(!segment.text.empty(), "segment {} is empty", i);
    FATHOM_CHECK(i == 0 || segment.is_markup != prompt.segments[i - 1].is_markup,
                 "segments {} and {} are of one kind", i - 1, i);
    FATHOM_CHECK(is_valid_utf8(segment.text), "segment {} ends inside a character", i);
    if (!segment.is_markup) continue;
    PromptWriter writer;
    writer.fixed(segment.text);
    const Prompt scanned = std::move(writer).finish();
    FATHOM_CHECK(scanned.segments.size() == 1 && scanned.segments.front().is_markup,
                 "markup has more than special tokens: {}", segment.text);
  }
}

std::string markup_of(const Prompt& prompt) {
  std::string markup;
  for (const PromptSegment& segment : prompt.segments) {
    if (segment.is_markup) markup += segment.text;
  }
  return markup;
}

struct Case {
  ChatFormat format = ChatFormat::kV2;
  bool thinking = false, add_generation_prompt = true;
};

Result<Prompt> render_value(const Case& what, const json::value& value) {
  auto conversation = parse_conversation(value, "fuzz");
  if (!conversation) {
    FATHOM_CHECK(conversation.error().message.starts_with("fuzz: "), "{}",
                 conversation.error().message);
    return tl::unexpected(conversation.error());
  }
  conversation->thinking |= what.thinking;
  conversation->add_generation_prompt = what.add_generation_prompt;
  return render(what.format, *conversation);
}

void fuzz_conversation(const Case& what, std::string_view text) {
  const auto value = parse_json(text, "fuzz");
  if (!value) return;
  const auto prompt = render_value(what, *value);
  if (!prompt) {
    FATHOM_CHECK(!prompt.error().message.empty(), "an error without a sentence");
    return;
  }
  check_prompt(*prompt);
  // Special tokens begin with '<': without those of the conversation the markup is the same.
  std::string harmless = json::serialize(*value);
  if (harmless.find(kHarmless) != std::string::npos) return;  // keys could become equal
  std::replace(harmless.begin(), harmless.end(), '<', kHarmless);
  const auto again = parse_json(harmless, "fuzz");
  if (!again) return;  // numbers beyond those that can be written
  const auto plain = render_value(what, *again);
  FATHOM_CHECK(plain.has_value(), "refused without \"<\": {}", plain.error().message);
  FATHOM_CHECK(markup_of(*plain) == markup_of(*prompt), "a conversation's text became markup: {}",
               prompt->text());
  FATHOM_CHECK(plain->opens_reasoning == prompt->opens_reasoning, "text opens reasoning: {}",
               prompt->text());
}

void fuzz_template(std::string_view text) {
  const auto format =
      detect_chat_format("deepseek_v3", text, [](std::string_view) { return false; });
  if (format) FATHOM_CHECK(chat_format_from_name(chat_format_name(*format)) == *format, "no name");
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom;
  if (size < 2) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
  const int format = data[0] % (kFormats + 1);
  if (format == kFormats) {
    fuzz_template(text);
  } else {
    fuzz_conversation({.format = static_cast<ChatFormat>(format),
                       .thinking = (data[1] & 1) != 0,
                       .add_generation_prompt = (data[1] & 2) == 0},
                      text);
  }
  return 0;
}
