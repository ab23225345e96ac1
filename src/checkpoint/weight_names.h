// Names, shapes and types of a DeepSeek-family checkpoint's tensors, as published on Hugging Face.
// One table, used in two directions: for_each() lists the tensors of a configuration, classify()
// interprets a name.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/model_config.h"

namespace fathom {

enum class WeightGroup {
  kEmbedding,
  kAttention,
  kDenseMlp,
  kExperts,
  kSharedExperts,
  kGate,
  kNorms,
  kHead,
  kMtp,     // everything in the layers after num_hidden_layers except scales
  kScales,  // of FP8 weights and activations
};
inline constexpr int kNumWeightGroups = 10;

std::string_view name_of(WeightGroup group);

struct PublishedTensor {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype = DType::kBF16;
  WeightGroup group = WeightGroup::kNorms;
};

// Immutable after construction; may be used by any thread.
class WeightNames {
 public:
  explicit WeightNames(const ModelConfig& config);

  // Calls visit for each tensor of the published form, including scales; stops when visit returns
  // false. Nothing is collected, because a configuration may declare many tensors.
  using Visit = std::function<bool(const PublishedTensor&)>;
  void for_each(const Visit& visit) const;

  // The same without scales, and with a quantized weight as "X.weight" in the model's type and its
  // own shape, whatever tensors hold it.
  void for_each_weight(const Visit& visit) const;

  // The group of a stored tensor; nothing for a name that such a model does not have.
  std::optional<WeightGroup> classify(std::string_view name) const;

  // Whether FP8 checkpoints store this matrix in FP8: the linear layers of attention and MLPs, also
  // in MTP layers; not the router, the embedding, the head, an indexer's weights_proj or an MTP
  // layer's eh_proj.
  bool is_linear(std::string_view name) const;

 private:
  // A tensor's name without its prefix, for example "self_attn.o_proj.weight".
  struct Part {
    std::string suffix;
    std::vector<int64_t> shape;
    WeightGroup group;
    bool linear = false;  // a matrix that quantisation applies to
    std::optional<DType> dtype;
  };

  void add_attention();
  void add_indexer(const IndexerConfig& indexer);
  void add_feed_forward();
  using VisitPart = std::function<bool(const std::string& prefix, const Part&, bool mtp)>;
  bool visit_part(const std::string& prefix, const Part& part, bool mtp, const Visit& visit) const;
  bool visit_four_bit(const PublishedTensor& weight, const Visit& visit) const;
  bool visit_layer(int64_t layer, const VisitPart& visit) const;
  void visit_parts(const VisitPart& visit) const;
  // "X.weight_scale" and the like -> "X.weight"; nothing if the name is not a scale's.
  std::optional<std::string> weight_of_scale(std::string_view name) const;
  bool is_quantized(const Part& part, std::string_view name) const;
  // The part that a tensor's name refers to, and its layer if it is in one; null for other names.
  const Part* find_part(std::string_view name, int64_t* layer) const;
  const Part* find_in_layer(int64_t layer, std::string_view rest) const;

  ModelConfig config_;
  std::vector<Part> whole_;    // outside the layers: "model.norm.weight"
  std::vector<Part> layer_;    // in every layer: attention and norms
  std::vector<Part> indexer_;  // in layers that choose keys
  std::vector<Part> dense_;    // in dense layers
  std::vector<Part> moe_;      // in MoE layers, without the routed experts
  std::vector<Part> expert_;   // in each routed expert, after "mlp.experts.7."
  std::vector<Part> mtp_;      // additional ones in MTP layers
};

// Tensors that are left out without a warning: buffers that some repackagers store and that are
// computed here (rotary_emb.inv_freq), and what a model has for pictures.
bool is_ignored_tensor(std::string_view name);

// The name without what stands before it where the language model is a part of a larger one:
// "language_model.model.norm.weight" and "model.language_model.norm.weight" are
// "model.norm.weight".
std::string without_prefix(std::string_view name);

}  // namespace fathom
