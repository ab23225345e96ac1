// A DeepSeek model's weights in one GPU's memory, in bf16, and how they come there.
//
// One allocation, sized before a byte is read. FP8 and wider matrices are rounded to bf16 with
// their scales multiplied in. Matrices that the same launch reads lie together.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "device/cuda/device_array.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// All pointers are device memory; matrices are dense, columns contiguous. H heads; null where the
// model has no such part.
struct MlpWeights {
  bf16* gate_up = nullptr;  // [2 * intermediate, hidden]: gate's rows, then up's
  bf16* down = nullptr;     // [hidden, intermediate]
};

struct LayerWeights {
  float* input_norm = nullptr;           // [hidden]
  float* post_attention_norm = nullptr;  // [hidden]

  // q_proj [H * (nope + rope), hidden] or, with query compression, q_a [q_lora, hidden]; then kv_a
  // [latent + rope, hidden].
  bf16* q_kv_a = nullptr;
  float* q_a_norm = nullptr;   // [q_lora]
  bf16* q_b = nullptr;         // [H * (nope + rope), q_lora]
  float* kv_a_norm = nullptr;  // [latent]
  bf16* kv_b = nullptr;        // [H * (nope + v), latent]
  bf16* uk = nullptr;          // [H, latent, nope]: W_UK transposed
  bf16* uv = nullptr;          // [H, v, latent]
  bf16* o = nullptr;           // [hidden, H * v]

  MlpWeights dense;           // of a dense layer
  std::byte* gate = nullptr;  // [experts, hidden] of gate_type: the router
  DType gate_type = DType::kF32;
  float* gate_bias = nullptr;  // [experts]
  MlpWeights experts;          // [experts] of each matrix
  MlpWeights shared;           // num_shared * moe_intermediate wide
};

struct ModelWeights {
  DeviceArray<std::byte> memory;
  bf16* embedding = nullptr;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  float* final_norm = nullptr;  // [hidden]
  bf16* head = nullptr;         // [vocab, hidden]
};

// Bytes that load_weights will allocate.
int64_t weight_bytes(const ModelConfig& config);

// Onto the current device. Errors name the tensor and the file; a failure of the device is thrown.
Result<ModelWeights> load_weights(const Checkpoint& checkpoint, const LoadOptions& options);

}  // namespace fathom::cuda
