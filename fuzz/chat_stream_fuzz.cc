// Stream parsers: any text, cut anywhere, gives what the uncut text gives, and nothing is lost
// where nothing may be dropped.
//
// Input: format, flags (1: inside reasoning, 2: tools expected), number of cuts (at most 8), one
// byte a cut (its distance from the one before), the text.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "chat/stream_parser.h"

namespace fathom {
namespace {

void check_equal(const ParsedAnswer& a, const ParsedAnswer& b) {
  FATHOM_CHECK(a.reasoning == b.reasoning, "reasoning depends on the cuts");
  FATHOM_CHECK(a.content == b.content, "content depends on the cuts");
  FATHOM_CHECK(a.tool_calls.size() == b.tool_calls.size(), "calls depend on the cuts");
  for (size_t i = 0; i < a.tool_calls.size(); ++i) {
    const ToolCall& x = a.tool_calls[i];
    const ToolCall& y = b.tool_calls[i];
    FATHOM_CHECK(!x.name.empty(), "call {} has no name", i);
    FATHOM_CHECK(x.name == y.name && x.id == y.id && x.arguments == y.arguments,
                 "call {} depends on the cuts", i);
  }
}

// Formats that trim nothing, without tools: the parts and the tag between them are the text.
void check_nothing_lost(ChatFormat format, bool inside, std::string_view text) {
  if (format != ChatFormat::kV31 && format != ChatFormat::kV32) return;
  const ParsedAnswer answer = parse_answer(format, inside, false, text);
  const bool closed = answer.reasoning.size() != text.size();
  const std::string joined =
      answer.reasoning + (inside && closed ? "</think>" : "") + answer.content;
  FATHOM_CHECK(joined == text, "text was lost");
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom;
  if (size < 3) return 0;
  constexpr int kFormats = static_cast<int>(ChatFormat::kFathomTiny) + 1;
  const auto format = static_cast<ChatFormat>(data[0] % kFormats);
  const bool inside = (data[1] & 1) != 0;
  const bool expect_tools = (data[1] & 2) != 0;
  const size_t cuts = data[2] % 9;
  if (size < 3 + cuts) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 3 + cuts, size - 3 - cuts);

  StreamParser parser(format, inside, expect_tools);
  ParsedAnswer cut;
  size_t begin = 0;
  for (size_t i = 0; i < cuts; ++i) {
    const size_t length = std::min<size_t>(data[3 + i], text.size() - begin);
    cut.add(parser.push(text.substr(begin, length)));
    begin += length;
  }
  cut.add(parser.push(text.substr(begin)));
  cut.add(parser.finish());
  check_equal(cut, parse_answer(format, inside, expect_tools, text));

  StreamParser bytewise(format, inside, expect_tools);
  ParsedAnswer bytes;
  for (size_t i = 0; i < text.size(); ++i) bytes.add(bytewise.push(text.substr(i, 1)));
  bytes.add(bytewise.finish());
  check_equal(cut, bytes);
  check_nothing_lost(format, inside, text);
  return 0;
}
