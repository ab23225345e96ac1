#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <tuple>

#include "base/math.h"
#include "checkpoint/four_bit_tensors.h"
#include "checkpoint/weight_names.h"
#include "model/kv_b_split.h"

namespace fathom {
namespace {

// Collects the tensors that some ranks of this process need from their checkpoint, and allocates
// each destination. What two ranks hold alike they share; a tensor of which several hold parts is
// read once.
class WeightCollector {
 public:
  WeightCollector(const Checkpoint& checkpoint, DType compute, const LoadOptions& options)
      : checkpoint_(checkpoint),
        options_(options),
        names_(checkpoint.config()),
        compute_(compute) {}

  // A norm weight or bias, kept in fp32.
  Result<> vector(const TensorPart& part, Buffer* out) {
    const int64_t size = part.cols.count;
    if (Buffer* const held = find(buffers_, part)) {
      *out = held->share();
      return {};
    }
    FATHOM_TRY(*out, Buffer::allocate(checked_bytes(size, 4), part.name));
    buffers_.emplace(key_of(part), out);
    add(part, [out, size](const ScaledMatrix& source) -> Result<> {
      auto* values = reinterpret_cast<float*>(out->data());
      for (int64_t i = 0; i < size; ++i) values[i] = source.at(0, i);
      return {};
    });
    return {};
  }

  // One matrix, packed.
  Result<> matrix(const TensorPart& part, PackedMatrix* out) {
    if (part.empty()) return {};
    if (PackedMatrix* const held = find(matrices_, part)) {
      *out = held->share();
      return {};
    }
    FATHOM_TRY(const PackedForm form, form_of({&part}));
    FATHOM_TRY(*out, PackedMatrix::allocate(part.rows.count, part.cols.count, form, part.name));
    matrices_.emplace(key_of(part), out);
    add(part, [out](const ScaledMatrix& source) -> Result<> {
      out->pack(0, source);
      if (out->form().reordered) out->set_columns(columns_of(source));
      return {};
    });
    return {};
  }

  // The head as MTP layers draft with it. Left empty where the model computes in fp32, for
  // comparisons, where the head's own form is not bf16 (others are small already), and where it is
  // too wide.
  Result<> draft_head(const TensorPart& part, DraftHead* out) {
    FATHOM_TRY(const PackedForm form, form_of({&part}));
    const bool is_bf16 = compute_ == DType::kBF16 && form.format == WeightFormat::kBF16;
    if (part.empty() || !is_bf16 || part.cols.count > DraftHead::kMostCols) return {};
    if (DraftHead* const held = find(draft_heads_, part)) {
      *out = held->share();
      return {};
    }
    FATHOM_TRY(*out, DraftHead::allocate(part.rows.count, part.cols.count, part.name));
    draft_heads_.emplace(key_of(part), out);
    add(part, [out](const ScaledMatrix& source) -> Result<> {
      out->pack(source);
      return {};
    });
    return {};
  }

  // gate_proj, up_proj and down_proj of one SwiGLU block.
  Result<> mlp(const MlpSpec& spec, MlpWeights* out) {
    if (spec.width() == 0) return {};
    FATHOM_RETURN_IF_ERROR(matrix(spec.down, &out->down));
    if (PackedMatrix* const held = find(matrices_, spec.gate)) {
      out->gate_up = held->share();
      return {};
    }
    FATHOM_TRY(const PackedForm form, form_of({&spec.gate, &spec.up}));
    FATHOM_TRY(out->gate_up, PackedMatrix::allocate(2 * spec.width(), spec.gate.cols.count, form,
                                                    spec.gate.name));
    matrices_.emplace(key_of(spec.gate), &out->gate_up);
    StackedColumns* columns = nullptr;
    if (form.reordered) {
      columns = &stacked_.emplace_back(StackedColumns{&out->gate_up, spec.gate.name, {}, {}});
    }
    for (const auto& [part, first] :
         {std::pair(&spec.gate, int64_t{0}), std::pair(&spec.up, spec.width())}) {
      add(*part,
          [packed = &out->gate_up, row = first, columns](const ScaledMatrix& source) -> Result<> {
            packed->pack(row, source);
            if (columns != nullptr) (row == 0 ? columns->gate : columns->up) = columns_of(source);
            return {};
          });
    }
    return {};
  }

  // kv_b_proj of this rank's heads, and each head's two halves for absorbed attention.
  Result<> kv_b(const AttentionSpec& spec, const ModelConfig& config, AttentionWeights* out) {
    const int64_t heads = spec.heads.count, nope = config.qk_nope_dim, v = config.v_dim;
    const TensorPart& kv_b = *spec.kv_b;
    if (AttentionWeights* const held = find(kv_bs_, kv_b)) {
      out->kv_b = held->kv_b.share();
      shared_heads_.emplace_back(held, out);
      return {};
    }
    // Four-bit ones are dequantized: W_UK's groups would lie across its rows.
    FATHOM_TRY(PackedForm form, form_of({&kv_b}));
    if (form.format == WeightFormat::kFourBit) {
      FATHOM_TRY(form, format_for(DType::kF32));
    }
    FATHOM_TRY(out->kv_b,
               PackedMatrix::allocate(heads * (nope + v), config.kv_lora_rank, form, kv_b.name));
    kv_bs_.emplace(key_of(kv_b), out);
    out->uk.resize(static_cast<size_t>(heads));
    out->uv.resize(static_cast<size_t>(heads));
    add(kv_b, [this, out, heads, nope, v](const ScaledMatrix& stored) -> Result<> {
      const OwnedMatrix wide = stored.is_four_bit() ? dequantize(stored) : OwnedMatrix();
      const ScaledMatrix& source = stored.is_four_bit() ? wide.view : stored;
      out->kv_b.pack(0, source);
      for (int64_t h = 0; h < heads; ++h) {
        const OwnedMatrix uk = transpose_rows(source, h * (nope + v), nope);
        const OwnedMatrix uv = slice_rows(source, h * (nope + v) + nope, v);
        FATHOM_RETURN_IF_ERROR(pack_as_stored(uk.view, "W_UK", &out->uk[h]));
        FATHOM_RETURN_IF_ERROR(pack_as_stored(uv.view, "W_UV", &out->uv[h]));
      }
      return {};
    });
    return {};
  }

  // Rows of the embedding table are copied out of it, so its type stays (f16 becomes f32).
  Result<> embedding(const TensorPart& part, ModelWeights* out) {
    FATHOM_TRY(const DType stored, loaded_dtype(part.name));
    const DType dtype = stored == DType::kBF16 ? DType::kBF16 : DType::kF32;
    out->embedding_dtype = dtype;
    if (Buffer* const held = find(buffers_, part)) {
      out->embedding = held->share();
      return {};
    }
    FATHOM_TRY(out->embedding,
               Buffer::allocate(
                   checked_bytes(part.rows.count, checked_bytes(part.cols.count, size_of(dtype))),
                   part.name));
    buffers_.emplace(key_of(part), &out->embedding);
    add(part, [out, dtype](const ScaledMatrix& source) -> Result<> {
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

  // Reads and places all of it.
  Result<> load() {
    std::vector<TensorRequest> requests;
    for (const auto& [name, wanted] : wanted_) {
      requests.push_back({.name = name,
                          .shape = wanted.shape,
                          .place = [&parts = wanted.parts](const ScaledMatrix& whole) -> Result<> {
                            for (const Part& part : parts) {
                              FATHOM_RETURN_IF_ERROR(part.place(whole.slice(part.rows, part.cols)));
                            }
                            return {};
                          }});
    }
    FATHOM_RETURN_IF_ERROR(load_tensors(checkpoint_, requests, options_));
    for (const StackedColumns& stacked : stacked_) {
      if (stacked.gate != stacked.up) {
        return invalid(
            "{}: {} and its up_proj have their columns in different orders (g_idx); supported is "
            "one order for both",
            checkpoint_.directory(), stacked.name);
      }
      stacked.matrix->set_columns(stacked.gate);
    }
    for (const auto& [held, out] : shared_heads_) {
      for (const PackedMatrix& uk : held->uk) out->uk.push_back(uk.share());
      for (const PackedMatrix& uv : held->uv) out->uv.push_back(uv.share());
    }
    return {};
  }

 private:
  using Place = std::function<Result<>(const ScaledMatrix&)>;
  struct Part {
    Slice rows, cols;
    Place place;
  };
  struct Wanted {
    std::vector<int64_t> shape;
    std::vector<Part> parts;
  };
  // Column order of each part of a stacked gate and up matrix whose columns are reordered.
  struct StackedColumns {
    PackedMatrix* matrix;
    std::string name;
    std::vector<int32_t> gate, up;
  };
  // The order of a matrix' columns; 0, 1, … where it has none of its own.
  static std::vector<int32_t> columns_of(const ScaledMatrix& source) {
    std::vector<int32_t> columns(static_cast<size_t>(source.cols()));
    std::iota(columns.begin(), columns.end(), 0);
    if (!source.columns.empty()) {
      std::copy_n(source.columns.data<int32_t>(), columns.size(), columns.begin());
    }
    return columns;
  }

  using Key = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>;
  static Key key_of(const TensorPart& part) {
    return {part.name, part.rows.first, part.rows.count, part.cols.first, part.cols.count};
  }
  template <typename T>
  static T* find(const std::map<Key, T*>& held, const TensorPart& part) {
    const auto found = held.find(key_of(part));
    return found == held.end() ? nullptr : found->second;
  }

  static int64_t checked_bytes(int64_t count, int64_t size) {
    const auto bytes = checked_mul(count, size);
    FATHOM_CHECK(bytes.has_value(), "{} x {} bytes; the configuration was checked", count, size);
    return *bytes;
  }

  void add(const TensorPart& part, Place place) {
    Wanted& wanted = wanted_[part.name];
    if (part.is_vector) {
      wanted.shape = {part.num_cols};
    } else {
      wanted.shape = {part.num_rows, part.num_cols};
    }
    wanted.parts.push_back({part.rows, part.cols, std::move(place)});
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

  // The packed form of a matrix stacked from these parts, which must agree.
  Result<PackedForm> form_of(const std::vector<const TensorPart*>& parts) const {
    std::optional<PackedForm> common;
    for (const TensorPart* part : parts) {
      FATHOM_TRY(const PackedForm form, form_of(*part));
      if (common && *common != form) {
        return invalid("{} is stored in another form than its partner {}", part->name,
                       parts.front()->name);
      }
      common = form;
    }
    return *common;
  }

  Result<PackedForm> form_of(const TensorPart& part) const {
    FATHOM_TRY(const auto four_bit,
               find_four_bit(checkpoint_, part.name, part.num_rows, part.num_cols));
    if (!four_bit) {
      FATHOM_TRY(const DType stored, loaded_dtype(part.name));
      const auto format = format_for(stored);
      if (!format) return with_context(part.name + ": ", format.error());
      return PackedForm(*format);
    }
    PackedForm form = WeightFormat::kFourBit;
    form.code = four_bit->code;
    form.group_cols = four_bit->group_cols;
    form.scales = four_bit->scale_type;
    form.zeros = four_bit->has_zeros;
    form.reordered = four_bit->order != nullptr && four_bit->group_cols > 0;
    if (part.cols.count == part.num_cols) return form;
    if (form.reordered) {
      return invalid(
          "{}: its groups have columns in any order (g_idx), which cannot be split over "
          "ranks (--tp)",
          part.name);
    }
    const int64_t group = form.group_cols;
    if (group > 0 && (part.cols.first % group != 0 || part.cols.count % group != 0)) {
      return invalid(
          "{}: a rank's columns {} to {} of {} are not whole groups of {} (quantization_config); "
          "--tp must leave groups whole",
          part.name, part.cols.first, part.cols.end(), part.num_cols, group);
    }
    return form;
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
  std::map<std::string, Wanted> wanted_;
  // What a rank holds already, by its part of the tensor. A block's gate matrix stands for both.
  std::map<Key, Buffer*> buffers_;
  std::map<Key, PackedMatrix*> matrices_;
  std::map<Key, AttentionWeights*> kv_bs_;
  std::map<Key, DraftHead*> draft_heads_;
  std::deque<StackedColumns> stacked_;  // places point to its elements
  std::vector<std::pair<const AttentionWeights*, AttentionWeights*>> shared_heads_;
};

Result<> collect_indexer(const IndexerSpec& spec, WeightCollector* collect, IndexerWeights* out) {
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.q, &out->q));
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.k, &out->k));
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.k_norm, &out->k_norm));
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.k_norm_bias, &out->k_norm_bias));
  return collect->matrix(spec.weights, &out->weights);
}

Result<> collect_attention(const ModelConfig& config, const AttentionSpec& spec,
                           WeightCollector* collect, AttentionWeights* out) {
  if (spec.q_a) FATHOM_RETURN_IF_ERROR(collect->matrix(*spec.q_a, &out->q_a));
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.q_b, &out->q_b));
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.kv_a, &out->kv_a));
  if (spec.k) FATHOM_RETURN_IF_ERROR(collect->matrix(*spec.k, &out->k));
  for (const auto& [part, buffer] : {std::pair(&spec.q_a_norm, &out->q_a_norm),
                                     {&spec.kv_a_norm, &out->kv_a_norm},
                                     {&spec.q_bias, &out->q_bias},
                                     {&spec.kv_a_bias, &out->kv_a_bias},
                                     {&spec.k_bias, &out->k_bias},
                                     {&spec.o_bias, &out->o_bias}}) {
    if (*part) FATHOM_RETURN_IF_ERROR(collect->vector(**part, buffer));
  }
  if (spec.kv_b) FATHOM_RETURN_IF_ERROR(collect->kv_b(spec, config, out));
  if (spec.indexer) {
    FATHOM_RETURN_IF_ERROR(collect_indexer(*spec.indexer, collect, &out->indexer.emplace()));
  }
  return collect->matrix(spec.o, &out->o);
}

Result<> collect_moe(const MoeSpec& spec, WeightCollector* collect, MoeWeights* out) {
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.router, &out->gate));
  if (spec.router_bias) {
    FATHOM_RETURN_IF_ERROR(collect->vector(*spec.router_bias, &out->gate_bias));
  }
  out->experts.resize(spec.experts.size());
  for (size_t e = 0; e < spec.experts.size(); ++e) {
    FATHOM_RETURN_IF_ERROR(collect->mlp(spec.experts[e], &out->experts[e]));
  }
  if (spec.shared) FATHOM_RETURN_IF_ERROR(collect->mlp(*spec.shared, &out->shared.emplace()));
  return {};
}

Result<> collect_layer(const ModelConfig& config, const LayerSpec& spec, WeightCollector* collect,
                       LayerWeights* out) {
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.input_norm, &out->input_norm));
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.post_attention_norm, &out->post_attention_norm));
  FATHOM_RETURN_IF_ERROR(collect_attention(config, spec.attention, collect, &out->attention));
  if (spec.moe) return collect_moe(*spec.moe, collect, &out->moe.emplace());
  return collect->mlp(*spec.dense, &out->dense.emplace());
}

Result<> collect_mtp(const ModelConfig& config, const MtpSpec& spec, WeightCollector* collect,
                     MtpWeights* out) {
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.embedding_norm, &out->embedding_norm));
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.hidden_norm, &out->hidden_norm));
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.head_norm, &out->head_norm));
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.from_embedding, &out->from_embedding));
  FATHOM_RETURN_IF_ERROR(collect->matrix(spec.from_hidden, &out->from_hidden));
  return collect_layer(config, spec.layer, collect, &out->layer);
}

Result<> collect_model(const ModelSpec& spec, WeightCollector* collect, ModelWeights* out) {
  FATHOM_RETURN_IF_ERROR(collect->embedding(spec.embedding, out));
  out->layers.resize(spec.layers.size());
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    FATHOM_RETURN_IF_ERROR(
        collect_layer(spec.config, spec.layers[layer], collect, &out->layers[layer]));
  }
  FATHOM_RETURN_IF_ERROR(collect->vector(spec.final_norm, &out->final_norm));
  out->mtp.resize(spec.mtp.size());
  for (size_t i = 0; i < spec.mtp.size(); ++i) {
    FATHOM_RETURN_IF_ERROR(collect_mtp(spec.config, spec.mtp[i], collect, &out->mtp[i]));
  }
  if (!spec.mtp.empty()) FATHOM_RETURN_IF_ERROR(collect->draft_head(spec.head, &out->draft_head));
  return collect->matrix(spec.head, &out->head);
}

int64_t bytes_of(const MlpWeights& mlp) { return mlp.gate_up.bytes() + mlp.down.bytes(); }

int64_t bytes_of(const LayerWeights& layer) {
  const AttentionWeights& a = layer.attention;
  int64_t total = layer.input_norm.size() + layer.post_attention_norm.size() + a.q_a_norm.size() +
                  a.kv_a_norm.size() + a.q_a.bytes() + a.q_b.bytes() + a.kv_a.bytes() +
                  a.k.bytes() + a.kv_b.bytes() + a.o.bytes() + a.q_bias.size() +
                  a.kv_a_bias.size() + a.k_bias.size() + a.o_bias.size();
  for (const PackedMatrix& head_uk : a.uk) total += head_uk.bytes();
  for (const PackedMatrix& head_uv : a.uv) total += head_uv.bytes();
  if (a.indexer) {
    total += a.indexer->q.bytes() + a.indexer->k.bytes() + a.indexer->weights.bytes() +
             a.indexer->k_norm.size() + a.indexer->k_norm_bias.size();
  }
  if (layer.dense) total += bytes_of(*layer.dense);
  if (!layer.moe) return total;
  total += layer.moe->gate.bytes() + layer.moe->gate_bias.size();
  for (const MlpWeights& expert : layer.moe->experts) total += bytes_of(expert);
  if (layer.moe->shared) total += bytes_of(*layer.moe->shared);
  return total;
}

}  // namespace

Result<std::vector<ModelWeights>> load_weights(const Checkpoint& checkpoint,
                                               std::span<const ModelSpec> specs, DType compute,
                                               const LoadOptions& options) {
  FATHOM_CHECK(compute == DType::kBF16 || compute == DType::kF32, "{}", name_of(compute));
  // The collector points into the weights, which must not move until the load has ended.
  std::vector<ModelWeights> weights(specs.size());
  WeightCollector collect(checkpoint, compute, options);
  for (size_t i = 0; i < specs.size(); ++i) {
    FATHOM_RETURN_IF_ERROR(collect_model(specs[i], &collect, &weights[i]));
  }
  FATHOM_RETURN_IF_ERROR(collect.load());
  return weights;
}

Result<std::vector<MlpWeights>> load_mlps(const Checkpoint& checkpoint,
                                          std::span<const MlpSpec> specs, DType compute,
                                          const LoadOptions& options) {
  std::vector<MlpWeights> weights(specs.size());
  WeightCollector collect(checkpoint, compute, options);
  for (size_t i = 0; i < specs.size(); ++i) {
    FATHOM_RETURN_IF_ERROR(collect.mlp(specs[i], &weights[i]));
  }
  FATHOM_RETURN_IF_ERROR(collect.load());
  return weights;
}

int64_t ModelWeights::bytes() const {
  int64_t total = embedding.size() + final_norm.size() + head.bytes() + draft_head.bytes();
  for (const LayerWeights& layer : layers) total += bytes_of(layer);
  for (const MtpWeights& layer : mtp) {
    total += layer.embedding_norm.size() + layer.hidden_norm.size() + layer.head_norm.size() +
             layer.from_embedding.bytes() + layer.from_hidden.bytes() + bytes_of(layer.layer);
  }
  return total;
}

}  // namespace fathom
