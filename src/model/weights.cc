#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "checkpoint/weight_names.h"
#include "model/kv_b_split.h"

namespace fathom {
namespace {

// Collects the tensors that a model needs from its checkpoint, and allocates each destination.
class WeightCollector {
 public:
  WeightCollector(const Checkpoint& checkpoint, DType compute, const LoadOptions& options)
      : checkpoint_(checkpoint),
        options_(options),
        names_(checkpoint.config()),
        compute_(compute) {}

  // A norm weight or bias, kept in fp32.
  Result<> vector(const std::string& name, int64_t size, Buffer* out) {
    FATHOM_TRY(*out, Buffer::allocate(checked_bytes(size, 4), name));
    add(name, {size}, [out, size](const ScaledMatrix& source) -> Result<> {
      auto* values = reinterpret_cast<float*>(out->data());
      for (int64_t i = 0; i < size; ++i) values[i] = source.at(0, i);
      return {};
    });
    return {};
  }

  // One matrix, packed.
  Result<> matrix(const std::string& name, int64_t rows, int64_t cols, PackedMatrix* out) {
    FATHOM_TRY(const WeightFormat format, format_of({name}));
    FATHOM_TRY(*out, PackedMatrix::allocate(rows, cols, format, name));
    add(name, {rows, cols}, [out](const ScaledMatrix& source) -> Result<> {
      out->pack(0, source);
      return {};
    });
    return {};
  }

  // gate_proj, up_proj and down_proj of one SwiGLU block.
  Result<> mlp(const std::string& prefix, int64_t hidden, int64_t intermediate, MlpWeights* out) {
    const std::string gate = prefix + "gate_proj.weight";
    const std::string up = prefix + "up_proj.weight";
    FATHOM_TRY(const WeightFormat format, format_of({gate, up}));
    FATHOM_TRY(out->gate_up, PackedMatrix::allocate(2 * intermediate, hidden, format, gate));
    for (const auto& [name, first] : {std::pair(gate, int64_t{0}), std::pair(up, intermediate)}) {
      add(name, {intermediate, hidden},
          [matrix = &out->gate_up, row = first](const ScaledMatrix& source) -> Result<> {
            matrix->pack(row, source);
            return {};
          });
    }
    return matrix(prefix + "down_proj.weight", hidden, intermediate, &out->down);
  }

  // kv_b_proj whole, and each head's two halves for absorbed attention.
  Result<> kv_b(const std::string& name, const ModelConfig& config, AttentionWeights* out) {
    const int64_t heads = config.num_heads, latent = config.kv_lora_rank;
    const int64_t nope = config.qk_nope_dim, v = config.v_dim;
    FATHOM_TRY(const WeightFormat format, format_of({name}));
    FATHOM_TRY(out->kv_b, PackedMatrix::allocate(heads * (nope + v), latent, format, name));
    out->uk.resize(static_cast<size_t>(heads));
    out->uv.resize(static_cast<size_t>(heads));
    const auto place = [this, out, heads, nope, v](const ScaledMatrix& source) -> Result<> {
      out->kv_b.pack(0, source);
      for (int64_t h = 0; h < heads; ++h) {
        const OwnedMatrix uk = transpose_rows(source, h * (nope + v), nope);
        const OwnedMatrix uv = slice_rows(source, h * (nope + v) + nope, v);
        FATHOM_RETURN_IF_ERROR(pack_as_stored(uk.view, "W_UK", &out->uk[h]));
        FATHOM_RETURN_IF_ERROR(pack_as_stored(uv.view, "W_UV", &out->uv[h]));
      }
      return {};
    };
    add(name, {heads * (nope + v), latent}, place);
    return {};
  }

  // The embedding table: rows are copied out of it, so its type stays (f16 becomes f32).
  Result<> embedding(const std::string& name, int64_t rows, int64_t cols, ModelWeights* out) {
    FATHOM_TRY(const DType stored, loaded_dtype(name));
    const DType dtype = stored == DType::kBF16 ? DType::kBF16 : DType::kF32;
    FATHOM_TRY(out->embedding,
               Buffer::allocate(checked_bytes(rows, checked_bytes(cols, size_of(dtype))), name));
    out->embedding_dtype = dtype;
    add(name, {rows, cols}, [out, dtype](const ScaledMatrix& source) -> Result<> {
      if (dtype == DType::kBF16) {
        std::memcpy(out->embedding.data(), source.values.raw(),
                    static_cast<size_t>(source.rows() * source.cols() * size_of(dtype)));
        return {};
      }
      auto* values = reinterpret_cast<float*>(out->embedding.data());
      for (int64_t r = 0; r < source.rows(); ++r) {
        for (int64_t c = 0; c < source.cols(); ++c) *values++ = source.at(r, c);
      }
      return {};
    });
    return {};
  }

  const std::vector<TensorRequest>& requests() const { return requests_; }

 private:
  static int64_t checked_bytes(int64_t count, int64_t size) {
    const auto bytes = checked_mul(count, size);
    FATHOM_CHECK(bytes.has_value(), "{} x {} bytes; the configuration was checked", count, size);
    return *bytes;
  }

  void add(const std::string& name, std::vector<int64_t> shape,
           std::function<Result<>(const ScaledMatrix&)> place) {
    requests_.push_back({name, std::move(shape), std::move(place)});
  }

  // The tensor's type after loading.
  Result<DType> loaded_dtype(const std::string& name) const {
    const TensorEntry* entry = checkpoint_.find(name);
    if (entry == nullptr) {
      return invalid("{}: the checkpoint has no tensor {}", checkpoint_.directory(), name);
    }
    const bool quantized =
        is_quantized_while_loading(checkpoint_, options_, names_.is_linear(name), entry->dtype);
    return quantized ? DType::kF8E4M3 : entry->dtype;
  }

  Result<WeightFormat> format_for(DType stored) const {
    switch (stored) {
      case DType::kF8E4M3:
        return WeightFormat::kF8E4M3;
      case DType::kBF16:
        return WeightFormat::kBF16;
      case DType::kF16:
      case DType::kF32:
        return compute_ == DType::kF32 ? WeightFormat::kF32 : WeightFormat::kBF16;
      default:
        return invalid("a weight stored as {}; supported are f32, bf16, f16 and e4m3",
                       name_of(stored));
    }
  }

  // The packed format of a matrix stacked from these tensors, which must agree.
  Result<WeightFormat> format_of(const std::vector<std::string>& names) const {
    std::optional<WeightFormat> common;
    for (const std::string& name : names) {
      FATHOM_TRY(const DType stored, loaded_dtype(name));
      const auto format = format_for(stored);
      if (!format) return with_context(name + ": ", format.error());
      if (common && *common != *format) {
        return invalid("{} is stored as {}, its partner {} differently", name, name_of(stored),
                       names.front());
      }
      common = *format;
    }
    return *common;
  }

  Result<> pack_as_stored(const ScaledMatrix& source, std::string_view purpose,
                          PackedMatrix* out) const {
    FATHOM_TRY(const WeightFormat format, format_for(source.values.dtype()));
    FATHOM_TRY(*out, PackedMatrix::allocate(source.rows(), source.cols(), format, purpose));
    out->pack(0, source);
    return {};
  }

  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  const WeightNames names_;
  const DType compute_;
  std::vector<TensorRequest> requests_;
};

Result<> collect_attention(const ModelConfig& config, const std::string& prefix,
                           WeightCollector* collect, AttentionWeights* out) {
  const int64_t hidden = config.hidden;
  const int64_t q_rows = config.num_heads * config.qk_dim();
  if (config.q_lora_rank > 0) {
    FATHOM_RETURN_IF_ERROR(
        collect->matrix(prefix + "q_a_proj.weight", config.q_lora_rank, hidden, &out->q_a));
    FATHOM_RETURN_IF_ERROR(
        collect->vector(prefix + "q_a_layernorm.weight", config.q_lora_rank, &out->q_a_norm));
    FATHOM_RETURN_IF_ERROR(
        collect->matrix(prefix + "q_b_proj.weight", q_rows, config.q_lora_rank, &out->q_b));
  } else {
    FATHOM_RETURN_IF_ERROR(collect->matrix(prefix + "q_proj.weight", q_rows, hidden, &out->q_b));
  }
  FATHOM_RETURN_IF_ERROR(collect->matrix(prefix + "kv_a_proj_with_mqa.weight", config.latent_dim(),
                                         hidden, &out->kv_a));
  FATHOM_RETURN_IF_ERROR(
      collect->vector(prefix + "kv_a_layernorm.weight", config.kv_lora_rank, &out->kv_a_norm));
  FATHOM_RETURN_IF_ERROR(collect->kv_b(prefix + "kv_b_proj.weight", config, out));
  return collect->matrix(prefix + "o_proj.weight", hidden, config.num_heads * config.v_dim,
                         &out->o);
}

Result<> collect_moe(const ModelConfig& config, const std::string& prefix, WeightCollector* collect,
                     MoeWeights* out) {
  FATHOM_RETURN_IF_ERROR(
      collect->matrix(prefix + "gate.weight", config.num_experts, config.hidden, &out->gate));
  if (config.gate == GateKind::kSigmoidBias) {
    FATHOM_RETURN_IF_ERROR(collect->vector(prefix + "gate.e_score_correction_bias",
                                           config.num_experts, &out->gate_bias));
  }
  out->experts.resize(static_cast<size_t>(config.num_experts));
  for (int64_t e = 0; e < config.num_experts; ++e) {
    FATHOM_RETURN_IF_ERROR(collect->mlp(fmt::format("{}experts.{}.", prefix, e), config.hidden,
                                        config.moe_intermediate, &out->experts[e]));
  }
  if (config.num_shared_experts > 0) {
    FATHOM_RETURN_IF_ERROR(collect->mlp(prefix + "shared_experts.", config.hidden,
                                        config.num_shared_experts * config.moe_intermediate,
                                        &out->shared.emplace()));
  }
  return {};
}

Result<> collect_layer(const ModelConfig& config, int64_t layer, WeightCollector* collect,
                       LayerWeights* out) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  FATHOM_RETURN_IF_ERROR(
      collect->vector(prefix + "input_layernorm.weight", config.hidden, &out->input_norm));
  FATHOM_RETURN_IF_ERROR(collect->vector(prefix + "post_attention_layernorm.weight", config.hidden,
                                         &out->post_attention_norm));
  FATHOM_RETURN_IF_ERROR(
      collect_attention(config, prefix + "self_attn.", collect, &out->attention));
  if (config.is_moe_layer(layer)) {
    return collect_moe(config, prefix + "mlp.", collect, &out->moe.emplace());
  }
  return collect->mlp(prefix + "mlp.", config.hidden, config.intermediate, &out->dense.emplace());
}

int64_t bytes_of(const MlpWeights& mlp) { return mlp.gate_up.bytes() + mlp.down.bytes(); }

}  // namespace

Result<ModelWeights> ModelWeights::load(const Checkpoint& checkpoint, DType compute,
                                        const LoadOptions& options) {
  FATHOM_CHECK(compute == DType::kBF16 || compute == DType::kF32, "{}", name_of(compute));
  const ModelConfig& config = checkpoint.config();
  // The requests point into the weights, which must not move until the load has ended.
  auto weights = std::make_unique<ModelWeights>();
  WeightCollector collect(checkpoint, compute, options);
  FATHOM_RETURN_IF_ERROR(collect.embedding("model.embed_tokens.weight", config.vocab_size,
                                           config.hidden, weights.get()));
  weights->layers.resize(static_cast<size_t>(config.num_layers));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    FATHOM_RETURN_IF_ERROR(collect_layer(config, layer, &collect, &weights->layers[layer]));
  }
  FATHOM_RETURN_IF_ERROR(collect.vector("model.norm.weight", config.hidden, &weights->final_norm));
  FATHOM_RETURN_IF_ERROR(
      collect.matrix("lm_head.weight", config.vocab_size, config.hidden, &weights->head));
  FATHOM_RETURN_IF_ERROR(load_tensors(checkpoint, collect.requests(), options));
  return std::move(*weights);
}

int64_t ModelWeights::bytes() const {
  int64_t total = embedding.size() + final_norm.size() + head.bytes();
  for (const LayerWeights& layer : layers) {
    const AttentionWeights& a = layer.attention;
    total += layer.input_norm.size() + layer.post_attention_norm.size() + a.q_a_norm.size() +
             a.kv_a_norm.size() + a.q_a.bytes() + a.q_b.bytes() + a.kv_a.bytes() + a.kv_b.bytes() +
             a.o.bytes();
    for (const PackedMatrix& head_uk : a.uk) total += head_uk.bytes();
    for (const PackedMatrix& head_uv : a.uv) total += head_uv.bytes();
    if (layer.dense) total += bytes_of(*layer.dense);
    if (!layer.moe) continue;
    total += layer.moe->gate.bytes() + layer.moe->gate_bias.size();
    for (const MlpWeights& expert : layer.moe->experts) total += bytes_of(expert);
    if (layer.moe->shared) total += bytes_of(*layer.moe->shared);
  }
  return total;
}

}  // namespace fathom
