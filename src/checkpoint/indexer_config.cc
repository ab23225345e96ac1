#include "checkpoint/indexer_config.h"

#include <algorithm>
#include <bit>

namespace fathom {
namespace {

constexpr int64_t kMaxIndexHeads = 256;
// Maximum width of an index head: the Hadamard transform and a row's single scale are for one
// vector.
constexpr int64_t kMaxIndexDim = 512;
constexpr int64_t kMaxFrequency = 1024;
constexpr std::string_view kSparseArchitecture = "DeepseekV32ForCausalLM";

bool contains_string(const json::value* array, std::string_view wanted) {
  if (array == nullptr || !array->is_array()) return false;
  return std::any_of(
      array->get_array().begin(), array->get_array().end(),
      [&](const json::value& item) { return item.is_string() && item.get_string() == wanted; });
}

// One entry of a list of layers; nothing for another value.
std::optional<bool> is_shared(std::string_view word) {
  if (word == "shared" || word == "S") return true;
  if (word == "full" || word == "F") return false;
  return std::nullopt;
}

// A list of words, or a string of letters, to [num_layers]. Entries of MTP layers may follow.
Result<std::vector<bool>> parse_list(const json::value& list, std::string_view key,
                                     const ModelConfig& config, const std::string& where) {
  std::vector<std::string> words;
  if (list.is_string()) {
    for (const char letter : list.get_string()) words.emplace_back(1, letter);
  } else if (list.is_array()) {
    for (const json::value& item : list.get_array()) {
      words.emplace_back(item.is_string() ? std::string(item.get_string()) : brief(item));
    }
  } else {
    return invalid("{}{} is {}, expected a list of \"full\" and \"shared\"", where, key,
                   brief(list));
  }
  const auto count = std::ssize(words);
  if (count != config.num_layers && count != config.num_layers + config.num_mtp_layers) {
    return invalid("{}{} has {} entries, expected {}, one a layer", where, key, count,
                   config.num_layers);
  }
  std::vector<bool> shared;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string& word = words[static_cast<size_t>(layer)];
    const auto value = is_shared(word);
    if (!value) {
      return invalid("{}{}[{}] is {:?}, supported are \"full\" and \"shared\"", where, key, layer,
                     word.substr(0, 60));
    }
    shared.push_back(*value);
  }
  return shared;
}

// Which layers have no indexer of their own: as a list, or as every how many layers one has.
Result<std::vector<bool>> parse_shared(const JsonFields& fields, const ModelConfig& config,
                                       const std::string& where) {
  for (const std::string_view key : {"indexer_types", "index_topk_pattern"}) {
    const json::value* list = fields.find(key);
    if (list == nullptr) continue;
    FATHOM_TRY(std::vector<bool> shared, parse_list(*list, key, config, where));
    if (shared.front()) {
      return invalid("{}{}[0] is \"shared\", but no layer before it chooses keys", where, key);
    }
    return shared;
  }
  FATHOM_TRY(const auto given, fields.optional_integer("index_topk_freq", 1, kMaxFrequency));
  const int64_t frequency = given.value_or(1);
  FATHOM_TRY(const auto first,
             fields.optional_integer("index_skip_topk_offset", 1, config.num_layers));
  std::vector<bool> shared;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const int64_t since = std::max<int64_t>(layer - first.value_or(2) + 1, 0);
    shared.push_back(since % frequency != 0);
  }
  return shared;
}

}  // namespace

bool declares_indexer(const JsonFields& fields, std::string_view model_type) {
  return model_type == "deepseek_v32" || model_type == "glm_moe_dsa" ||
         contains_string(fields.find("architectures"), kSparseArchitecture) ||
         fields.has("index_topk") || fields.has("index_n_heads") || fields.has("index_head_dim");
}

Result<IndexerConfig> parse_indexer(const JsonFields& fields, const ModelConfig& config,
                                    const std::string& where) {
  if (config.q_lora_rank == 0) {
    return invalid("{}q_lora_rank is missing; the indexer's queries are made from its output",
                   where);
  }
  IndexerConfig indexer;
  FATHOM_TRY(indexer.num_heads, fields.integer("index_n_heads", 1, kMaxIndexHeads));
  FATHOM_TRY(
      indexer.head_dim,
      fields.integer("index_head_dim", std::max<int64_t>(config.qk_rope_dim, 1), kMaxIndexDim));
  if (!std::has_single_bit(static_cast<uint64_t>(indexer.head_dim))) {
    return invalid("{}index_head_dim is {}, must be a power of two (Hadamard transform)", where,
                   indexer.head_dim);
  }
  FATHOM_TRY(indexer.topk, fields.integer("index_topk", 1, config.max_position));
  // transformers' files of GLM-5 leave it out.
  FATHOM_TRY(const auto interleaved, fields.optional_boolean("indexer_rope_interleave"));
  indexer.interleaved = interleaved.value_or(config.model_type == "glm_moe_dsa");
  FATHOM_TRY(indexer.shared, parse_shared(fields, config, where));
  FATHOM_TRY(const auto shares, fields.optional_boolean("index_share_for_mtp_iteration"));
  indexer.shares_drafts = shares.value_or(false);
  if (std::find(indexer.shared.begin(), indexer.shared.end(), true) == indexer.shared.end()) {
    indexer.shared.clear();
  }
  return indexer;
}

}  // namespace fathom
