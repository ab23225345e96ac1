// The DeepSeek V2 / V3 decoder over a paged latent cache: tokens in, logits out.
//
// Owns the weights and the activations' workspace; the caller owns the cache. One forward() at a
// time, on the rank's thread. Under tensor parallelism a model is one rank's part: all ranks of the
// lane call forward() with the same batches, each with a cache of its own, and meet after each
// layer's attention and feed-forward, at the embedding and at the logits.
//
// Under expert parallelism all ranks of the world call forward() in the same steps, a lane without
// work with a batch of no rows, and tokens go to their experts' ranks (model/expert_exchange.h). A
// lane's ranks each route a slice of its rows. The feed-forward then has the bits of one rank.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "cache/latent_layout.h"
#include "comm/group.h"
#include "model/attention_plan.h"
#include "model/expert_exchange.h"
#include "model/forward_batch.h"
#include "model/lane_rows.h"
#include "model/weights.h"
#include "model/workspace.h"
#include "ops/grouped_heads/grouped_heads.h"
#include "ops/indexer/index_keys.h"
#include "ops/linear/linear.h"
#include "ops/rope/rope.h"

namespace fathom {

struct ModelOptions {
  DType compute = DType::kBF16;  // or kF32: float32 throughout, the reference
  int64_t max_rows = 2048;       // tokens in one step
  AttentionPolicy attention;
};

// The groups that a rank is in.
struct RankGroups {
  Group* lane = nullptr;   // the ranks of its lane; null with tp 1
  Group* world = nullptr;  // all ranks; needed where tokens are exchanged
};

class DeepSeekModel {
 public:
  // The whole model on one rank.
  static Result<std::unique_ptr<DeepSeekModel>> load(const Checkpoint& checkpoint,
                                                     const ModelOptions& options,
                                                     const LoadOptions& load_options,
                                                     const Stream& stream, int64_t mtp_layers = 0);
  // A rank's part; the weights are those of its spec. `groups` outlive the model.
  static Result<std::unique_ptr<DeepSeekModel>> create(const ModelSpec& spec, ModelWeights weights,
                                                       const ModelOptions& options,
                                                       const Stream& stream,
                                                       const RankGroups& groups);

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  int64_t weight_bytes() const { return weights_.bytes(); }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

  // Runs the batch's tokens through all layers, writes their cache rows, and computes logits
  // [logit_rows, vocab] f32, on the lane's first rank alone (the others' may be empty). In a lane
  // of several ranks, largest_only rows have a token in `tokens` [logit_rows] instead (-1: none),
  // whose other entries are not written. Requires rows <= max_rows and pages < cache.num_pages().
  // Throws CommError. A batch of no rows only computes other ranks' tokens, if it has their
  // experts.
  void forward(const ForwardBatch& batch, const LatentCache& cache, TensorView logits,
               std::span<int32_t> tokens = {});

  // The MTP layers, as many as the spec has. Their caches are the layers behind the model's: a
  // token's row is in the token's own slot, made from the token and the state before it. That is
  // the main model's for the first layer and the layer's before for the others, so the i-th has no
  // row of the first i tokens, from 1 on. Pages keep the states that later rows need. forward()
  // writes the rows of its tokens that are no drafts, from mtp_lens on. Their experts are split
  // over the lane, also under expert parallelism: lanes draft apart, and answers don't depend on
  // it.

  // LatentCache's state_bytes and layers for a model with these MTP layers.
  static int64_t state_bytes(const ModelConfig& config, DType compute, int64_t mtp_layers = 1);
  static int64_t cache_layers(const ModelConfig& config, int64_t mtp_layers = 1);

  // Runs MTP layers alone over the batch's tokens, all behind a sequence's first, and writes their
  // rows. Without `states` these are tokens that are known: all layers get their rows, and the
  // first one gives logits, [logit_rows, vocab] f32 of the tokens that follow, as forward(). With
  // `states` [rows] these are drafts, one a sequence with logits: row r follows logit row
  // states[r] of the last call, whose layer's state it takes in, and the next layer gives the
  // logits; behind the last one, the last one again.
  void draft(const ForwardBatch& batch, std::span<const int32_t> states, const LatentCache& cache,
             TensorView logits, std::span<int32_t> tokens = {});

  // Expert parallelism, between two steps.

  // The weights in this rank's slots of a layer, counted as the table counts layers.
  std::span<const MlpWeights> expert_slots(int64_t moe_layer) const;
  // The weights of this rank's slots of some of the table's layers.
  using ExpertSlots = std::map<int64_t, std::vector<MlpWeights>>;
  // From now on experts are where `table` says; `slots` are this rank's of the layers that change.
  // All ranks do this between the same steps.
  void place_experts(std::shared_ptr<const ExpertTable> table, ExpertSlots&& slots);
  // Tokens that this rank routed to each expert in the last step: [layers with routed experts,
  // experts]. Empty where tokens are not exchanged.
  std::span<const int32_t> expert_counts() const { return expert_counts_; }

 private:
  DeepSeekModel(const ModelSpec& spec, const ModelOptions& options, const Stream& stream,
                Group* lane)
      : config_(spec.config),
        heads_(spec.num_heads()),
        vocabulary_(spec.vocabulary()),
        options_(options),
        stream_(stream),
        lane_(lane),
        expert_table_(spec.expert_table) {}

  // State shared by all layers of one step.
  struct Step {
    const ForwardBatch& batch;
    AttentionPlan plan;
    std::vector<int64_t> slots;  // [rows]: slot of each token's cache row
    LaneRows rows;
    int32_t first_key = 0;  // PagedBatch's
    // [rows] of draft_keys_ whose keys the rows attend to; empty: they choose.
    std::vector<int32_t> key_sources = {};
  };
  // What the rows with logits of the last draft() attended to, for the steps behind them. A list is
  // valid where its row saw more than topk keys.
  struct DraftKeys {
    std::vector<int32_t> visible;  // [rows]: keys that the first step's row saw
    std::vector<int32_t> lists;    // [rows, topk]
  };
  // A layer's part of the cache.
  struct LayerCache {
    LatentPages latent;
    IndexKeyPages index_keys;  // with sparse attention
  };
  static LayerCache layer_cache(const LatentCache& cache, int64_t layer);
  Step make_step(const ForwardBatch& batch, int32_t first_key);
  // `moe_layer`: as the expert table counts; none: the lane alone computes the layer.
  void run_layer(const LayerWeights& weights, std::optional<int64_t> moe_layer, const Step& step,
                 const LayerCache& cache, TensorView x);

  // x [rows, hidden] of each of these: where rows are divided over the lane, only this rank's own
  // are there, in `residual` too.
  void attention(const AttentionWeights& weights, const Step& step, const LayerCache& cache,
                 TensorView x, TensorView residual);
  void project(const AttentionWeights& weights, const Step& step, const LayerCache& cache,
               TensorView x, TensorView q);
  // The queries' rotation, in the two parts that both forms of attention read.
  void rotate_queries(const Step& step, ConstTensorView q);
  // The GEMMs that fill the cache, x -> kv_a; of a row's two parts, or both at once.
  void add_cache_tasks(const AttentionWeights& weights, ConstTensorView x, TensorView kv_a,
                       std::vector<LinearTask>& tasks) const;
  // The part of project() that fills the cache, alone.
  void project_cache_rows(const AttentionWeights& weights, const Step& step,
                          const LayerCache& cache, TensorView x);
  void write_cache(const AttentionWeights& weights, const Step& step, const LayerCache& cache,
                   TensorView kv_a, TensorView x);
  static void add_cache_rows(const AttentionWeights& weights, std::span<const int64_t> slots,
                             Slice rows, const LayerCache& cache, std::vector<Piece>& pieces);
  void absorbed_attention(const AttentionWeights& weights, const Step& step,
                          const AbsorbedGroup& group, const LatentPages& pages);
  void sparse_attention(const Step& step, const AbsorbedGroup& group, ConstTensorView q_latent,
                        ConstTensorView q_rope, const LatentPages& pages, TensorView o_latent);
  // W_UK and W_UV of absorbed attention; with grouped queries each head's place in the row.
  void absorb_queries(const AttentionWeights& weights, ConstTensorView q_nope, TensorView q_latent,
                      TensorView q_rope);
  void expand_values(const AttentionWeights& weights, ConstTensorView o_latent, TensorView out);
  void mha_attention(const AttentionWeights& weights, const Step& step, const MhaRows& which,
                     const LatentPages& pages);
  // Sparse attention (deepseek_indexer.cc): the cache rows of all tokens, and the lists of keys of
  // the rows that choose, [scored rows, topk] of the workspace. They stand until the next layer
  // with an indexer: layers between attend to the same keys.
  IndexRotation index_rotation() const {
    return {.table = &rope_, .interleaved = config_.indexer->interleaved};
  }
  void write_keys(const IndexerWeights& weights, const Step& step, const IndexKeyPages& pages,
                  ConstTensorView own_x);
  void choose_keys(const IndexerWeights& weights, const Step& step, const IndexKeyPages& pages,
                   TensorView x);
  void make_queries(const IndexerWeights& weights, const Step& step,
                    std::span<const SparseRow> scored, IndexKeyFormat format, TensorView x);
  void score_keys(const Step& step, Slice scored, const IndexKeyPages& pages);
  TensorView key_lists(const Step& step) const;
  // From now on the lane's ranks compare these lists, too.
  void compare_lists(ConstTensorView lists);
  // Lists of the rows that would choose, from those of the draft's first step.
  void reuse_keys(const Step& step);
  // draft_keys_ of these rows of the step.
  void keep_draft_keys(const Step& step, std::span<const int32_t> logit_rows);
  // Each row's experts and their weights, [rows, k] of the workspace.
  struct Routes {
    TensorView expert_ids, weights;
  };
  void feed_forward(const LayerWeights& weights, const LaneRows& rows, TensorView x,
                    TensorView residual);
  void add_feed_forward(const LayerWeights& weights, const Routes& routes, ConstTensorView x,
                        TensorView out);
  void exchanged_moe(const MoeWeights& weights, int64_t moe_layer, const LaneRows& rows,
                     ConstTensorView x, TensorView residual);
  Routes route(const MoeWeights& weights, ConstTensorView x, Slice some);
  void host_experts();
  void embed(const Step& step, TensorView residual);
  // Returns the normed states of the batch's logit rows, on all ranks. draft_head: empty for the
  // head itself.
  ConstTensorView logits(const Step& step, ConstTensorView residual, const Buffer& norm,
                         const DraftHead& draft_head, TensorView out, std::span<int32_t> tokens);
  // MTP layers (deepseek_mtp.cc), counted from 0.
  struct MtpRows;
  bool has_mtp() const { return !weights_.mtp.empty(); }
  void make_states(const Step& step, ConstTensorView residual, const Buffer& norm,
                   TensorView states);
  void write_mtp_rows(const ForwardBatch& batch, const LatentCache& cache);
  void draft_known(const ForwardBatch& batch, const LatentCache& cache, TensorView logits_out,
                   std::span<int32_t> tokens);
  void draft_next(const ForwardBatch& batch, std::span<const int32_t> states,
                  const LatentCache& cache, TensorView logits_out, std::span<int32_t> tokens);
  void draft_logits(int64_t layer, const MtpRows& rows, std::vector<int32_t> key_sources,
                    const LatentCache& cache, TensorView logits_out, std::span<int32_t> tokens);
  void write_rows(int64_t layer, const MtpRows& rows, const LatentCache& cache);
  void write_rows_behind(int64_t layer, const MtpRows& rows, const LatentCache& cache);
  void run_mtp_layer(int64_t layer, const Step& step, const MtpRows& rows, const LatentCache& cache,
                     TensorView residual);
  void write_cache_rows(int64_t layer, const MtpRows& rows, const LatentCache& cache);
  void combine_inputs(int64_t layer, const Step& step, std::span<const std::byte* const> states,
                      TensorView residual);
  void keep_states(int64_t layer, const ForwardBatch& batch, const std::byte* states,
                   const LatentCache& cache) const;
  std::byte* state_of(int64_t layer, const ForwardBatch& batch, int64_t sequence, int64_t position,
                      const LatentCache& cache) const;
  TensorView mtp_states(int64_t layer, int64_t rows) const;
  int64_t hidden_bytes() const { return config_.hidden * size_of(options_.compute); }
  TensorView part_of_sum(TensorView residual);
  // residual += the sum of all ranks' parts.
  void add_parts(const LaneRows& rows, TensorView residual);

  const ModelConfig config_;
  const int64_t heads_;     // of this rank
  const Slice vocabulary_;  // its rows of embedding and head
  const ModelOptions options_;
  const Stream stream_;
  Group* const lane_;       // null: alone
  Group* world_ = nullptr;  // where tokens are exchanged
  RopeTable rope_;
  GroupedHeads grouped_;    // with grouped queries
  uint64_t lane_plan_ = 0;  // the hash that the lane's ranks compare
  float softmax_scale_ = 1;
  float eps_ = 1e-6f;
  ModelWeights weights_;
  Workspace workspace_;
  DraftKeys draft_keys_;
  int64_t draft_number_ = 0;  // of the sequences' drafts, from 0: the last draft()'s
  // [MTP layers][logit rows of the last draft()]: the layer's state of the sequence's last row,
  // in workspace_.mtp_state; null: it had no row.
  std::vector<std::vector<const std::byte*>> draft_states_;
  Buffer logits_part_;  // [logit rows, vocabulary_.count] f32, grows; with a lane only
  // Where tokens are exchanged; null and empty elsewhere.
  std::shared_ptr<const ExpertTable> expert_table_;
  std::unique_ptr<ExpertExchange> exchange_;
  std::vector<size_t> moe_layers_;  // [the table's layers]: their numbers in the model
  std::vector<int32_t> expert_counts_;
};

}  // namespace fathom
