#include "model/weights_cuda.h"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <mutex>

#include "base/math.h"
#include "model/kv_b_split.h"
#include "model/weight_upload_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 256;

// Lays the weights out in one piece of memory, and lists the tensors that fill it.
class WeightCollector {
 public:
  // Room for `count` values of T at *field, once the memory is there.
  template <typename T>
  void place(T** field, int64_t count) {
    fields_.push_back([field, offset = bytes_](std::byte* memory) {
      *field = reinterpret_cast<T*>(memory + offset);
    });
    bytes_ = round_up(bytes_ + count * static_cast<int64_t>(sizeof(T)), kAlignment);
  }

  // A norm weight or bias.
  void vector(const std::string& name, int64_t size, float** field) {
    place(field, size);
    add(name, {size},
        [field](const ScaledMatrix& source, WeightUpload& upload) { upload.copy(source, *field); });
  }

  // A matrix that fills *field from element `first` on.
  template <typename T>
  void part(const std::string& name, int64_t rows, int64_t cols, T** field, int64_t first) {
    add(name, {rows, cols}, [field, first](const ScaledMatrix& source, WeightUpload& upload) {
      upload.copy(source, *field + first);
    });
  }

  template <typename T>
  void matrix(const std::string& name, int64_t rows, int64_t cols, T** field) {
    place(field, rows * cols);
    part(name, rows, cols, field, 0);
  }

  // The router, in bf16 if it is stored so, otherwise in fp32, which takes three times the
  // instructions. There is room for either.
  void router(const std::string& name, int64_t experts, int64_t hidden, LayerWeights* out) {
    place(&out->gate, experts * hidden * static_cast<int64_t>(sizeof(float)));
    add(name, {experts, hidden}, [out](const ScaledMatrix& source, WeightUpload& upload) {
      if (source.values.dtype() == DType::kBF16 && source.scales.empty()) {
        out->gate_type = DType::kBF16;
        upload.copy(source, reinterpret_cast<bf16*>(out->gate));
      } else {
        out->gate_type = DType::kF32;
        upload.copy(source, reinterpret_cast<float*>(out->gate));
      }
    });
  }

  // `count` SwiGLU blocks, block i's tensors under prefix_of(i).
  void mlps(const std::function<std::string(int64_t)>& prefix_of, int64_t count, int64_t hidden,
            int64_t intermediate, MlpWeights* out) {
    const int64_t half = intermediate * hidden;
    place(&out->gate_up, count * 2 * half);
    place(&out->down, count * half);
    for (int64_t i = 0; i < count; ++i) {
      const std::string prefix = prefix_of(i);
      part(prefix + "gate_proj.weight", intermediate, hidden, &out->gate_up, 2 * i * half);
      part(prefix + "up_proj.weight", intermediate, hidden, &out->gate_up, (2 * i + 1) * half);
      part(prefix + "down_proj.weight", hidden, intermediate, &out->down, i * half);
    }
  }

  // kv_b_proj whole, and each head's two halves for absorbed attention.
  void kv_b(const std::string& name, const ModelConfig& config, LayerWeights* out) {
    const int64_t heads = config.num_heads, latent = config.kv_lora_rank;
    const int64_t nope = config.qk_nope_dim, v = config.v_dim;
    place(&out->kv_b, heads * (nope + v) * latent);
    place(&out->uk, heads * latent * nope);
    place(&out->uv, heads * v * latent);
    add(name, {heads * (nope + v), latent}, [=](const ScaledMatrix& source, WeightUpload& upload) {
      upload.copy(source, out->kv_b);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * (nope + v);
        upload.copy(transpose_rows(source, row, nope).view, out->uk + h * latent * nope);
        upload.copy(slice_rows(source, row + nope, v).view, out->uv + h * v * latent);
      }
    });
  }

  int64_t bytes() const { return bytes_; }
  const std::vector<TensorRequest>& requests() const { return requests_; }
  void set_fields(std::byte* memory) const {
    for (const auto& set : fields_) set(memory);
  }

 private:
  template <typename Place>
  void add(const std::string& name, std::vector<int64_t> shape, Place place) {
    requests_.push_back({name, std::move(shape), [this, place](const ScaledMatrix& source) {
                           return on_this_thread(source, place);
                         }});
  }

  // A device's failure ends a loading thread as any other error does.
  template <typename Place>
  Result<> on_this_thread(const ScaledMatrix& source, const Place& place) {
    try {
      std::unique_ptr<WeightUpload> upload;
      {
        const std::scoped_lock lock(mutex_);
        if (!idle_.empty()) {
          upload = std::move(idle_.back());
          idle_.pop_back();
        }
      }
      check(cudaSetDevice(device_), "choosing the device");
      if (!upload) upload = std::make_unique<WeightUpload>();
      place(source, *upload);
      const std::scoped_lock lock(mutex_);
      idle_.push_back(std::move(upload));
      return {};
    } catch (const DeviceError& failure) {
      return error(Code::kInternal, "{}", failure.what());
    }
  }

  static int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the device");
    return device;
  }

  const int device_ = current_device();
  int64_t bytes_ = 0;
  std::vector<std::function<void(std::byte*)>> fields_;
  std::vector<TensorRequest> requests_;
  std::mutex mutex_;  // guards idle_
  std::vector<std::unique_ptr<WeightUpload>> idle_;
};

void collect_attention(const ModelConfig& config, const std::string& prefix,
                       WeightCollector& collect, LayerWeights* out) {
  const int64_t hidden = config.hidden, q_rows = config.num_heads * config.qk_dim();
  const bool compressed = config.q_lora_rank > 0;
  const int64_t first_rows = compressed ? config.q_lora_rank : q_rows;
  collect.place(&out->q_kv_a, (first_rows + config.latent_dim()) * hidden);
  collect.part(prefix + (compressed ? "q_a_proj.weight" : "q_proj.weight"), first_rows, hidden,
               &out->q_kv_a, 0);
  collect.part(prefix + "kv_a_proj_with_mqa.weight", config.latent_dim(), hidden, &out->q_kv_a,
               first_rows * hidden);
  if (compressed) {
    collect.vector(prefix + "q_a_layernorm.weight", config.q_lora_rank, &out->q_a_norm);
    collect.matrix(prefix + "q_b_proj.weight", q_rows, config.q_lora_rank, &out->q_b);
  }
  collect.vector(prefix + "kv_a_layernorm.weight", config.kv_lora_rank, &out->kv_a_norm);
  collect.kv_b(prefix + "kv_b_proj.weight", config, out);
  collect.matrix(prefix + "o_proj.weight", hidden, config.num_heads * config.v_dim, &out->o);
}

void collect_moe(const ModelConfig& config, const std::string& prefix, WeightCollector& collect,
                 LayerWeights* out) {
  collect.router(prefix + "gate.weight", config.num_experts, config.hidden, out);
  if (config.gate == GateKind::kSigmoidBias) {
    collect.vector(prefix + "gate.e_score_correction_bias", config.num_experts, &out->gate_bias);
  }
  collect.mlps([&](int64_t e) { return fmt::format("{}experts.{}.", prefix, e); },
               config.num_experts, config.hidden, config.moe_intermediate, &out->experts);
  if (config.num_shared_experts > 0) {
    collect.mlps([&](int64_t) { return prefix + "shared_experts."; }, 1, config.hidden,
                 config.num_shared_experts * config.moe_intermediate, &out->shared);
  }
}

void collect_model(const ModelConfig& config, WeightCollector& collect, ModelWeights* out) {
  collect.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden, &out->embedding);
  out->layers.resize(static_cast<size_t>(config.num_layers));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    LayerWeights* const weights = &out->layers[static_cast<size_t>(layer)];
    collect.vector(prefix + "input_layernorm.weight", config.hidden, &weights->input_norm);
    collect.vector(prefix + "post_attention_layernorm.weight", config.hidden,
                   &weights->post_attention_norm);
    collect_attention(config, prefix + "self_attn.", collect, weights);
    if (config.is_moe_layer(layer)) {
      collect_moe(config, prefix + "mlp.", collect, weights);
    } else {
      collect.mlps([&](int64_t) { return prefix + "mlp."; }, 1, config.hidden, config.intermediate,
                   &weights->dense);
    }
  }
  collect.vector("model.norm.weight", config.hidden, &out->final_norm);
  collect.matrix("lm_head.weight", config.vocab_size, config.hidden, &out->head);
}

}  // namespace

int64_t weight_bytes(const ModelConfig& config) {
  ModelWeights weights;
  WeightCollector collect;
  collect_model(config, collect, &weights);
  return collect.bytes();
}

Result<ModelWeights> load_weights(const Checkpoint& checkpoint, const LoadOptions& options) {
  // Fields point into it until the load has ended.
  const auto weights = std::make_unique<ModelWeights>();
  WeightCollector collect;
  collect_model(checkpoint.config(), collect, weights.get());
  weights->memory = DeviceArray<std::byte>(collect.bytes());
  collect.set_fields(weights->memory.data());
  FATHOM_RETURN_IF_ERROR(load_tensors(checkpoint, collect.requests(), options));
  return std::move(*weights);
}

}  // namespace fathom::cuda
