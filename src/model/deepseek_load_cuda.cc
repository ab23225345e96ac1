// What a model has before its first step: the plan of its kernels, memory, weights, constants; part
// of DeepSeekModel (deepseek_cuda.h).
#include <algorithm>
#include <vector>

#include "base/log.h"
#include "base/math.h"
#include "model/deepseek_cuda.h"
#include "model/layer_options.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/gate/gate_cuda.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/library_plan.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 1024;

// Where the experts are: of the layers as options say, consecutive ones by rank if they do not, and
// of the MTP layer always so.
std::shared_ptr<const ExpertTable> expert_table_of(const ModelConfig& config,
                                                   const ModelOptions& options,
                                                   const Placement& placement) {
  if (!placement.exchanges_tokens()) return nullptr;
  ExpertTable table = options.expert_table != nullptr ? *options.expert_table
                                                      : ExpertTable::contiguous(config, placement);
  if (options.with_mtp && config.is_moe_layer(config.num_layers)) {
    const int ranks = placement.world();
    ExpertLists lists = table.lists();
    lists.push_back(ExpertTable::contiguous(1, config.num_experts, ranks).lists_of(0));
    auto longer = ExpertTable::create(config.num_experts, ranks, lists, "experts");
    FATHOM_CHECK(longer.has_value(), "{}", longer.error().message);
    table = std::move(*longer);
  }
  return std::make_shared<const ExpertTable>(std::move(table));
}

ModelSpec spec_of(const Checkpoint& checkpoint, const ModelOptions& options,
                  const RankPlace& place) {
  const ModelConfig& config = checkpoint.config();
  auto table = expert_table_of(config, options, place.placement);
  return make_spec(config, place.placement, place.rank, std::move(table), options.with_mtp);
}

}  // namespace

DeepSeekModel::DeepSeekModel(ModelSpec spec, KernelPlan plan, const ModelOptions& options)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      options_(options),
      device_(DeviceContext::current()) {}

// Widths are padded to multiples of `unit`, see MlpWeights.
MoeShape DeepSeekModel::moe_shape(int64_t unit) const {
  return {.hidden = static_cast<int32_t>(config_.hidden),
          .num_experts = static_cast<int32_t>(config_.num_experts),
          .experts_per_token = static_cast<int32_t>(config_.experts_per_token),
          .inter = static_cast<int32_t>(round_up(plan_.widths.routed, unit)),
          .shared_inter = static_cast<int32_t>(round_up(plan_.widths.shared, unit))};
}

// A dense layer's MLP as a MoE with one expert.
MoeShape DeepSeekModel::dense_shape(int64_t unit) const {
  return {.hidden = static_cast<int32_t>(config_.hidden),
          .num_experts = 1,
          .experts_per_token = 1,
          .inter = static_cast<int32_t>(round_up(plan_.widths.dense, unit)),
          .shared_inter = 0};
}

// The shared expert beside four-bit ones, likewise.
MoeShape DeepSeekModel::shared_shape() const {
  MoeShape shape = dense_shape(kBf16WidthUnit);
  shape.inter = static_cast<int32_t>(round_up(plan_.widths.shared, kBf16WidthUnit));
  return shape;
}

bool DeepSeekModel::has_four_bit_experts() const {
  return std::any_of(plan_.layers.begin(), plan_.layers.end(),
                     [](const LayerForms& forms) { return forms.four_bit_experts.has_value(); });
}

int64_t DeepSeekModel::mlp_bytes() const {
  const auto rows = static_cast<int32_t>(options_.max_rows);
  int64_t bytes = 0;
  const auto add = [&](int64_t width, MoeShape (DeepSeekModel::*shape)(int64_t) const) {
    if (width == 0) return;
    bytes = std::max(bytes, moe_workspace_bytes((this->*shape)(kBf16WidthUnit), rows));
    if (config_.hidden % kScaleBlock != 0) return;
    bytes = std::max(bytes, scaled_moe_workspace_bytes((this->*shape)(kScaleBlock), rows));
  };
  add(plan_.widths.dense, &DeepSeekModel::dense_shape);
  if (!exchanges()) add(plan_.widths.routed, &DeepSeekModel::moe_shape);
  if (has_four_bit_experts() && plan_.widths.routed > 0) {
    bytes = std::max(bytes, four_bit_moe_workspace_bytes(moe_shape(kBf16WidthUnit), rows));
    if (plan_.widths.shared > 0) {
      bytes = std::max(bytes, moe_workspace_bytes(shared_shape(), rows));
    }
  }
  return bytes;
}

// Calls place(pointer, count) for each buffer.
template <typename Place>
void DeepSeekModel::for_each_piece(const Place& place) {
  const int64_t rows = options_.max_rows, heads = heads_, keys = options_.most_keys;
  const int64_t hidden = config_.hidden, latent = config_.kv_lora_rank;
  const int64_t rope = config_.qk_rope_dim, heads_out = heads * config_.v_dim,
                routed = std::max<int64_t>(1, config_.experts_per_token);
  const int64_t normed = std::max(rows, options_.max_logit_rows);
  const int64_t quantized =  // GEMM input rows, or keys
      std::max(round_up(normed, kScalesPadding) *
                   std::max({hidden * (options_.with_mtp ? 2 : 1), config_.q_lora_rank, heads_out}),
               round_up(keys, kScalesPadding) * latent);
  place(residual_, rows * hidden);
  place(logit_residual_, options_.max_logit_rows * hidden);
  place(normed_, normed * hidden);
  place(delta_, rows * hidden);
  place(mtp_input_, options_.with_mtp ? rows * 2 * hidden : 0);
  place(q_kv_a_, rows * q_kv_a_columns());
  if (config_.q_lora_rank > 0) {
    place(q_a_normed_, rows * config_.q_lora_rank);
    place(q_, rows * q_rows());
  }
  place(q_rope_, rows * heads * rope);
  place(q_latent_, rows * heads * latent);
  place(o_latent_, rows * heads * latent);
  place(heads_out_, rows * heads_out);
  place(quantized_, quantized);
  place(quantized_scales_, ceil_div(quantized, kScaleBlock));
  place(partial_lse_, rows * heads);
  if (is_sparse()) {
    const int64_t index_rows = std::min(rows, IndexPass::kMostRows);
    const int64_t index_heads = config_.indexer->num_heads;
    place(index_q_, index_rows * index_query_columns());
    place(index_values_, index_rows * index_query_columns());
    place(index_head_weights_, index_rows * index_heads);
    place(index_weights_, index_rows * index_heads);
    place(index_scores_, score_buffer_floats(*options_.sparse, index_rows, options_.max_length));
    place(key_lists_, rows * config_.indexer->topk);
    place(sparse_scratch_, sparse_scratch_words());
  }
  place(key_latent_, keys * latent);
  place(key_rope_, keys * rope);
  place(kv_, keys * heads * (config_.qk_nope_dim + config_.v_dim));
  place(expert_ids_, rows * routed);
  place(expert_weights_, rows * routed);
  place(dense_ids_, rows);
  place(dense_weights_, rows);
  place(mlp_, mlp_bytes());
  place(shared_out_, has_four_bit_experts() && plan_.widths.shared > 0 ? rows * hidden : 0);
  place(progress_, kMoeProgressWords);
  place(scaled_progress_, kScaledMoeProgressWords);
  place(expert_rows_, exchange_bytes());
  place(hosts_, exchanges() ? spec_.expert_table->num_layers() * config_.num_experts : 0);
  place(exchange_, decode_layers_exchange_bytes(plan_.decode_layers));
  place(gate_scratch_, gate_scratch_words(rows, hidden, config_.num_experts, plan_.budget.sms));
  place(decode_scratch_, latent_decode_scratch(plan_.budget.sms).words());
  place(cos_sin_, config_.max_position * rope);
  place(logits_, options_.max_logit_rows * logits_stride());
  place(library_workspace_, plan_.takes_library ? CublasLt::kWorkspaceBytes : 0);
}

int64_t DeepSeekModel::workspace_bytes() {
  int64_t bytes = 0;
  for_each_piece([&](auto* pointer, int64_t count) {
    bytes = round_up(bytes + count * static_cast<int64_t>(sizeof(*pointer)), kAlignment);
  });
  return bytes;
}

Result<KernelPlan> DeepSeekModel::plan(const Checkpoint& checkpoint, const ModelSpec& spec,
                                       const ModelOptions& options, const LoadOptions& load_options,
                                       int ranks_on_device) {
  return plan_kernels(spec, WeightForms(checkpoint, options.stored_fp8, load_options),
                      {.cache_format = options.cache_format,
                       .batch_invariant = options.batch_invariant,
                       .has_library = !cublas_lt_version().empty()},
                      DeviceContext::current().budget().divided_by(ranks_on_device));
}

Result<ModelMemory> DeepSeekModel::memory(const Checkpoint& checkpoint, const ModelOptions& options,
                                          const LoadOptions& load_options, const RankPlace& place) {
  ModelSpec spec = spec_of(checkpoint, options, place);
  FATHOM_TRY(KernelPlan kernels,
             plan(checkpoint, spec, options, load_options, place.ranks_on_device));
  const int64_t weights = weight_bytes(spec, kernels.layers);
  return ModelMemory{weights,
                     DeepSeekModel(std::move(spec), std::move(kernels), options).workspace_bytes()};
}

Result<std::unique_ptr<DeepSeekModel>> DeepSeekModel::load(const Checkpoint& checkpoint,
                                                           const ModelOptions& options,
                                                           const LoadOptions& load_options) {
  const RankPlace place = {.device = DeviceContext::current().device()};
  FATHOM_TRY(auto models, load_ranks(checkpoint, options, load_options, {&place, 1}));
  return std::move(models.front());
}

Result<std::vector<std::unique_ptr<DeepSeekModel>>> DeepSeekModel::load_ranks(
    const Checkpoint& checkpoint, const ModelOptions& options, const LoadOptions& load_options,
    std::span<const RankPlace> places) {
  const DeviceContext& before = DeviceContext::current();
  std::vector<std::unique_ptr<DeepSeekModel>> models;
  std::vector<WeightsOfRank> ranks;
  for (const RankPlace& place : places) {
    FATHOM_TRY(auto model, create(checkpoint, options, load_options, place));
    ranks.push_back({model->spec_, model->plan_.layers, model->device_});
    models.push_back(std::move(model));
  }
  const auto& layers = models.front()->plan_.layers;
  const auto wide = std::count_if(layers.begin(), layers.end(), [](const LayerForms& forms) {
    return forms.dequantizes_four_bits;
  });
  if (wide > 0) {
    log_info(
        "{} of {} layers have four-bit weights beside routed experts, or in a form that GPUs' "
        "kernels do not take: these are dequantized to bf16",
        wide, layers.size());
  }
  FATHOM_TRY(auto weights, load_weights(checkpoint, ranks, load_options));
  for (size_t i = 0; i < models.size(); ++i) models[i]->take(std::move(weights[i]));
  before.make_current();
  return models;
}

// All but the weights. Leaves the place's device current.
Result<std::unique_ptr<DeepSeekModel>> DeepSeekModel::create(const Checkpoint& checkpoint,
                                                             const ModelOptions& options,
                                                             const LoadOptions& load_options,
                                                             const RankPlace& place) {
  DeviceContext::of(place.device).make_current();
  ModelSpec spec = spec_of(checkpoint, options, place);
  FATHOM_TRY(KernelPlan kernels,
             plan(checkpoint, spec, options, load_options, place.ranks_on_device));
  std::unique_ptr<DeepSeekModel> model(
      new DeepSeekModel(std::move(spec), std::move(kernels), options));
  model->shares_device_ = place.ranks_on_device > 1;
  model->workspace_ = DeviceArray<std::byte>(model->workspace_bytes());
  int64_t bytes = 0;
  model->for_each_piece([&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(model->workspace_.data() + bytes);
    bytes = round_up(bytes + count * static_cast<int64_t>(sizeof(T)), kAlignment);
  });
  model->fill_constants();
  return model;
}

void DeepSeekModel::take(ModelWeights weights) {
  device_.make_current();
  weights_ = std::move(weights);
  describe_decode_layers();
  if (plan_.takes_library) prepare_library();
}

void DeepSeekModel::join(std::span<DeepSeekModel* const> ranks, const PeerGroup& group) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank]->lane_.assign(ranks.begin(), ranks.end());
    PeerRank& peers = ranks[rank]->peers_;
    peers = group.rank(static_cast<int>(rank));
    peers.shares_device |= ranks[rank]->shares_device_;  // with another lane's rank
  }
}

void DeepSeekModel::fill_constants() {
  const auto upload = [](const auto& values, auto* to) {
    check(cudaMemcpy(to, values.data(), values.size() * sizeof(values[0]), cudaMemcpyHostToDevice),
          "copying to the device");
  };
  const auto rows = static_cast<size_t>(options_.max_rows);
  upload(std::vector<int32_t>(rows, 0), dense_ids_);
  upload(std::vector<float>(rows, 1.0f), dense_weights_);
  upload(tabulate(rope_table(config_), config_.max_position), cos_sin_);
  upload(std::vector<uint64_t>(kMoeProgressWords, 0), progress_);
  upload(std::vector<uint64_t>(kScaledMoeProgressWords, 0), scaled_progress_);
  check(cudaMemset(expert_rows_, 0, static_cast<size_t>(exchange_bytes())),
        "preparing the exchange of experts' rows");
  const int64_t layers_bytes = decode_layers_exchange_bytes(plan_.decode_layers);
  if (layers_bytes > 0) {
    check(cudaMemset(exchange_, 0, static_cast<size_t>(layers_bytes)),
          "preparing one token's exchange");
  }
  const int64_t gate_words =
      gate_scratch_words(options_.max_rows, config_.hidden, config_.num_experts, plan_.budget.sms);
  check(cudaMemset(gate_scratch_, 0xFF, static_cast<size_t>(gate_words) * sizeof(float)),
        "preparing the router's memory");
  prepare_latent_decode_scratch(decode_scratch_, plan_.budget.sms, {device_, nullptr});
  check(cudaStreamSynchronize(nullptr), "preparing the workspace");
}

// Runs each GEMM that the library takes once for every class of row counts: steps then neither
// query algorithms nor load kernels.
void DeepSeekModel::prepare_library() {
  library_ = CublasLt::load(library_workspace_);
  const LayerWeights &first = weights_.layers.front(),
                     &last = weights_.layers[static_cast<size_t>(config_.num_layers) - 1];
  const int64_t hidden = config_.hidden, lora = config_.q_lora_rank, latent = config_.kv_lora_rank,
                heads_out = heads_ * config_.v_dim,
                keys_columns = heads_ * (config_.qk_nope_dim + config_.v_dim);
  const int64_t most_rows = std::max(options_.max_rows, options_.most_keys);
  for (int64_t least = 65; least <= most_rows; least = rows_alike(least) + 1) {
    const auto run = [&](bf16* x, const WeightMatrix& weight, MatrixSize size, void* out,
                         DType type, int64_t most) {
      if (least > most || is_e4m3(weight)) return;
      const int64_t some_rows = std::min(rows_alike(least), most);
      check(cudaMemset(x, 0, static_cast<size_t>(some_rows * size.k) * sizeof(bf16)),
            "clearing a product's rows");
      product({.data = x, .stride = size.k}, weight, size, {out, size.n, type}, some_rows,
              {device_, nullptr});
    };
    const int64_t rows = options_.max_rows;
    run(normed_, first.q_kv_a, {q_kv_a_columns(), hidden}, q_kv_a_, DType::kBF16, rows);
    if (lora > 0) run(q_a_normed_, first.q_b, {q_rows(), lora}, q_, DType::kBF16, rows);
    if (is_sparse()) {
      run(q_a_normed_, first.indexer.q, {index_query_columns(), lora}, index_q_, DType::kBF16,
          std::min(rows, IndexPass::kMostRows));
      run(normed_, first.indexer.weights, {config_.indexer->num_heads, hidden}, index_head_weights_,
          DType::kF32, std::min(rows, IndexPass::kMostRows));
    }
    run(key_latent_, first.kv_b, {keys_columns, latent}, kv_, DType::kBF16, options_.most_keys);
    run(heads_out_, first.o, {hidden, heads_out}, delta_, DType::kBF16, rows);
    run(normed_, {.values = weights_.head}, {gpu_logit_columns(spec_), hidden}, logits_,
        DType::kF32, options_.max_logit_rows);
    if (options_.with_mtp) {
      run(mtp_input_, weights_.mtp.projection, {hidden, 2 * hidden}, residual_, DType::kF32, rows);
      run(normed_, mtp_keys(), {cache_columns(), hidden}, q_kv_a_, DType::kBF16, rows);
    }
    if (last.gate_type == DType::kBF16 &&
        gate_scratch_words(1, hidden, config_.num_experts, plan_.budget.sms) > 0) {
      run(normed_, {.values = last.gate}, {config_.num_experts, hidden}, residual_, DType::kF32,
          std::min(rows, rows * hidden / config_.num_experts));
    }
  }
  // Not the whole device: that fails while another engine of this process captures a graph.
  check(cudaStreamSynchronize(nullptr), "preparing cuBLASLt");
}

}  // namespace fathom::cuda
