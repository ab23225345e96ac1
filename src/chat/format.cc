#include "chat/format.h"

#include "base/check.h"
#include "chat/encoders.h"
#include "chat/prefill.h"

namespace fathom {
namespace {

struct NamedFormat {
  std::string_view name;
  ChatFormat format;
};

// The first name of a format is canonical; others are aliases.
constexpr NamedFormat kFormatNames[] = {
    {"deepseek-v2", ChatFormat::kV2},
    {"deepseek-v2.5", ChatFormat::kV25},
    {"deepseek-v3", ChatFormat::kV3},
    {"deepseek-v3-0324", ChatFormat::kV30324},
    {"deepseek-r1-0528", ChatFormat::kV30324},
    {"deepseek-r1", ChatFormat::kR1},
    {"deepseek-v3.1", ChatFormat::kV31},
    {"deepseek-v3.2", ChatFormat::kV32},
    {"kimi-k2", ChatFormat::kKimiK2},
    {"kimi-k2-thinking", ChatFormat::kKimiK2Thinking},
    {"kimi-k2.5", ChatFormat::kKimiK25},
    {"moonlight", ChatFormat::kMoonlight},
    {"glm-4.7", ChatFormat::kGlm47},
    {"glm-5", ChatFormat::kGlm5},
    {"glm-5.1", ChatFormat::kGlm5},
    {"glm-5.2", ChatFormat::kGlm52},
    {"gigachat-3", ChatFormat::kGigachat3},
    {"gigachat-3.1", ChatFormat::kGigachat31},
    {"fathom-tiny", ChatFormat::kFathomTiny},
};

constexpr V3Style kV25Style{.joins_system = false,
                            .cuts_reasoning = false,
                            .newline_in_results = true,
                            .r1_calls = true,
                            .assistant_with_user = false,
                            .reasons = false,
                            .opening = ""};
constexpr V3Style kV3Style{.joins_system = true,
                           .cuts_reasoning = true,
                           .newline_in_results = false,
                           .r1_calls = false,
                           .assistant_with_user = false,
                           .reasons = false,
                           .opening = ""};
constexpr V3Style kV30324Style{.joins_system = true,
                               .cuts_reasoning = true,
                               .newline_in_results = true,
                               .r1_calls = false,
                               .assistant_with_user = true,
                               .reasons = true,
                               .opening = ""};
constexpr V3Style kR1Style{.joins_system = false,
                           .cuts_reasoning = true,
                           .newline_in_results = true,
                           .r1_calls = true,
                           .assistant_with_user = false,
                           .reasons = true,
                           .opening = "<think>\n"};

constexpr GlmStyle kGlm47Style{.trims_reasoning = true,
                               .names_effort = false,
                               .bare_tools = false,
                               .no_reasoning = "</think>"};
constexpr GlmStyle kGlm5Style{.trims_reasoning = false,
                              .names_effort = false,
                              .bare_tools = false,
                              .no_reasoning = "</think>"};
constexpr GlmStyle kGlm52Style{.trims_reasoning = false,
                               .names_effort = true,
                               .bare_tools = true,
                               .no_reasoning = "<think></think>"};

// A text in a template that identifies a format. The first match decides.
struct Trait {
  std::string_view text;
  std::string_view also;  // must be present too
  ChatFormat format;
};
constexpr Trait kTraits[] = {
    {"tool_calls_section_begin", "tools_ts_str", ChatFormat::kKimiK25},
    {"tool_calls_section_begin", "<think>", ChatFormat::kKimiK2Thinking},
    {"tool_calls_section_begin", "", ChatFormat::kKimiK2},
    {"<|im_middle|>You are a helpful assistant<|im_end|>", "", ChatFormat::kMoonlight},
    {"[gMASK]<sop>", "Reasoning Effort: ", ChatFormat::kGlm52},
    {"[gMASK]<sop>", "reasoning_content is defined", ChatFormat::kGlm5},
    {"[gMASK]<sop>", "'</think>' if", ChatFormat::kGlm47},
    {"<|role_sep|>", "<|function_call|>", ChatFormat::kGigachat31},
    {"<|role_sep|>", "'function call'", ChatFormat::kGigachat3},
    {"｜DSML｜", "", ChatFormat::kV32},
    {"<｜tool▁call▁end｜>{additional_tool_calls}", "", ChatFormat::kFathomTiny},
    {"<｜Assistant｜></think>", "", ChatFormat::kV31},
    {"<｜Assistant｜><think></think>", "", ChatFormat::kV31},  // copies that engines edited
    {"content + '<｜Assistant｜>'", "", ChatFormat::kV30324},
    {"<｜Assistant｜><think>", "", ChatFormat::kR1},
    {"<｜Assistant｜>", "is_first_sp", ChatFormat::kV3},
    {"<｜Assistant｜>", "<｜User｜>", ChatFormat::kV25},
    {"'User: '", "'Assistant:'", ChatFormat::kV2},
};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace

std::string_view chat_format_name(ChatFormat format) {
  for (const NamedFormat& named : kFormatNames) {
    if (named.format == format) return named.name;
  }
  FATHOM_CHECK(false, "chat format {} has no name", static_cast<int>(format));
}

std::string chat_format_names() {
  std::string all;
  for (const NamedFormat& named : kFormatNames) {
    if (!all.empty()) all += ", ";
    all += named.name;
  }
  return all;
}

Result<ChatFormat> chat_format_from_name(std::string_view name) {
  for (const NamedFormat& named : kFormatNames) {
    if (named.name == name) return named.format;
  }
  return invalid("chat format \"{}\" is not known; known are {}", name, chat_format_names());
}

Result<ChatFormat> detect_chat_format(std::string_view model_type, std::string_view chat_template,
                                      const std::function<bool(std::string_view)>& has_token) {
  for (const Trait& trait : kTraits) {
    if (contains(chat_template, trait.text) && contains(chat_template, trait.also)) {
      return trait.format;
    }
  }
  if (!chat_template.empty()) {
    return invalid(
        "chat_template is not one that Fathom knows; name its form with --chat-format: {}",
        chat_format_names());
  }
  if (model_type == "deepseek_v32") return ChatFormat::kV32;
  if (model_type == "kimi_k2") return ChatFormat::kKimiK2;
  if (model_type == "kimi_k25") return ChatFormat::kKimiK25;
  if (model_type == "glm4_moe_lite") return ChatFormat::kGlm47;
  if (model_type == "glm_moe_dsa") return ChatFormat::kGlm5;
  if (model_type == "deepseek_v2") return ChatFormat::kV2;
  if (model_type == "deepseek_v3") {
    // Special tokens that a generation added (V3.1: search, R1: think).
    if (has_token("<｜search▁begin｜>")) return ChatFormat::kV31;
    return has_token("<think>") ? ChatFormat::kR1 : ChatFormat::kV3;
  }
  return invalid(
      "the checkpoint has no chat_template and model_type \"{}\" does not tell its chat format; "
      "name "
      "it with --chat-format: {}",
      model_type, chat_format_names());
}

namespace {

Result<Prompt> encode(ChatFormat format, const Conversation& conversation) {
  switch (format) {
    case ChatFormat::kV2:
      return encode_v2(conversation);
    case ChatFormat::kV25:
      return encode_v3(conversation, kV25Style);
    case ChatFormat::kV3:
      return encode_v3(conversation, kV3Style);
    case ChatFormat::kV30324:
      return encode_v3(conversation, kV30324Style);
    case ChatFormat::kR1:
      return encode_v3(conversation, kR1Style);
    case ChatFormat::kV31:
      return encode_v31(conversation);
    case ChatFormat::kV32:
      return encode_v32(conversation);
    case ChatFormat::kKimiK2:
      return encode_kimi(conversation, false);
    case ChatFormat::kKimiK2Thinking:
      return encode_kimi(conversation, true);
    case ChatFormat::kKimiK25:
      return encode_kimi_k25(conversation);
    case ChatFormat::kMoonlight:
      return encode_moonlight(conversation);
    case ChatFormat::kGlm47:
      return encode_glm(conversation, kGlm47Style);
    case ChatFormat::kGlm5:
      return encode_glm(conversation, kGlm5Style);
    case ChatFormat::kGlm52:
      return encode_glm(conversation, kGlm52Style);
    case ChatFormat::kGigachat3:
      return encode_gigachat(conversation, false);
    case ChatFormat::kGigachat31:
      return encode_gigachat(conversation, true);
    case ChatFormat::kFathomTiny:
      return encode_fathom_tiny(conversation);
  }
  FATHOM_CHECK(false, "unknown chat format {}", static_cast<int>(format));
}

}  // namespace

Result<Prompt> render(ChatFormat format, const Conversation& conversation) {
  if (!conversation.continue_final_message) return encode(format, conversation);
  FATHOM_RETURN_IF_ERROR(check_prefill(conversation, format));
  FATHOM_TRY(Prompt prompt, encode(format, conversation));
  const Prefill prefill = read_prefill(conversation.messages.back(), format_reasons(format));
  prompt.continues_answer = prefill.stage != Prefill::Stage::kNothing;
  if (prompt.continues_answer) {
    prompt.opens_reasoning = prefill.stage == Prefill::Stage::kReasoning;
  }
  return prompt;
}

}  // namespace fathom
