#include "cli/sampling_flags.h"

namespace fathom {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 32;

Result<std::pair<int32_t, float>> parse_bias(const std::string& text) {
  const size_t equals = text.find('=');
  const auto ids = parse_token_list(std::string_view(text).substr(0, equals));
  const auto bias = equals == std::string::npos
                        ? Result<double>(invalid("none"))
                        : parse_number(std::string_view(text).substr(equals + 1));
  if (!ids || ids->size() != 1 || !bias) {
    return invalid("--logit-bias is \"{}\", expected ID=BIAS, as in 42=-100", text);
  }
  return std::pair(ids->front(), static_cast<float>(*bias));
}

}  // namespace

void add_sampling_flags(CLI::App& app, SamplingFlags* flags) {
  FlagGroup group(app, "Sampling");
  const std::string models = "generation_config.json's, or ";
  group.number("--temperature,--temp", &flags->temperature, 0, kMaxTemperature,
               "Sampling temperature; 0: always the most likely token", models + "1");
  group.number("--top-p", &flags->top_p, 0, 1,
               "Sample from the smallest set of tokens with this probability", models + "1");
  group.count("--top-k", &flags->top_k, -1, std::numeric_limits<int32_t>::max(),
              "Sample from this many of the most likely tokens; 0: all", models + "all");
  group.number("--min-p", &flags->min_p, 0, 1,
               "Sample from tokens with at least this share of the most likely one's probability",
               "0");
  group.number("--repetition-penalty", &flags->repetition_penalty, kMinRepetitionPenalty,
               kMaxRepetitionPenalty, "Divides the logits of tokens seen in prompt or answer", "1");
  group.number("--presence-penalty", &flags->presence_penalty, -kMaxPenalty, kMaxPenalty,
               "Subtracted from the logits of tokens in the answer", "0");
  group.number("--frequency-penalty", &flags->frequency_penalty, -kMaxPenalty, kMaxPenalty,
               "Subtracted from a token's logit for each occurrence in the answer", "0");
  group.texts("--logit-bias", &flags->logit_bias, "ID=BIAS",
              "Added to a token's logit; may be given several times");
  group.count("--max-tokens,--max-new-tokens", &flags->max_tokens, 1, kMaxTokens,
              "Longest answer in tokens", "to the end of the context");
  group.count("--min-tokens", &flags->min_tokens, 0, kMaxTokens, "Shortest answer in tokens", "0");
  group.texts("--stop", &flags->stop, "TEXT",
              "The answer ends before this text; may be given several times");
  group.token_ids("--stop-token-ids", &flags->stop_token_ids, "The answer ends at any of these");
  group.toggle("--ignore-eos", &flags->ignore_eos, "Go on after the end-of-sequence token");
  group.toggle("--include-stop-str-in-output", &flags->include_stop,
               "Show the text or token that ended the answer");
  group.toggle("--keep-special-tokens", &flags->keep_special_tokens,
               "Show special tokens in the answer's text");
}

Result<SamplingParams> sampling_params(const SamplingFlags& flags,
                                       const GenerationDefaults& defaults,
                                       std::optional<int64_t> seed) {
  SamplingParams params;
  params.temperature = flags.temperature.value_or(defaults.temperature.value_or(1));
  params.top_p = flags.top_p.value_or(defaults.top_p.value_or(1));
  params.top_k = flags.top_k.value_or(defaults.top_k.value_or(0));
  params.min_p = flags.min_p.value_or(0);
  params.repetition_penalty = flags.repetition_penalty.value_or(1);
  params.presence_penalty = flags.presence_penalty.value_or(0);
  params.frequency_penalty = flags.frequency_penalty.value_or(0);
  for (const std::string& text : flags.logit_bias) {
    FATHOM_TRY(const auto bias, parse_bias(text));
    params.logit_bias.push_back(bias);
  }
  if (seed) params.seed = static_cast<uint64_t>(*seed);
  params.max_tokens = flags.max_tokens;
  params.min_tokens = flags.min_tokens.value_or(0);
  params.stop = flags.stop;
  params.stop_token_ids = flags.stop_token_ids;
  params.ignore_eos = flags.ignore_eos;
  params.include_stop_in_output = flags.include_stop;
  params.skip_special_tokens = !flags.keep_special_tokens;
  return params;
}

}  // namespace fathom
