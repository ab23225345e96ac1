#include "checkpoint/model_config.h"

#include <cmath>

#include "base/json.h"
#include "checkpoint/generation_config.h"
#include "checkpoint/indexer_config.h"
#include "checkpoint/other_architectures.h"
#include "checkpoint/quantization_config.h"

namespace fathom {
namespace {

// Upper limits, several times the largest published model. Nothing is allocated by these numbers
// before the files are known to match them; the limits keep products within 64 bits.
constexpr int64_t kMaxVocab = 1 << 24;
constexpr int64_t kMaxWidth = 1 << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxMtpLayers = 8;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1 << 14;
constexpr int64_t kMaxLoraRank = 1 << 16;
constexpr int64_t kMaxExperts = 1 << 14;
constexpr int64_t kMaxPosition = 1 << 30;
constexpr int64_t kMaxExpertsInAll = 1 << 18;  // layers times experts; Kimi K2 has 23,424

// Reads one config.json: its fields, the prefix of errors, and the result. `outer` has the fields
// around a text_config, where storage may be described; the same object if there is none.
class ConfigReader {
 public:
  ConfigReader(const json::object& object, std::string where, const json::object& outer,
               std::string outer_where)
      : fields_(object, where),
        where_(std::move(where)),
        outer_(outer, outer_where),
        outer_where_(std::move(outer_where)) {}

  Result<ModelConfig> read() {
    FATHOM_RETURN_IF_ERROR(read_family());
    FATHOM_RETURN_IF_ERROR(read_sizes());
    FATHOM_RETURN_IF_ERROR(read_attention());
    FATHOM_RETURN_IF_ERROR(read_indexer());
    FATHOM_RETURN_IF_ERROR(read_rope());
    FATHOM_RETURN_IF_ERROR(read_feed_forward());
    FATHOM_RETURN_IF_ERROR(read_tokens());
    FATHOM_RETURN_IF_ERROR(read_storage());
    return std::move(config_);
  }

 private:
  Result<> read_family() {
    FATHOM_TRY(config_.model_type, outer_.string("model_type"));
    config_.is_known_type = is_known_model_type(config_.model_type);
    FATHOM_RETURN_IF_ERROR(check_architecture(fields_, config_.model_type, where_));
    FATHOM_TRY(const auto activation, fields_.optional_string("hidden_act"));
    if (activation && *activation != "silu") {
      return invalid("{}hidden_act is {:?}, supported is \"silu\"", where_, *activation);
    }
    // Options that no published model of the family sets, and that change the meaning of its
    // weights.
    FATHOM_RETURN_IF_ERROR(require_switch("mlp_bias", false));
    FATHOM_RETURN_IF_ERROR(require_switch("rope_interleave", true));
    FATHOM_TRY(const auto tied, fields_.optional_boolean("tie_word_embeddings"));
    config_.tied_embeddings = tied.value_or(false);
    return {};
  }

  Result<> require_switch(std::string_view key, bool supported) {
    FATHOM_TRY(const auto value, fields_.optional_boolean(key));
    if (value.value_or(supported) != supported) {
      return invalid("{}{} is {}, supported is {}", where_, key, !supported, supported);
    }
    return {};
  }

  Result<> read_sizes() {
    FATHOM_TRY(config_.vocab_size, fields_.integer("vocab_size", 1, kMaxVocab));
    FATHOM_TRY(config_.hidden, fields_.integer("hidden_size", 1, kMaxWidth));
    FATHOM_TRY(config_.num_layers, fields_.integer("num_hidden_layers", 1, kMaxLayers));
    FATHOM_TRY(const auto mtp,
               fields_.optional_integer("num_nextn_predict_layers", 0, kMaxMtpLayers));
    config_.num_mtp_layers = mtp.value_or(0);
    FATHOM_TRY(config_.max_position, fields_.integer("max_position_embeddings", 1, kMaxPosition));
    FATHOM_TRY(const auto eps, number("rms_norm_eps", 1e-12, 1));
    config_.rms_norm_eps = eps;
    return {};
  }

  Result<> read_attention() {
    FATHOM_TRY(config_.num_heads, fields_.integer("num_attention_heads", 1, kMaxHeads));
    FATHOM_TRY(const auto bias, fields_.optional_boolean("attention_bias"));
    config_.has_qkv_bias = bias.value_or(false);
    if (is_grouped_query(fields_, config_.model_type)) return read_grouped_query();
    FATHOM_TRY(const auto norm, fields_.optional_boolean("qk_latent_layernorm"));
    config_.latent_norm = norm.value_or(true);
    FATHOM_TRY(const auto kv_heads, fields_.optional_integer("num_key_value_heads", 1, kMaxHeads));
    if (kv_heads.value_or(config_.num_heads) != config_.num_heads) {
      return invalid("{}num_key_value_heads is {}, must equal num_attention_heads, {}", where_,
                     *kv_heads, config_.num_heads);
    }
    FATHOM_TRY(const auto q_rank, fields_.optional_integer("q_lora_rank", 1, kMaxLoraRank));
    config_.q_lora_rank = q_rank.value_or(0);
    FATHOM_TRY(config_.kv_lora_rank, fields_.integer("kv_lora_rank", 1, kMaxLoraRank));
    FATHOM_TRY(config_.qk_nope_dim, fields_.integer("qk_nope_head_dim", 1, kMaxHeadDim));
    FATHOM_TRY(config_.qk_rope_dim, fields_.integer("qk_rope_head_dim", 0, kMaxHeadDim));
    FATHOM_TRY(config_.v_dim, fields_.integer("v_head_dim", 1, kMaxHeadDim));
    if (config_.qk_rope_dim % 2 != 0) {
      return invalid("{}qk_rope_head_dim is {}, must be even (rotated in pairs)", where_,
                     config_.qk_rope_dim);
    }
    // Written by convert_checkpoint() alone.
    FATHOM_TRY(const auto rope_heads, fields_.optional_integer("qk_rope_heads", 1, kMaxHeads));
    config_.rope_heads = rope_heads.value_or(1);
    if (config_.qk_rope_dim % (2 * config_.rope_heads) != 0) {
      return invalid("{}qk_rope_heads is {}, qk_rope_head_dim, {}, is not that many even parts",
                     where_, config_.rope_heads, config_.qk_rope_dim);
    }
    return {};
  }

  // Llama, Mistral and Qwen2, which has biases without saying so.
  Result<> read_grouped_query() {
    const bool is_qwen = config_.model_type == "qwen2";
    config_.has_o_bias = config_.has_qkv_bias && !is_qwen;
    config_.has_qkv_bias = config_.has_qkv_bias || is_qwen;
    GroupedQueryConfig gqa;
    FATHOM_TRY(const auto kv_heads,
               fields_.optional_integer("num_key_value_heads", 1, config_.num_heads));
    gqa.kv_heads = kv_heads.value_or(config_.num_heads);
    if (config_.num_heads % gqa.kv_heads != 0) {
      return invalid("{}num_key_value_heads is {}, must divide num_attention_heads, {}", where_,
                     gqa.kv_heads, config_.num_heads);
    }
    FATHOM_TRY(const auto head_dim, fields_.optional_integer("head_dim", 2, kMaxHeadDim));
    if (!head_dim && config_.hidden % config_.num_heads != 0) {
      return invalid("{}hidden_size is {}, must be a multiple of num_attention_heads, {}", where_,
                     config_.hidden, config_.num_heads);
    }
    gqa.head_dim = head_dim.value_or(config_.hidden / config_.num_heads);
    if (gqa.head_dim < 2 || gqa.head_dim % 2 != 0 || gqa.kv_heads * gqa.head_dim > kMaxLoraRank) {
      return invalid("{}head_dim is {} in {} KV heads, must be even and at most {} in all", where_,
                     gqa.head_dim, gqa.kv_heads, kMaxLoraRank);
    }
    config_.kv_lora_rank = config_.qk_rope_dim = gqa.kv_heads * gqa.head_dim;
    config_.qk_nope_dim = config_.v_dim = gqa.head_dim;
    config_.latent_norm = false;
    config_.gqa = gqa;
    return {};
  }

  Result<> read_indexer() {
    if (!declares_indexer(fields_, config_.model_type)) return {};
    FATHOM_TRY(config_.indexer, parse_indexer(fields_, config_, where_));
    return {};
  }

  // Reads rope_theta and rope_scaling, or transformers 5's rope_parameters, which holds both.
  Result<> read_rope() {
    const json::value* scaling = nullptr;
    std::string key;
    for (const char* candidate : {"rope_parameters", "rope_scaling"}) {
      scaling = fields_.find(candidate);
      key = candidate;
      if (scaling != nullptr) break;
    }
    if (scaling != nullptr && !scaling->is_object()) {
      return invalid("{}{} is {}, expected an object", where_, key, brief(*scaling));
    }
    static const json::object kNone;
    const JsonFields rope(scaling == nullptr ? kNone : scaling->get_object(), where_ + key + ".");
    const bool theta_inside = rope.has("rope_theta");
    FATHOM_TRY(const auto theta,
               (theta_inside ? rope : fields_).optional_number("rope_theta", 1.001, 1e10));
    if (config_.qk_rope_dim == 0) return {};  // nothing is rotated
    if (!theta) return invalid("{}rope_theta is missing", where_);
    config_.rope_theta = *theta;
    if (scaling == nullptr) return {};
    FATHOM_TRY(const auto partial, rope.optional_number("partial_rotary_factor", 0, 1));
    if (partial.value_or(1) != 1) {
      return invalid("{}{}.partial_rotary_factor is {}; all of qk_rope_head_dim, {}, is rotated",
                     where_, key, *partial, config_.qk_rope_dim);
    }

    FATHOM_TRY(const auto rope_type, rope.optional_string("rope_type"));
    FATHOM_TRY(const auto type, rope.optional_string("type"));
    const std::string kind = rope_type ? *rope_type : type ? *type : "default";
    if (kind == "default") return {};
    if (kind == "llama3") return read_llama3(rope, key);
    if (kind != "yarn" || config_.gqa) {
      return invalid("{}{}.{} is {:?}, supported are \"{}\" and \"default\"", where_, key,
                     rope_type ? "rope_type" : "type", kind.substr(0, 60),
                     config_.gqa ? "llama3" : "yarn");
    }
    return read_yarn(rope, key);
  }

  Result<> read_llama3(const JsonFields& rope, const std::string& key) {
    Llama3RopeConfig llama3;
    for (const auto& [name, value] : {std::pair("factor", &llama3.factor),
                                      {"low_freq_factor", &llama3.low_freq_factor},
                                      {"high_freq_factor", &llama3.high_freq_factor}}) {
      FATHOM_TRY(const auto given, rope.optional_number(name, 1e-3, 1e6));
      if (!given) return invalid("{}{}.{} is missing", where_, key, name);
      *value = *given;
    }
    if (llama3.high_freq_factor <= llama3.low_freq_factor) {
      return invalid("{}{}.high_freq_factor is {}, must be above low_freq_factor, {}", where_, key,
                     llama3.high_freq_factor, llama3.low_freq_factor);
    }
    FATHOM_TRY(llama3.original_max_position,
               rope.integer("original_max_position_embeddings", 1, kMaxPosition));
    config_.llama3 = llama3;
    return {};
  }

  Result<> read_yarn(const JsonFields& rope, const std::string& key) {
    YarnConfig yarn;
    FATHOM_TRY(const auto factor, rope.optional_number("factor", 1, 1e6));
    if (!factor) return invalid("{}{}.factor is missing", where_, key);
    yarn.factor = *factor;
    FATHOM_TRY(yarn.original_max_position,
               rope.integer("original_max_position_embeddings", 1, kMaxPosition));
    FATHOM_TRY(const auto fast, rope.optional_number("beta_fast", 1e-3, 1e6));
    FATHOM_TRY(const auto slow, rope.optional_number("beta_slow", 1e-3, 1e6));
    yarn.beta_fast = fast.value_or(yarn.beta_fast);
    yarn.beta_slow = slow.value_or(yarn.beta_slow);
    if (yarn.beta_fast < yarn.beta_slow) {
      return invalid("{}{}.beta_fast is {}, must not be below beta_slow, {}", where_, key,
                     yarn.beta_fast, yarn.beta_slow);
    }
    FATHOM_TRY(const auto mscale, rope.optional_number("mscale", 0, 1000));
    FATHOM_TRY(const auto mscale_all_dim, rope.optional_number("mscale_all_dim", 0, 1000));
    yarn.mscale = mscale.value_or(yarn.mscale);
    yarn.mscale_all_dim = mscale_all_dim.value_or(yarn.mscale_all_dim);
    if (rope.has("attention_factor")) {
      return invalid("{}{}.attention_factor is not supported; mscale and mscale_all_dim are",
                     where_, key);
    }
    config_.yarn = yarn;
    return {};
  }

  Result<> read_feed_forward() {
    FATHOM_TRY(config_.intermediate, fields_.integer("intermediate_size", 1, kMaxWidth));
    // A model without any of these fields is dense; with one, all are required.
    bool moe = false;
    for (const char* key : {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"}) {
      moe = moe || fields_.has(key);
    }
    if (!moe) return {};
    FATHOM_TRY(config_.num_experts, fields_.integer("n_routed_experts", 1, kMaxExperts));
    if (config_.num_layers * config_.num_experts > kMaxExpertsInAll) {
      return invalid("{}n_routed_experts is {} in {} layers, the limit is {} in all", where_,
                     config_.num_experts, config_.num_layers, kMaxExpertsInAll);
    }
    FATHOM_TRY(const auto shared, fields_.optional_integer("n_shared_experts", 0, 64));
    config_.num_shared_experts = shared.value_or(0);
    FATHOM_TRY(config_.experts_per_token,
               fields_.integer("num_experts_per_tok", 1, config_.num_experts));
    FATHOM_TRY(config_.moe_intermediate, fields_.integer("moe_intermediate_size", 1, kMaxWidth));
    FATHOM_RETURN_IF_ERROR(read_dense_layers());
    FATHOM_TRY(const auto frequency, fields_.optional_integer("moe_layer_freq", 1, kMaxLayers));
    config_.moe_layer_freq = frequency.value_or(1);
    FATHOM_TRY(const auto scaling, number("routed_scaling_factor", 1e-6, 1e6));
    config_.routed_scaling = scaling;
    FATHOM_TRY(const auto normalize, fields_.optional_boolean("norm_topk_prob"));
    if (!normalize) return invalid("{}norm_topk_prob is missing", where_);
    config_.normalize_weights = *normalize;
    return read_gate();
  }

  // How many layers are dense, or transformers 5's list of them, in which they come first.
  Result<> read_dense_layers() {
    const json::value* types = fields_.find("mlp_layer_types");
    if (types == nullptr || fields_.has("first_k_dense_replace")) {
      FATHOM_TRY(config_.first_dense_layers,
                 fields_.integer("first_k_dense_replace", 0, config_.num_layers));
    }
    if (types == nullptr) return {};
    if (!types->is_array() || std::ssize(types->get_array()) != config_.num_layers) {
      return invalid("{}mlp_layer_types is {}, expected a list of {} entries, one a layer", where_,
                     brief(*types), config_.num_layers);
    }
    const json::array& layers = types->get_array();
    const auto is = [&](size_t layer, std::string_view kind) {
      return layers[layer].is_string() && layers[layer].get_string() == kind;
    };
    int64_t dense = 0;
    while (dense < config_.num_layers && is(static_cast<size_t>(dense), "dense")) ++dense;
    for (int64_t layer = dense; layer < config_.num_layers; ++layer) {
      if (is(static_cast<size_t>(layer), "sparse")) continue;
      return invalid("{}mlp_layer_types[{}] is {}; supported are dense layers, then sparse ones",
                     where_, layer, brief(layers[static_cast<size_t>(layer)]));
    }
    if (fields_.has("first_k_dense_replace") && dense != config_.first_dense_layers) {
      return invalid("{}first_k_dense_replace is {}, mlp_layer_types begins with {} dense layers",
                     where_, config_.first_dense_layers, dense);
    }
    config_.first_dense_layers = dense;
    return {};
  }

  // topk_method decides (DeepSeek's demo uses the hidden size instead). transformers 5 omits it
  // where the model type implies it.
  Result<> read_gate() {
    const bool v2 = config_.model_type == "deepseek_v2";
    FATHOM_TRY(const auto given, fields_.optional_string("topk_method"));
    const std::string method = given.value_or(v2 ? "greedy" : "noaux_tc");
    if (method == "greedy") {
      config_.gate = GateKind::kSoftmaxGreedy;
    } else if (method == "group_limited_greedy") {
      config_.gate = GateKind::kSoftmaxGroupLimited;
    } else if (method == "noaux_tc") {
      config_.gate = GateKind::kSigmoidBias;
    } else {
      return invalid(
          "{}topk_method is {:?}; supported are greedy, group_limited_greedy and noaux_tc", where_,
          method.substr(0, 60));
    }
    const std::string_view implied = config_.gate == GateKind::kSigmoidBias ? "sigmoid" : "softmax";
    FATHOM_TRY(const auto scoring, fields_.optional_string("scoring_func"));
    if (scoring && *scoring != implied) {
      return invalid("{}scoring_func is {:?}; with topk_method {:?} supported is {:?}", where_,
                     scoring->substr(0, 60), method, implied);
    }
    // Only the group-limited gates read the groups; greedy configurations may have null there.
    if (config_.gate == GateKind::kSoftmaxGreedy) return {};
    return read_groups();
  }

  Result<> read_groups() {
    FATHOM_TRY(config_.num_groups, fields_.integer("n_group", 1, config_.num_experts));
    FATHOM_TRY(config_.groups_per_token, fields_.integer("topk_group", 1, config_.num_groups));
    if (config_.num_experts % config_.num_groups != 0) {
      return invalid("{}n_group is {}, must divide n_routed_experts, {}", where_,
                     config_.num_groups, config_.num_experts);
    }
    const int64_t group_size = config_.num_experts / config_.num_groups;
    if (config_.gate == GateKind::kSigmoidBias && group_size < 2) {
      return invalid("{}n_group is {}: groups of {} expert, the gate sums the best two of each",
                     where_, config_.num_groups, group_size);
    }
    if (config_.experts_per_token > config_.groups_per_token * group_size) {
      return invalid("{}num_experts_per_tok is {}, the {} groups of topk_group have {} experts",
                     where_, config_.experts_per_token, config_.groups_per_token,
                     config_.groups_per_token * group_size);
    }
    return {};
  }

  Result<> read_tokens() {
    const int64_t last = config_.vocab_size - 1;
    FATHOM_TRY(const auto bos, fields_.optional_integer("bos_token_id", 0, last));
    if (bos) config_.bos_id = static_cast<int32_t>(*bos);
    const bool outside = !fields_.has("eos_token_id");
    FATHOM_TRY(config_.eos_ids, parse_token_ids(outside ? outer_ : fields_, "eos_token_id", last,
                                                outside ? outer_where_ : where_));
    return {};
  }

  Result<> read_storage() {
    FATHOM_TRY(const bool found, read_dtype(fields_, where_));
    if (!found) {
      if (const auto outer = read_dtype(outer_, outer_where_); !outer) {
        return tl::unexpected(outer.error());
      }
    }
    for (const auto& [fields, where] :
         {std::pair(&fields_, &where_), std::pair(&outer_, &outer_where_)}) {
      for (const char* spelling : {"quantization_config", "compression_config"}) {
        const json::value* value = fields->find(spelling);
        if (value == nullptr) continue;
        if (!value->is_object()) {
          return invalid("{}{} is {}, expected an object", *where, spelling, brief(*value));
        }
        FATHOM_TRY(config_.quantization,
                   parse_quantization_config(value->get_object(), *where + spelling + "."));
        return {};
      }
    }
    return {};
  }

  // The type of unquantized weights; false if it is not said.
  Result<bool> read_dtype(const JsonFields& fields, const std::string& where) {
    const char* key = fields.has("torch_dtype") ? "torch_dtype" : "dtype";  // transformers 5
    FATHOM_TRY(const auto dtype, fields.optional_string(key));
    if (!dtype) return false;
    if (*dtype == "bfloat16") {
      config_.stored_dtype = DType::kBF16;
    } else if (*dtype == "float16") {
      config_.stored_dtype = DType::kF16;
    } else if (*dtype == "float32") {
      config_.stored_dtype = DType::kF32;
    } else {
      return invalid("{}{} is {:?}; supported are bfloat16, float16 and float32", where, key,
                     dtype->substr(0, 60));
    }
    return true;
  }

  Result<double> number(std::string_view key, double min, double max) {
    FATHOM_TRY(const auto value, fields_.optional_number(key, min, max));
    if (!value) return invalid("{}{} is missing", where_, key);
    return *value;
  }

  JsonFields fields_;
  std::string where_;
  JsonFields outer_;
  std::string outer_where_;
  ModelConfig config_;
};

}  // namespace

double ModelConfig::softmax_scale() const {
  const double scale = 1 / std::sqrt(static_cast<double>(qk_dim()));
  if (!yarn || yarn->mscale_all_dim == 0 || yarn->factor <= 1) return scale;
  const double g = 0.1 * yarn->mscale_all_dim * std::log(yarn->factor) + 1;
  return scale * g * g;
}

Result<ModelConfig> parse_model_config(std::string_view text, std::string_view source) {
  FATHOM_TRY(const json::value value, parse_json(text, source));
  if (!value.is_object()) {
    return invalid("{}: is {}, expected an object", source, brief(value));
  }
  const json::object& outer = value.get_object();
  const std::string where = fmt::format("{}: ", source);
  // A model that also takes pictures has its language model's fields in an object of their own.
  const json::value* inner = outer.if_contains("text_config");
  if (inner == nullptr || inner->is_null()) return ConfigReader(outer, where, outer, where).read();
  if (!inner->is_object()) {
    return invalid("{}text_config is {}, expected an object", where, brief(*inner));
  }
  return ConfigReader(inner->get_object(), where + "text_config.", outer, where).read();
}

}  // namespace fathom
