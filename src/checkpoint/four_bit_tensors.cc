#include "checkpoint/four_bit_tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "checkpoint/dummy_weights.h"
#include "checkpoint/four_bit_decode.h"
#include "checkpoint/four_bit_layout.h"

namespace fathom {
namespace {

using Kind = QuantizationConfig::Kind;
using Role = FourBitPart::Role;

constexpr std::string_view kWeightEnd = ".weight";

bool is_type_of(const FourBitPart& part, DType dtype) {
  if (part.role == Role::kShape) return dtype == DType::kI64 || dtype == DType::kI32;
  if (part.role != Role::kScales) return dtype == part.dtype;
  if (part.dtype == DType::kU8) return dtype == DType::kU8 || dtype == DType::kF8E8M0;
  if (part.dtype == DType::kF8E4M3) return dtype == DType::kF8E4M3;
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
}

const TensorEntry** entry_of(FourBitTensors& tensors, Role role) {
  switch (role) {
    case Role::kCodes:
      return &tensors.codes;
    case Role::kScales:
      return &tensors.scales;
    case Role::kZeros:
      return &tensors.zeros;
    case Role::kOrder:
      return &tensors.order;
    case Role::kShape:
      return &tensors.shape;
    case Role::kGlobalScale:
      return &tensors.global_scale;
  }
  return nullptr;
}

// Sizes that the format can hold.
Result<> check_sizes(const Checkpoint& checkpoint, const FourBitTensors& tensors) {
  const QuantizationConfig& quantization = checkpoint.config().quantization;
  const bool words = quantization.kind == Kind::kAwq || quantization.kind == Kind::kGptq;
  if (words && (tensors.rows % 8 != 0 || tensors.cols % 8 != 0)) {
    return invalid("{}: tensor {:?} of [{}, {}]: this format holds multiples of 8",
                   checkpoint.directory(), tensors.name, tensors.rows, tensors.cols);
  }
  if (tensors.group_cols > 0 && tensors.cols % tensors.group_cols != 0) {
    return invalid("{}: tensor {:?} of [{}, {}]: its columns are not whole groups of {}",
                   checkpoint.directory(), tensors.name, tensors.rows, tensors.cols,
                   tensors.group_cols);
  }
  return {};
}

// A place in the file, for errors about what a tensor holds.
std::string place_of(const Checkpoint& checkpoint, const FourBitTensors& tensors,
                     const TensorEntry& entry) {
  const std::string module = tensors.name.substr(0, tensors.name.size() - kWeightEnd.size());
  for (const FourBitPart& part :
       four_bit_parts(checkpoint.config().quantization, tensors.rows, tensors.cols)) {
    FourBitTensors copy = tensors;
    if (*entry_of(copy, part.role) != &entry) continue;
    return fmt::format("{}: tensor {:?} ", checkpoint.file_of(entry),
                       module + std::string(part.suffix));
  }
  return fmt::format("{}: tensor {:?} ", checkpoint.file_of(entry), tensors.name);
}

// Reads tensors of one weight into its buffers.
class Reading {
 public:
  Reading(const Checkpoint& checkpoint, const FourBitTensors& tensors, const ReadTensor& read,
          FourBitBuffers& buffers)
      : checkpoint_(checkpoint),
        quantization_(checkpoint.config().quantization),
        tensors_(tensors),
        read_(read),
        buffers_(buffers) {}

  Result<> check_shape() {
    if (tensors_.shape == nullptr) return {};
    FATHOM_TRY(const std::byte* stored, read(*tensors_.shape));
    std::array<int64_t, 2> sizes{};
    for (int64_t i = 0; i < 2; ++i) {
      if (tensors_.shape->dtype == DType::kI64) {
        std::memcpy(&sizes[static_cast<size_t>(i)], stored + 8 * i, 8);
      } else {
        int32_t size = 0;
        std::memcpy(&size, stored + 4 * i, 4);
        sizes[static_cast<size_t>(i)] = size;
      }
    }
    if (sizes[0] == tensors_.rows && sizes[1] == tensors_.cols) return {};
    return invalid("{}says [{}, {}], config.json calls for [{}, {}]", place(*tensors_.shape),
                   sizes[0], sizes[1], tensors_.rows, tensors_.cols);
  }

  Result<> codes() {
    FATHOM_TRY(const std::byte* stored, read(*tensors_.codes));
    buffers_.codes.resize(static_cast<size_t>(tensors_.rows * tensors_.cols));
    decode_codes(quantization_.kind, stored, tensors_.rows, tensors_.cols, buffers_.codes.data());
    return {};
  }

  Result<> scales() {
    float global = 1;
    if (tensors_.global_scale != nullptr) {
      FATHOM_TRY(const std::byte* stored, read(*tensors_.global_scale));
      std::memcpy(&global, stored, sizeof global);
      if (!std::isfinite(global) || global == 0) {
        return invalid("{}holds {}; a scale is a finite number and not 0",
                       place(*tensors_.global_scale), global);
      }
    }
    const TensorEntry& entry = *tensors_.scales;
    FATHOM_TRY(const std::byte* stored, read(entry));
    const int64_t count = tensors_.rows * tensors_.groups;
    buffers_.scales.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      // AWQ and GPTQ store [groups, rows].
      const int64_t at =
          is_transposed() ? i % tensors_.groups * tensors_.rows + i / tensors_.groups : i;
      const float scale = decode_scale(entry.dtype, stored, at);
      if (!std::isfinite(scale)) {
        return invalid("{}holds {} at index {}; a scale is a finite number", place(entry), scale,
                       at);
      }
      buffers_.scales[static_cast<size_t>(i)] = global == 1 ? scale : scale / global;
    }
    return {};
  }

  Result<> zeros() {
    buffers_.zeros.clear();
    if (tensors_.zeros == nullptr) return {};
    FATHOM_TRY(const std::byte* stored, read(*tensors_.zeros));
    buffers_.zeros.resize(static_cast<size_t>(tensors_.rows * tensors_.groups));
    decode_zeros(quantization_, stored, tensors_.rows, tensors_.groups, buffers_.zeros.data());
    if (tensors_.has_zeros) return {};
    const auto other = std::find_if(buffers_.zeros.begin(), buffers_.zeros.end(),
                                    [](uint8_t zero) { return zero != kSymmetricZero; });
    if (other != buffers_.zeros.end()) {
      const int64_t at = other - buffers_.zeros.begin();
      return invalid(
          "{}holds a zero point of {} for row {}, group {}; quantization_config says symmetric, "
          "which has {} everywhere",
          place(*tensors_.zeros), static_cast<int>(*other), at / tensors_.groups,
          at % tensors_.groups, kSymmetricZero);
    }
    buffers_.zeros.clear();
    return {};
  }

  // Brings the columns of each group together.
  Result<> order() {
    buffers_.columns.clear();
    if (tensors_.order == nullptr || tensors_.group_cols == 0) return {};
    FATHOM_TRY(const std::byte* stored, read(*tensors_.order));
    FATHOM_TRY(buffers_.columns, decode_order(stored, tensors_.cols, tensors_.groups,
                                              tensors_.group_cols, place(*tensors_.order)));
    if (buffers_.columns.empty()) return {};
    std::vector<uint8_t> row(buffers_.columns.size());
    for (int64_t r = 0; r < tensors_.rows; ++r) {
      uint8_t* const codes = buffers_.codes.data() + r * tensors_.cols;
      for (size_t c = 0; c < row.size(); ++c) row[c] = codes[buffers_.columns[c]];
      std::copy(row.begin(), row.end(), codes);
    }
    return {};
  }

 private:
  bool is_transposed() const {
    return quantization_.kind == Kind::kAwq || quantization_.kind == Kind::kGptq;
  }

  std::string place(const TensorEntry& entry) const {
    return place_of(checkpoint_, tensors_, entry);
  }

  Result<const std::byte*> read(const TensorEntry& entry) {
    buffers_.stored.resize(static_cast<size_t>(entry.bytes));
    FATHOM_RETURN_IF_ERROR(read_(entry, buffers_.stored));
    return buffers_.stored.data();
  }

  const Checkpoint& checkpoint_;
  const QuantizationConfig& quantization_;
  const FourBitTensors& tensors_;
  const ReadTensor& read_;
  FourBitBuffers& buffers_;
};

ScaledMatrix matrix_of(const FourBitTensors& tensors, const FourBitBuffers& buffers) {
  ScaledMatrix matrix;
  matrix.values = ConstTensorView(buffers.codes.data(), {tensors.rows, tensors.cols});
  matrix.scales = ConstTensorView(buffers.scales.data(), {tensors.rows, tensors.groups});
  matrix.scale_rows = 1;
  matrix.scale_cols = tensors.group_cols == 0 ? tensors.cols : tensors.group_cols;
  matrix.code = tensors.code;
  if (!buffers.zeros.empty()) {
    matrix.zeros = ConstTensorView(buffers.zeros.data(), {tensors.rows, tensors.groups});
  }
  if (!buffers.columns.empty()) {
    matrix.columns = ConstTensorView(buffers.columns.data(), {tensors.cols});
  }
  return matrix;
}

}  // namespace

std::vector<const TensorEntry*> FourBitTensors::entries() const {
  std::vector<const TensorEntry*> all;
  for (const TensorEntry* entry : {codes, scales, zeros, order, shape, global_scale}) {
    if (entry != nullptr) all.push_back(entry);
  }
  return all;
}

Result<std::optional<FourBitTensors>> find_four_bit(const Checkpoint& checkpoint,
                                                    std::string_view name, int64_t rows,
                                                    int64_t cols) {
  using Found = std::optional<FourBitTensors>;
  const QuantizationConfig& quantization = checkpoint.config().quantization;
  if (!quantization.is_four_bit() || !name.ends_with(kWeightEnd)) return Found();
  const std::string module(name.substr(0, name.size() - kWeightEnd.size()));
  const std::string codes_name = module + std::string(four_bit_codes_suffix(quantization));
  if (checkpoint.find(codes_name) == nullptr) return Found();
  if (checkpoint.find(name) != nullptr) {
    return invalid("{}: there are both {:?} and {:?}", checkpoint.directory(), name, codes_name);
  }
  FourBitTensors tensors;
  tensors.name = name;
  tensors.rows = rows;
  tensors.cols = cols;
  tensors.group_cols = quantization.group_cols;
  FATHOM_RETURN_IF_ERROR(check_sizes(checkpoint, tensors));
  for (const FourBitPart& part : four_bit_parts(quantization, rows, cols)) {
    const std::string part_name = module + std::string(part.suffix);
    const TensorEntry* const entry = checkpoint.find(part_name);
    if (entry == nullptr) {
      if (!part.required) continue;
      return invalid("{}: tensor {:?} is missing beside {:?}", checkpoint.directory(), part_name,
                     codes_name);
    }
    // GPTQ stores the trivial order, too.
    if (part.role == Role::kOrder && quantization.kind == Kind::kGptq && !quantization.act_order) {
      continue;
    }
    const std::string& file = checkpoint.file_of(*entry);
    if (!is_type_of(part, entry->dtype)) {
      return invalid("{}: tensor {:?} is stored as {}, expected {}", file, part_name,
                     name_of(entry->dtype), name_of(part.dtype));
    }
    if (!entry->has_shape(part.shape)) {
      return invalid("{}: tensor {:?} has shape [{}], a weight of [{}, {}] in this form has [{}]",
                     file, part_name, fmt::join(entry->shape, ", "), rows, cols,
                     fmt::join(part.shape, ", "));
    }
    *entry_of(tensors, part.role) = entry;
  }
  tensors.groups = tensors.group_cols == 0 ? 1 : cols / tensors.group_cols;
  const bool e2m1 = quantization.kind == Kind::kMxfp4 || quantization.kind == Kind::kNvfp4;
  tensors.code = e2m1 ? FourBitCode::kE2m1 : FourBitCode::kInteger;
  tensors.has_zeros = tensors.zeros != nullptr && !quantization.symmetric;
  const bool fits_bf16 = tensors.scales->dtype == DType::kBF16 || quantization.kind == Kind::kMxfp4;
  tensors.scale_type = fits_bf16 ? DType::kBF16 : DType::kF32;
  return Found(std::move(tensors));
}

Result<ScaledMatrix> read_four_bit(const Checkpoint& checkpoint, const FourBitTensors& tensors,
                                   const ReadTensor& read, FourBitBuffers& buffers) {
  Reading reading(checkpoint, tensors, read, buffers);
  FATHOM_RETURN_IF_ERROR(reading.check_shape());
  FATHOM_RETURN_IF_ERROR(reading.codes());
  FATHOM_RETURN_IF_ERROR(reading.scales());
  FATHOM_RETURN_IF_ERROR(reading.zeros());
  FATHOM_RETURN_IF_ERROR(reading.order());
  return matrix_of(tensors, buffers);
}

ScaledMatrix dummy_four_bit(const FourBitTensors& tensors, uint64_t seed, FourBitBuffers& buffers) {
  buffers.codes.resize(static_cast<size_t>(tensors.rows * tensors.cols));
  fill_dummy_codes(tensors.name, seed, buffers.codes);
  return dummy_four_bit_scales(tensors, seed, buffers);
}

ScaledMatrix dummy_four_bit_scales(const FourBitTensors& tensors, uint64_t seed,
                                   FourBitBuffers& buffers) {
  buffers.scales.resize(static_cast<size_t>(tensors.rows * tensors.groups));
  fill_dummy_four_bit_scales(tensors.name, tensors.code, tensors.cols, seed, buffers.scales);
  if (tensors.scale_type == DType::kBF16) {
    const bool powers = tensors.code == FourBitCode::kE2m1;
    for (float& scale : buffers.scales) {
      scale = powers ? std::exp2(std::round(std::log2(scale))) : to_float(to_bf16(scale));
    }
  }
  buffers.zeros.assign(tensors.has_zeros ? static_cast<size_t>(tensors.rows * tensors.groups) : 0,
                       static_cast<uint8_t>(kSymmetricZero));
  buffers.columns.clear();
  return matrix_of(tensors, buffers);
}

}  // namespace fathom
