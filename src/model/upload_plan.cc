#include "model/upload_plan.h"

#include "base/check.h"
#include "base/math.h"
#include "model/gpu_support.h"
#include "ops/moe/plans/four_bit_tiles.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kPlaceAlignment = 256;

// `count` rows of a matrix from row `first` on, which begins a scale block if it has them.
WeightPlace place_of(const WeightMatrix& matrix, int64_t cols, int64_t first, int64_t count) {
  WeightPlace at{.type = matrix.type, .rows = count, .cols = cols};
  at.values = static_cast<std::byte*>(matrix.values) + first * cols * size_of(matrix.type);
  if (matrix.scales != nullptr) {
    at.scales = matrix.scales + first / kScaleBlock * (cols / kScaleBlock);
  }
  if (matrix.row_scales != nullptr) at.row_scales = matrix.row_scales + first;
  return at;
}

class Planner {
 public:
  Planner(const ModelSpec& spec, std::byte* memory)
      : config_(spec.config), memory_(reinterpret_cast<uintptr_t>(memory)) {
    plan_.tensors = std::make_unique<ModelTensors>();
  }

  UploadPlan model(const ModelSpec& spec, std::span<const LayerForms> forms) {
    ModelTensors& out = *plan_.tensors;
    table(spec.embedding, spec.embedding.rows.count, &out.embedding);
    out.layers.resize(forms.size());
    for (size_t i = 0; i < spec.layers.size(); ++i) {
      layer(spec.layers[i], forms[i], &out.layers[i]);
    }
    if (!spec.mtp.empty()) mtp(spec.mtp.front(), forms.back(), &out);
    vector(spec.final_norm, &out.final_norm);
    table(spec.head, gpu_logit_columns(spec), &out.head);
    return std::move(plan_);
  }

 private:
  template <typename T>
  T* take(int64_t count) {
    T* const memory = reinterpret_cast<T*>(memory_ + static_cast<uintptr_t>(plan_.bytes));
    plan_.bytes = round_up(plan_.bytes + count * static_cast<int64_t>(sizeof(T)), kPlaceAlignment);
    return memory;
  }

  void allocate(const WeightForm& form, int64_t rows, int64_t cols, WeightMatrix* out) {
    out->type = form.type;
    out->values = take<std::byte>(rows * cols * size_of(form.type));
    if (form.type != DType::kF8E4M3) return;
    out->scales = take<float>(ceil_div(rows, kScaleBlock) * (cols / kScaleBlock));
    if (form.by_row) out->row_scales = take<float>(rows);
  }

  void layer(const LayerSpec& spec, const LayerForms& forms, LayerWeights* out) {
    vector(spec.input_norm, &out->input_norm);
    vector(spec.post_attention_norm, &out->post_attention_norm);
    attention(spec.attention, forms, out);
    if (spec.moe) {
      moe(*spec.moe, forms, out);
    } else {
      mlps({&*spec.dense, 1}, forms.mlps, &out->dense);
    }
  }

  void mtp(const MtpSpec& spec, const LayerForms& forms, ModelTensors* out) {
    layer(spec.layer, forms, &out->layers.back());
    vector(spec.embedding_norm, &out->mtp.embedding_norm);
    vector(spec.hidden_norm, &out->mtp.hidden_norm);
    const TensorPart projection = spec.projection();
    matrix({&projection}, forms.mtp_projection, &out->mtp.projection);
    vector(spec.head_norm, &out->mtp.head_norm);
  }

  void attention(const AttentionSpec& spec, const LayerForms& forms, LayerWeights* out) {
    if (spec.q_a) {
      if (spec.indexer) {
        matrix({&*spec.q_a, &spec.indexer->k, &spec.kv_a}, forms.q_kv_a, &out->q_kv_a);
        indexer(*spec.indexer, forms, &out->indexer);
      } else {
        matrix({&*spec.q_a, &spec.kv_a}, forms.q_kv_a, &out->q_kv_a);
      }
      vector(*spec.q_a_norm, &out->q_a_norm);
      matrix({&spec.q_b}, forms.q_b, &out->q_b);
    } else {
      matrix({&spec.q_b, &spec.kv_a}, forms.q_kv_a, &out->q_kv_a);
    }
    vector(*spec.kv_a_norm, &out->kv_a_norm);
    kv_b(spec, forms, out);
    matrix({&spec.o}, forms.o, &out->o);
  }

  void indexer(const IndexerSpec& spec, const LayerForms& forms, IndexerMatrices* out) {
    matrix({&spec.q}, forms.index_q, &out->q);
    matrix({&spec.weights}, {}, &out->weights);
    vector(spec.k_norm, &out->k_norm);
    vector(spec.k_norm_bias, &out->k_norm_bias);
  }

  void moe(const MoeSpec& spec, const LayerForms& forms, LayerWeights* out) {
    router(spec.router, forms.router, out);
    if (spec.router_bias) vector(*spec.router_bias, &out->gate_bias);
    if (forms.four_bit_experts) {
      four_bit_mlps(spec.experts, *forms.four_bit_experts, &out->experts);
    } else {
      mlps(spec.experts, forms.mlps, &out->experts);
    }
    if (spec.shared) mlps({&*spec.shared, 1}, forms.mlps, &out->shared);
  }

  // A norm weight or bias.
  void vector(const TensorPart& part, float** field) {
    *field = take<float>(part.cols.count);
    upload(part, {.type = DType::kF32, .values = *field, .rows = 1, .cols = part.cols.count});
  }

  // The embedding or the head, in bf16, padded with zeros to `padded_rows`.
  void table(const TensorPart& part, int64_t padded_rows, bf16** field) {
    *field = take<bf16>(padded_rows * part.cols.count);
    upload(part, {.values = *field, .rows = padded_rows, .cols = part.cols.count});
  }

  // Space is reserved for either type.
  void router(const TensorPart& part, DType type, LayerWeights* out) {
    const int64_t rows = part.rows.count, cols = part.cols.count;
    out->gate = take<std::byte>(rows * cols * static_cast<int64_t>(sizeof(float)));
    out->gate_type = type;
    upload(part, {.type = type, .values = out->gate, .rows = rows, .cols = cols});
  }

  // Matrices stacked by rows.
  void matrix(StackedParts parts, const WeightForm& form, WeightMatrix* out) {
    int64_t rows = 0, cols = 0;
    for (const TensorPart* part : parts) {
      rows += part->rows.count;
      cols = part->cols.count;
    }
    allocate(form, rows, cols, out);
    int64_t first = 0;
    for (const TensorPart* part : parts) {
      upload(*part, place_of(*out, cols, first, part->rows.count), out);
      first += part->rows.count;
    }
  }

  // kv_b_proj whole, and each head's two halves for absorbed attention.
  void kv_b(const AttentionSpec& spec, const LayerForms& forms, LayerWeights* out) {
    const int64_t heads = spec.heads.count, latent = config_.kv_lora_rank;
    const int64_t nope = config_.qk_nope_dim, v = config_.v_dim;
    matrix({&*spec.kv_b}, forms.kv_b, &out->kv_b);
    allocate(forms.kv_b_halves, heads * latent, nope, &out->uk);
    allocate(forms.kv_b_halves, heads * v, latent, &out->uv);
    plan_.uploads.back().split = {.kv_b = plan_.uploads.back().place,
                                  .uk = place_of(out->uk, nope, 0, heads * latent),
                                  .uv = place_of(out->uv, latent, 0, heads * v),
                                  .heads = static_cast<int32_t>(heads),
                                  .nope = static_cast<int32_t>(nope),
                                  .v = static_cast<int32_t>(v),
                                  .latent = static_cast<int32_t>(latent)};
  }

  void mlps(std::span<const MlpSpec> blocks, DType type, MlpWeights* out) {
    const int64_t hidden = config_.hidden, width = blocks.front().width();
    if (width == 0) return;
    const auto count = std::ssize(blocks);
    const int64_t wide = round_up(width, type == DType::kF8E4M3 ? kScaleBlock : kBf16WidthUnit);
    out->width = wide;
    allocate({type}, count * 2 * wide, hidden, &out->gate_up);
    allocate({type}, count * hidden, wide, &out->down);
    for (int64_t i = 0; i < count; ++i) {
      const MlpSpec& block = blocks[static_cast<size_t>(i)];
      upload(block.gate, place_of(out->gate_up, hidden, 2 * i * wide, wide), &out->gate_up);
      upload(block.up, place_of(out->gate_up, hidden, (2 * i + 1) * wide, wide), &out->gate_up);
      upload(block.down, place_of(out->down, wide, i * hidden, hidden), &out->down);
    }
  }

  // Codes and scales in tiles, gate's and up's rows in turn.
  void four_bit_mlps(std::span<const MlpSpec> blocks, FourBitCode code, MlpWeights* out) {
    const int64_t hidden = config_.hidden, width = blocks.front().width();
    if (width == 0) return;
    const auto count = std::ssize(blocks);
    const int64_t wide = round_up(width, kFourBitBlockColumns);
    const int64_t gate_up_bytes = four_bit_bytes(2 * wide, hidden),
                  down_bytes = four_bit_bytes(hidden, wide);
    out->width = wide;
    out->code = code;
    const auto tiles = [&](int64_t bytes, WeightMatrix* matrix) {
      matrix->type = DType::kU8;
      matrix->values = take<std::byte>(count * bytes);
    };
    tiles(gate_up_bytes, &out->gate_up);
    tiles(down_bytes, &out->down);
    const auto place = [](const WeightMatrix& matrix, int64_t first, int64_t rows, int64_t cols,
                          WeightPlace::TileRows of) {
      return WeightPlace{.type = DType::kU8,
                         .values = static_cast<std::byte*>(matrix.values) + first,
                         .rows = rows,
                         .cols = cols,
                         .tile_rows = of};
    };
    for (int64_t i = 0; i < count; ++i) {
      using enum WeightPlace::TileRows;
      const MlpSpec& block = blocks[static_cast<size_t>(i)];
      upload(block.gate, place(out->gate_up, i * gate_up_bytes, wide, hidden, kGate),
             &out->gate_up);
      upload(block.up, place(out->gate_up, i * gate_up_bytes, wide, hidden, kUp), &out->gate_up);
      upload(block.down, place(out->down, i * down_bytes, hidden, wide, kAll), &out->down);
    }
  }

  void upload(const TensorPart& part, const WeightPlace& place, WeightMatrix* out = nullptr) {
    plan_.uploads.push_back({part, place, out, std::nullopt});
  }

  const ModelConfig& config_;
  const uintptr_t memory_;
  UploadPlan plan_;
};

}  // namespace

UploadPlan plan_upload(const ModelSpec& spec, std::span<const LayerForms> forms,
                       std::byte* memory) {
  const size_t layers = spec.layers.size() + std::min<size_t>(spec.mtp.size(), 1);
  FATHOM_CHECK(forms.size() == layers, "forms of {} layers, the spec has {}", forms.size(), layers);
  return Planner(spec, memory).model(spec, forms);
}

}  // namespace fathom::cuda
