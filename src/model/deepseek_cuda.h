// The DeepSeek V2 / V3 decoder on one GPU: the steps of model/deepseek.h in about ten launches a
// layer, or one for all layers of experts (ops/decode_layers). Each launch is an operation of
// ops/*_cuda.h.
//
// Owns the weights and the activations' workspace in device memory; the cache belongs to the
// caller. One forward() at a time, on the thread that owns the device.
#pragma once

#include <memory>

#include "cache/cache_format.h"
#include "model/attention_plan.h"
#include "model/step_layout.h"
#include "model/weights_cuda.h"
#include "ops/decode_layers/decode_layers_cuda.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/moe/moe_cuda.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"

namespace fathom::cuda {

inline bool is_e4m3(const WeightMatrix& weight) { return weight.type == DType::kF8E4M3; }

struct ModelOptions {
  int64_t max_rows = 8192;       // tokens in one step
  int64_t max_logit_rows = 512;  // of one step
  int64_t most_keys = 0;  // that are expanded at a time for multi-head attention; whole tiles
  bool batch_invariant = false;  // a row's bits do not depend on what else is in the step
  StoredFp8 stored_fp8 = StoredFp8::kKept;
};

// Pages of the latent cache in device memory: layer l's are [num_pages, kPageSize, row bytes] from
// data + l * layer_bytes on.
struct CacheMemory {
  CacheFormat format = CacheFormat::kBF16;
  std::byte* data = nullptr;
  int64_t num_pages = 0;
  int64_t layer_bytes = 0;
};

class DeepSeekModel {
 public:
  // On the current device.
  static Result<std::unique_ptr<DeepSeekModel>> load(const Checkpoint& checkpoint,
                                                     const ModelOptions& options,
                                                     const LoadOptions& load_options);
  // Bytes of device memory that load() takes for the weights, and besides.
  static int64_t weight_bytes(const Checkpoint& checkpoint, const ModelOptions& options,
                              const LoadOptions& load_options);
  static int64_t workspace_bytes(const ModelConfig& config, const ModelOptions& options);

  const ModelConfig& config() const { return config_; }
  int num_multiprocessors() const { return num_multiprocessors_; }

  // Enqueues the step whose arrays are at `arrays` in device memory (step.memory, copied):
  // writes the rows' cache rows and logits() [step.logit_rows, vocab] f32. `sampled` are the tokens
  // of the step before. Launches only: a step without multi-head rows can be captured, and the
  // graph replayed for any step of as many rows.
  void forward(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
               const CacheMemory& cache, cudaStream_t stream);
  float* logits() const { return logits_; }
  // Whether steps of one row are launched otherwise when it sees more than kMostDecodeLayersTokens
  // keys: a graph holds for either.
  bool one_row_depends_on_keys() const {
    return decode_layers_.size() > 0 && !options_.batch_invariant;
  }

 private:
  struct Query {
    bf16* data = nullptr;  // [rows, H, nope + rope]
    int64_t stride = 0;    // elements from row to row
  };
  struct Pages {
    CacheFormat format = CacheFormat::kBF16;
    std::byte* data = nullptr;  // one layer's
    int64_t count = 0;
  };
  struct MatrixSize {
    int64_t n = 0, k = 0;
  };
  struct Output {
    void* data = nullptr;
    int64_t stride = 0;
    DType type = DType::kBF16;
  };
  // Rows as products read them: in bf16, in e4m3 with scales, or both.
  struct Activation {
    bf16* data = nullptr;  // null: not there
    int64_t stride = 0;
    QuantizedRows quantized = {};  // values null: not there
  };
  // Which of the two the products of some weights read.
  struct Forms {
    bool bf16 = false, e4m3 = false;
    float input_scale = 0;  // of e4m3, see WeightMatrix
  };
  static Forms forms_of(const WeightMatrix& weight);
  static Forms feed_forward_forms(const LayerWeights& weights);

  DeepSeekModel(const ModelConfig& config, const ModelOptions& options);

  template <typename Place>
  void for_each_piece(const Place& place);
  void fill_constants();
  void describe_decode_layers();
  DecodeLayersShape decode_layers_shape() const;
  bool takes_decode_layers(const StepLayout& step) const;
  void last_layers(const StepLayout& step, const std::byte* arrays, const CacheMemory& cache,
                   cudaStream_t stream);
  bool lends_library() const;
  void prepare_library();

  void attention(const LayerWeights& weights, const Activation& x, const StepLayout& step,
                 const std::byte* arrays, const Pages& pages, cudaStream_t stream);
  Query project_query(const LayerWeights& weights, int64_t rows, cudaStream_t stream);
  Activation heads_out(const LayerWeights& weights, const StepLayout& step) const;
  void absorbed_attention(const LayerWeights& weights, const StepLayout& step,
                          const std::byte* arrays, const Query& query, const Pages& pages,
                          const Activation& out, cudaStream_t stream);
  void mha_attention(const LayerWeights& weights, const StepLayout& step, size_t pass,
                     const std::byte* arrays, const Query& query, const Pages& pages,
                     const Activation& out, cudaStream_t stream);
  void feed_forward(const LayerWeights& weights, const Activation& x, int64_t rows,
                    const int32_t* num_valid_rows, cudaStream_t stream);

  Activation add_and_norm(float* residual, const bf16* delta, const float* weight, Forms forms,
                          int64_t rows, cudaStream_t stream);
  void logits_of(float* residual, int64_t rows, cudaStream_t stream);
  Activation narrow_and_norm(const StepLayout& step, const std::byte* arrays, const float* weight,
                             Forms forms, cudaStream_t stream);
  void product(const Activation& x, const WeightMatrix& weight, MatrixSize size, const Output& out,
               int64_t rows, cudaStream_t stream);
  void head_product(const Activation& x, int64_t x_head_stride, const WeightMatrix& weight,
                    MatrixSize size, const Activation& out, int64_t rows, cudaStream_t stream);
  Activation normed(Forms forms, int64_t rows) const;
  QuantizedRows quantized(int64_t rows, int64_t k, float input_scale) const;

  ScaleForm scale_form() const {
    return config_.quantization.scales_are_powers_of_two ? ScaleForm::kPowerOfTwo : ScaleForm::kF32;
  }
  int64_t q_rows() const { return config_.num_heads * config_.qk_dim(); }
  // Columns of q_kv_a's product.
  int64_t q_kv_a_columns() const {
    return (config_.q_lora_rank > 0 ? config_.q_lora_rank : q_rows()) + config_.latent_dim();
  }

  const ModelConfig config_;
  const ModelOptions options_;
  int num_multiprocessors_ = 0;
  ModelWeights weights_;
  // Of the layers from this one on, which one token takes in one launch; empty: none.
  int64_t first_decode_layer_ = 0;
  DeviceArray<DecodeLayer> decode_layers_;
  DeviceArray<std::byte> workspace_;
  std::unique_ptr<CublasLt> library_;  // lent to products in bf16; null: not there

  // Of the workspace; element counts for max_rows.
  float* residual_ = nullptr;          // [rows, hidden]
  float* logit_residual_ = nullptr;    // [max_logit_rows, hidden]
  bf16* normed_ = nullptr;             // [rows, hidden]
  bf16* delta_ = nullptr;              // [rows, hidden]: what a block adds to the residual
  bf16* q_kv_a_ = nullptr;             // [rows, q or q_lora, and latent + rope]
  bf16* q_a_normed_ = nullptr;         // [rows, q_lora]
  bf16* q_ = nullptr;                  // [rows, H, nope + rope], with query compression
  bf16* q_rope_ = nullptr;             // [rows, H, rope]
  bf16* q_latent_ = nullptr;           // [rows, H, latent]; later, multi-head: fp32 [rows, H, v]
  bf16* o_latent_ = nullptr;           // [rows, H, latent]
  bf16* heads_out_ = nullptr;          // [rows, H, v]; or in e4m3, and scales after it
  e4m3* quantized_ = nullptr;          // [rows, k]: what the next product reads, if in e4m3
  float* quantized_scales_ = nullptr;  // [k / 128, rows up to a multiple of 4]: its
  float* partial_lse_ = nullptr;       // [rows, H]
  bf16* key_latent_ = nullptr;         // [most_keys, latent]
  bf16* key_rope_ = nullptr;           // [most_keys, rope]
  bf16* kv_ = nullptr;                 // [most_keys, H, nope + v]
  int32_t* expert_ids_ = nullptr;      // [rows, k]
  float* expert_weights_ = nullptr;    // [rows, k]
  int32_t* dense_ids_ = nullptr;       // [rows]: 0, a dense layer's only expert
  float* dense_weights_ = nullptr;     // [rows]: 1
  std::byte* mlp_ = nullptr;           // the operation's own
  // Of the experts in bf16 and in e4m3: counters, zero at first.
  uint64_t* progress_ = nullptr;
  uint64_t* scaled_progress_ = nullptr;
  std::byte* exchange_ = nullptr;    // decode_layers' own, zero at first
  float* gate_scratch_ = nullptr;    // the router's own, every bit set at first
  float* decode_scratch_ = nullptr;  // latent_decode's
  float* cos_sin_ = nullptr;         // [max_position, rope / 2, 2]
  float* logits_ = nullptr;          // [max_logit_rows, vocab]
  std::byte* library_workspace_ = nullptr;
};

}  // namespace fathom::cuda
