// Splits a model's streamed output into reasoning, content and tool calls.
//
// The concatenation of the deltas depends only on the whole text, not on how it is cut. Text that
// may be the beginning of a marker is held back until it is decided.
//
// Reasoning: if format and mode allow it, it ends at the first </think>; without one, everything is
// reasoning. Tool markers inside reasoning are reasoning. For R1 and V3-0324 / R1-0528, white space
// after <think> and around </think> is dropped, and the model may write <think> itself. For other
// formats nothing is dropped, and </think> outside reasoning is ordinary text.
//
// Tool calls, if the caller expects any:
// - A call begins when its name is complete; from then on its arguments are streamed. They are not
//   validated: arguments cut off at the end stay cut off. Missing arguments are "{}".
// - Text that does not become a call (a marker without a name, other text inside a block, an
//   unfinished beginning) is content, unchanged. Only call markers and white space beside markers
//   are dropped. If the output was cut (by max_tokens, a stop string, an abort), the unfinished
//   beginning of a call or marker is dropped too.
// - DeepSeek's formats have no call ids: `id` is empty and the caller assigns one. Kimi's ids are
//   part of the format.
// - GLM: arguments are rebuilt as JSON, each once it is complete. One that its tool's schema
// declares
//   as a string is one; others are copied if they are valid JSON, as strings if not.
// - V3.2 (DSML): arguments are rebuilt as JSON. A parameter with string="true" is encoded as it
//   arrives; any other is copied once complete, as a string if it is not valid JSON.
//
// Used by one thread. Input is UTF-8; a character cut between pushes is held until it is complete.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/marker_scan.h"

namespace fathom {

struct ToolCallDelta {
  int index = 0;          // which call of this completion, from 0
  std::string id;         // with the first delta of a call, if the format has ids
  std::string name;       // with the first delta of a call, empty afterwards
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
  // opens_reasoning and continues_answer are those of the Prompt. `tools` are read by formats that
  // do not say which arguments are strings, and not kept.
  StreamParser(ChatFormat format, bool opens_reasoning, bool expect_tools,
               bool continues_answer = false, std::span<const Tool> tools = {});
  ~StreamParser();
  StreamParser(StreamParser&&) noexcept;
  StreamParser& operator=(StreamParser&&) noexcept;

  StreamDelta push(std::string_view text);
  // Call once, at the end. Decides all text held back. `is_cut`: the completion did not end by
  // itself.
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

// Parses a whole text at once.
ParsedAnswer parse_answer(ChatFormat format, bool opens_reasoning, bool expect_tools,
                          std::string_view text);

}  // namespace fathom
