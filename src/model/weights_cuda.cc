#include "model/weights_cuda.h"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <mutex>

#include "base/math.h"
#include "checkpoint/stored_scales.h"
#include "model/kv_b_split.h"
#include "model/weight_upload_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kBlock = 128;  // of a scale

// A stored matrix, one of those that lie one below the other.
struct Part {
  std::string name;
  int64_t rows = 0;
};

// Lays the weights out in one piece of memory, and lists the tensors that fill it.
class WeightCollector {
 public:
  WeightCollector(const Checkpoint& checkpoint, StoredFp8 stored_fp8)
      : checkpoint_(checkpoint), keep_fp8_(stored_fp8 == StoredFp8::kKept) {}

  // A norm weight or bias.
  void vector(const std::string& name, int64_t size, float** field) {
    place(field, size);
    add(name, {size}, [=](const ScaledMatrix& source, WeightUpload& upload) {
      upload.copy(source, {.type = DType::kF32, .values = *field, .rows = 1, .cols = size});
    });
  }

  // The embedding or the head.
  void table(const std::string& name, int64_t rows, int64_t cols, bf16** field) {
    place(field, rows * cols);
    add(name, {rows, cols}, [=](const ScaledMatrix& source, WeightUpload& upload) {
      upload.copy(source, {.values = *field, .rows = rows, .cols = cols});
    });
  }

  // Matrices one below the other: in e4m3 if all are stored so and each begins a block.
  void matrix(const std::vector<Part>& parts, int64_t cols, WeightMatrix* field) {
    int64_t rows = 0;
    bool scaled = cols % kBlock == 0, by_row = false;
    for (const Part& part : parts) {
      scaled = scaled && rows % kBlock == 0 && is_fp8(part.name);
      by_row = by_row || (scaled && is_scaled_by_row(part, cols));
      rows += part.rows;
    }
    allocate(scaled ? DType::kF8E4M3 : DType::kBF16, scaled && by_row, rows, cols, field);
    int64_t first = 0;
    for (const Part& part : parts) {
      fill(part, cols, field, first, part.rows, cols);
      first += part.rows;
    }
  }

  // The router, in bf16 if it is stored so, otherwise in fp32, which takes three times the
  // instructions. There is room for either.
  void router(const std::string& name, int64_t experts, int64_t hidden, LayerWeights* out) {
    place(&out->gate, experts * hidden * static_cast<int64_t>(sizeof(float)));
    add(name, {experts, hidden}, [=](const ScaledMatrix& source, WeightUpload& upload) {
      const bool narrow = source.values.dtype() == DType::kBF16 && source.scales.empty();
      out->gate_type = narrow ? DType::kBF16 : DType::kF32;
      upload.copy(source, {out->gate_type, out->gate, nullptr, nullptr, experts, hidden});
    });
  }

  // Whether `count` SwiGLU blocks, block i's tensors under prefix_of(i), can be in e4m3: all or
  // none.
  using PrefixOf = std::function<std::string(int64_t)>;
  bool mlps_are_fp8(const PrefixOf& prefix_of, int64_t count, int64_t hidden,
                    int64_t intermediate) const {
    if (hidden % kBlock != 0) return false;
    for (int64_t i = 0; i < count; ++i) {
      for (const char* name : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) {
        const bool down = name[0] == 'd';
        const Part part{prefix_of(i) + name, down ? hidden : intermediate};
        if (!is_fp8(part.name) || is_scaled_by_row(part, down ? intermediate : hidden)) {
          return false;
        }
      }
    }
    return true;
  }

  void mlps(const PrefixOf& prefix_of, int64_t count, int64_t hidden, int64_t intermediate,
            bool fp8, MlpWeights* out) {
    const int64_t width = fp8 ? round_up(intermediate, kBlock) : intermediate;
    const DType type = fp8 ? DType::kF8E4M3 : DType::kBF16;
    out->width = width;
    allocate(type, false, count * 2 * width, hidden, &out->gate_up);
    allocate(type, false, count * hidden, width, &out->down);
    for (int64_t i = 0; i < count; ++i) {
      const std::string prefix = prefix_of(i);
      const Part gate{prefix + "gate_proj.weight", intermediate};
      const Part up{prefix + "up_proj.weight", intermediate};
      fill(gate, hidden, &out->gate_up, 2 * i * width, width, hidden);
      fill(up, hidden, &out->gate_up, (2 * i + 1) * width, width, hidden);
      fill({prefix + "down_proj.weight", hidden}, intermediate, &out->down, i * hidden, hidden,
           width);
    }
  }

  // kv_b_proj whole, and each head's two halves for absorbed attention.
  void kv_b(const std::string& name, const ModelConfig& config, LayerWeights* out) {
    const int64_t heads = config.num_heads, latent = config.kv_lora_rank;
    const int64_t nope = config.qk_nope_dim, v = config.v_dim;
    const Part whole{name, heads * (nope + v)};
    const bool scaled = latent % kBlock == 0 && is_fp8(name);
    const bool by_row = scaled && is_scaled_by_row(whole, latent);
    allocate(scaled ? DType::kF8E4M3 : DType::kBF16, by_row, whole.rows, latent, &out->kv_b);
    // A head's nope rows are whole blocks of the checkpoint's then.
    const bool halves_scaled = scaled && !by_row && nope % kBlock == 0 && v % kBlock == 0;
    const DType type = halves_scaled ? DType::kF8E4M3 : DType::kBF16;
    allocate(type, false, heads * latent, nope, &out->uk);
    allocate(type, false, heads * v, latent, &out->uv);
    add(name, {whole.rows, latent}, [=](const ScaledMatrix& source, WeightUpload& upload) {
      upload.copy(source, place_of(out->kv_b, latent, 0, whole.rows));
      // One scale for all is one for each block.
      ScaledMatrix blocks = source;
      std::vector<float> scales;
      if (halves_scaled && source.scale_rows != kBlock) {
        scales.assign(static_cast<size_t>(whole.rows / kBlock * (latent / kBlock)),
                      source.scale_at(0, 0));
        blocks.scales = ConstTensorView(scales.data(), {whole.rows / kBlock, latent / kBlock});
        blocks.scale_rows = blocks.scale_cols = kBlock;
      }
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * (nope + v);
        upload.copy(transpose_rows(blocks, row, nope).view,
                    place_of(out->uk, nope, h * latent, latent));
        upload.copy(slice_rows(blocks, row + nope, v).view, place_of(out->uv, latent, h * v, v));
      }
    });
  }

  int64_t bytes() const { return bytes_; }
  const std::vector<TensorRequest>& requests() const { return requests_; }
  void set_fields(std::byte* memory) const {
    for (const auto& set : fields_) set(memory);
  }

 private:
  // Room for `count` values of T at *field, once the memory is there.
  template <typename T>
  void place(T** field, int64_t count) {
    fields_.push_back([field, offset = bytes_](std::byte* memory) {
      *field = reinterpret_cast<T*>(memory + offset);
    });
    bytes_ = round_up(bytes_ + count * static_cast<int64_t>(sizeof(T)), kAlignment);
  }

  void allocate(DType type, bool by_row, int64_t rows, int64_t cols, WeightMatrix* field) {
    field->type = type;
    fields_.push_back(
        [field, offset = bytes_](std::byte* memory) { field->values = memory + offset; });
    bytes_ = round_up(bytes_ + rows * cols * size_of(type), kAlignment);
    if (type != DType::kF8E4M3) return;
    place(&field->scales, ceil_div(rows, kBlock) * (cols / kBlock));
    if (by_row) place(&field->row_scales, rows);
  }

  // `count` rows of a matrix from row `first` on, which begins a block if it has them.
  static WeightPlace place_of(const WeightMatrix& matrix, int64_t cols, int64_t first,
                              int64_t count) {
    WeightPlace at{.type = matrix.type, .rows = count, .cols = cols};
    at.values = static_cast<std::byte*>(matrix.values) + first * cols * size_of(matrix.type);
    if (matrix.scales != nullptr) at.scales = matrix.scales + first / kBlock * (cols / kBlock);
    if (matrix.row_scales != nullptr) at.row_scales = matrix.row_scales + first;
    return at;
  }

  // The stored matrix `part` of `cols` columns fills [count, wide] of *field from row `first` on.
  void fill(const Part& part, int64_t cols, WeightMatrix* field, int64_t first, int64_t count,
            int64_t wide) {
    add(part.name, {part.rows, cols}, [=](const ScaledMatrix& source, WeightUpload& upload) {
      upload.copy(source, place_of(*field, wide, first, count));
    });
  }

  bool is_fp8(const std::string& name) const {
    const TensorEntry* const entry = checkpoint_.find(name);
    return keep_fp8_ && entry != nullptr && entry->dtype == DType::kF8E4M3;
  }

  // Of one that is FP8. What is wrong with its scales is load_tensors' to say.
  bool is_scaled_by_row(const Part& part, int64_t cols) const {
    const auto scales =
        find_scales(checkpoint_, part.name, *checkpoint_.find(part.name), part.rows, cols);
    return scales && scales->scale_rows == 1 && part.rows > 1;
  }

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

  const Checkpoint& checkpoint_;
  const bool keep_fp8_;
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
  const Part kv_a{prefix + "kv_a_proj_with_mqa.weight", config.latent_dim()};
  if (compressed) {
    const Part q_a{prefix + "q_a_proj.weight", config.q_lora_rank};
    collect.matrix({q_a, kv_a}, hidden, &out->q_kv_a);
    collect.vector(prefix + "q_a_layernorm.weight", config.q_lora_rank, &out->q_a_norm);
    collect.matrix({{prefix + "q_b_proj.weight", q_rows}}, config.q_lora_rank, &out->q_b);
  } else {
    collect.matrix({{prefix + "q_proj.weight", q_rows}, kv_a}, hidden, &out->q_kv_a);
  }
  collect.vector(prefix + "kv_a_layernorm.weight", config.kv_lora_rank, &out->kv_a_norm);
  collect.kv_b(prefix + "kv_b_proj.weight", config, out);
  collect.matrix({{prefix + "o_proj.weight", hidden}}, config.num_heads * config.v_dim, &out->o);
}

void collect_moe(const ModelConfig& config, const std::string& prefix, WeightCollector& collect,
                 LayerWeights* out) {
  const int64_t hidden = config.hidden, width = config.moe_intermediate;
  const int64_t shared_width = config.num_shared_experts * width;
  const auto routed = [&](int64_t e) { return fmt::format("{}experts.{}.", prefix, e); };
  const auto shared = [&](int64_t) { return prefix + "shared_experts."; };
  collect.router(prefix + "gate.weight", config.num_experts, hidden, out);
  if (config.gate == GateKind::kSigmoidBias) {
    collect.vector(prefix + "gate.e_score_correction_bias", config.num_experts, &out->gate_bias);
  }
  const bool fp8 = collect.mlps_are_fp8(routed, config.num_experts, hidden, width) &&
                   (shared_width == 0 || collect.mlps_are_fp8(shared, 1, hidden, shared_width));
  collect.mlps(routed, config.num_experts, hidden, width, fp8, &out->experts);
  if (shared_width > 0) collect.mlps(shared, 1, hidden, shared_width, fp8, &out->shared);
}

void collect_dense(const ModelConfig& config, const std::string& prefix, WeightCollector& collect,
                   LayerWeights* out) {
  const auto only = [&](int64_t) { return prefix; };
  const bool fp8 = collect.mlps_are_fp8(only, 1, config.hidden, config.intermediate);
  collect.mlps(only, 1, config.hidden, config.intermediate, fp8, &out->dense);
}

void collect_model(const ModelConfig& config, WeightCollector& collect, ModelWeights* out) {
  collect.table("model.embed_tokens.weight", config.vocab_size, config.hidden, &out->embedding);
  out->layers.resize(static_cast<size_t>(config.num_layers));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    LayerWeights* const weights = &out->layers[static_cast<size_t>(layer)];
    collect.vector(prefix + "input_layernorm.weight", config.hidden, &weights->input_norm);
    collect.vector(prefix + "post_attention_layernorm.weight", config.hidden,
                   &weights->post_attention_norm);
    collect_attention(config, prefix + "self_attn.", collect, weights);
    const auto feed_forward = config.is_moe_layer(layer) ? collect_moe : collect_dense;
    feed_forward(config, prefix + "mlp.", collect, weights);
  }
  collect.vector("model.norm.weight", config.hidden, &out->final_norm);
  collect.table("lm_head.weight", config.vocab_size, config.hidden, &out->head);
}

}  // namespace

int64_t weight_bytes(const Checkpoint& checkpoint, StoredFp8 stored_fp8) {
  ModelWeights weights;
  WeightCollector collect(checkpoint, stored_fp8);
  collect_model(checkpoint.config(), collect, &weights);
  return collect.bytes();
}

Result<ModelWeights> load_weights(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                                  const LoadOptions& options) {
  // Fields point into it until the load has ended.
  const auto weights = std::make_unique<ModelWeights>();
  WeightCollector collect(checkpoint, stored_fp8);
  collect_model(checkpoint.config(), collect, weights.get());
  weights->memory = DeviceArray<std::byte>(collect.bytes());
  collect.set_fields(weights->memory.data());
  FATHOM_RETURN_IF_ERROR(load_tensors(checkpoint, collect.requests(), options));
  return std::move(*weights);
}

}  // namespace fathom::cuda
