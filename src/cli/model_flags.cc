#include "cli/model_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "chat/format.h"
#include "checkpoint/hub_cache.h"
#include "engine/gpu_runner.h"
#include "model/gpu_support.h"
#include "placement/expert_table.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr const char* kBundledModel = "models/fathom-tiny";
constexpr const char* kModelVariable = "FATHOM_MODEL";
// Larger values than any supported machine allows are typing errors.
constexpr int64_t kMaxTokens = int64_t{1} << 32;
constexpr int64_t kMaxSequences = 1 << 16;
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxGiB = 1 << 20;
constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr int64_t kMaxEplbSteps = 1'000'000'000;
// SGLang's names of --dsa-dense-threshold, the newer first.
constexpr const char* kThresholdVariables[] = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
                                               "SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"};
constexpr std::string_view kTrivialLocation = "trivial";
// Rows of a step: enough for the matrix units, few enough that other requests do not wait long.
constexpr int64_t kCpuStepRows = 2048, kGpuStepRows = 8192;
// With this many sequences, a step is no longer bound by reading the weights.
constexpr int64_t kCpuSequences = 256, kGpuSequences = 1024;

// The numbers of "cuda:N" or of a list of such names; empty if it is none.
std::vector<int> numbers_of_gpus(const std::string& names) {
  std::vector<int> numbers;
  for (size_t at = 0; at <= names.size();) {
    const size_t end = std::min(names.find(',', at), names.size());
    const std::string name = names.substr(at, end - at);
    const bool numbered = name.starts_with("cuda:") && name.size() > 5 && name.size() < 8 &&
                          name.find_first_not_of("0123456789", 5) == std::string::npos;
    if (!numbered) return {};
    numbers.push_back(std::atoi(name.c_str() + 5));
    at = end + 1;
  }
  return numbers;
}

// A CLI11 validator: returns the error, or an empty string.
std::string check_device(const std::string& name) {
  if (name == "auto" || name == "cpu" || name == "cuda") return "";
  return numbers_of_gpus(name).empty()
             ? fmt::format("'{}' is none of auto, cpu, cuda, cuda:N, cuda:N,cuda:M,…", name)
             : "";
}

// The model if the command line names none; empty: the bundled one.
std::string default_model() {
  const char* const name = std::getenv(kModelVariable);
  return name == nullptr ? "" : name;
}

bool is_one_of_several_nodes(const ModelFlags& flags) {
  const auto place = node_place(flags.nodes);
  return place && place->is_one_of_several();
}

// A threshold of keys, and who asks for it.
struct AskedThreshold {
  std::string name;
  std::optional<int64_t> keys;
};

Result<AskedThreshold> asked_threshold(const ModelFlags& flags) {
  if (flags.dense_threshold) return AskedThreshold{"--dsa-dense-threshold", flags.dense_threshold};
  for (const char* const name : kThresholdVariables) {
    const char* const text = std::getenv(name);
    if (text == nullptr || *text == '\0') continue;
    const auto keys = parse_count(text);
    if (!keys || *keys < 0) return invalid("{} is {:?}, not a number of keys", name, text);
    return AskedThreshold{name, *keys};
  }
  return AskedThreshold{};
}

// What GPUs have not of the model's sparse attention; empty: nothing, or the model has none, or
// cannot be opened: who opens it says why.
std::string sparse_attention_lacks(const ModelFlags& flags) {
  const auto model = resolve_model_flag(flags);
  if (!model) return "";
  const std::string path = *model + "/config.json";
  const auto text = read_text_file(path, kMaxConfigBytes);
  const auto config = text ? parse_model_config(*text, path) : tl::unexpected(text.error());
  if (!config || !config->indexer) return "";
  const auto supported = gpu_supports(make_spec(*config), flags.cache_format());
  if (supported) return "";
  return fmt::format("sparse attention of this shape is there on the CPU only, so far: {}",
                     supported.error().message);
}

// What the flags and the model ask for and GPUs have not; empty: nothing.
std::string gpu_lacks(const ModelFlags& flags) {
  if (is_one_of_several_nodes(flags)) {
    return "several nodes are there on the CPU only, so far";
  }
  if (flags.placement().exchanges_tokens() && flags.eplb) {
    return "experts move between ranks (--enable-eplb) on the CPU only, so far";
  }
  if (flags.placement().redundant_experts > 0) {
    return "copies of experts (--num-redundant-experts) are there on the CPU only, so far";
  }
  if (flags.compute() != DType::kBF16 || flags.cache_format() == CacheFormat::kF32) {
    return "on a GPU there are neither float32 products nor an f32 cache";
  }
  return sparse_attention_lacks(flags);
}

std::string too_few_gpus(int count, int ranks) {
  return fmt::format(
      "{} ranks, and {} GPUs of compute capability 9.0 are there; ranks that share one are listed, "
      "as in --device cuda:0,cuda:0",
      ranks, count);
}

bool is_on_gpu(const ModelFlags& flags) {
  const auto gpus = flags.gpus();
  return gpus && !gpus->empty();
}

}  // namespace

DType ModelFlags::compute() const { return dtype == "float32" ? DType::kF32 : DType::kBF16; }

CacheFormat ModelFlags::cache_format() const {
  if (kv_cache_dtype == "auto") {
    return compute() == DType::kF32 ? CacheFormat::kF32 : CacheFormat::kBF16;
  }
  const auto format = parse_cache_format(kv_cache_dtype);
  FATHOM_CHECK(format.has_value(), "--kv-cache-dtype allows {}, the cache does not",
               kv_cache_dtype);
  return *format;
}

AttentionForm ModelFlags::attention_form() const {
  if (attention == "absorbed") return AttentionForm::kAbsorbed;
  return attention == "mha" ? AttentionForm::kMha : AttentionForm::kAuto;
}

Result<std::optional<int64_t>> ModelFlags::dense_keys(const ModelConfig& config) const {
  FATHOM_TRY(const AskedThreshold asked, asked_threshold(*this));
  if (!asked.keys) return std::optional<int64_t>();
  if (!config.indexer) {
    log_warning("{} is {}, the model has no sparse attention", asked.name, *asked.keys);
    return std::optional<int64_t>();
  }
  if (*asked.keys > config.indexer->topk) {
    return invalid(
        "{} is {}, at most index_topk of the model, {}: attention to more keys than it chooses "
        "gives other answers",
        asked.name, *asked.keys, config.indexer->topk);
  }
  return asked.keys;
}

bool ModelFlags::has_placement_file() const { return expert_location != kTrivialLocation; }

Placement ModelFlags::placement() const {
  const int64_t of_lane = dp_attention ? tp / dp : tp;
  return {.tp = static_cast<int>(of_lane),
          .dp = static_cast<int>(dp),
          .expert_parallel = expert_parallel || ep_size > 1,
          .redundant_experts = redundant_experts};
}

Result<> ModelFlags::check_ranks() const {
  if (dp_attention && tp % dp != 0) {
    return invalid("--enable-dp-attention divides --tp {} by --dp {}: it must be a multiple", tp,
                   dp);
  }
  const Placement ranks = placement();
  if (ep_size > 1 && ep_size != ranks.world()) {
    return invalid("--ep-size is {}, allowed are 1 and the number of all ranks, {}", ep_size,
                   ranks.world());
  }
  if (ranks.exchanges_tokens()) return {};
  constexpr std::string_view kNeeds = "needs --enable-expert-parallel and more than one rank";
  if (has_placement_file()) {
    return invalid("--init-expert-location {} {}", expert_location, kNeeds);
  }
  if (eplb) return invalid("--enable-eplb {}", kNeeds);
  if (overlap_exchange) return invalid("--overlap-expert-exchange {}", kNeeds);
  return {};
}

std::string ModelFlags::why_cpu(const std::string& root) const {
  if (device != "auto") return "";
  std::string reason = why_no_gpu(root);
  if (reason.empty()) reason = why_not_on(num_gpus());
  return reason.empty() ? "" : fmt::format("--device auto takes the CPU: {}", reason);
}

std::string ModelFlags::why_not_on(int count) const {
  if (count == 0) return "";
  const int ranks = placement().world();
  const std::string lacks = gpu_lacks(*this);
  return lacks.empty() && ranks > count ? too_few_gpus(count, ranks) : lacks;
}

Result<std::vector<int>> ModelFlags::gpus() const {
  if (device == "cpu") return std::vector<int>();
  if (placement().world() > 1) expect_gpu_ranks();
  return gpus_among(num_gpus());
}

Result<std::vector<int>> ModelFlags::gpus_among(int count) const {
  const int ranks = placement().world();
  std::vector<int> first(static_cast<size_t>(ranks));
  std::iota(first.begin(), first.end(), 0);
  if (device == "auto") {
    return count > 0 && why_not_on(count).empty() ? first : std::vector<int>();
  }
  if (const std::string lacks = gpu_lacks(*this); !lacks.empty()) {
    return invalid("--device {}: {}", device, lacks);
  }
  std::vector<int> numbers = device == "cuda" ? first : numbers_of_gpus(device);
  for (const int number : numbers) {
    if (number < count) continue;
    if (device == "cuda" && count > 0)
      return invalid("--device cuda: {}", too_few_gpus(count, ranks));
    return invalid("--device {}: {} GPUs of compute capability 9.0 are there", device, count);
  }
  if (std::ssize(numbers) != ranks) {
    return invalid("--device {} names {} GPUs for {} ranks: list one for each", device,
                   numbers.size(), ranks);
  }
  return numbers;
}

int64_t ModelFlags::step_rows() const {
  if (max_batched_tokens) return *max_batched_tokens;
  return is_on_gpu(*this) ? kGpuStepRows : kCpuStepRows;
}

int64_t ModelFlags::many_sequences() const {
  return is_on_gpu(*this) ? kGpuSequences : kCpuSequences;
}

CLI::Option* add_model_positional(CLI::App& app, ModelFlags* flags) {
  return app
      .add_option("MODEL,-m,--model,--model-path", flags->model,
                  "Directory with config.json, tokenizer.json and *.safetensors, or a Hugging Face "
                  "id in the local hub cache (default: the bundled model; also -m, --model)")
      ->envname(kModelVariable)
      ->type_name("");
}

void add_model_flags(CLI::App& app, ModelFlags* flags) {
  FlagGroup model(app, "Model");
  model.choice("--load-format", &flags->load_format, {"auto", "dummy"},
               "Source of the weights (dummy: random weights, for which config.json is enough)");
  model.count("--num-hidden-layers", &flags->num_hidden_layers, 1, kMaxLayers,
              "With --load-format dummy: run only this many layers of the model");
  model.text("--chat-format", &flags->chat_format, "NAME",
             "auto (by the chat template), or " + chat_format_names());
  model.text(
      "--chat-template,--chat-template-file", &flags->chat_template, "FILE",
      "The chat format whose template this file holds (it is recognised, never executed), or "
      "a name as for --chat-format");
  model.toggle("-q,--quiet", &flags->quiet, "No memory plan and no progress on stderr");

  model
      .text(
          "--device", &flags->device, "NAME",
          "cpu; cuda, the first GPUs, one for each rank; cuda:N, or a list of them, one for each "
          "rank, of which several may be the same; or auto: as cuda where there are so many GPUs, "
          "otherwise cpu (default: auto)")
      ->check(check_device);
  model.toggle("--cuda-graphs,!--no-cuda-graphs,!--enforce-eager,!--disable-cuda-graph",
               &flags->graphs,
               "Launch decode steps on a GPU as captured CUDA graphs (default: on)");

  FlagGroup numerics(app, "Numerics");
  numerics.choice("--dtype", &flags->dtype, {"auto", "bfloat16", "float32"},
                  "Input type of GEMMs (auto: bfloat16); float32 computes in float32 throughout");
  numerics.choice(
      "--quantization", &flags->quantization, {"auto", "none", "fp8"},
      "auto, none: weights as stored; fp8: quantize a checkpoint in bf16, f16 or f32 to "
      "e4m3 with block-wise 128x128 scales while loading it");
  numerics.choice("--kv-cache-dtype", &flags->kv_cache_dtype,
                  {"auto", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2", "f32"},
                  "Format of the latent cache (auto: bf16, with --dtype float32: f32)");
  numerics.choice("--attention", &flags->attention, {"auto", "absorbed", "mha"},
                  "Attention form (auto: the cheaper one for each sequence)");
  numerics.count("--dsa-dense-threshold", &flags->dense_threshold, 0, kMaxTokens,
                 "With sparse attention (DeepSeek-V3.2): rows that see at most so many keys attend "
                 "to all of them without scoring any; the same answers",
                 "the model's index_topk, which is the most");
  numerics.toggle(
      "--deterministic,--enable-deterministic-inference", &flags->deterministic,
      "On a GPU: batch-invariant; a request's logits are bitwise identical in any batch");

  FlagGroup capacity(app, "Capacity");
  capacity.count("--max-model-len,--context-length", &flags->max_model_len, 1, kMaxTokens,
                 "Longest sequence in tokens, prompt and completion", "the model's");
  capacity.count("--max-num-seqs,--max-running-requests", &flags->max_num_seqs, 1, kMaxSequences,
                 "Sequences that run concurrently",
                 "the command's number of requests, or 256, on a GPU 1024");
  capacity.count("--max-num-batched-tokens,--chunked-prefill-size", &flags->max_batched_tokens, 1,
                 1 << 20, "Tokens in one step; longer prompts are computed in chunks",
                 "2048, on a GPU 8192");
  capacity.count("--max-total-tokens", &flags->max_total_tokens, 1, kMaxTokens,
                 "Capacity of the latent cache in tokens",
                 "what the command needs, at most 64K; all that a GPU holds");
  capacity.toggle("--enable-prefix-caching,!--no-enable-prefix-caching,!--disable-radix-cache",
                  &flags->prefix_caching,
                  "Keep computed pages for prompts with the same prefix (default: on; off in bench "
                  "and eval)");
  capacity.count("--kv-offload-gib", &flags->kv_offload_gib, 0, kMaxGiB,
                 "GiB of host memory for pages evicted from the latent cache");
  capacity.text("--kv-offload-dir", &flags->kv_offload_dir, "DIR",
                "Directory of files for pages evicted from host memory (default: none)");
  capacity.count("--kv-offload-disk-gib", &flags->kv_offload_disk_gib, 1, kMaxGiB,
                 "Largest total size of the files in --kv-offload-dir in GiB");
  capacity.count(
      "--gpu-step-timeout", &flags->gpu_step_seconds, 0, 86'400,
      "Seconds after which a step on a GPU counts as stuck: the process names it and ends "
      "with status 3; 0: never",
      "30");
  capacity.count("-t,--threads", &flags->threads, 1, kMaxThreads, "CPU threads", "one per core");
  capacity.count("--tp,--tensor-parallel-size,--tp-size", &flags->tp, 1, kMaxRanks,
                 "Tensor-parallel ranks: each computes its share of the heads, of the feed-forward "
                 "columns and of the vocabulary. On the CPU they share the threads",
                 "1");
  capacity.count("--dp,--data-parallel-size,--dp-size", &flags->dp, 1, kMaxRanks,
                 "Data-parallel ranks: each has sequences and a cache of its own, and --tp "
                 "tensor-parallel ranks. Limits of sequences, rows and cache are those of each",
                 "1");
  capacity.toggle("--enable-dp-attention", &flags->dp_attention,
                  "Count as SGLang does: --tp is the number of all ranks, --dp of them at a time "
                  "without tensor parallelism of attention");
  capacity.toggle("--enable-expert-parallel", &flags->expert_parallel,
                  "Distribute whole experts over all --tp times --dp ranks, instead of columns of "
                  "every expert");
  capacity.toggle(
      "--overlap-expert-exchange", &flags->overlap_exchange,
      "On GPUs with --enable-expert-parallel: exchange one part of the rows of a step of "
      "more than --max-num-batched-tokens beside the experts' GEMMs of another");
  capacity.count("--ep-size,--ep,--expert-parallel-size", &flags->ep_size, 1, kMaxRanks,
                 "The number of all ranks: the same as --enable-expert-parallel", "1");
  capacity.count("--num-redundant-experts,--ep-num-redundant-experts", &flags->redundant_experts, 0,
                 kMaxTableExperts * kMaxRanks,
                 "Copies of experts of a layer beyond one of each, over all ranks");
  capacity.text("--init-expert-location", &flags->expert_location, "FILE",
                "Placement file that says where the experts are at first (default: trivial, "
                "consecutive ones by rank)");
  capacity.toggle("--enable-eplb", &flags->eplb,
                  "Move experts between steps so that all ranks get as many tokens");
  capacity.count("--eplb-rebalance-num-iterations", &flags->eplb_steps, 1, kMaxEplbSteps,
                 "Steps between two plans of --enable-eplb, and those that a plan looks at",
                 "1000");
  add_node_flags(app, &flags->nodes);
  add_speculation_flags(app, &flags->speculation);
  capacity.count("--seed", &flags->seed, 0, kAny, "Seed of all random numbers", "random");
}

std::optional<std::string> find_bundled(const std::string& relative_path) {
  std::error_code failure;
  std::vector<fs::path> places;
  for (fs::path place = fs::read_symlink("/proc/self/exe", failure).parent_path();
       !place.empty() && place != place.root_path(); place = place.parent_path()) {
    places.push_back(place);
    places.push_back(place / "share/fathom");
  }
  places.push_back(FATHOM_SOURCE_DIR);
  for (const fs::path& place : places) {
    if (fs::exists(place / relative_path, failure)) return (place / relative_path).string();
  }
  return std::nullopt;
}

void take_text_for_model(ModelFlags* flags, std::string* text) {
  if (!text->empty() || flags->model.empty()) return;
  std::error_code failure;
  if (fs::exists(flags->model, failure)) return;
  if (flags->model == "-" || flags->model.find_first_of(" \t\n") != std::string::npos ||
      flags->model.find_first_not_of("0123456789,") == std::string::npos) {
    *text = std::exchange(flags->model, default_model());
  }
}

bool is_no_model(const std::string& word) {
  if (word.empty() || word == default_model() || word.find('/') != std::string::npos) return false;
  const auto directory = resolve_model(word);
  return !directory && directory.error().code == Code::kNotFound;
}

void take_word_for_text(ModelFlags* flags, std::string* text) {
  *text = std::exchange(flags->model, default_model());
  std::fputs(fmt::format("fathom: \"{}\" is no model here, so it is the text for {}\n", *text,
                         flags->model.empty() ? "the bundled model" : flags->model)
                 .c_str(),
             stderr);
}

Result<std::string> resolve_model_flag(const ModelFlags& flags) {
  if (!flags.model.empty()) return flags.model;
  if (auto bundled = find_bundled(kBundledModel)) return *bundled;
  return not_found("the bundled model ({}) is not beside the program; name a MODEL", kBundledModel);
}

}  // namespace fathom
