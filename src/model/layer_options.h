// Options of single operations and forms of cache rows, derived from a model's configuration.
#pragma once

#include <optional>
#include <vector>

#include "cache/latent_layout.h"
#include "checkpoint/model_config.h"
#include "model/attention_plan.h"
#include "ops/gate/gate.h"
#include "ops/indexer/sparse_plan.h"
#include "ops/rope/rope.h"

namespace fathom {

// The norms inside attention use this eps whatever rms_norm_eps says, as in DeepSeek's own code and
// in transformers; the two are equal in all published DeepSeek checkpoints.
inline constexpr float kInnerNormEps = 1e-6f;

// How a step's rows choose their keys; none for a model without an indexer. The policy's dense_keys
// are at most the model's topk, which the flag's check has seen to.
std::optional<SparseLimits> sparse_limits(const ModelConfig& config, const AttentionPolicy& policy);

std::optional<YarnParameters> yarn_parameters(const ModelConfig& config);
RopeTable rope_table(const ModelConfig& config);
GateOptions gate_options(const ModelConfig& config);

LatentLayout latent_layout(const ModelConfig& config, CacheFormat format);
// e4m3, as DeepSeek-V3.2 stores them, whatever the latent's format; f32 beside an f32 latent. None
// for a model without an indexer.
std::optional<IndexKeyLayout> index_key_layout(const ModelConfig& config, CacheFormat format);
// [cache_layers]: whether a layer has index keys; layers behind the model's are MTP layers.
std::vector<bool> layers_with_index_keys(const ModelConfig& config, int64_t cache_layers);
// Bytes of a token's index key in a layer that has some; 0 without an indexer.
int64_t index_key_bytes(const ModelConfig& config, CacheFormat format);
// Bytes of a token in all layers of the model.
int64_t cache_token_bytes(const ModelConfig& config, CacheFormat format);

}  // namespace fathom
