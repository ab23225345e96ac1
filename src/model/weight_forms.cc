#include "model/weight_forms.h"

#include "checkpoint/stored_scales.h"
#include "tensor/scale_form.h"

namespace fathom {

WeightForm WeightForms::matrix(const std::vector<MatrixPart>& parts, int64_t cols) const {
  if (cols % kScaleBlock != 0) return {};
  WeightForm form{DType::kF8E4M3};
  int64_t rows = 0;
  for (const MatrixPart& part : parts) {
    if (rows % kScaleBlock != 0 || !is_e4m3(part.name)) return {};
    form.by_row = form.by_row || is_scaled_by_row(part, cols);
    rows += part.rows;
  }
  return form;
}

WeightForm WeightForms::kv_b_halves(const MatrixPart& kv_b, int64_t latent, int64_t nope,
                                    int64_t v) const {
  const WeightForm whole = matrix({kv_b}, latent);
  // Transposed, per-row scales would be per-column.
  const bool blocks = nope % kScaleBlock == 0 && v % kScaleBlock == 0 && !whole.by_row;
  return blocks ? whole : WeightForm{};
}

WeightForm WeightForms::mlps(const PrefixOf& prefix_of, int64_t count, int64_t hidden) const {
  if (hidden % kScaleBlock != 0) return {};
  for (int64_t i = 0; i < count; ++i) {
    for (const char* name : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) {
      if (!is_e4m3(prefix_of(i) + name)) return {};
    }
  }
  return {DType::kF8E4M3};
}

// Whether the tensor's own type is e4m3 in device memory.
bool WeightForms::is_e4m3(const std::string& name) const {
  const TensorEntry* const entry = checkpoint_.find(name);
  if (!keep_fp8_ || entry == nullptr) return false;
  return entry->dtype == DType::kF8E4M3 ||
         is_quantized_while_loading(checkpoint_, options_, true, entry->dtype);
}

// Errors in its scales are reported by load_tensors.
bool WeightForms::is_scaled_by_row(const MatrixPart& part, int64_t cols) const {
  const TensorEntry* const entry = checkpoint_.find(part.name);
  if (entry == nullptr || part.rows == 1) return false;
  const auto scales = find_scales(checkpoint_, part.name, *entry, part.rows, cols);
  return scales && scales->scale_rows == 1;
}

}  // namespace fathom
