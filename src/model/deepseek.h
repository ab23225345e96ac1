// The DeepSeek V2 / V3 decoder over a paged latent cache: tokens in, logits out.
//
// Owns the weights and the activations' workspace; the caller owns the cache. One forward() at a
// time, on the rank's thread. Under tensor parallelism a model is one rank's part: all ranks of the
// lane call forward() with the same batches, each with a cache of its own, and meet after each
// layer's attention and feed-forward, at the embedding and at the logits.
#pragma once

#include <memory>

#include "cache/latent_layout.h"
#include "comm/group.h"
#include "model/attention_plan.h"
#include "model/forward_batch.h"
#include "model/weights.h"
#include "model/workspace.h"
#include "ops/rope/rope.h"

namespace fathom {

struct ModelOptions {
  DType compute = DType::kBF16;  // or kF32: float32 throughout, the reference
  int64_t max_rows = 2048;       // tokens in one step
  AttentionPolicy attention;
};

class DeepSeekModel {
 public:
  // The whole model on one rank.
  static Result<std::unique_ptr<DeepSeekModel>> load(const Checkpoint& checkpoint,
                                                     const ModelOptions& options,
                                                     const LoadOptions& load_options,
                                                     const Stream& stream);
  // A rank's part; the weights are those of its spec. `lane` joins the lane's ranks and outlives
  // the model; null with tp 1.
  static Result<std::unique_ptr<DeepSeekModel>> create(const ModelSpec& spec, ModelWeights weights,
                                                       const ModelOptions& options,
                                                       const Stream& stream, Group* lane);

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  int64_t weight_bytes() const { return weights_.bytes(); }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

  // Runs the batch's tokens through all layers, writes their cache rows, and computes logits
  // [logit_rows, vocab] f32, on the lane's first rank alone (the others' may be empty). Requires
  // rows <= max_rows and pages < cache.num_pages(). Throws CommError.
  void forward(const ForwardBatch& batch, const LatentCache& cache, TensorView logits);

 private:
  DeepSeekModel(const ModelSpec& spec, const ModelOptions& options, const Stream& stream,
                Group* lane)
      : config_(spec.config),
        heads_(spec.num_heads()),
        vocabulary_(spec.vocabulary()),
        options_(options),
        stream_(stream),
        lane_(lane) {}

  // State shared by all layers of one step.
  struct Step {
    const ForwardBatch& batch;
    AttentionPlan plan;
    std::vector<int64_t> slots;  // [rows]: slot of each token's cache row
  };

  void attention(const AttentionWeights& weights, const Step& step, const LatentPages& pages,
                 ConstTensorView x, TensorView residual);
  void absorbed_attention(const AttentionWeights& weights, const Step& step,
                          const AbsorbedGroup& group, const LatentPages& pages);
  void mha_attention(const AttentionWeights& weights, const Step& step, int32_t sequence,
                     const LatentPages& pages);
  void feed_forward(const LayerWeights& weights, ConstTensorView x, TensorView residual);
  void feed_forward_part(const LayerWeights& weights, ConstTensorView x, TensorView out);
  void embed(const ForwardBatch& batch, TensorView residual);
  void logits(const Step& step, ConstTensorView residual, TensorView out);
  void gather_logits(ConstTensorView part, TensorView out);
  // Runs add(out), which adds this rank's part of a sum over the lane to `out`, so that the
  // residual gets the whole sum.
  template <typename Add>
  void add_over_lane(TensorView residual, const Add& add);

  const ModelConfig config_;
  const int64_t heads_;     // of this rank
  const Slice vocabulary_;  // its rows of embedding and head
  const ModelOptions options_;
  const Stream stream_;
  Group* const lane_;  // null: alone
  RopeTable rope_;
  float softmax_scale_ = 1;
  float eps_ = 1e-6f;
  ModelWeights weights_;
  Workspace workspace_;
  Buffer logits_part_;  // [logit rows, vocabulary_.count] f32, grows; with a lane only
};

}  // namespace fathom
