#include "checkpoint/stored_scales.h"

#include <cmath>
#include <cstring>

#include "base/math.h"

namespace fathom {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";
constexpr int64_t kBlock = 128;

// Matches a stored shape with one of the three forms; false if none fits.
bool fit_shape(const std::vector<int64_t>& shape, int64_t rows, int64_t cols,
               StoredScales& scales) {
  int64_t count = 1;
  // The header's parser has checked the product for overflow.
  for (const int64_t size : shape) count *= size;
  const bool flat = shape.size() <= 1;
  const int64_t block_rows = ceil_div(rows, kBlock);
  const int64_t block_cols = ceil_div(cols, kBlock);
  if (count == 1 && shape.size() <= 2) {
    scales.scale_rows = rows;
    scales.scale_cols = cols;
  } else if (count == rows && (flat || (shape.size() == 2 && shape[1] == 1))) {
    scales.scale_rows = 1;
    scales.scale_cols = cols;
  } else if (shape.size() == 2 && shape[0] == block_rows && shape[1] == block_cols) {
    scales.scale_rows = scales.scale_cols = kBlock;
  } else {
    return false;
  }
  scales.grid_rows = ceil_div(rows, scales.scale_rows);
  scales.grid_cols = ceil_div(cols, scales.scale_cols);
  return true;
}

}  // namespace

Result<StoredScales> find_scales(const Checkpoint& checkpoint, const std::string& name,
                                 const TensorEntry& weight, int64_t rows, int64_t cols) {
  StoredScales scales;
  const bool fp8 = weight.dtype == DType::kF8E4M3;
  if (name.ends_with(kWeightSuffix)) {
    const std::string module = name.substr(0, name.size() - kWeightSuffix.size());
    for (const char* suffix : {".weight_scale_inv", ".weight_scale"}) {
      const TensorEntry* entry = checkpoint.find(module + suffix);
      if (entry == nullptr) continue;
      if (scales.entry != nullptr) {
        return invalid("{}: tensor {:?} has both weight_scale_inv and weight_scale",
                       checkpoint.directory(), name);
      }
      scales.name = module + suffix;
      scales.entry = entry;
    }
  }
  if (scales.entry == nullptr) {
    if (!fp8) return scales;
    return invalid("{}: tensor {:?} is stored as FP8 without a weight_scale_inv or weight_scale",
                   checkpoint.file_of(weight), name);
  }
  const TensorEntry& entry = *scales.entry;
  const std::string& file = checkpoint.file_of(entry);
  if (!fp8) {
    return invalid("{}: tensor {:?} scales {:?}, which is stored as {}, not e4m3", file,
                   scales.name, name, name_of(weight.dtype));
  }
  if (entry.dtype != DType::kF32 && entry.dtype != DType::kBF16 && entry.dtype != DType::kF8E8M0) {
    return invalid("{}: tensor {:?} is stored as {}; a scale is f32, bf16 or e8m0", file,
                   scales.name, name_of(entry.dtype));
  }
  if (!fit_shape(entry.shape, rows, cols, scales)) {
    return invalid(
        "{}: tensor {:?} has shape [{}]; scales of [{}, {}] are [1], [{}, 1] or "
        "[{}, {}]",
        file, scales.name, fmt::join(entry.shape, ", "), rows, cols, rows, ceil_div(rows, kBlock),
        ceil_div(cols, kBlock));
  }
  return scales;
}

Result<> decode_scales(const StoredScales& scales, std::span<const std::byte> bytes,
                       std::span<float> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    if (scales.entry->dtype == DType::kF32) {
      std::memcpy(&out[i], bytes.data() + 4 * i, 4);
    } else if (scales.entry->dtype == DType::kBF16) {
      bf16 value;
      std::memcpy(&value, bytes.data() + 2 * i, 2);
      out[i] = to_float(value);
    } else {
      out[i] = e8m0_to_float(static_cast<uint8_t>(bytes[i]));
    }
    if (!std::isfinite(out[i])) {
      return invalid("tensor {:?} holds {} at index {}; a scale is a finite number", scales.name,
                     out[i], i);
    }
  }
  return {};
}

}  // namespace fathom
