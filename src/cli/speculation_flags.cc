#include "cli/speculation_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>

#include "base/json.h"
#include "base/log.h"
#include "model/forward_batch.h"

namespace fathom {
namespace {

constexpr std::string_view kConfig = "--speculative-config";
// vLLM's names of the MTP layer's method.
constexpr std::array<std::string_view, 2> kMethods = {"mtp", "deepseek_mtp"};

// What a flag asks for.
struct Wanted {
  std::string flag;
  int64_t drafts = 0;
};

// The drafts of vLLM's JSON; none: it asks for another method.
Result<std::optional<int64_t>> drafts_of_config(const std::string& text) {
  auto parsed = parse_json(text, kConfig);
  if (!parsed) return tl::unexpected<Status>(parsed.error());
  const json::object* const config = parsed->if_object();
  if (config == nullptr) return invalid("{} is no JSON object", kConfig);
  const json::value* const method = config->if_contains("method");
  if (method != nullptr && !method->is_string()) {
    return invalid("{}: method is no string", kConfig);
  }
  const std::string_view name = method == nullptr ? "" : std::string_view(method->get_string());
  if (std::find(kMethods.begin(), kMethods.end(), name) == kMethods.end()) {
    log_warning("{}: method '{}' is not there, only mtp; answers are the same without drafts",
                kConfig, name);
    return std::nullopt;
  }
  const json::value* const drafts = config->if_contains("num_speculative_tokens");
  if (drafts == nullptr) return std::optional<int64_t>(1);
  if (!drafts->is_int64() || drafts->get_int64() < 0 || drafts->get_int64() > kMaxDrafts) {
    return invalid("{}: num_speculative_tokens is {}, allowed are 0 to {}", kConfig,
                   json::serialize(*drafts), kMaxDrafts);
  }
  return std::optional<int64_t>(drafts->get_int64());
}

Result<std::optional<Wanted>> wanted_drafts(const SpeculationFlags& flags) {
  if (flags.is_off && flags.drafts.value_or(0) > 0) {
    return invalid("--mtp {} and --no-mtp contradict each other", *flags.drafts);
  }
  if (flags.is_off) return Wanted{"--no-mtp", 0};
  if (flags.drafts && !flags.config.empty()) {
    return invalid("--mtp {} and {} both say how many drafts there are", *flags.drafts, kConfig);
  }
  if (flags.drafts) return Wanted{fmt::format("--mtp {}", *flags.drafts), *flags.drafts};
  if (flags.config.empty()) return std::nullopt;
  FATHOM_TRY(const std::optional<int64_t> drafts, drafts_of_config(flags.config));
  if (!drafts) return std::nullopt;
  return Wanted{std::string(kConfig), *drafts};
}

}  // namespace

void add_speculation_flags(CLI::App& app, SpeculationFlags* flags) {
  FlagGroup group(app, "Speculation");
  group.count("--mtp,--speculative-num-steps", &flags->drafts, 0, kMaxDrafts,
              "Most tokens of a sequence that the model's MTP layer drafts for a step; fewer where "
              "they do not pay. Answers are the same",
              kDefaultDrafts == 0 ? "0" : fmt::format("{}, on the CPU", kDefaultDrafts));
  group.toggle("--no-mtp", &flags->is_off, "No drafts; the MTP layer is not loaded");
  group.toggle("--mtp-always", &flags->is_always,
               "As many drafts as --mtp says in every step, also where they do not pay");
  group.text(std::string(kConfig), &flags->config, "JSON",
             R"(vLLM's form: {"method": "mtp", "num_speculative_tokens": K})");
}

Result<int64_t> drafts_of(const SpeculationFlags& flags, const Checkpoint& checkpoint) {
  FATHOM_TRY(const std::optional<Wanted> wanted, wanted_drafts(flags));
  const int64_t drafts = wanted ? wanted->drafts : kDefaultDrafts;
  if (drafts == 0) return 0;
  const bool has_layer = checkpoint.config().num_mtp_layers > 0;
  const auto missing = has_layer ? checkpoint.missing_mtp_tensor() : std::nullopt;
  if (!wanted) {
    // Drafts from random weights are never right.
    return has_layer && !missing && !checkpoint.is_dummy() ? drafts : 0;
  }
  if (!has_layer) {
    log_warning("{}: {} has no MTP layer, it runs without drafts", wanted->flag,
                checkpoint.directory());
    return 0;
  }
  if (missing) {
    return invalid(
        "{}: config.json names an MTP layer, its tensor {:?} is missing; --no-mtp runs the model "
        "without it",
        checkpoint.directory(), *missing);
  }
  return drafts;
}

}  // namespace fathom
