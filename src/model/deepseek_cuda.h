// The DeepSeek V2 / V3 decoder on one GPU: the steps of model/deepseek.h in about ten launches a
// layer, or one launch for all MoE layers (ops/decode_layers). Each launch is an operation of
// ops/*_cuda.h.
//
// Owns the weights and the activations' workspace in device memory; the caller owns the cache. One
// forward() at a time, on the rank's thread, whose current device is the model's.
//
// Under tensor parallelism a model is one rank's part. The ranks of a lane enqueue the same steps
// and meet in launches (ops/peer_sum): after each layer's attention and feed-forward, where their
// parts of a sum are added on the way to the next norm, and at the logits, which the first rank
// gathers. A row of the embedding is read in the memory of the rank that has it.
//
// Under expert parallelism a model has whole experts, and all ranks meet in each layer with experts
// (ops/moe/exchange_cuda): those of a lane without rows call serve_experts(), or in a draft step
// serve_draft_experts().
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/math.h"
#include "cache/cache_format.h"
#include "device/cuda/gpu_stream.h"
#include "device/cuda/peer_group.h"
#include "model/attention_plan.h"
#include "model/gpu_support.h"
#include "model/kernel_plan.h"
#include "model/layer_options.h"
#include "model/step_layout.h"
#include "model/weights_cuda.h"
#include "ops/decode_layers/decode_layers_cuda.h"
#include "ops/indexer/index_pages_cuda.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/exchange_cuda/moe_over_ranks_cuda.h"
#include "ops/mtp/mtp_rows_cuda.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"
#include "placement/split.h"

namespace fathom::cuda {

inline bool is_e4m3(const WeightMatrix& weight) { return weight.type == DType::kF8E4M3; }

struct ModelOptions {
  int64_t max_rows = 8192;       // tokens in one step
  int64_t max_logit_rows = 512;  // in one step
  int64_t most_keys = 0;         // expanded at a time for multi-head attention; whole tiles
  bool batch_invariant = false;  // a row's bits do not depend on the other rows of the step
  StoredFp8 stored_fp8 = StoredFp8::kKept;
  CacheFormat cache_format = CacheFormat::kBF16;  // of forward()'s cache
  std::optional<SparseLimits> sparse = {};        // of a model with an indexer
  int64_t max_length = 0;                         // of a sequence; read with sparse attention
  // Where the experts are under expert parallelism; null: consecutive ones by rank.
  std::shared_ptr<const ExpertTable> expert_table = {};
  bool with_mtp = false;  // with the MTP layer, its cache rows and the states in the cache's pages
  // Under expert parallelism: the rounds of a step of more rows than one takes run in turn, at the
  // cost of a second workspace (RoundsInTurn).
  bool rounds_in_turn = false;
};

// A step's rows, and logit rows, of all lanes together, without padding: what ranks with experts of
// their own must know of one another.
struct WorldRows {
  int64_t rows = 0, logit_rows = 0;
  // Whether these are a guess, which costs no more than time: of a captured step, which is replayed
  // with up to max_rows of them.
  bool is_captured = false;
};

// Where a rank runs.
struct RankPlace {
  Placement placement = {};  // has passed check_placement()
  int rank = 0;
  int device = 0;
  int ranks_on_device = 1;  // which divide its SMs
};

// Bytes of device memory.
struct ModelMemory {
  int64_t weights = 0, workspace = 0;
};

// Pages of the latent cache in device memory. Layer l's part of page p, [kPageSize, row bytes],
// begins at data + l * layer_bytes + p * page_stride * (bytes of one such part). With layer_bytes
// one part and page_stride the number of layers the layout is [num_pages, num_layers, kPageSize,
// row bytes]: a page is contiguous and copied at once. With layer_bytes num_pages parts and
// page_stride 1 each layer has an array of its own.
//
// With an MTP layer or sparse attention pages are contiguous, gpu_page_stride() parts apart: the
// latent rows of all layers, the MTP layer's and the states that the page keeps for it, then the
// index keys of all these layers, kIndexPageBytes each.
struct CacheMemory {
  CacheFormat format = CacheFormat::kBF16;
  std::byte* data = nullptr;
  int64_t num_pages = 0;  // in the pool
  int64_t layer_bytes = 0;
  int64_t page_stride = 1;  // StepLimits::page_stride

  // Page numbers on the device are below this.
  int64_t num_device_pages() const { return (num_pages - 1) * page_stride + 1; }
  int64_t page_bytes() const { return page_stride * layer_bytes; }
};

class DeepSeekModel {
 public:
  // On the current device. Plans the kernels first: what is not supported is refused before a
  // weight is read.
  static Result<std::unique_ptr<DeepSeekModel>> load(const Checkpoint& checkpoint,
                                                     const ModelOptions& options,
                                                     const LoadOptions& load_options);
  // Ranks of one process, each on its device, their weights in one pass. Those of a lane do not run
  // before join().
  static Result<std::vector<std::unique_ptr<DeepSeekModel>>> load_ranks(
      const Checkpoint& checkpoint, const ModelOptions& options, const LoadOptions& load_options,
      std::span<const RankPlace> places);
  // Makes the models the ranks of one lane, in order. The group has their devices, and outlives
  // them.
  static void join(std::span<DeepSeekModel* const> ranks, const PeerGroup& group);
  // Makes the models the ranks of one world, in order, which exchange the rows of their experts.
  // The group has their devices and no other use, and outlives them. Refuses experts that are
  // stored in FP8 on some ranks and not on others. Before the first step or capture.
  static Result<> join_world(std::span<DeepSeekModel* const> ranks, const PeerGroup& group);
  // Rows up to this many are summed in one launch that stores them to all ranks at once (peer_sum),
  // more are divided over the ranks (peer_sum_rows).
  static constexpr int64_t kMostPeerRows = 128;

  // What the rank takes on the current device. Refuses what load() refuses by its plan.
  static Result<ModelMemory> memory(const Checkpoint& checkpoint, const ModelOptions& options,
                                    const LoadOptions& load_options, const RankPlace& place);

  const ModelConfig& config() const { return config_; }
  int num_multiprocessors() const { return plan_.budget.sms; }

  // Enqueues the step whose arrays are at `arrays` in device memory (step.memory, copied): writes
  // the rows' cache rows and logits() [step.logit_rows, vocab] f32, rows logits_stride() apart.
  // `sampled` are the tokens of the step before, in memory that the device reaches. In a lane of
  // several ranks logits() are written on the first alone, and their sums wait for all ranks to
  // enqueue the same step. Launches only, no host synchronisation: a step
  // without multi-head rows can be captured, and the graph replayed for any step with the same
  // number of rows. `all` is read under expert parallelism alone.
  void forward(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
               const CacheMemory& cache, GpuStream stream, const WorldRows& all = {});
  // Enqueues a step of the MTP layer (StepPlanner::plan_draft()), as forward(): writes its rows'
  // cache rows and logits() of the tokens after them, and leaves the states of the logit rows for
  // the draft step that follows, before any other forward().
  void draft(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
             const CacheMemory& cache, GpuStream stream, const WorldRows& all = {});
  // forward() and draft() for a rank whose lane has no rows in the step: compute its experts for
  // the others.
  void serve_experts(const WorldRows& all, GpuStream stream);
  void serve_draft_experts(const WorldRows& all, GpuStream stream);
  float* logits() const { return logits_; }
  // In a lane of several ranks: the first has the columns of all, another its own.
  int64_t logits_stride() const {
    return spec_.tp_rank() == 0 ? round_up(config_.vocab_size, kVocabularyUnit)
                                : gpu_logit_columns(spec_);
  }
  int64_t num_heads() const { return heads_; }
  // Steps of up to so many rows use other launches beyond so many keys of all sequences: a graph is
  // valid on one side only. 0: the same ones always.
  int64_t most_rows_of_one_launch() const { return most_decode_layers_rows(plan_.decode_layers); }
  int64_t most_keys_of_one_launch(int64_t rows, CacheFormat format) const {
    return most_decode_layers_bytes(plan_.decode_layers, rows) /
           latent_layout(config_, format).row_bytes();
  }

 private:
  struct Query {
    bf16* data = nullptr;  // [rows, H, nope + rope]
    int64_t stride = 0;    // elements from row to row
  };
  struct Pages {
    CacheFormat format = CacheFormat::kBF16;
    std::byte* data = nullptr;  // one layer's
    int64_t count = 0;
    IndexPages index_keys = {};  // with sparse attention
  };
  struct MatrixSize {
    int64_t n = 0, k = 0;
  };
  struct Output {
    void* data = nullptr;
    int64_t stride = 0;
    DType type = DType::kBF16;
  };
  static constexpr int64_t kScalesPadding = 4;  // of each row of scales, see QuantizedRows
  // GEMM input rows: in bf16, in e4m3 with scales, or both.
  struct Activation {
    bf16* data = nullptr;  // null: absent
    int64_t stride = 0;
    QuantizedRows quantized = {};  // values null: absent
  };
  // The formats that some weights' GEMMs read.
  struct Forms {
    bool bf16 = false, e4m3 = false;
    float input_scale = 0;  // for e4m3, see WeightMatrix
  };
  static Forms forms_of(const WeightMatrix& weight);
  static Forms feed_forward_forms(const LayerWeights& weights);

  // The norms of a layer, or the one after all layers of the model, or after the MTP layer.
  enum class NormKind { kInput, kPostAttention, kFinal, kMtpFinal };
  struct Norm {
    NormKind kind;
    size_t layer = 0;
  };
  const float* norm_weight(Norm norm) const;
  // What the GEMMs after a norm read.
  Forms norm_forms(Norm norm) const;

  static Result<KernelPlan> plan(const Checkpoint& checkpoint, const ModelSpec& spec,
                                 const ModelOptions& options, const LoadOptions& load_options,
                                 int ranks_on_device);
  static Result<std::unique_ptr<DeepSeekModel>> create(const Checkpoint& checkpoint,
                                                       const ModelOptions& options,
                                                       const LoadOptions& load_options,
                                                       const RankPlace& place);
  void take(ModelWeights weights);
  DeepSeekModel(ModelSpec spec, KernelPlan plan, const ModelOptions& options);

  template <typename Place>
  void for_each_piece(const Place& place);
  int64_t workspace_bytes();
  int64_t mlp_bytes() const;
  MoeShape moe_shape(int64_t unit) const;
  MoeShape dense_shape(int64_t unit) const;
  MoeShape shared_shape() const;
  void fill_constants();
  void describe_decode_layers();
  bool takes_decode_layers(const StepLayout& step, CacheFormat format) const;
  void last_layers(const StepLayout& step, const std::byte* arrays, const CacheMemory& cache,
                   GpuStream stream);
  template <typename Arguments>
  void set_embedding(Arguments& arguments) const;
  void logits_and_mtp_rows(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
                           const CacheMemory& cache, GpuStream stream);
  KeptStates kept_states(const CacheMemory& cache) const;
  void combine_mtp_inputs(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
                          const CacheMemory& cache, GpuStream stream);
  Activation project_mtp_inputs(int64_t rows, GpuStream stream);
  void write_mtp_keys(const StepLayout& step, const std::byte* arrays, int64_t slots,
                      const Activation& x, const CacheMemory& cache, GpuStream stream);
  WeightMatrix mtp_keys() const;
  void prepare_library();

  void attention(const LayerWeights& weights, const Activation& x, const StepLayout& step,
                 const std::byte* arrays, const Pages& pages, GpuStream stream);
  static Activation rows_from(const Activation& x, int64_t first);
  Pages pages_of(const CacheMemory& cache, int64_t layer) const;
  Activation query_latent(const LayerWeights& weights, int64_t rows, GpuStream stream);
  Query project_query(const LayerWeights& weights, const Activation& latent, int64_t rows,
                      GpuStream stream);
  Activation heads_out(const LayerWeights& weights, const StepLayout& step) const;
  void absorbed_attention(const LayerWeights& weights, const StepLayout& step,
                          const std::byte* arrays, const Query& query, const Pages& pages,
                          const Activation& out, GpuStream stream);
  void latent_attention(const StepLayout& step, const std::byte* arrays, const Pages& pages,
                        int64_t rows, GpuStream stream);
  void sparse_attention(const StepLayout& step, const std::byte* arrays, const Pages& pages,
                        int64_t rows, GpuStream stream);
  bool is_sparse() const { return options_.sparse.has_value(); }
  int32_t top_keys() const { return static_cast<int32_t>(config_.indexer->topk); }
  int64_t index_query_columns() const {
    return is_sparse() ? config_.indexer->num_heads * config_.indexer->head_dim : 0;
  }
  // Rows of one launch of sparse attention, and the keys of a split of their lists.
  int64_t sparse_rows() const;
  int32_t sparse_split(int64_t rows) const;
  int64_t sparse_scratch_words() const;
  void list_all_keys(const StepLayout& step, const std::byte* arrays, GpuStream stream);
  void write_index_key_rows(const IndexerMatrices& weights, const bf16* keys, int64_t stride,
                            const StepLayout& step, const std::byte* arrays, int64_t slots,
                            const Pages& pages, GpuStream stream);
  void choose_keys(const IndexerMatrices& weights, const Activation& x, const Activation& latent,
                   const IndexPass& pass, const StepLayout& step, const std::byte* arrays,
                   const Pages& pages, GpuStream stream);
  void mha_attention(const LayerWeights& weights, const StepLayout& step, size_t pass,
                     const std::byte* arrays, const Query& query, const Pages& pages,
                     const Activation& out, GpuStream stream);
  bool exchanges() const { return spec_.placement.exchanges_tokens(); }
  int64_t exchange_bytes() const;
  int64_t exchange_bytes(bool of_odd_rounds) const;
  ExpertExchange exchange_view(bool scaled, bool of_odd_rounds) const;
  void feed_forward(size_t layer, const Activation& x, int64_t rows, const int32_t* num_valid_rows,
                    const WorldRows& all, GpuStream stream);
  void experts(const MlpWeights& experts, const MlpWeights& shared, const Activation& x,
               int64_t rows, bool routed, GpuStream stream);
  void four_bit_experts(const MlpWeights& experts, const MlpWeights& shared, const Activation& x,
                        int64_t rows, GpuStream stream);
  bool has_four_bit_experts() const;
  void experts_of_ranks(size_t layer, const Activation& x, int64_t rows,
                        const int32_t* num_valid_rows, const WorldRows& all, GpuStream stream);

  using ResidualField = float* DeepSeekModel::*;  // residual_ or logit_residual_
  Activation add_and_norm(ResidualField residual, bool adds, Norm norm, int64_t rows,
                          GpuStream stream);
  Activation narrow_and_norm(const StepLayout& step, const std::byte* arrays, Norm norm,
                             GpuStream stream);
  void sum_and_norm(const AddRmsNormArguments& own, ResidualField residual, Norm norm,
                    int64_t divided_rows, GpuStream stream);
  void logits_of(ResidualField residual, Norm norm, int64_t rows, GpuStream stream);
  void head(const Activation& x, int64_t rows, GpuStream stream);
  void product(const Activation& x, const WeightMatrix& weight, MatrixSize size, const Output& out,
               int64_t rows, GpuStream stream);
  void head_product(const Activation& x, int64_t x_head_stride, const WeightMatrix& weight,
                    MatrixSize size, const Activation& out, int64_t rows, GpuStream stream);
  Activation normed(Forms forms, int64_t rows) const;
  QuantizedRows quantized(int64_t rows, int64_t k, float input_scale) const;

  ScaleForm scale_form() const {
    return config_.quantization.scales_are_powers_of_two ? ScaleForm::kPowerOfTwo : ScaleForm::kF32;
  }
  // SMs of launches that wait for other ranks. Those that share a device leave nearly all of it to
  // the ranks that they wait for, whose kernels may need whole clusters of free SMs.
  int peer_sms() const { return peers_.shares_device ? 2 : plan_.budget.sms; }
  int64_t q_rows() const { return heads_ * config_.qk_dim(); }
  // Columns of the q_kv_a GEMM: the query, an index key, the latent and the rotary key; and those
  // of its last part, a token's cache rows.
  int64_t q_kv_a_columns() const {
    return (config_.q_lora_rank > 0 ? config_.q_lora_rank : q_rows()) + cache_columns();
  }
  int64_t cache_columns() const {
    return (is_sparse() ? config_.indexer->head_dim : 0) + config_.latent_dim();
  }

  const ModelSpec spec_;
  const ModelConfig& config_ = spec_.config;
  const int64_t heads_ = spec_.num_heads();  // of this rank
  const KernelPlan plan_;
  const ModelOptions options_;
  DeviceContext& device_;
  ModelWeights weights_;
  DeviceArray<DecodeLayer> decode_layers_;  // from plan_.first_decode_layer on
  DeviceArray<std::byte> workspace_;
  std::unique_ptr<CublasLt> library_;       // passed to bf16 GEMMs; null: absent
  std::vector<const DeepSeekModel*> lane_;  // the ranks of the lane, itself included; empty: alone
  PeerRank peers_;                          // with a lane only
  bool shares_device_ = false;              // with ranks of any lane

  // Under expert parallelism: the exchange of rows for experts in bf16 and in e4m3, and of odd
  // rounds where they run in turn.
  ExpertExchange exchanges_[2], odd_exchanges_[2];
  std::unique_ptr<RoundsInTurn> rounds_in_turn_;

  // Workspace; element counts for max_rows.
  float* residual_ = nullptr;          // [rows, hidden]
  float* logit_residual_ = nullptr;    // [max_logit_rows, hidden]
  bf16* normed_ = nullptr;             // [rows, hidden]
  bf16* delta_ = nullptr;              // [rows, hidden]: to be added to the residual
  bf16* mtp_input_ = nullptr;          // [rows, 2 * hidden], with an MTP layer
  bf16* q_kv_a_ = nullptr;             // [rows, q or q_lora, and latent + rope]
  bf16* q_a_normed_ = nullptr;         // [rows, q_lora]
  bf16* q_ = nullptr;                  // [rows, H, nope + rope], with query compression
  bf16* q_rope_ = nullptr;             // [rows, H, rope]
  bf16* q_latent_ = nullptr;           // [rows, H, latent]; later, multi-head: fp32 [rows, H, v]
  bf16* o_latent_ = nullptr;           // [rows, H, latent]
  bf16* heads_out_ = nullptr;          // [rows, H, v]; or e4m3, followed by scales
  e4m3* quantized_ = nullptr;          // [rows, k]: the next GEMM's input in e4m3
  float* quantized_scales_ = nullptr;  // [k / 128, rows up to a multiple of 4]: its scales
  float* partial_lse_ = nullptr;       // [rows, H]
  // With sparse attention, of the rows of an index pass:
  bf16* index_q_ = nullptr;              // [rows, index heads, 128]
  e4m3* index_values_ = nullptr;         // the same in e4m3
  float* index_head_weights_ = nullptr;  // [rows, index heads]: weights_proj's output
  float* index_weights_ = nullptr;       // the same, scaled
  float* index_scores_ = nullptr;        // [rows, columns]
  int32_t* key_lists_ = nullptr;         // [rows, index_topk]: of all rows of a step
  float* sparse_scratch_ = nullptr;
  bf16* key_latent_ = nullptr;       // [most_keys, latent]
  bf16* key_rope_ = nullptr;         // [most_keys, rope]
  bf16* kv_ = nullptr;               // [most_keys, H, nope + v]
  int32_t* expert_ids_ = nullptr;    // [rows, k]
  float* expert_weights_ = nullptr;  // [rows, k]
  int32_t* dense_ids_ = nullptr;     // [rows]: 0, a dense layer's only expert
  float* dense_weights_ = nullptr;   // [rows]: 1
  std::byte* mlp_ = nullptr;         // scratch of the MLP operation
  bf16* shared_out_ = nullptr;       // [rows, hidden]: beside four-bit experts
  // Counters of the MoE kernels in bf16 and in e4m3, zero at first.
  uint64_t* progress_ = nullptr;
  uint64_t* scaled_progress_ = nullptr;
  std::byte* expert_rows_ = nullptr;  // workspace of the exchange of experts' rows, zero at first
  ExpertHost* hosts_ = nullptr;       // [layers with experts, experts]: where they are
  std::byte* exchange_ = nullptr;     // scratch of decode_layers, zero at first
  float* gate_scratch_ = nullptr;     // scratch of the router, every bit set at first
  float* decode_scratch_ = nullptr;   // scratch of latent_decode
  float* cos_sin_ = nullptr;          // [max_position, rope / 2, 2]
  float* logits_ = nullptr;           // [max_logit_rows, logits_stride()]
  std::byte* library_workspace_ = nullptr;
};

// The table of an embedding's, or another operation's, arguments: a shard a rank of the lane.
template <typename Arguments>
void DeepSeekModel::set_embedding(Arguments& arguments) const {
  arguments.shards[0] = {weights_.embedding, spec_.embedding.rows.count};
  for (size_t rank = 0; rank < lane_.size(); ++rank) {
    arguments.shards[rank] = {lane_[rank]->weights_.embedding,
                              lane_[rank]->spec_.embedding.rows.count};
    arguments.num_shards = static_cast<int>(lane_.size());
  }
}

}  // namespace fathom::cuda
