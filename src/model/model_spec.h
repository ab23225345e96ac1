// What one rank computes, as plain data: the layers in order, and of each tensor the rows and
// columns that the rank holds. Everything about splitting is decided here; both backends build
// their weights from it.
//
// Tensor parallelism splits heads, the inner columns of feed-forward blocks (by whole 128-blocks,
// if there are enough) and the vocabulary over the ranks of a lane. The latent projections, norms,
// the router, the indexer and the cache are whole on every rank. Lanes are alike: data parallelism
// splits nothing. Expert parallelism gives a rank the whole experts of its slots, as an expert
// table says, and the whole shared expert.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/model_config.h"
#include "placement/expert_table.h"
#include "placement/placement.h"
#include "tensor/slice.h"

namespace fathom {

// A tensor of the checkpoint and the part of it that a rank holds. A vector (norm, bias) has one
// row.
struct TensorPart {
  std::string name;
  int64_t num_rows = 1, num_cols = 0;  // of the whole tensor
  Slice rows, cols;
  bool is_vector = false;

  bool is_whole() const { return rows.count == num_rows && cols.count == num_cols; }
  bool empty() const { return rows.count == 0 || cols.count == 0; }
  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

// silu(gate x) * (up x), then down. All parts are empty on a rank without columns of the block.
struct MlpSpec {
  TensorPart gate, up;  // [intermediate, hidden]
  TensorPart down;      // [hidden, intermediate]

  int64_t width() const { return gate.rows.count; }
};

// Chooses each row's keys (DeepSeek-V3.2); whole on every rank, so that all choose alike.
struct IndexerSpec {
  TensorPart q;                    // [index heads * index dim, q_lora]
  TensorPart k;                    // [index dim, hidden]
  TensorPart k_norm, k_norm_bias;  // [index dim]
  TensorPart weights;              // [index heads, hidden]
};

struct AttentionSpec {
  Slice heads;
  std::optional<TensorPart> q_a;       // with query compression
  TensorPart q_b;                      // or q_proj: [H * (nope + rope), q_lora or hidden]
  TensorPart kv_a;                     // whole; with grouped queries v_proj: [latent, hidden]
  std::optional<TensorPart> k;         // k_proj [latent, hidden]: with grouped queries, whole
  std::optional<TensorPart> kv_b;      // [H * (nope + v), latent]; not with grouped queries
  TensorPart o;                        // [hidden, H * v]
  std::optional<IndexerSpec> indexer;  // with sparse attention, unless it is another layer's
  std::optional<TensorPart> q_a_norm, kv_a_norm;  // with latent_norm
  // Biases of q_b, kv_a, k and o, where the model has them.
  std::optional<TensorPart> q_bias, kv_a_bias, k_bias, o_bias;
};

struct MoeSpec {
  TensorPart router;  // [experts, hidden], whole
  std::optional<TensorPart> router_bias;
  std::vector<MlpSpec> experts;  // [experts], or of the rank's slots with expert parallelism
  std::optional<MlpSpec> shared;
};

struct LayerSpec {
  TensorPart input_norm, post_attention_norm;
  AttentionSpec attention;
  std::optional<MlpSpec> dense;  // exactly one of the two
  std::optional<MoeSpec> moe;
};

// A next-token layer (multi-token prediction, DeepSeek-V3 2024, section 2.2):
//   u = W_e · rms_norm(embedding of token i) + W_h · rms_norm(state of token i - 1)
//   own state = rms_norm(layer(u)), logits = head · own state
// with the main model's embedding and head. The state is the main model's for the first of these
// layers, whose logits are of token i + 1, and the layer's before for each other: those of the
// second are of token i + 1 where i itself was drafted. It has whole norms and projections on every
// rank.
struct MtpSpec {
  TensorPart embedding_norm, hidden_norm, head_norm;
  TensorPart from_embedding, from_hidden;  // [hidden, hidden]: the two halves of eh_proj
  LayerSpec layer;

  TensorPart projection() const;  // [hidden, 2 * hidden]: eh_proj whole
};

struct ModelSpec {
  ModelConfig config;  // of the whole model
  Placement placement;
  int rank = 0;
  TensorPart embedding, head;  // [vocab, hidden]: the same rows of both, perhaps of one tensor
  TensorPart final_norm;
  std::vector<LayerSpec> layers;
  std::vector<MtpSpec> mtp;                         // with speculation
  std::shared_ptr<const ExpertTable> expert_table;  // null: no exchange of tokens

  int tp_rank() const { return placement.tp_rank_of(rank); }
  int64_t num_heads() const { return layers.front().attention.heads.count; }
  Slice vocabulary() const { return head.rows; }
  // What is in a slot of a layer, counted among those with routed experts.
  const MlpSpec& expert(int64_t moe_layer, size_t slot) const;
};

// The placement has passed check_placement(). `table` is needed where placement.exchanges_tokens(),
// and not read elsewhere; it has passed check_expert_table(), without MTP layers. It may have one
// layer more for each of these with experts; the columns of those without one are split over the
// lane, like those of a dense layer. The first `mtp_layers` MTP layers are part of the model, at
// most config.num_mtp_layers and kMaxDrafts.
ModelSpec make_spec(const ModelConfig& config, const Placement& placement, int rank,
                    std::shared_ptr<const ExpertTable> table = nullptr, int64_t mtp_layers = 0);
// The whole model on one rank.
ModelSpec make_spec(const ModelConfig& config, int64_t mtp_layers = 0);

// How many MTP layers draft, if a step has at most so many drafts of a sequence: one for each
// draft, as far as there are some.
int64_t num_drafting_layers(const ModelConfig& config, int64_t max_drafts);

}  // namespace fathom
