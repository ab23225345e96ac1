#include "chat/call_syntax.h"

namespace fathom {
namespace {

constexpr CallSyntax kTypedCalls{.block_begin = "<｜tool▁calls▁begin｜>",
                                 .before_name = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                                 .after_name = "\n```json\n",
                                 .call_end = "\n```<｜tool▁call▁end｜>",
                                 .between = "\n",
                                 .block_end = "<｜tool▁calls▁end｜>"};
constexpr CallSyntax kNamedCalls{.block_begin = "<｜tool▁calls▁begin｜>",
                                 .before_name = "<｜tool▁call▁begin｜>",
                                 .after_name = "<｜tool▁sep｜>",
                                 .call_end = "<｜tool▁call▁end｜>",
                                 .between = "",
                                 .block_end = "<｜tool▁calls▁end｜>"};
constexpr CallSyntax kKimiCalls{.block_begin = "<|tool_calls_section_begin|>",
                                .before_name = "<|tool_call_begin|>functions.",
                                .after_name = "<|tool_call_argument_begin|>",
                                .call_end = "<|tool_call_end|>",
                                .between = "",
                                .block_end = "<|tool_calls_section_end|>",
                                .numbered = true};
constexpr CallSyntax kDsmlCalls{.block_begin = "<｜DSML｜function_calls>\n",
                                .before_name = "<｜DSML｜invoke name=\"",
                                .after_name = "\">\n",
                                .call_end = "</｜DSML｜invoke>\n",
                                .between = "",
                                .block_end = "</｜DSML｜function_calls>",
                                .json_arguments = false};

constexpr CallSyntax kGigachat3Calls{
    .block_begin = "",
    .before_name = "<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"",
    .after_name = "\", \"arguments\": ",
    .call_end = "}",
    .between = "",
    .block_end = "",
    .single = true};
constexpr CallSyntax kGigachat31Calls{.block_begin = "",
                                      .before_name = "<|function_call|>{\"name\": \"",
                                      .after_name = "\", \"arguments\": ",
                                      .call_end = "}",
                                      .between = "",
                                      .block_end = "",
                                      .single = true};
constexpr CallSyntax kGlmCalls{.block_begin = "",
                               .before_name = "<tool_call>",
                               .after_name = "",
                               .call_end = "</tool_call>",
                               .between = "",
                               .block_end = "",
                               .json_arguments = false,
                               .key_begin = "<arg_key>",
                               .key_end = "</arg_key><arg_value>",
                               .value_end = "</arg_value>"};

}  // namespace

std::optional<CallSyntax> call_syntax(ChatFormat format) {
  switch (format) {
    case ChatFormat::kV2:
    case ChatFormat::kMoonlight:
      return std::nullopt;
    case ChatFormat::kV25:
    case ChatFormat::kV3:
    case ChatFormat::kV30324:
    case ChatFormat::kR1:
      return kTypedCalls;
    case ChatFormat::kV31:
    case ChatFormat::kFathomTiny:
      return kNamedCalls;
    case ChatFormat::kV32:
      return kDsmlCalls;
    case ChatFormat::kKimiK2:
    case ChatFormat::kKimiK2Thinking:
    case ChatFormat::kKimiK25:
      return kKimiCalls;
    case ChatFormat::kGigachat3:
      return kGigachat3Calls;
    case ChatFormat::kGigachat31:
      return kGigachat31Calls;
    case ChatFormat::kGlm47:
    case ChatFormat::kGlm5:
    case ChatFormat::kGlm52:
      return kGlmCalls;
  }
  return std::nullopt;
}

}  // namespace fathom
