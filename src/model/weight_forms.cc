#include "model/weight_forms.h"

#include <algorithm>

#include "checkpoint/four_bit_tensors.h"
#include "checkpoint/stored_scales.h"
#include "tensor/scale_form.h"

namespace fathom {
namespace {

// Whether a part's scales are those of whole blocks of the stored matrix.
bool begins_block(const TensorPart& part) {
  return part.rows.first % kScaleBlock == 0 && part.cols.first % kScaleBlock == 0;
}

// Whether matrices are stored in four bits and held in bf16.
bool dequantizes_four_bits(const LayerSpec& layer, const LayerForms& out,
                           const WeightForms& forms) {
  const auto any = [&](std::initializer_list<const TensorPart*> parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [&](const TensorPart* part) { return forms.is_four_bit(*part); });
  };
  const auto of_mlp = [&](const MlpSpec& mlp) { return any({&mlp.gate, &mlp.up, &mlp.down}); };
  const AttentionSpec& attention = layer.attention;
  return (attention.q_a && any({&*attention.q_a})) || (attention.kv_b && any({&*attention.kv_b})) ||
         any({&attention.q_b, &attention.kv_a, &attention.o}) ||
         (attention.indexer && any({&attention.indexer->q, &attention.indexer->k})) ||
         (layer.dense && of_mlp(*layer.dense)) ||
         (layer.moe && layer.moe->shared && of_mlp(*layer.moe->shared)) ||
         (layer.moe && !out.four_bit_experts && of_mlp(layer.moe->experts.front()));
}

LayerForms forms_of(const LayerSpec& layer, const ModelConfig& config, const WeightForms& forms) {
  const AttentionSpec& attention = layer.attention;
  LayerForms out;
  if (attention.indexer) {
    out.q_kv_a = forms.matrix({&*attention.q_a, &attention.indexer->k, &attention.kv_a});
    out.index_q = forms.matrix({&attention.indexer->q});
    out.q_b = forms.matrix({&attention.q_b});
  } else if (attention.q_a) {
    out.q_kv_a = forms.matrix({&*attention.q_a, &attention.kv_a});
    out.q_b = forms.matrix({&attention.q_b});
  } else {
    out.q_kv_a = forms.matrix({&attention.q_b, &attention.kv_a});
  }
  out.kv_b = forms.matrix({&*attention.kv_b});
  out.kv_b_halves = forms.kv_b_halves(*attention.kv_b, config.qk_nope_dim, config.v_dim);
  out.o = forms.matrix({&attention.o});
  if (layer.dense) {
    out.mlps = forms.mlps({&*layer.dense, 1});
    return out;
  }
  const MoeSpec& moe = *layer.moe;
  out.router = forms.router(moe.router);
  out.mlps = forms.mlps(moe.experts);
  out.four_bit_experts = forms.four_bit(moe.experts);
  if (moe.shared && forms.mlps({&*moe.shared, 1}) != out.mlps) out.mlps = DType::kBF16;
  return out;
}

}  // namespace

WeightForm WeightForms::matrix(StackedParts parts) const {
  WeightForm form{DType::kF8E4M3};
  int64_t rows = 0;
  for (const TensorPart* part : parts) {
    const bool is_block = rows % kScaleBlock == 0 && begins_block(*part);
    if (!is_block || part->cols.count % kScaleBlock != 0 || !is_e4m3(*part)) return {};
    form.by_row = form.by_row || is_scaled_by_row(*part);
    rows += part->rows.count;
  }
  return form;
}

WeightForm WeightForms::kv_b_halves(const TensorPart& kv_b, int64_t nope, int64_t v) const {
  const WeightForm whole = matrix({&kv_b});
  // Transposed, per-row scales would be per-column.
  const bool blocks = nope == kScaleBlock && v == kScaleBlock && !whole.by_row;
  return blocks ? whole : WeightForm{};
}

DType WeightForms::mlps(std::span<const MlpSpec> blocks) const {
  for (const MlpSpec& block : blocks) {
    if (block.gate.cols.count % kScaleBlock != 0) return DType::kBF16;
    for (const TensorPart* part : {&block.gate, &block.up, &block.down}) {
      if (!begins_block(*part) || !is_e4m3(*part)) return DType::kBF16;
    }
  }
  return DType::kF8E4M3;
}

bool WeightForms::is_four_bit(const TensorPart& part) const {
  const auto found = find_four_bit(checkpoint_, part.name, part.num_rows, part.num_cols);
  return found && *found;
}

std::optional<FourBitCode> WeightForms::four_bit(std::span<const MlpSpec> blocks) const {
  constexpr int64_t kScaleColumns = 32;  // that share a scale in the kernels' layout
  std::optional<FourBitCode> code;
  for (const MlpSpec& block : blocks) {
    for (const TensorPart* part : {&block.gate, &block.up, &block.down}) {
      // Errors in its tensors are reported by load_tensors.
      const auto found = find_four_bit(checkpoint_, part->name, part->num_rows, part->num_cols);
      if (!found || !*found) return {};
      const FourBitTensors& tensors = **found;
      const bool fits = tensors.scale_type == DType::kBF16 && !tensors.has_zeros &&
                        tensors.order == nullptr && tensors.group_cols % kScaleColumns == 0 &&
                        part->cols.first % kScaleColumns == 0;
      if (!fits) return {};
      code = tensors.code;
    }
  }
  return code;
}

DType WeightForms::router(const TensorPart& part) const {
  const TensorEntry* const entry = checkpoint_.find(part.name);
  return entry != nullptr && entry->dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

// Whether the tensor's own type is e4m3 in device memory.
bool WeightForms::is_e4m3(const TensorPart& part) const {
  const TensorEntry* const entry = checkpoint_.find(part.name);
  if (!keep_fp8_ || entry == nullptr) return false;
  return entry->dtype == DType::kF8E4M3 ||
         is_quantized_while_loading(checkpoint_, options_, true, entry->dtype);
}

// Errors in its scales are reported by load_tensors.
bool WeightForms::is_scaled_by_row(const TensorPart& part) const {
  const TensorEntry* const entry = checkpoint_.find(part.name);
  if (entry == nullptr || part.num_rows == 1) return false;
  const auto scales = find_scales(checkpoint_, part.name, *entry, part.num_rows, part.num_cols);
  return scales && scales->scale_rows == 1;
}

std::vector<LayerForms> layer_forms(const ModelSpec& spec, const WeightForms& forms) {
  std::vector<LayerForms> out;
  out.reserve(spec.layers.size() + 1);
  const auto add = [&](const LayerSpec& layer) {
    out.push_back(forms_of(layer, spec.config, forms));
    out.back().dequantizes_four_bits = dequantizes_four_bits(layer, out.back(), forms);
  };
  for (const LayerSpec& layer : spec.layers) add(layer);
  if (!spec.mtp.empty()) {
    add(spec.mtp.front().layer);
    const TensorPart projection = spec.mtp.front().projection();
    out.back().mtp_projection = forms.matrix({&projection});
  }
  return out;
}

}  // namespace fathom
