// Small checkpoints of each published form, and their weights read back from device memory: shared
// by the tests of loading onto a GPU.
#pragma once

#include <string>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "checkpoint/test_files.h"
#include "model/weights_cuda.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {

struct Sizes {
  int hidden = 256, dense = 328, width = 136, experts = 5, heads = 3, q_lora = 128;
  int latent = 512, nope = 128, v = 128;
};

// config.json of two layers, the second with experts.
std::string config_text(const Sizes& sizes, const std::string& quantization);

// Values of quantization_config.
inline constexpr const char* kBlocks =
    R"({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]})";
inline constexpr const char* kPowersOfTwo =
    R"({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "scale_fmt": "ue8m0"})";
inline constexpr const char* kTensorStatic =
    R"({"quant_method": "fp8", "activation_scheme": "static",
        "ignored_layers": ["lm_head", "model.layers.0.self_attn.o_proj"]})";
inline constexpr const char* kRow =
    R"({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"],
          "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
          "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                "dynamic": true}}}})";

// Writes a checkpoint of this config's tensors, all random, into the folder; matrices have type
// `wide` where they are not FP8.
Checkpoint write_checkpoint(const TestFolder& folder, const std::string& config,
                            DType wide = DType::kBF16);

// Loads all of a checkpoint, or one rank's part.
Result<ModelWeights> load_whole(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                                const LoadOptions& options);
Result<ModelWeights> load_rank(const Checkpoint& checkpoint, const ModelSpec& spec,
                               StoredFp8 stored_fp8, const LoadOptions& options);
// Bytes that load_whole() allocates.
int64_t bytes_of_whole(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                       const LoadOptions& options);

template <typename T>
std::vector<T> fetch(const void* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  check(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
        "copying from the device");
  return values;
}

// All [rows, cols] of a WeightMatrix.
struct Fetched {
  DType type;
  int64_t rows, cols;
  std::vector<bf16> narrow;
  std::vector<e4m3> codes;
  std::vector<float> scales, row_scales;

  Fetched(const WeightMatrix& matrix, int64_t n, int64_t k) : type(matrix.type), rows(n), cols(k) {
    if (type == DType::kBF16) {
      narrow = fetch<bf16>(matrix.values, n * k);
      return;
    }
    codes = fetch<e4m3>(matrix.values, n * k);
    scales = fetch<float>(matrix.scales, ceil_div(n, kScaleBlock) * (k / kScaleBlock));
    if (matrix.row_scales != nullptr) row_scales = fetch<float>(matrix.row_scales, n);
  }

  float at(int64_t r, int64_t c) const {
    if (type == DType::kBF16) return to_float(narrow[static_cast<size_t>(r * cols + c)]);
    float scale =
        scales[static_cast<size_t>(r / kScaleBlock * (cols / kScaleBlock) + c / kScaleBlock)];
    if (!row_scales.empty()) scale *= row_scales[static_cast<size_t>(r)];
    return to_float(codes[static_cast<size_t>(r * cols + c)]) * scale;
  }
};

}  // namespace fathom::cuda
