// Splits a model's answer, as it arrives, into reasoning, content and tool calls.
//
// The sum of the deltas is a function of the whole text alone: however it is cut, the same
// reasoning, content and calls come out. What may be the beginning of a marker is held back until
// it is decided.
//
// Reasoning. Where it may be (format and mode), it ends at the first </think>; without one all is
// reasoning. Tool markers inside reasoning are reasoning. R1, V3-0324 / R1-0528: white space after
// <think> and around </think> is dropped, and the model may write <think> itself. Other formats:
// not a byte is dropped, and outside reasoning </think> is ordinary text.
//
// Tool calls, when the caller expects any:
//  - Something is a call from the moment its name is complete; from then on its arguments are
//  handed
//    on as they arrive. They are not checked: arguments cut off by the end stay cut off.
//    Missing arguments are "{}".
//  - What does not become a call (a marker without a name, other text inside a block, an unfinished
//    beginning) is content, as it was written. Only markers of calls and white space beside markers
//    disappear, and with them the unfinished beginning of a call or a marker where the answer was
//    cut (by max_tokens, a stop string, an abort): it is no text.
//  - DeepSeek's formats have no call ids: `id` is empty and the caller names the call. Kimi's are
//    part of the format.
//  - V3.2 (DSML): arguments are rebuilt as JSON. A parameter marked string="true" is encoded as it
//    arrives; another is pasted once complete, as a string if it is not JSON.
//
// One thread. Input is UTF-8; a character cut by push() waits for its rest.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/marker_scan.h"

namespace fathom {

struct ToolCallDelta {
  int index = 0;          // which call of this answer, from 0
  std::string id;         // with the first delta of a call, if the format has ids
  std::string name;       // with the first delta of a call, empty after
  std::string arguments;  // to be appended
};

struct StreamDelta {
  std::string reasoning;
  std::string content;
  std::vector<ToolCallDelta> tool_calls;

  bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

class ReasoningSplitter;
class ToolCallStage;

class StreamParser {
 public:
  // opens_reasoning and continues_answer: of the Prompt that is answered.
  StreamParser(ChatFormat format, bool opens_reasoning, bool expect_tools,
               bool continues_answer = false);
  ~StreamParser();
  StreamParser(StreamParser&&) noexcept;
  StreamParser& operator=(StreamParser&&) noexcept;

  StreamDelta push(std::string_view text);
  // Once, at the end; decides all that was held back. `is_cut`: the answer did not end by itself.
  StreamDelta finish(bool is_cut = false);
  bool saw_tool_calls() const;

 private:
  StreamDelta advance(std::string_view text, TextEnd end);

  std::string incomplete_;  // the beginning of a character
  std::unique_ptr<ReasoningSplitter> reasoning_;
  std::unique_ptr<ToolCallStage> calls_;
};

struct ParsedAnswer {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> tool_calls;

  void add(const StreamDelta& delta);
};

// The whole text at once.
ParsedAnswer parse_answer(ChatFormat format, bool opens_reasoning, bool expect_tools,
                          std::string_view text);

}  // namespace fathom
