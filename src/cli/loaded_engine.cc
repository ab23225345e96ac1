#include "cli/loaded_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/log.h"
#include "base/math.h"
#include "cli/engine_faults.h"
#include "cli/node_engine.h"
#include "cli/rank_memory.h"
#include "engine/gpu_runner.h"
#include "model/gpu_support.h"
#include "model/layer_options.h"
#include "placement/expert_table_file.h"

namespace fathom {
namespace {

// The default capacity: 64K tokens of a bf16 cache are 0.6 GiB for the bundled model and 4.6 GB for
// DeepSeek-V3.
constexpr int64_t kDefaultCacheTokens = 65536;
// 1/16 of a GPU's memory stays free for graphs and the driver.
constexpr int64_t kGpuShareLeftFree = 16;
// Logits of prompt positions are computed together up to this size: 2,048 rows for a vocabulary of
// 8,192, 129 rows for V3's 129,280.
constexpr int64_t kPromptLogitBytes = 64 << 20;
// A command's own requests all wait in the engine's queue.
constexpr int64_t kUnboundedQueue = int64_t{1} << 40;

Result<Checkpoint> open_checkpoint(const ModelFlags& flags) {
  FATHOM_TRY(const std::string model, resolve_model_flag(flags));
  if (flags.is_dummy()) return Checkpoint::open_dummy(model, flags.num_hidden_layers);
  if (flags.num_hidden_layers) {
    return invalid(
        "--num-hidden-layers needs --load-format dummy: real weights are for all layers");
  }
  return Checkpoint::open(model);
}

// The format of --chat-template: its name, or a file with a template that Fathom recognizes.
Result<ChatFormat> format_of_template(const std::string& name_or_file) {
  if (auto named = chat_format_from_name(name_or_file)) return named;
  constexpr int64_t kMaxTemplateBytes = 1 << 20;
  const auto text = read_text_file(name_or_file, kMaxTemplateBytes);
  if (!text) return with_context("--chat-template: ", text.error());
  auto format = detect_chat_format("", *text, [](std::string_view) { return false; });
  if (!format || text->empty()) {
    return invalid("--chat-template: {} holds no template that Fathom knows; known are {}",
                   name_or_file, chat_format_names());
  }
  return format;
}

Result<ChatFormat> choose_chat_format(const ModelFlags& flags, const Checkpoint& checkpoint,
                                      const Tokenizer* tokenizer) {
  if (flags.chat_format != "auto" && !flags.chat_template.empty()) {
    return invalid("--chat-format and --chat-template both name the chat format, only one may");
  }
  if (flags.chat_format != "auto") return chat_format_from_name(flags.chat_format);
  if (!flags.chat_template.empty()) return format_of_template(flags.chat_template);
  if (tokenizer == nullptr) return invalid("{} has no tokenizer.json", checkpoint.directory());
  return detect_chat_format(
      checkpoint.config().model_type, tokenizer->chat_template().value_or(""),
      [tokenizer](std::string_view word) { return tokenizer->token_id(word).has_value(); });
}

Result<std::shared_ptr<const Tokenizer>> tokenizer_for(const Checkpoint& checkpoint, bool needed) {
  auto loaded = Tokenizer::load(checkpoint.directory());
  if (!loaded) {
    if (!needed && loaded.error().code == Code::kNotFound) return nullptr;
    return tl::unexpected<Status>(loaded.error());
  }
  std::shared_ptr<const Tokenizer> tokenizer = std::move(*loaded);
  if (tokenizer->vocab_size() > checkpoint.config().vocab_size) {
    return invalid("{}/tokenizer.json: its largest id is {}, vocab_size in config.json is {}",
                   checkpoint.directory(), tokenizer->vocab_size() - 1,
                   checkpoint.config().vocab_size);
  }
  return tokenizer;
}

LoadOptions load_options(const ModelFlags& flags) {
  LoadOptions options;
  options.num_threads = static_cast<int>(flags.threads);
  options.show_progress = !flags.quiet;
  options.dummy_seed = static_cast<uint64_t>(flags.seed.value_or(0));
  options.quantize_fp8 = flags.quantization == "fp8";
  return options;
}

GpuRunnerOptions gpu_options(const LoadedEngine& loaded, const ModelFlags& flags,
                             const EngineOptions& engine) {
  GpuRunnerOptions options;
  options.placement = flags.placement();
  options.devices = loaded.gpus;
  options.max_model_len = flags.max_model_len;
  options.max_batched_tokens = flags.step_rows();
  options.max_num_seqs = loaded.max_num_seqs;
  options.max_prompt_logit_rows = engine.max_prompt_logit_rows;
  options.max_drafts = loaded.max_drafts;
  options.cache_format = loaded.cache_format;
  options.num_threads = static_cast<int>(flags.threads);
  options.graphs = flags.graphs;
  options.attention = flags.attention_form();
  options.dense_keys = loaded.dense_keys;
  options.deterministic = flags.deterministic;
  options.overlap_exchange = flags.overlap_exchange;
  options.step_timeout = std::chrono::seconds(flags.gpu_step_seconds);
  options.load = loaded.load;
  return options;
}

// What a node cannot have although a process alone can.
Result<> check_nodes(const ModelFlags& flags) {
  FATHOM_TRY(const NodePlace place, node_place(flags.nodes));
  if (!place.is_one_of_several()) return {};
  if (flags.kv_offload_gib > 0 || !flags.kv_offload_dir.empty()) {
    return invalid(
        "--kv-offload-gib is {} and --kv-offload-dir '{}' with --nnodes {}: pages of other nodes "
        "cannot be offloaded",
        flags.kv_offload_gib, flags.kv_offload_dir, place.nnodes);
  }
  const auto ranks = ranks_of_nodes(place, flags.placement().world());
  if (!ranks) return tl::unexpected(ranks.error());
  return {};
}

// Checks that the model and the engine would also make, but only after the weights are read.
Result<> check_limits(const LoadedEngine& loaded, const ModelFlags& flags) {
  const ModelConfig& config = loaded.checkpoint.config();
  if (flags.max_model_len > config.max_position) {
    return invalid("--max-model-len is {}, the positions of {} end at {}", flags.max_model_len,
                   loaded.checkpoint.directory(), config.max_position);
  }
  if (flags.deterministic && loaded.gpus.empty()) {
    return invalid(
        "--deterministic is for a GPU; on the CPU a row's logits do not depend on the rows beside "
        "it, only on how its prompt was split into steps");
  }
  if (flags.deterministic && flags.attention_form() == AttentionForm::kMha) {
    return invalid("--deterministic computes answers absorbed, --attention asks for mha");
  }
  if (flags.overlap_exchange && loaded.gpus.empty()) {
    return invalid(
        "--overlap-expert-exchange is for GPUs; CPU ranks exchange a step's rows at once");
  }
  FATHOM_RETURN_IF_ERROR(flags.check_ranks());
  const auto placed = check_placement(flags.placement(), config);
  if (!placed) return with_context("--", placed.error());
  FATHOM_RETURN_IF_ERROR(check_nodes(flags));
  if (loaded.max_num_seqs > flags.step_rows()) {
    return invalid("--max-num-seqs is {}, at most --max-num-batched-tokens, {}",
                   loaded.max_num_seqs, flags.step_rows());
  }
  return {};
}

// Memory request of the GPU that has the least room per rank; sets `ranks` to the number of ranks
// on it.
Result<MemoryRequest> gpu_memory_request(const LoadedEngine& loaded,
                                         const GpuRunnerOptions& options, int* ranks) {
  FATHOM_TRY(const GpuMemory memory, gpu_memory(loaded.checkpoint, options));
  *ranks = memory.ranks;
  MemoryRequest request;
  request.budget = memory.free;
  request.fixed = {{"weights", memory.weights},
                   {"working space", memory.working_space},
                   {"left free", memory.total / kGpuShareLeftFree}};
  return request;
}

Result<MemoryPlan> plan(const LoadedEngine& loaded, const ModelFlags& flags,
                        const EngineNeeds& needs, MemoryRequest request, int ranks) {
  const ModelConfig& config = loaded.checkpoint.config();
  if (flags.kv_offload_gib > 0 && loaded.gpus.empty()) {
    request.fixed.push_back({"offloaded pages", flags.kv_offload_gib << 30});
  }
  // Each rank has its lane's whole cache.
  request.cache_row_bytes = latent_layout(config, loaded.cache_format).row_bytes() * ranks;
  request.index_key_bytes = index_key_bytes(config, loaded.cache_format) * ranks;
  const int64_t drafting = num_drafting_layers(config, loaded.max_drafts);
  const int64_t mtp_layers = loaded.gpus.empty() ? drafting : std::min<int64_t>(drafting, 1);
  request.cache_layers = DeepSeekModel::cache_layers(config, mtp_layers);
  const auto has_index_keys = layers_with_index_keys(config, request.cache_layers);
  request.index_key_layers = std::count(has_index_keys.begin(), has_index_keys.end(), true);
  if (loaded.max_drafts > 0 && loaded.gpus.empty()) {
    request.cache_state_bytes =
        DeepSeekModel::state_bytes(config, loaded.compute, mtp_layers) * ranks;
  } else if (!loaded.gpus.empty()) {
    request.cache_state_bytes =
        gpu_page_rest(config, loaded.cache_format, loaded.max_drafts > 0) * ranks;
  }
  request.page_tokens = kPageSize;
  if (flags.max_total_tokens) {
    request.max_total_tokens = *flags.max_total_tokens;
    return plan_memory(request);
  }
  FATHOM_TRY(const MemoryPlan most, plan_memory(request));
  if (!loaded.gpus.empty()) return most;  // a GPU's memory has no other use
  const int64_t length = flags.max_model_len > 0 ? flags.max_model_len : config.max_position;
  const int64_t full = checked_mul(loaded.max_num_seqs, length).value_or(kDefaultCacheTokens);
  // A requested length is kept; the model's own may be reduced.
  const int64_t wanted = needs.total_tokens > 0
                             ? needs.total_tokens
                             : std::max(std::min(full, kDefaultCacheTokens), flags.max_model_len);
  request.max_total_tokens = std::min(wanted, most.tokens());
  return plan_memory(request);
}

EngineOptions engine_options(const LoadedEngine& loaded, const ModelFlags& flags,
                             const EngineNeeds& needs) {
  EngineOptions options;
  options.prefix_caching = flags.prefix_caching.value_or(needs.prefix_caching);
  options.max_num_seqs = loaded.max_num_seqs;
  options.max_batched_tokens = flags.step_rows();
  options.max_drafts = loaded.max_drafts;
  options.adapts_drafts = !flags.speculation.is_always;
  options.kv_offload_bytes = flags.kv_offload_gib << 30;
  options.kv_offload_dir = flags.kv_offload_dir;
  options.kv_offload_disk_bytes = flags.kv_offload_disk_gib << 30;
  if (needs.queue) {
    options.max_queued_requests = needs.queue->max_requests;
    options.max_queued_tokens = needs.queue->max_tokens;
    options.max_queue_time = needs.queue->max_queue_time;
    options.max_total_time = needs.queue->max_total_time;
  } else {
    options.max_queued_requests = kUnboundedQueue;
    options.max_queued_tokens = kUnboundedQueue;
    options.max_queue_time = options.max_total_time = std::chrono::nanoseconds(0);
  }
  options.eos_ids = loaded.checkpoint.generation_defaults().eos_ids;
  if (options.eos_ids.empty() && loaded.tokenizer && loaded.tokenizer->eos_id()) {
    options.eos_ids.push_back(*loaded.tokenizer->eos_id());
  }
  if (needs.prompt_logprobs) {
    const int64_t row_bytes = loaded.checkpoint.config().vocab_size * 4;
    options.max_prompt_logit_rows =
        std::clamp(kPromptLogitBytes / row_bytes, options.max_prompt_logit_rows,
                   std::max<int64_t>(options.max_batched_tokens, 64));
  }
  return options;
}

void show(const MemoryPlan& memory, const ModelFlags& flags) {
  if (!flags.quiet) std::fputs(memory_plan_table(memory).c_str(), stderr);
}

Result<std::unique_ptr<Runner>> load_on_cpu(LoadedEngine& loaded, const ModelFlags& flags,
                                            const EngineNeeds& needs) {
  FATHOM_TRY(const NodePlace place, node_place(flags.nodes));
  if (place.is_one_of_several()) {
    FATHOM_TRY(auto nodes, join_nodes(place, loaded, flags));
    return load_nodes(std::move(nodes), loaded, flags, needs);
  }
  FATHOM_TRY(const ModelRunnerOptions options, plan_ranks(loaded, flags, needs, nullptr));
  return ModelRunner::create(loaded.checkpoint, options);
}

Result<std::unique_ptr<Runner>> load_on_gpu(LoadedEngine& loaded, const ModelFlags& flags,
                                            const EngineNeeds& needs, const EngineOptions& engine) {
  GpuRunnerOptions options = gpu_options(loaded, flags, engine);
  FATHOM_TRY(options.expert_table, expert_table_of(loaded.checkpoint.config(), flags));
  int ranks = 1;
  FATHOM_TRY(MemoryRequest request, gpu_memory_request(loaded, options, &ranks));
  FATHOM_TRY(loaded.memory, plan(loaded, flags, needs, std::move(request), ranks));
  options.max_total_tokens = loaded.memory.tokens();
  show(loaded.memory, flags);
  return create_gpu_runner(loaded.checkpoint, options);
}

// The plan is that of all ranks: those of both sites hold the weights together, and share the
// threads.
Result<SiteRunners> load_sites(LoadedEngine& loaded, const ModelFlags& flags,
                               const EngineNeeds& needs) {
  FATHOM_TRY(const ModelRunnerOptions all, plan_ranks(loaded, flags, needs, nullptr));
  std::array<ModelRunnerOptions, 2> options = {all, all};
  auto& [prefill, decode] = options;
  prefill.placement.dp = static_cast<int>(needs.sites->prefill_lanes.size());
  decode.placement.dp = static_cast<int>(needs.sites->decode_lanes.size());
  const int ranks = all.placement.world();
  const int threads = std::max(all.num_threads, ranks);
  prefill.num_threads = threads * prefill.placement.world() / ranks;
  decode.num_threads = threads - prefill.num_threads;
  FATHOM_TRY(auto runners, ModelRunner::create_several(loaded.checkpoint, options));
  return SiteRunners{.prefill = std::move(runners.front()), .decode = std::move(runners.back())};
}

}  // namespace

Result<std::shared_ptr<const ExpertTable>> expert_table_of(const ModelConfig& config,
                                                           const ModelFlags& flags) {
  const Placement placement = flags.placement();
  if (!placement.exchanges_tokens()) return nullptr;
  if (!flags.has_placement_file()) {
    return std::make_shared<const ExpertTable>(ExpertTable::contiguous(config, placement));
  }
  FATHOM_TRY(ExpertTable table, read_expert_table(flags.expert_location));
  const auto fits = check_expert_table(table, config, placement, false);
  if (!fits) return with_context(flags.expert_location + ": ", fits.error());
  return std::make_shared<const ExpertTable>(std::move(table));
}

Result<ModelRunnerOptions> plan_ranks(LoadedEngine& loaded, const ModelFlags& flags,
                                      const EngineNeeds& needs, World* world) {
  ModelRunnerOptions options;
  options.compute = loaded.compute;
  options.cache_format = loaded.cache_format;
  options.max_model_len = flags.max_model_len;
  options.max_batched_tokens = flags.step_rows();
  options.num_threads = loaded.num_threads;
  options.placement = flags.placement();
  FATHOM_TRY(options.expert_table, expert_table_of(loaded.checkpoint.config(), flags));
  options.max_drafts = loaded.max_drafts;
  options.balancer = {.rebalances = flags.eplb, .rebalance_steps = flags.eplb_steps};
  options.attention.form = flags.attention_form();
  options.attention.dense_keys = loaded.dense_keys;
  options.load = loaded.load;
  options.world = world;
  options.at_meeting = meeting_fault();
  FATHOM_TRY(MemoryRequest request,
             rank_memory(loaded.checkpoint, loaded.available, loaded.num_threads, options));
  FATHOM_TRY(loaded.memory,
             plan(loaded, flags, needs, std::move(request), ranks_here(options).second));
  options.max_total_tokens = loaded.memory.tokens();
  show(loaded.memory, flags);
  return options;
}

Result<LoadedEngine> open_model(const ModelFlags& flags, const EngineNeeds& needs) {
  LoadedEngine loaded;
  loaded.available = available_memory();
  FATHOM_TRY(loaded.checkpoint, open_checkpoint(flags));
  FATHOM_TRY(loaded.tokenizer, tokenizer_for(loaded.checkpoint, needs.needs_tokenizer));
  loaded.chat_format = choose_chat_format(flags, loaded.checkpoint, loaded.tokenizer.get());
  if (!loaded.chat_format && (flags.chat_format != "auto" || !flags.chat_template.empty())) {
    return tl::unexpected<Status>(loaded.chat_format.error());
  }
  loaded.load = load_options(flags);
  FATHOM_RETURN_IF_ERROR(check_load_options(loaded.checkpoint, loaded.load));
  loaded.compute = flags.compute();
  loaded.cache_format = flags.cache_format();
  loaded.num_threads = static_cast<int>(flags.threads > 0 ? flags.threads : default_threads());
  loaded.max_num_seqs = flags.max_num_seqs.value_or(std::min(needs.num_seqs, flags.step_rows()));
  FATHOM_TRY(loaded.gpus, flags.gpus());
  if (const std::string reason = flags.why_cpu(); !reason.empty()) log_warning("{}", reason);
  FATHOM_RETURN_IF_ERROR(check_limits(loaded, flags));
  FATHOM_TRY(loaded.dense_keys, flags.dense_keys(loaded.checkpoint.config()));
  FATHOM_TRY(loaded.max_drafts, drafts_of(flags.speculation, loaded.checkpoint));
  return loaded;
}

Result<LoadedEngine> load_engine(const ModelFlags& flags, const EngineNeeds& needs) {
  FATHOM_TRY(LoadedEngine loaded, open_model(flags, needs));
  EngineOptions engine = engine_options(loaded, flags, needs);
  SiteRunners runners;
  std::unique_ptr<Runner>& runner = runners.decode;
  if (!needs.sites) {
    FATHOM_TRY(runner, loaded.gpus.empty() ? load_on_cpu(loaded, flags, needs)
                                           : load_on_gpu(loaded, flags, needs, engine));
  } else if (loaded.gpus.empty()) {
    FATHOM_TRY(runners, load_sites(loaded, flags, needs));
  } else {
    return invalid(
        "--prefill-ranks and --decode-ranks are for --device cpu: on GPUs a process has one role");
  }
  loaded.max_model_len = runner->max_model_len();
  PageTransfer* const pages = runner->page_transfer(0);
  if (pages != nullptr) loaded.page_bytes = pages->page_bytes();
  if (needs.prefill) {
    FATHOM_TRY(engine.prefill, needs.prefill(loaded));
  }
  engine.cache_observers = needs.cache_observers;
  runner = with_engine_faults(std::move(runner), &engine);
  if (needs.sites) {
    FATHOM_TRY(loaded.engine, Engine::create_separated(engine, std::move(runners), *needs.sites,
                                                       loaded.tokenizer));
  } else {
    FATHOM_TRY(loaded.engine, Engine::create(engine, std::move(runner), loaded.tokenizer));
  }
  return loaded;
}

}  // namespace fathom
