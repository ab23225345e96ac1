#include "checkpoint/weight_names.h"

#include <algorithm>
#include <charconv>

#include "base/math.h"
#include "checkpoint/four_bit_layout.h"
#include "checkpoint/tensor_names.h"

namespace fathom {
namespace {

using namespace tensor_names;

constexpr std::string_view kWeight = ".weight";
// Suffixes of the tensors that quantization adds beside "X.weight".
constexpr std::string_view kScaleSuffixes[] = {".weight_scale_inv", ".weight_scale", kInputScale};

// Consumes a number such as "12." at the front of `text`. Nothing if there is none, or one with
// leading zeros, which no checkpoint has.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, failure] = std::from_chars(text.data(), end, number);
  if (failure != std::errc() || rest == end || *rest != '.' || number < 0) return std::nullopt;
  if (text.front() == '0' && number != 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(rest - text.data()) + 1);
  return number;
}

}  // namespace

std::string_view name_of(WeightGroup group) {
  switch (group) {
    case WeightGroup::kEmbedding:
      return "embedding";
    case WeightGroup::kAttention:
      return "attention";
    case WeightGroup::kDenseMlp:
      return "dense mlp";
    case WeightGroup::kExperts:
      return "experts";
    case WeightGroup::kSharedExperts:
      return "shared experts";
    case WeightGroup::kGate:
      return "gate";
    case WeightGroup::kNorms:
      return "norms";
    case WeightGroup::kHead:
      return "head";
    case WeightGroup::kMtp:
      return "mtp";
    case WeightGroup::kScales:
      return "scales";
  }
  return "?";
}

WeightNames::WeightNames(const ModelConfig& config) : config_(config) {
  const int64_t hidden = config.hidden;
  whole_ = {
      {std::string(kEmbedding), {config.vocab_size, hidden}, WeightGroup::kEmbedding, false, {}},
      {std::string(kFinalNorm), {hidden}, WeightGroup::kNorms, false, {}},
  };
  if (!config.tied_embeddings) {
    whole_.push_back(
        {std::string(kHead), {config.vocab_size, hidden}, WeightGroup::kHead, false, {}});
  }
  // The MTP module concatenates the next token's embedding and the hidden state; eh_proj reads
  // both.
  mtp_ = {
      {"embed_tokens.weight", {config.vocab_size, hidden}, WeightGroup::kMtp, false, {}},
      {"enorm.weight", {hidden}, WeightGroup::kMtp, false, {}},
      {"hnorm.weight", {hidden}, WeightGroup::kMtp, false, {}},
      {"eh_proj.weight", {hidden, 2 * hidden}, WeightGroup::kMtp, false, {}},
      {"shared_head.norm.weight", {hidden}, WeightGroup::kMtp, false, {}},
      {"shared_head.head.weight", {config.vocab_size, hidden}, WeightGroup::kMtp, false, {}},
  };
  add_attention();
  add_feed_forward();
}

void WeightNames::add_attention() {
  const int64_t hidden = config_.hidden;
  const int64_t heads = config_.num_heads;
  const auto norm = [&](std::string_view name, int64_t width) {
    layer_.push_back({std::string(name), {width}, WeightGroup::kNorms, false, {}});
  };
  const auto linear = [&](std::string_view name, int64_t rows, int64_t cols) {
    layer_.push_back({std::string(name), {rows, cols}, WeightGroup::kAttention, true, {}});
  };
  const auto bias = [&](std::string_view name, int64_t size) {
    layer_.push_back({std::string(name), {size}, WeightGroup::kAttention, false, {}});
  };
  const bool compressed = config_.q_lora_rank > 0;
  norm(kInputNorm, hidden);
  norm(kPostAttentionNorm, hidden);
  if (compressed) {
    linear(kQA, config_.q_lora_rank, hidden);
    if (config_.latent_norm) norm(kQANorm, config_.q_lora_rank);
    linear(kQB, heads * config_.qk_dim(), config_.q_lora_rank);
  } else {
    linear(kQ, heads * config_.qk_dim(), hidden);
  }
  if (config_.has_qkv_bias) bias(compressed ? kQBBias : kQBias, heads * config_.qk_dim());
  if (config_.gqa) {
    const int64_t size = config_.kv_lora_rank;
    linear(kK, size, hidden);
    linear(kV, size, hidden);
    if (config_.has_qkv_bias) bias(kKBias, size), bias(kVBias, size);
  } else {
    linear(kKvA, config_.latent_dim(), hidden);
    if (config_.has_qkv_bias) bias(kKvABias, config_.latent_dim());
    if (config_.latent_norm) norm(kKvANorm, config_.kv_lora_rank);
    linear(kKvB, heads * (config_.qk_nope_dim + config_.v_dim), config_.kv_lora_rank);
  }
  linear(kO, hidden, heads * config_.v_dim);
  if (config_.has_o_bias) bias(kOBias, hidden);
  if (config_.indexer) add_indexer(*config_.indexer);
}

void WeightNames::add_indexer(const IndexerConfig& indexer) {
  const int64_t hidden = config_.hidden, dim = indexer.head_dim;
  const auto attention = WeightGroup::kAttention;
  const auto name = [](std::string_view text) { return std::string(text); };
  indexer_.push_back(
      {name(kIndexQ), {indexer.num_heads * dim, config_.q_lora_rank}, attention, true, {}});
  indexer_.push_back({name(kIndexK), {dim, hidden}, attention, true, {}});
  indexer_.push_back({name(kIndexKNorm), {dim}, WeightGroup::kNorms, false, DType::kF32});
  indexer_.push_back({name(kIndexKNormBias), {dim}, WeightGroup::kNorms, false, DType::kF32});
  indexer_.push_back({name(kIndexWeights), {indexer.num_heads, hidden}, attention, false, {}});
}

void WeightNames::add_feed_forward() {
  const int64_t hidden = config_.hidden;
  const auto mlp = [&](std::vector<Part>& parts, std::string_view prefix, int64_t width,
                       WeightGroup group) {
    const auto named = [&](std::string_view name) {
      return std::string(prefix) + std::string(name);
    };
    parts.push_back({named(kGateProj), {width, hidden}, group, true, {}});
    parts.push_back({named(kUpProj), {width, hidden}, group, true, {}});
    parts.push_back({named(kDownProj), {hidden, width}, group, true, {}});
  };
  mlp(dense_, kMlp, config_.intermediate, WeightGroup::kDenseMlp);
  if (config_.num_experts == 0) return;
  const int64_t experts = config_.num_experts;
  moe_.push_back({std::string(kRouter), {experts, hidden}, WeightGroup::kGate, false, {}});
  if (config_.gate == GateKind::kSigmoidBias) {
    moe_.push_back({std::string(kRouterBias), {experts}, WeightGroup::kGate, false, DType::kF32});
  }
  if (config_.num_shared_experts > 0) {
    mlp(moe_, kSharedExperts, config_.num_shared_experts * config_.moe_intermediate,
        WeightGroup::kSharedExperts);
  }
  mlp(expert_, "", config_.moe_intermediate, WeightGroup::kExperts);
}

bool WeightNames::is_quantized(const Part& part, std::string_view name) const {
  const QuantizationConfig& quantization = config_.quantization;
  if (!part.linear || quantization.kind == QuantizationConfig::Kind::kNone) return false;
  name.remove_suffix(kWeight.size());
  return std::none_of(
      quantization.ignored.begin(), quantization.ignored.end(), [&](const std::string& ignored) {
        return name == ignored || (name.starts_with(ignored) && name[ignored.size()] == '.');
      });
}

bool WeightNames::visit_part(const std::string& prefix, const Part& part, bool mtp,
                             const Visit& visit) const {
  PublishedTensor tensor{prefix + part.suffix, part.shape, config_.stored_dtype,
                         mtp ? WeightGroup::kMtp : part.group};
  if (part.dtype) tensor.dtype = *part.dtype;
  if (!is_quantized(part, tensor.name)) return visit(tensor);
  if (config_.quantization.is_four_bit()) return visit_four_bit(tensor, visit);

  tensor.dtype = DType::kF8E4M3;
  if (!visit(tensor)) return false;
  const std::string module = tensor.name.substr(0, tensor.name.size() - kWeight.size());
  PublishedTensor scale{module + ".weight_scale", {1}, DType::kF32, WeightGroup::kScales};
  const QuantizationConfig& quantization = config_.quantization;
  if (quantization.kind == QuantizationConfig::Kind::kFp8Block) {
    scale.name = module + ".weight_scale_inv";
    scale.shape = {ceil_div(part.shape[0], quantization.block_rows),
                   ceil_div(part.shape[1], quantization.block_cols)};
  } else if (quantization.kind == QuantizationConfig::Kind::kFp8Row) {
    scale.shape = {part.shape[0], 1};
  }
  if (!visit(scale)) return false;
  if (!quantization.static_activations) return true;
  return visit({module + std::string(kInputScale), {1}, DType::kF32, WeightGroup::kScales});
}

bool WeightNames::visit_four_bit(const PublishedTensor& weight, const Visit& visit) const {
  const std::string module = weight.name.substr(0, weight.name.size() - kWeight.size());
  const auto parts = four_bit_parts(config_.quantization, weight.shape[0], weight.shape[1]);
  return std::all_of(parts.begin(), parts.end(), [&](const FourBitPart& part) {
    if (!part.required) return true;
    const bool codes = part.role == FourBitPart::Role::kCodes;
    return visit({module + std::string(part.suffix), part.shape, part.dtype,
                  codes ? weight.group : WeightGroup::kScales});
  });
}

bool WeightNames::visit_layer(int64_t layer, const VisitPart& visit) const {
  const bool mtp = layer >= config_.num_layers;
  const std::string prefix = fmt::format("{}{}.", kLayers, layer);
  const auto all = [&](const std::vector<Part>& parts, const std::string& before) {
    return std::all_of(parts.begin(), parts.end(),
                       [&](const Part& part) { return visit(before, part, mtp); });
  };
  if (mtp && !all(mtp_, prefix)) return false;
  if (!all(layer_, prefix)) return false;
  if (config_.has_indexer(layer) && !all(indexer_, prefix)) return false;
  if (!config_.is_moe_layer(layer)) return all(dense_, prefix);
  if (!all(moe_, prefix)) return false;
  for (int64_t expert = 0; expert < config_.num_experts; ++expert) {
    if (!all(expert_, fmt::format("{}{}{}.", prefix, kExperts, expert))) return false;
  }
  return true;
}

void WeightNames::visit_parts(const VisitPart& visit) const {
  for (const Part& part : whole_) {
    if (!visit("", part, false)) return;
  }
  for (int64_t layer = 0; layer < config_.num_layers + config_.num_mtp_layers; ++layer) {
    if (!visit_layer(layer, visit)) return;
  }
}

void WeightNames::for_each(const Visit& visit) const {
  visit_parts([&](const std::string& prefix, const Part& part, bool mtp) {
    return visit_part(prefix, part, mtp, visit);
  });
}

void WeightNames::for_each_weight(const Visit& visit) const {
  visit_parts([&](const std::string& prefix, const Part& part, bool mtp) {
    return visit({prefix + part.suffix, part.shape, part.dtype.value_or(config_.stored_dtype),
                  mtp ? WeightGroup::kMtp : part.group});
  });
}

std::optional<std::string> WeightNames::weight_of_scale(std::string_view name) const {
  const auto weight = [&](std::string_view suffix) {
    return std::string(name.substr(0, name.size() - suffix.size())) + std::string(kWeight);
  };
  for (const std::string_view suffix : kScaleSuffixes) {
    if (name.ends_with(suffix)) return weight(suffix);
  }
  const size_t dot = name.rfind('.');
  if (!config_.quantization.is_four_bit() || dot == std::string_view::npos) return std::nullopt;
  if (!is_four_bit_companion(name.substr(dot))) return std::nullopt;
  return weight(name.substr(dot));
}

std::optional<WeightGroup> WeightNames::classify(std::string_view name) const {
  if (const auto weight = weight_of_scale(name)) {
    return classify(*weight) ? std::optional(WeightGroup::kScales) : std::nullopt;
  }
  if (config_.quantization.is_four_bit()) {
    const std::string_view codes = four_bit_codes_suffix(config_.quantization);
    if (name.ends_with(codes)) {
      const auto module = name.substr(0, name.size() - codes.size());
      const std::string weight = std::string(module) + std::string(kWeight);
      return is_linear(weight) ? classify(weight) : std::nullopt;
    }
  }
  int64_t layer = 0;
  const Part* part = find_part(name, &layer);
  if (part == nullptr) return std::nullopt;
  return layer >= config_.num_layers ? WeightGroup::kMtp : part->group;
}

bool WeightNames::is_linear(std::string_view name) const {
  int64_t layer = 0;
  const Part* part = find_part(name, &layer);
  return part != nullptr && part->linear;
}

const WeightNames::Part* WeightNames::find_part(std::string_view name, int64_t* layer) const {
  for (const Part& part : whole_) {
    if (name == part.suffix) return &part;
  }
  if (!name.starts_with(kLayers)) return nullptr;
  name.remove_prefix(kLayers.size());
  const auto number = take_number(name);
  if (!number || *number >= config_.num_layers + config_.num_mtp_layers) return nullptr;
  *layer = *number;
  return find_in_layer(*number, name);
}

const WeightNames::Part* WeightNames::find_in_layer(int64_t layer, std::string_view rest) const {
  const auto among = [&](const std::vector<Part>& parts) -> const Part* {
    for (const Part& part : parts) {
      if (rest == part.suffix) return &part;
    }
    return nullptr;
  };
  if (const Part* part = among(layer_)) return part;
  if (layer >= config_.num_layers) {
    if (const Part* part = among(mtp_)) return part;
  }
  if (config_.has_indexer(layer)) {
    if (const Part* part = among(indexer_)) return part;
  }
  if (!config_.is_moe_layer(layer)) return among(dense_);
  if (!rest.starts_with(kExperts)) return among(moe_);
  rest.remove_prefix(kExperts.size());
  const auto expert = take_number(rest);
  if (!expert || *expert >= config_.num_experts) return nullptr;
  return among(expert_);
}

bool is_ignored_tensor(std::string_view name) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  // In Kimi K2.5's files, and in those that transformers writes of it.
  if (name.starts_with("model.")) name.remove_prefix(std::string_view("model.").size());
  constexpr std::string_view kPictures[] = {"vision_tower.", "vision_model.", "visual.",
                                            "mm_projector.", "multi_modal_projector."};
  return std::any_of(std::begin(kPictures), std::end(kPictures),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

std::string without_prefix(std::string_view name) {
  constexpr std::string_view kBefore = "language_model.", kInside = "model.language_model.";
  if (name.starts_with(kBefore)) return std::string(name.substr(kBefore.size()));
  if (name.starts_with(kInside)) return "model." + std::string(name.substr(kInside.size()));
  return std::string(name);
}

}  // namespace fathom
