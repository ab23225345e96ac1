#include "engine/gpu_rank_cuda.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cuda/co_resident.h"
#include "model/gpu_support.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

using cuda::check;

// Larger steps are long enough to hide their launches.
constexpr int64_t kMostGraphRows = 512;

// One sequence after the other with so many rows, the last with what is left. Placeholders: a graph
// reads the actual ones from device memory.
ForwardBatch placeholders(int64_t rows, int32_t queries) {
  ForwardBatch batch;
  batch.max_pages = 1;
  batch.query_start = {0};
  for (int32_t row = 0; row < rows; ++row) {
    batch.token_ids.push_back(0);
    batch.positions.push_back(row % queries);
    batch.logit_rows.push_back(row);
    const bool is_last = row + 1 == rows || (row + 1) % queries == 0;
    if (!is_last) continue;
    batch.query_start.push_back(row + 1);
    batch.context_lens.push_back(0);
    batch.prompt_lens.push_back(0);
    batch.block_tables.push_back(0);
  }
  return batch;
}

// The number of keys that multi-head attention expands at a time: 1 GiB of them, whatever the
// context. Longer contexts are expanded in several passes, each of which costs a step of 8,192
// tokens 1 to 2 % of the keys' time.
int64_t most_keys(const ModelConfig& config, const GpuRunnerOptions& options) {
  constexpr int64_t kBytes = int64_t{1} << 30, kTile = cuda::MhaPrefillTile::kKeys;
  const int64_t heads = ceil_div(config.num_heads, int64_t{options.placement.tp});
  const int64_t key_bytes =
      heads * (config.qk_nope_dim + config.v_dim) * static_cast<int64_t>(sizeof(bf16));
  const int64_t most = options.expanded_keys > 0 ? options.expanded_keys : kBytes / key_bytes;
  const int64_t wanted = std::max(gpu_model_len(config, options), options.max_batched_tokens);
  return std::max(kTile, std::min(most / kTile * kTile, round_up(wanted, kTile)));
}

int64_t most_graph_rows(const GpuRunnerOptions& options) {
  return std::min({options.max_num_seqs * (1 + options.max_drafts), kMostGraphRows,
                   options.max_batched_tokens});
}

// The limits of the model and of its planners: all rows of a captured step choose in one pass.
std::optional<SparseLimits> gpu_sparse_limits(const ModelConfig& config,
                                              const GpuRunnerOptions& options) {
  auto limits = sparse_limits(config, gpu_policy(options));
  if (limits) fit_one_pass(*limits, most_graph_rows(options), gpu_model_len(config, options));
  return limits;
}

// Whether a short step is faster with lists of all its keys than with the kernels that read whole
// pages. Measured at 1,024 keys: by 3 to 6 % with 656 bytes a token, by -2 to 4 % with bf16
// (docs/sparse_attention.md); the other 8-bit formats are taken to be as the first.
bool lists_beat_pages(CacheFormat format) { return format != CacheFormat::kBF16; }

}  // namespace

int64_t gpu_model_len(const ModelConfig& config, const GpuRunnerOptions& options) {
  const int64_t most = options.max_model_len > 0 ? options.max_model_len : config.max_position;
  return std::min(most, round_up(options.max_total_tokens, kPageSize));
}

AttentionPolicy gpu_policy(const GpuRunnerOptions& options) {
  AttentionPolicy policy = gpu_attention_policy();
  policy.form = options.attention;
  policy.dense_keys = options.dense_keys;
  return policy;
}

cuda::ModelOptions gpu_model_options(const ModelConfig& config, const GpuRunnerOptions& options) {
  return {.max_rows = options.max_batched_tokens,
          .max_logit_rows =
              options.max_num_seqs * (1 + options.max_drafts) + options.max_prompt_logit_rows,
          .most_keys = gpu_takes_multi_head(config) ? most_keys(config, options) : 0,
          .batch_invariant = options.deterministic,
          .stored_fp8 = options.stored_fp8,
          .cache_format = options.cache_format,
          .sparse = gpu_sparse_limits(config, options),
          .max_length = gpu_model_len(config, options),
          .expert_table = options.expert_table,
          .with_mtp = options.max_drafts > 0,
          .rounds_in_turn = options.overlap_exchange};
}

GpuRank::GpuRank(const ModelConfig& config, const GpuRunnerOptions& options, int device)
    : config_(config), options_(options), device_(cuda::DeviceContext::of(device)) {
  use_device();
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

GpuRank::~GpuRank() {
  use_device();
  cudaStreamSynchronize(stream_);
  for (Graphs* graphs : {&long_graphs_, &draft_graphs_, &long_draft_graphs_}) graphs->clear();
  graphs_.clear();
  graphs_of_many_keys_.clear();
  cudaStreamDestroy(stream_);
}

Result<> GpuRank::prepare(std::unique_ptr<cuda::DeepSeekModel> model, int64_t further_bytes) {
  model_ = std::move(model);
  const int64_t pages = ceil_div(options_.max_total_tokens, kPageSize);
  const int64_t bytes = latent_layout(config_, options_.cache_format).page_bytes();
  const int64_t parts = gpu_page_stride(config_, options_.cache_format, options_.max_drafts > 0);
  cache_memory_ = cuda::DeviceArray<std::byte>(pages * parts * bytes);
  const auto rows = checked_mul(pages * kPageSize, parts);
  if (!rows || *rows > std::numeric_limits<int32_t>::max()) {
    return error(Code::kResourceExhausted,
                 "a cache of {} tokens in {} layers has more than 2^31 - 1 rows: lower "
                 "--max-total-tokens",
                 options_.max_total_tokens, parts);
  }
  cache_ = {options_.cache_format, cache_memory_.data(), pages, bytes, parts};
  const AttentionPolicy policy = gpu_policy(options_);
  const cuda::StepLimits limits = {.heads = model_->num_heads(),
                                   .num_multiprocessors = model_->num_multiprocessors(),
                                   .shape = {.latent_dim = config_.kv_lora_rank,
                                             .rope_dim = config_.qk_rope_dim,
                                             .nope_dim = config_.qk_nope_dim,
                                             .v_dim = config_.v_dim,
                                             .sparse = gpu_sparse_limits(config_, options_)},
                                   .policy = policy,
                                   .most_keys = most_keys(config_, options_),
                                   .batch_invariant = options_.deterministic,
                                   .max_length = gpu_model_len(config_, options_),
                                   .lists_always = lists_beat_pages(options_.cache_format),
                                   .page_stride = parts,
                                   .with_mtp = options_.max_drafts > 0};
  planner_.emplace(limits);
  const int64_t most_pages = ceil_div(gpu_model_len(config_, options_), kPageSize);
  const auto most_bytes = [&](const cuda::StepPlanner& planner) {
    return planner.most_bytes(options_.max_batched_tokens, options_.max_num_seqs, most_pages);
  };
  int64_t arrays = most_bytes(*planner_);
  if (options_.max_drafts > 0) {
    draft_planner_.emplace(cuda::draft_limits(limits));
    arrays = std::max(arrays, most_bytes(*draft_planner_));
  }
  arrays += further_bytes;
  arrays_ = cuda::DeviceArray<std::byte>(arrays);
  for (auto& staged : staged_arrays_) staged = cuda::PinnedArray<std::byte>(arrays);
  return {};
}

cuda::StepLayout& GpuRank::plan_draft(const ForwardBatch& batch, std::span<const int32_t> states,
                                      const cuda::WorldRows& all) {
  is_draft_ = true;
  all_ = all;
  const bool can_replay = !batch.logit_rows.empty() && is_one_exchange(all);
  graph_ = can_replay ? find(draft_graphs_, batch.num_rows()) : nullptr;
  draft_planner_->plan_draft(batch, states, graph_ != nullptr ? graph_->rows : 0, layout_);
  if (layout_.decodes.size() > 1) graph_ = nullptr;
  if (graph_ != nullptr && !layout_.index_passes.empty()) {
    graph_ = find(long_draft_graphs_, layout_.rows);
  }
  return layout_;
}

// The smallest graph with as many rows; null: none.
const GpuRank::CapturedGraph* GpuRank::find(const Graphs& graphs, int64_t rows) {
  const auto found = std::lower_bound(
      graphs.begin(), graphs.end(), rows,
      [](const CapturedGraph& captured, int64_t wanted) { return captured.rows < wanted; });
  return found == graphs.end() ? nullptr : &*found;
}

cuda::StepLayout& GpuRank::plan(const ForwardBatch& batch, const cuda::WorldRows& all) {
  int64_t rows = batch.num_rows();
  is_draft_ = false;
  all_ = all;
  graph_ = nullptr;
  const auto queries = static_cast<size_t>(cuda::most_queries(batch));
  if (is_one_exchange(all) && queries <= tiles_.size() && planner_->is_decode(batch)) {
    graph_ = find(graphs_.at(tiles_[queries - 1]), rows);
    if (graph_ != nullptr) rows = graph_->rows;
  }
  planner_->plan(batch, rows, layout_);
  if (graph_ != nullptr && rows <= model_->most_rows_of_one_launch() &&
      layout_.all_keys > model_->most_keys_of_one_launch(rows, cache_.format)) {
    graph_ = find(graphs_of_many_keys_.at(tiles_[queries - 1]), rows);
  }
  if (graph_ != nullptr && !layout_.index_passes.empty()) {
    graph_ = find(long_graphs_, rows);
  }
  if (layout_.decodes.size() > 1) graph_ = nullptr;
  return layout_;
}

std::string GpuRank::enqueue(int slot, const int32_t* sampled) {
  const auto bytes = std::ssize(layout_.memory);
  FATHOM_CHECK(bytes <= arrays_.size(), "a step's arrays take {} bytes of {}", bytes,
               arrays_.size());
  std::byte* const staged = staged_arrays_[slot].data();
  std::memcpy(staged, layout_.memory.data(), layout_.memory.size());
  check(cudaMemcpyAsync(arrays_.data(), staged, layout_.memory.size(), cudaMemcpyHostToDevice,
                        stream_),
        "copying a step's arrays");
  if (graph_ != nullptr) {
    graph_->graph.launch(stream_);
    return graph_->kernels;
  }
  const cuda::CoResidentLog log;
  enqueue_model(sampled);
  return log.text();
}

std::string GpuRank::enqueue_for_others(const cuda::WorldRows& all, bool is_draft) {
  const cuda::CoResidentLog log;
  if (is_draft) {
    model_->serve_draft_experts(all, gpu_stream());
  } else {
    model_->serve_experts(all, gpu_stream());
  }
  return log.text();
}

// A graph has one exchange of experts' rows a layer, of up to max_batched_tokens rows.
bool GpuRank::is_one_exchange(const cuda::WorldRows& all) const {
  return !options_.placement.exchanges_tokens() ||
         std::max(all.rows, all.logit_rows) <= options_.max_batched_tokens;
}

// Row counts of a captured step: as if all lanes had as many rows.
cuda::WorldRows GpuRank::likely_rows(int64_t rows) const {
  const int64_t likely = std::min(rows * options_.placement.dp, options_.max_batched_tokens);
  return {.rows = likely, .logit_rows = likely, .is_captured = true};
}

// Padded row counts of the captured steps.
std::vector<int64_t> GpuRank::graph_sizes() const {
  const int64_t most = most_graph_rows(options_);
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < most; size += size < 4 ? 1 : size < 16 ? 4 : size < 64 ? 8 : 16) {
    sizes.push_back(size);
  }
  sizes.push_back(most);
  return sizes;
}

void GpuRank::capture(const int32_t* sampled) {
  for (int32_t queries = 1; queries <= 1 + options_.max_drafts; ++queries) {
    is_draft_ = false;
    planner_->plan(placeholders(queries, queries), queries, layout_);
    const int tile = layout_.decodes.empty() ? 0 : layout_.decodes.front().tile_rows;
    tiles_.push_back(tile);
    Graphs& graphs = graphs_[tile];
    if (!graphs.empty()) continue;  // fewer rows a sequence have the same
    for (const int64_t rows : graph_sizes()) {
      if (rows < queries) continue;
      planner_->plan(placeholders(rows, queries), rows, layout_);
      all_ = likely_rows(rows);
      graphs.push_back(capture_model(sampled));
      if (config_.indexer && queries == 1) {
        planner_->plan_any_length(layout_);
        long_graphs_.push_back(capture_model(sampled));
      }
      if (rows > model_->most_rows_of_one_launch()) continue;
      layout_.all_keys = model_->most_keys_of_one_launch(rows, cache_.format) + 1;
      graphs_of_many_keys_[tile].push_back(capture_model(sampled));
    }
  }
  if (draft_planner_) capture_drafts(sampled);
  check(cudaStreamSynchronize(stream_), "uploading the graphs");
}

void GpuRank::capture_drafts(const int32_t* sampled) {
  is_draft_ = true;
  for (const int64_t rows : graph_sizes()) {
    ForwardBatch batch = placeholders(rows, 1);
    std::fill(batch.positions.begin(), batch.positions.end(), 1);
    std::fill(batch.context_lens.begin(), batch.context_lens.end(), 1);
    draft_planner_->plan_draft(batch, {}, rows, layout_);
    if (layout_.decodes.size() > 1) continue;
    all_ = likely_rows(rows);
    draft_graphs_.push_back(capture_model(sampled));
    if (!config_.indexer) continue;
    draft_planner_->plan_any_length(layout_);
    long_draft_graphs_.push_back(capture_model(sampled));
  }
}

GpuRank::CapturedGraph GpuRank::capture_model(const int32_t* sampled) {
  const cuda::CoResidentLog log;
  cuda::Graph graph(stream_, [&] { enqueue_model(sampled); });
  return {layout_.rows, std::move(graph), log.text()};
}

}  // namespace fathom
