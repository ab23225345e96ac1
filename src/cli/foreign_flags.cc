#include "cli/foreign_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>

#include "base/json.h"
#include "cli/foreign_flag_table.h"

namespace fathom {
namespace {

enum class Takes { kNothing, kOne, kSome, kMaybeOne };

// Maps other servers' values of a flag to the values here.
struct ValueRule {
  std::string_view flag, values;
  std::string_view value;  // the value here; empty: the default
  std::string_view note = "";
};

constexpr std::string_view kBf16 = "products take bfloat16, its 16 bits";
constexpr ValueRule kValueRules[] = {
    {"max-model-len", "auto -1 0", ""},
    {"max-num-seqs", "-1", ""},
    {"seed", "-1", ""},
    {"threads", "-1", ""},
    {"max-num-batched-tokens", "-1", "", "long prompts are always computed in chunks"},
    {"dtype", "half float16 fp16", "bfloat16", kBf16},
    {"dtype", "bf16", "bfloat16"},
    {"dtype", "float fp32 f32", "float32"},
    {"kv-cache-dtype", "bfloat16", "bf16"},
    {"kv-cache-dtype", "float16 half f16", "bf16", "the latent cache has bf16, its 16 bits"},
    {"kv-cache-dtype", "fp8_ds_mla", "fp8"},
    {"load-format", "safetensors fastsafetensors instanttensor runai_streamer layered hf", "auto"},
    {"device", "none", "cpu"},
    {"device", "gpu", "cuda"},
    {"quantization", "None", "none"},
    {"log-level", "critical", "error"},
    {"log-level", "warn", "warning"},
    {"log-level", "trace", "debug"},
    {"dataset-name", "random-ids", "random"},
    {"dataset-name", "prefix-repetition", "prefix_repetition"},
    {"sampling-defaults", "auto", "model"},
    {"sampling-defaults", "vllm", "openai"},
};

bool has_word(std::string_view words, std::string_view word) {
  for (size_t at = words.find(word); at != std::string_view::npos; at = words.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || words[at - 1] == ' ') && (end == words.size() || words[end] == ' ')) {
      return true;
    }
  }
  return false;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_number(std::string_view word) {
  const size_t digits = word.starts_with('-') ? 1 : 0;
  return word.size() > digits &&
         word.find_first_not_of("0123456789.,[]", digits) == std::string_view::npos;
}

// Values are "-", negative numbers, and words without a leading dash.
bool is_flag_word(std::string_view word) {
  return word.size() > 1 && word.starts_with('-') && !is_number(word);
}

bool is_no(std::string_view value) {
  return value == "false" || value == "False" || value == "0" || value == "off" || value == "no";
}

struct ForeignFlag {
  const ForeignGroup* group = nullptr;
  Takes takes = Takes::kNothing;
  bool negated = false;
};

using Groups = std::span<const ForeignGroup>;

// `name` has no leading dashes if it is a long flag.
std::optional<ForeignFlag> find_foreign(Groups groups, std::string_view name) {
  if (name.empty() || name.find(' ') != std::string_view::npos) return std::nullopt;
  for (const ForeignGroup& group : groups) {
    if (has_word(group.switches, name)) return ForeignFlag{&group, Takes::kNothing};
    if (has_word(group.values, name)) return ForeignFlag{&group, Takes::kOne};
    if (has_word(group.lists, name)) return ForeignFlag{&group, Takes::kSome};
    if (has_word(group.maybe_values, name)) return ForeignFlag{&group, Takes::kMaybeOne};
    if (name.starts_with("no-") && has_word(group.switches, name.substr(3))) {
      return ForeignFlag{&group, Takes::kNothing, true};
    }
  }
  return std::nullopt;
}

const CLI::Option* find_own(const CLI::App& command, std::string_view name) {
  const bool is_short = name.size() == 2 && name[0] == '-';
  for (const CLI::Option* option : command.get_options()) {
    if (is_short ? option->check_sname(std::string(1, name[1]))
                 : option->check_lname(std::string(name))) {
      return option;
    }
  }
  return nullptr;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }
bool takes_many(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}

bool is_same_model(const std::string& one, const std::string& other) {
  const auto plain = [](std::string path) {
    while (path.size() > 1 && path.ends_with('/')) path.pop_back();
    return path;
  };
  std::error_code failure;
  return plain(one) == plain(other) || std::filesystem::equivalent(one, other, failure);
}

bool is_bench(const CLI::App& command) {
  return command.get_parent() != nullptr && command.get_parent()->get_name() == "bench";
}

class Translator {
 public:
  Translator(const CLI::App& command, const std::vector<std::string>& words)
      : command_(command),
        words_(words),
        groups_(is_bench(command) ? load_groups() : server_groups()),
        serves_(!is_bench(command)) {}

  Result<LaunchLine> run(const std::string& model) {
    model_ = model;
    while (at_ < words_.size()) {
      const std::string& word = words_[at_];
      if (word == "--") break;
      if (!is_flag_word(word)) {
        if (model_.empty()) model_ = word;
        line_.arguments.push_back(words_[at_++]);
        continue;
      }
      ++at_;
      FATHOM_RETURN_IF_ERROR(take_flag(word));
    }
    line_.arguments.insert(line_.arguments.end(), words_.begin() + static_cast<std::ptrdiff_t>(at_),
                           words_.end());
    if (!tokenizer_.empty() && !is_same_model(tokenizer_, model_)) {
      // A hub's name, beside MODEL's folder, is the same tokenizer under another name.
      std::error_code ignored;
      if (std::filesystem::exists(tokenizer_, ignored)) {
        return invalid(
            "--tokenizer is \"{}\", allowed is MODEL: a model has its own tokenizer.json",
            tokenizer_);
      }
      note(fmt::format("--tokenizer {} has no effect: MODEL's tokenizer.json is read", tokenizer_));
    }
    if (!generation_config_.empty() && !is_same_model(generation_config_, model_)) {
      note(fmt::format(
          "--generation-config {} has no effect: MODEL's generation_config.json is read",
          generation_config_));
    }
    return std::move(line_);
  }

 private:
  // The known flag in a word, without its value; also for "--max_model_len" and
  // "--compilation-config.level".
  std::string known_name(const std::string& written) const {
    const auto known = [this](const std::string& name) {
      return find_own(command_, name) != nullptr || find_foreign(groups_, name) ||
             (serves_ && name == "tokenizer") ||
             (name.starts_with("no-") && find_own(command_, name.substr(3)) != nullptr);
    };
    std::string name = written.starts_with("--") ? written.substr(2) : written;
    if (known(name)) return name;
    std::replace(name.begin(), name.end(), '_', '-');
    if (known(name)) return name;
    name = name.substr(0, name.find('.'));
    if (known(name)) return name;
    return written.starts_with("-O") ? "-O" : "";
  }

  Result<> take_flag(const std::string& word) {
    const size_t equals = word.find('=');
    const std::string written = word.substr(0, equals);
    std::optional<std::string> value;
    if (equals != std::string::npos) value = word.substr(equals + 1);
    const std::string name = known_name(written);
    if (serves_ && name == "tokenizer") {
      FATHOM_TRY(tokenizer_, needed_value(written, value));
      return {};
    }
    if (const CLI::Option* own = find_own(command_, name)) return take_own(word, *own, value);
    if (const auto foreign = find_foreign(groups_, name)) {
      return take_foreign(written, name, *foreign, value);
    }
    if (name.starts_with("no-") && !takes_value(*find_own(command_, name.substr(3)))) {
      line_.arguments.push_back("--" + name.substr(3) + "=false");
    } else {
      line_.arguments.push_back(word);
    }
    return {};
  }

  Result<std::string> needed_value(const std::string& flag,
                                   const std::optional<std::string>& value) {
    if (value) return *value;
    if (at_ == words_.size() || is_flag_word(words_[at_])) {
      return invalid("{} needs one value", flag);
    }
    return words_[at_++];
  }

  void note(const std::string& sentence) {
    auto& notes = line_.notes;
    if (std::find(notes.begin(), notes.end(), sentence) == notes.end()) notes.push_back(sentence);
  }

  Result<> take_own(const std::string& word, const CLI::Option& own,
                    std::optional<std::string> value) {
    // vLLM's -q is --quantization. Here it is --quiet, which is never followed by such a word.
    if (word == "-q" && at_ < words_.size() && has_word("auto none fp8", words_[at_])) {
      return say_alias("--quantization", words_[at_++]);
    }
    if (!takes_value(own)) {
      // Unchanged except for '_'.
      std::string flag = word.starts_with("--") ? "--" + known_name(word.substr(0, word.find('=')))
                                                : word.substr(0, word.find('='));
      line_.arguments.push_back(value ? flag + "=" + *value : flag);
      return {};
    }
    if (!value) {
      if (at_ == words_.size()) {  // the parser reports the missing value
        line_.arguments.push_back(word);
        return {};
      }
      value = words_[at_++];
    }
    const std::string flag = own.get_lnames().front();
    if (flag == "model") model_ = *value;
    FATHOM_RETURN_IF_ERROR(say(own, *value));
    // vLLM's "--served-model-name a b". Before MODEL is known, a further word may be MODEL.
    while (takes_many(own) && (!serves_ || !model_.empty()) && at_ < words_.size() &&
           !is_flag_word(words_[at_])) {
      FATHOM_RETURN_IF_ERROR(say(own, words_[at_++]));
    }
    return {};
  }

  // Adds a flag of the command, translating its value.
  Result<> say(const CLI::Option& own, const std::string& value) {
    const std::string& flag = own.get_lnames().front();
    for (const ValueRule& rule : kValueRules) {
      if (rule.flag != flag || !has_word(rule.values, value)) continue;
      if (!rule.note.empty())
        note(fmt::format("--{} {} has no effect: {}", flag, value, rule.note));
      if (!rule.value.empty()) {
        line_.arguments.push_back(fmt::format("--{}={}", flag, rule.value));
      }
      return {};
    }
    if (flag == "allowed-origins" && value.starts_with('[')) {  // vLLM's form: a JSON list
      FATHOM_TRY(const json::value list, parse_json(value, "--allowed-origins"));
      if (!list.is_array()) return invalid("--allowed-origins is not a list");
      for (const json::value& origin : list.get_array()) {
        if (!origin.is_string()) return invalid("--allowed-origins is not a list of texts");
        line_.arguments.push_back("--allowed-origins=" + std::string(origin.get_string()));
      }
      return {};
    }
    line_.arguments.push_back(fmt::format("--{}={}", flag, value));
    return {};
  }

  // As long as MODEL is unknown, it may follow a list of values.
  std::vector<std::string> following_values(Takes takes) {
    std::vector<std::string> values;
    while (at_ < words_.size() && !is_flag_word(words_[at_])) {
      if (takes == Takes::kMaybeOne && !values.empty()) break;
      if (serves_ && !values.empty() && model_.empty() && !is_number(words_[at_])) break;
      values.push_back(words_[at_++]);
    }
    return values;
  }

  Result<> take_foreign(const std::string& written, const std::string& name,
                        const ForeignFlag& flag, const std::optional<std::string>& given) {
    const ForeignGroup& group = *flag.group;
    std::string value = given.value_or("");
    if (flag.takes == Takes::kOne) {
      FATHOM_TRY(value, needed_value(written, given));
    } else if (flag.takes != Takes::kNothing && !given) {
      const auto values = following_values(flag.takes);
      if (values.empty() && flag.takes == Takes::kSome) {
        return invalid("{} needs a value", written);
      }
      value = fmt::format("{}", fmt::join(values, " "));
    }
    const bool is_switch = flag.takes == Takes::kNothing;
    const bool is_off = is_switch && (flag.negated != (given && is_no(*given)));
    switch (group.asked) {
      case Asked::kNote:
        if (name.ends_with("gpu-layers") || name == "-ngl") {
          if (value == "0") return say_alias("--device", "cpu");
        }
        // "--flag=false", or false in a file, is the same as no flag.
        if (!is_off || flag.negated) {
          note(fmt::format("{} has no effect: {}", written, group.reason));
        }
        return {};
      case Asked::kOnly:
        if (has_word(group.argument, value) || (value.empty() && flag.takes == Takes::kMaybeOne)) {
          return {};
        }
        return invalid("{} is \"{}\", allowed {} {}: {}", written, value,
                       group.argument.find(' ') == std::string_view::npos ? "is" : "are",
                       fmt::join(split(group.argument, ' '), ", "), group.reason);
      case Asked::kRefused:
        if (is_off) return {};
        return invalid("{} asks for what is not there: {}", written, group.reason);
      case Asked::kAlias:
        break;
    }
    if (is_switch) {
      const std::string own(group.argument);
      if (own.find('=') == std::string::npos) {
        line_.arguments.push_back(is_off ? own + "=false" : own);
      } else if (!is_off) {
        line_.arguments.push_back(own);
      }
      return {};
    }
    if (name == "generation-config" && !has_word("auto vllm", value)) {
      generation_config_ = value;  // compared with MODEL, which may follow
      return {};
    }
    // llama.cpp's lists are separated by commas.
    const bool is_list = name == "alias" || name == "-a" || name == "cors-origins";
    for (const std::string& one : is_list ? split(value, ',') : std::vector{value}) {
      FATHOM_RETURN_IF_ERROR(say_alias(group.argument, one));
    }
    return {};
  }

  Result<> say_alias(std::string_view flag, const std::string& value) {
    if (flag == "--tokenizer") {
      tokenizer_ = value;
      return {};
    }
    const CLI::Option* own = find_own(command_, flag.substr(2));
    if (own == nullptr) return invalid("{} has no flag {}", command_.get_name(), flag);
    return say(*own, value);
  }

  const CLI::App& command_;
  const std::vector<std::string>& words_;
  const Groups groups_;
  const bool serves_;  // the command has MODEL and a tokenizer; a load generator has no positionals
  size_t at_ = 0;
  std::string model_, tokenizer_, generation_config_;
  LaunchLine line_;
};

}  // namespace

Result<LaunchLine> translate_launch_line(const CLI::App& command,
                                         const std::vector<std::string>& arguments,
                                         const std::string& model) {
  return Translator(command, arguments).run(model);
}

bool is_foreign_flag(std::string_view name) {
  return name == "tokenizer" || find_foreign(server_groups(), name).has_value();
}

}  // namespace fathom
