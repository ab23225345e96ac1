#include "cli/inspect_command.h"

#include "base/json.h"
#include "cache/latent_layout.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/inventory.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/memory_plan.h"
#include "engine/gpu_runner.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

constexpr CacheFormat kFormats[] = {CacheFormat::kF32, CacheFormat::kBF16, CacheFormat::kFp8Scaled,
                                    CacheFormat::kE4M3, CacheFormat::kE5M2};

std::string_view gate_text(GateKind gate) {
  switch (gate) {
    case GateKind::kSoftmaxGreedy:
      return "softmax, greedy";
    case GateKind::kSoftmaxGroupLimited:
      return "softmax, group-limited";
    case GateKind::kSigmoidBias:
      return "sigmoid with bias";
  }
  return "?";
}

std::string four_bit_text(std::string_view what, const QuantizationConfig& quantization) {
  const std::string group = quantization.group_cols == 0
                                ? "one scale a row"
                                : fmt::format("groups of {}", quantization.group_cols);
  return fmt::format("{}, {}{}", what, group, quantization.symmetric ? "" : ", zero points");
}

std::string storage_text(const ModelConfig& config) {
  const QuantizationConfig& quantization = config.quantization;
  switch (quantization.kind) {
    case QuantizationConfig::Kind::kNone:
      return std::string(name_of(config.stored_dtype));
    case QuantizationConfig::Kind::kFp8Block:
      return fmt::format("e4m3 in blocks of {}x{}, scales {}", quantization.block_rows,
                         quantization.block_cols,
                         quantization.scales_are_powers_of_two ? "ue8m0" : "f32");
    case QuantizationConfig::Kind::kFp8Tensor:
      return "e4m3, one scale a tensor";
    case QuantizationConfig::Kind::kFp8Row:
      return "e4m3, one scale a row";
    case QuantizationConfig::Kind::kPackedInt4:
      return four_bit_text("INT4", quantization);
    case QuantizationConfig::Kind::kAwq:
      return four_bit_text("INT4 (AWQ)", quantization);
    case QuantizationConfig::Kind::kGptq:
      return four_bit_text("INT4 (GPTQ)", quantization);
    case QuantizationConfig::Kind::kMxfp4:
      return four_bit_text("MXFP4", quantization);
    case QuantizationConfig::Kind::kNvfp4:
      return four_bit_text("NVFP4", quantization);
  }
  return "?";
}

// The plan that `run` would use by default: the machine's free memory as the budget, a bf16 cache,
// and one sequence of full length, or as much of it as fits.
Result<MemoryPlan> default_plan(const ModelConfig& config, const Inventory& inventory) {
  MemoryRequest request;
  request.budget = available_memory().bytes;
  request.fixed = weight_lines(inventory, false);
  request.cache_row_bytes = latent_layout(config, CacheFormat::kBF16).row_bytes();
  request.index_key_bytes = index_key_bytes(config, CacheFormat::kBF16);
  request.cache_layers = config.num_layers;
  request.index_key_layers = config.num_indexers();
  request.page_tokens = kPageSize;
  FATHOM_TRY(MemoryPlan plan, plan_memory(request));
  if (plan.tokens() <= config.max_position) return plan;
  request.max_total_tokens = config.max_position;
  return plan_memory(request);
}

int64_t num_moe_layers(const ModelConfig& config) {
  int64_t count = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) count += config.is_moe_layer(layer);
  return count;
}

std::string attention_text(const ModelConfig& config) {
  std::string text;
  if (config.gqa) {
    text = fmt::format("{} heads, {} KV heads of {}", config.num_heads, config.gqa->kv_heads,
                       config.gqa->head_dim);
    if (config.has_qkv_bias)
      text += config.has_o_bias ? ", biases of q, k, v and o" : ", biases of q, k and v";
  } else {
    text = fmt::format("{} heads, q_lora {}, kv_lora {}, nope {}, rope {}, v {}", config.num_heads,
                       config.q_lora_rank, config.kv_lora_rank, config.qk_nope_dim,
                       config.qk_rope_dim, config.v_dim);
    if (config.rope_heads > 1) text += fmt::format(" (rope of {} heads)", config.rope_heads);
    if (config.has_qkv_bias) text += ", biases of q and kv_a";
    if (!config.latent_norm) text += ", no norm on the latent";
  }
  return text + fmt::format(", softmax scale {:.7f}", config.softmax_scale());
}

void print_config(const Checkpoint& checkpoint, std::FILE* out) {
  const ModelConfig& config = checkpoint.config();
  const auto line = [&](std::string_view what, const std::string& text) {
    fmt::print(out, "  {:<11} {}\n", what, text);
  };
  fmt::print(out, "{}\n", checkpoint.directory());
  const int64_t moe = num_moe_layers(config);
  line("type", fmt::format("{}, {} layers ({} dense, {} MoE), {} MTP", config.model_type,
                           config.num_layers, config.num_layers - moe, moe, config.num_mtp_layers));
  line("sizes", fmt::format("hidden {}, vocabulary {}, positions {}, dense MLP {}", config.hidden,
                            config.vocab_size, config.max_position, config.intermediate) +
                    (config.tied_embeddings ? ", the embedding is the head" : ""));
  line("attention", attention_text(config));
  line("rope", config.yarn
                   ? fmt::format("theta {}, YaRN factor {} over {} positions", config.rope_theta,
                                 config.yarn->factor, config.yarn->original_max_position)
                   : fmt::format("theta {}", config.rope_theta));
  if (config.indexer) {
    line("indexer", fmt::format("{} heads of {}, {} keys a row, in {} of {} layers",
                                config.indexer->num_heads, config.indexer->head_dim,
                                config.indexer->topk, config.num_indexers(), config.num_layers));
  }
  if (config.num_experts > 0) {
    line("experts",
         fmt::format("{} of width {}, {} a token from {} of {} groups, {} shared",
                     config.num_experts, config.moe_intermediate, config.experts_per_token,
                     config.groups_per_token, config.num_groups, config.num_shared_experts));
    line("gate", fmt::format("{}, {}, times {}", gate_text(config.gate),
                             config.normalize_weights ? "normalised" : "not normalised",
                             config.routed_scaling));
  }
  line("storage", fmt::format("{}, {} file(s)", storage_text(config), checkpoint.files().size()));
}

void print_tensors(const ModelConfig& config, const Inventory& inventory, std::FILE* out) {
  const auto row = [&](std::string_view what, const GroupTotals& totals) {
    fmt::print(out, "  {:<16}{:>10}{:>20}{:>20}\n", what, totals.tensors, totals.parameters,
               totals.bytes);
  };
  fmt::print(out, "\n  {:<16}{:>10}{:>20}{:>20}\n", "Tensors", "count", "parameters", "bytes");
  for (int i = 0; i < kNumWeightGroups; ++i) {
    const auto group = static_cast<WeightGroup>(i);
    if (inventory.of(group).tensors > 0) row(name_of(group), inventory.of(group));
  }
  row("in all", inventory.total());
  if (inventory.unused.tensors > 0) row("not used", inventory.unused);
  fmt::print(out, "  active per token: {} parameters\n", inventory.active_parameters(config));
}

void print_cache(const ModelConfig& config, std::FILE* out) {
  fmt::print(out, "\nCache bytes per token\n");
  for (const CacheFormat format : kFormats) {
    const int64_t index_key = index_key_bytes(config, format);
    std::string parts =
        fmt::format("{} x {} layers", latent_layout(config, format).row_bytes(), config.num_layers);
    if (index_key > 0) {
      parts += fmt::format(", index keys {} x {}", index_key, config.num_indexers());
    }
    fmt::print(out, "  {:<9}{:>10}  {}\n", name_of(format), cache_token_bytes(config, format),
               parts);
  }
}

// Prints the memory that `run` would take on the first GPU besides the cache, in the types that a
// GPU stores.
void print_gpu(const Checkpoint& checkpoint, std::FILE* out) {
  if (num_gpus() == 0) return;
  const auto memory = gpu_memory(checkpoint, GpuRunnerOptions());
  if (!memory) {
    fmt::print(out, "\nGPU memory: {}\n", memory.error().message);
    return;
  }
  const auto line = [&](std::string_view what, int64_t bytes) {
    fmt::print(out, "  {:<28}{:>12.4f} GiB\n", what, static_cast<double>(bytes) / (1 << 30));
  };
  fmt::print(out, "\nGPU memory, {}\n", gpu_name(0));
  line("weights", memory->weights);
  line("working space", memory->working_space);
  line("free", memory->free);
}

json::value gpu_json(const Checkpoint& checkpoint) {
  if (num_gpus() == 0) return nullptr;
  const auto memory = gpu_memory(checkpoint, GpuRunnerOptions());
  if (!memory) return {{"error", memory.error().message}};
  return {{"weight_bytes", memory->weights},
          {"working_space_bytes", memory->working_space},
          {"free_bytes", memory->free}};
}

json::object totals_json(const GroupTotals& totals) {
  return {{"tensors", totals.tensors}, {"parameters", totals.parameters}, {"bytes", totals.bytes}};
}

json::value indexer_json(const ModelConfig& config) {
  if (!config.indexer) return nullptr;
  return {{"num_heads", config.indexer->num_heads},
          {"head_dim", config.indexer->head_dim},
          {"topk", config.indexer->topk},
          {"num_layers", config.num_indexers()},
          {"interleaved", config.indexer->interleaved}};
}

json::object config_json(const ModelConfig& config) {
  return {{"model_type", config.model_type},
          {"hidden_size", config.hidden},
          {"vocab_size", config.vocab_size},
          {"tied_embeddings", config.tied_embeddings},
          {"num_layers", config.num_layers},
          {"num_moe_layers", num_moe_layers(config)},
          {"num_mtp_layers", config.num_mtp_layers},
          {"max_position", config.max_position},
          {"num_heads", config.num_heads},
          {"num_kv_heads", config.gqa ? json::value(config.gqa->kv_heads) : json::value(nullptr)},
          {"q_lora_rank", config.q_lora_rank},
          {"kv_lora_rank", config.kv_lora_rank},
          {"qk_nope_dim", config.qk_nope_dim},
          {"qk_rope_dim", config.qk_rope_dim},
          {"v_dim", config.v_dim},
          {"softmax_scale", config.softmax_scale()},
          {"rope_theta", config.rope_theta},
          {"yarn_factor", config.yarn ? json::value(config.yarn->factor) : json::value(nullptr)},
          {"indexer", indexer_json(config)},
          {"num_experts", config.num_experts},
          {"num_shared_experts", config.num_shared_experts},
          {"experts_per_token", config.experts_per_token},
          {"gate", gate_text(config.gate)},
          {"storage", storage_text(config)}};
}

void print_json(const Checkpoint& checkpoint, const Inventory& inventory,
                const Result<MemoryPlan>& plan, std::FILE* out) {
  const ModelConfig& config = checkpoint.config();
  json::object groups, cache, memory;
  for (int i = 0; i < kNumWeightGroups; ++i) {
    const auto group = static_cast<WeightGroup>(i);
    groups[name_of(group)] = totals_json(inventory.of(group));
  }
  for (const CacheFormat format : kFormats) {
    cache[name_of(format)] = cache_token_bytes(config, format);
  }
  if (plan) {
    memory = {{"weight_bytes", plan->fixed_bytes},
              {"available_bytes", plan->request.budget},
              {"page_tokens", plan->request.page_tokens},
              {"pages_that_fit", plan->pages_that_fit}};
  } else {
    memory = {{"error", plan.error().message}};
  }
  const json::object all = {{"directory", checkpoint.directory()},
                            {"files", checkpoint.files().size()},
                            {"config", config_json(config)},
                            {"groups", groups},
                            {"total", totals_json(inventory.total())},
                            {"unused", totals_json(inventory.unused)},
                            {"active_parameters", inventory.active_parameters(config)},
                            {"cache_bytes_per_token", cache},
                            {"memory", memory},
                            {"gpu_memory", gpu_json(checkpoint)}};
  fmt::print(out, "{}\n", json::serialize(all));
}

}  // namespace

// A checkpoint that cannot be run is described as far as possible, then the error is returned.
Result<> inspect(const std::string& model, bool json, std::FILE* out) {
  FATHOM_TRY(const Checkpoint checkpoint, Checkpoint::open(model));
  const Inventory inventory = take_inventory(checkpoint);
  const auto plan =
      default_plan(checkpoint.config(), take_loaded_inventory(checkpoint, LoadOptions()));
  if (json) {
    print_json(checkpoint, inventory, plan, out);
    return check_stored(checkpoint);
  }
  print_config(checkpoint, out);
  print_tensors(checkpoint.config(), inventory, out);
  print_cache(checkpoint.config(), out);
  // A model that does not fit can still be inspected.
  fmt::print(out, "\n{}", plan ? memory_plan_table(*plan) : plan.error().message + "\n");
  print_gpu(checkpoint, out);
  return check_stored(checkpoint);
}

}  // namespace fathom
