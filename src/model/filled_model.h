// A model on the CPU with random or stored weights and a cache of random rows, for benchmarks that
// time steps after long contexts without computing them.
//
// Owns both; one thread steps it. A mistake in the arguments ends the program.
#pragma once

#include <memory>
#include <string_view>

#include "model/deepseek.h"

namespace fathom {

class FilledModel {
 public:
  // Random weights of the model that `config`, the text of a config.json, describes. The cache has
  // room for `tokens` and is full; a step has at most `rows`.
  FilledModel(std::string_view config, const AttentionPolicy& policy, int64_t tokens, int64_t rows,
              ThreadPool& pool);
  // The weights of a checkpoint.
  FilledModel(const Checkpoint& checkpoint, const AttentionPolicy& policy, int64_t tokens,
              int64_t rows, ThreadPool& pool);

  // Milliseconds of a step of `rows` tokens of each sequence after `context` others, with logits of
  // each sequence's last. Sequences have pages of their own.
  double step(int64_t context, int64_t rows, int64_t sequences = 1);

  const ModelConfig& config() const { return model_->config(); }
  int64_t weight_bytes() const { return model_->weight_bytes(); }
  // Latent cache bytes of a token in all layers, without index keys.
  int64_t cache_bytes_per_token() const;

 private:
  void fill_cache();

  Stream stream_;
  std::unique_ptr<DeepSeekModel> model_;
  LatentCache cache_;
};

}  // namespace fathom
