// Loading onto the GPU: compares device memory with the host's reading of the same checkpoint, for
// each published form, from files and with dummy weights.
#include "model/weights_cuda.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/math.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/test_files.h"
#include "model/weight_trial_cuda.h"
#include "tensor/quantize_weight.h"
#include "tensor/scaled_matrix.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kBlock = kScaleBlock;

// ---- The host's reading ----

struct HostMatrix {
  int64_t rows = 0, cols = 0;
  std::vector<std::byte> values;
  std::vector<float> scales;
  ScaledMatrix view;

  explicit HostMatrix(const ScaledMatrix& from) : rows(from.rows()), cols(from.cols()) {
    const auto* data = static_cast<const std::byte*>(from.values.raw());
    values.assign(data, data + rows * cols * size_of(from.values.dtype()));
    view = from;
    view.values = ConstTensorView(values.data(), from.values.dtype(), {rows, cols});
    if (from.scales.empty()) return;
    const int64_t count = from.scales.size(0) * from.scales.size(1);
    scales.assign(from.scales.row<float>(0), from.scales.row<float>(0) + count);
    view.scales = ConstTensorView(scales.data(), {from.scales.size(0), from.scales.size(1)});
  }
  HostMatrix(const HostMatrix&) = delete;
  HostMatrix& operator=(const HostMatrix&) = delete;
};

using HostTensors = std::map<std::string, std::unique_ptr<HostMatrix>>;

LoadOptions quiet() {
  LoadOptions options;
  options.show_progress = false;
  return options;
}

HostTensors read_on_host(const Checkpoint& checkpoint) {
  HostTensors tensors;
  std::mutex mutex;
  std::vector<TensorRequest> requests;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    if (name.find("scale") != std::string::npos) continue;
    requests.push_back({name, entry.shape, [&, key = name](const ScaledMatrix& matrix) -> Result<> {
                          auto copy = std::make_unique<HostMatrix>(matrix);
                          const std::scoped_lock lock(mutex);
                          tensors[key] = std::move(copy);
                          return {};
                        }});
  }
  const auto loaded = load_tensors(checkpoint, requests, quiet());
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  return tensors;
}

// ---- Device memory ----

// The expected device values of a checkpoint matrix.
std::vector<float> expected(const HostMatrix& matrix, const Fetched& device) {
  std::vector<float> wide;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.cols; ++c) {
      const float value = matrix.view.at(r, c);
      wide.push_back(device.type == DType::kBF16 ? to_float(to_bf16(value)) : value);
    }
  }
  const bool by_row = matrix.view.scale_rows == 1 && device.row_scales.empty();
  const bool quantised = matrix.view.values.dtype() != DType::kF8E4M3 || by_row;
  if (device.type == DType::kBF16 || !quantised) return wide;
  std::vector<e4m3> codes(wide.size());
  const int64_t grid_rows = ceil_div(matrix.rows, kBlock),
                grid_cols = ceil_div(matrix.cols, kBlock);
  std::vector<float> scales(static_cast<size_t>(grid_rows * grid_cols));
  const auto done =
      quantize_weights(ConstTensorView(wide.data(), {matrix.rows, matrix.cols}), ScaleForm::kF32,
                       TensorView(codes.data(), {matrix.rows, matrix.cols}),
                       TensorView(scales.data(), {grid_rows, grid_cols}));
  FATHOM_CHECK(done.has_value(), "{}", done.error().message);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.cols; ++c) {
      const auto at = static_cast<size_t>(r * matrix.cols + c);
      wide[at] =
          to_float(codes[at]) * scales[static_cast<size_t>(r / kBlock * grid_cols + c / kBlock)];
    }
  }
  return wide;
}

// Expects `host` in rows [first, first + rows) of the device's, zeros in columns beyond, and then
// zero rows up to `padded`.
void expect_part(const HostMatrix& host, const Fetched& device, int64_t first, int64_t padded,
                 const std::string& name) {
  const std::vector<float> wide = expected(host, device);
  int64_t wrong = 0;
  for (int64_t r = 0; r < padded; ++r) {
    for (int64_t c = 0; c < device.cols; ++c) {
      const bool inside = r < host.rows && c < host.cols;
      const float want = inside ? wide[static_cast<size_t>(r * host.cols + c)] : 0;
      const float have = device.at(first + r, c);
      if (have == want) continue;
      if (++wrong == 1) {
        ADD_FAILURE() << name << " [" << r << ", " << c << "] is " << have << ", not " << want;
      }
    }
  }
  EXPECT_EQ(wrong, 0) << name;
}

void expect_vector(const HostMatrix& host, const float* device, const std::string& name) {
  const auto values = fetch<float>(device, host.cols);
  for (int64_t i = 0; i < host.cols; ++i) {
    ASSERT_EQ(values[static_cast<size_t>(i)], host.view.at(0, i)) << name << " " << i;
  }
}

// Fills memory that the next allocation of this size gets, so that bytes a load leaves unwritten
// are not zero.
void poison(int64_t bytes) {
  const DeviceArray<std::byte> memory(bytes);
  check(cudaMemset(memory.data(), 0xFF, memory.bytes()), "poisoning");
  check(cudaDeviceSynchronize(), "poisoning");
}

// ---- The whole model ----

// Compares one load with the host's reading.
class Comparison {
 public:
  Comparison(const Checkpoint& checkpoint, StoredFp8 stored_fp8, const LoadOptions& options)
      : config_(checkpoint.config()), host_(read_on_host(checkpoint)) {
    poison(bytes_of_whole(checkpoint, stored_fp8, options));
    auto loaded = load_whole(checkpoint, stored_fp8, options);
    FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
    weights = std::move(*loaded);
    EXPECT_EQ(weights.memory.size(), bytes_of_whole(checkpoint, stored_fp8, options));
  }

  void all() {
    WeightMatrix table;
    table.values = weights.embedding;
    whole("model.embed_tokens.weight", table);
    table.values = weights.head;
    whole("lm_head.weight", table);
    expect_vector(host("model.norm.weight"), weights.final_norm, "norm");
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      prefix_ = fmt::format("model.layers.{}.", layer);
      const LayerWeights& w = weights.layers[static_cast<size_t>(layer)];
      expect_vector(host(prefix_ + "input_layernorm.weight"), w.input_norm, "input_norm");
      expect_vector(host(prefix_ + "post_attention_layernorm.weight"), w.post_attention_norm,
                    "post_attention_norm");
      attention(w);
      halves(w);
      feed_forward(layer, w);
    }
  }

  ModelWeights weights;

 private:
  const HostMatrix& host(const std::string& name) const { return *host_.at(name); }

  void whole(const std::string& name, const WeightMatrix& matrix) {
    const HostMatrix& from = host(name);
    expect_part(from, Fetched(matrix, from.rows, from.cols), 0, from.rows, name);
  }

  void attention(const LayerWeights& w) {
    const std::string attn = prefix_ + "self_attn.";
    const bool compressed = config_.q_lora_rank > 0;
    const HostMatrix& q = host(attn + (compressed ? "q_a_proj.weight" : "q_proj.weight"));
    const HostMatrix& kv = host(attn + "kv_a_proj_with_mqa.weight");
    const Fetched both(w.q_kv_a, q.rows + kv.rows, q.cols);
    expect_part(q, both, 0, q.rows, attn + "q_a");
    expect_part(kv, both, q.rows, kv.rows, attn + "kv_a");
    if (compressed) {
      expect_vector(host(attn + "q_a_layernorm.weight"), w.q_a_norm, "q_a_norm");
      whole(attn + "q_b_proj.weight", w.q_b);
    }
    expect_vector(host(attn + "kv_a_layernorm.weight"), w.kv_a_norm, "kv_a_norm");
    whole(attn + "kv_b_proj.weight", w.kv_b);
    whole(attn + "o_proj.weight", w.o);
  }

  void halves(const LayerWeights& w) {
    const int64_t heads = config_.num_heads, latent = config_.kv_lora_rank;
    const int64_t nope = config_.qk_nope_dim, v = config_.v_dim;
    const Fetched kv_b(w.kv_b, heads * (nope + v), latent), uk(w.uk, heads * latent, nope);
    const Fetched uv(w.uv, heads * v, latent);
    const auto same = [&](const Fetched& half, int64_t row, int64_t col, int64_t of) {
      const float value = kv_b.at(of, &half == &uk ? row % latent : col);
      return half.at(row, col) == (half.type == DType::kBF16 ? to_float(to_bf16(value)) : value);
    };
    int64_t wrong = 0;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t l = 0; l < latent; ++l) {
        for (int64_t i = 0; i < nope; ++i) {
          wrong += !same(uk, h * latent + l, i, h * (nope + v) + i);
        }
        for (int64_t i = 0; i < v; ++i) {
          wrong += !same(uv, h * v + i, l, h * (nope + v) + nope + i);
        }
      }
    }
    EXPECT_EQ(wrong, 0) << prefix_ << " halves of kv_b_proj";
  }

  void mlps(const MlpWeights& mlp, int64_t count, const auto& prefix_of) {
    const Fetched gate_up(mlp.gate_up, count * 2 * mlp.width, config_.hidden);
    const Fetched down(mlp.down, count * config_.hidden, mlp.width);
    for (int64_t i = 0; i < count; ++i) {
      const std::string prefix = prefix_of(i);
      expect_part(host(prefix + "gate_proj.weight"), gate_up, 2 * i * mlp.width, mlp.width,
                  prefix + "gate");
      expect_part(host(prefix + "up_proj.weight"), gate_up, (2 * i + 1) * mlp.width, mlp.width,
                  prefix + "up");
      expect_part(host(prefix + "down_proj.weight"), down, i * config_.hidden, config_.hidden,
                  prefix + "down");
    }
  }

  void feed_forward(int64_t layer, const LayerWeights& w) {
    const std::string mlp = prefix_ + "mlp.";
    if (!config_.is_moe_layer(layer)) {
      mlps(w.dense, 1, [&](int64_t) { return mlp; });
      return;
    }
    mlps(w.experts, config_.num_experts,
         [&](int64_t e) { return fmt::format("{}experts.{}.", mlp, e); });
    if (config_.num_shared_experts > 0) {
      mlps(w.shared, 1, [&](int64_t) { return mlp + "shared_experts."; });
    }
    const HostMatrix& router = host(mlp + "gate.weight");
    if (w.gate_type == DType::kF32) {
      for (int64_t r = 0; r < router.rows; ++r) {
        const auto row = fetch<float>(w.gate + r * router.cols * 4, router.cols);
        for (int64_t c = 0; c < router.cols; ++c) {
          ASSERT_EQ(row[static_cast<size_t>(c)], router.view.at(r, c));
        }
      }
    } else {
      WeightMatrix matrix;
      matrix.values = w.gate;
      whole(mlp + "gate.weight", matrix);
    }
    if (w.gate_bias != nullptr) {
      expect_vector(host(mlp + "gate.e_score_correction_bias"), w.gate_bias, "bias");
    }
  }

  const ModelConfig config_;
  const HostTensors host_;
  std::string prefix_;
};

void compare_written(const std::string& config, DType wide = DType::kBF16) {
  const TestFolder folder;
  const Checkpoint checkpoint = write_checkpoint(folder, config, wide);
  Comparison(checkpoint, StoredFp8::kKept, quiet()).all();
  Comparison(checkpoint, StoredFp8::kExpandedToBF16, quiet()).all();
}

DType type_of_experts(const std::string& config) {
  const TestFolder folder;
  const Checkpoint checkpoint = write_checkpoint(folder, config);
  return load_whole(checkpoint, StoredFp8::kKept, quiet())->layers[1].experts.down.type;
}

TEST(Weights, InBf16) { compare_written(config_text({}, "")); }
TEST(Weights, InF32) { compare_written(config_text({}, ""), DType::kF32); }
TEST(Weights, InF16) { compare_written(config_text({}, ""), DType::kF16); }
TEST(Weights, InBlocks) { compare_written(config_text({}, kBlocks)); }
TEST(Weights, InBlocksWithScalesOf8Bits) { compare_written(config_text({}, kPowersOfTwo)); }
TEST(Weights, WithoutQueryCompression) { compare_written(config_text({.q_lora = 0}, kBlocks)); }
TEST(Weights, WithAScaleATensor) { compare_written(config_text({}, kTensorStatic)); }
TEST(Weights, WithAScaleARow) { compare_written(config_text({}, kRow)); }

// Heads that are no whole blocks: the halves of kv_b_proj become bf16.
TEST(Weights, OfNarrowHeads) {
  for (const char* form : {"", kBlocks, kTensorStatic, kRow}) {
    compare_written(config_text({.nope = 64, .v = 48}, form));
  }
  compare_written(config_text({.nope = 256, .v = 384}, kBlocks));
}

// Widths that no e4m3 GEMM supports.
TEST(Weights, OfOddWidths) {
  for (const char* form : {kBlocks, kTensorStatic, kRow}) {
    compare_written(config_text({.hidden = 200, .q_lora = 72, .latent = 96}, form));
  }
}

TEST(Weights, AreKeptInE4M3WhereTheyCanBe) {
  EXPECT_EQ(type_of_experts(config_text({}, kBlocks)), DType::kF8E4M3);
  EXPECT_EQ(type_of_experts(config_text({}, kTensorStatic)), DType::kF8E4M3);
  EXPECT_EQ(type_of_experts(config_text({}, kRow)), DType::kF8E4M3);
  EXPECT_EQ(type_of_experts(config_text({.hidden = 200}, kBlocks)), DType::kBF16);
}

TEST(Weights, HaveTheInputScalesOfAStaticCheckpoint) {
  const TestFolder folder;
  const Checkpoint checkpoint = write_checkpoint(folder, config_text({}, kTensorStatic));
  const auto weights = load_whole(checkpoint, StoredFp8::kKept, quiet());
  ASSERT_TRUE(weights.has_value()) << weights.error().message;
  std::map<std::string, float> scales;
  std::mutex mutex;
  std::vector<TensorRequest> requests;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    if (!name.ends_with("input_scale")) continue;
    requests.push_back({name, {1}, [&, key = name](const ScaledMatrix& matrix) -> Result<> {
                          const std::scoped_lock lock(mutex);
                          scales[key] = matrix.at(0, 0);
                          return {};
                        }});
  }
  ASSERT_TRUE(load_tensors(checkpoint, requests, quiet()));
  const auto largest = [&](const std::string& prefix, const std::vector<std::string>& ends) {
    float value = 0;
    for (const auto& [name, scale] : scales) {
      for (const std::string& end : ends) {
        if (name.starts_with(prefix) && name.ends_with(end + ".input_scale")) {
          value = std::max(value, scale);
        }
      }
    }
    return value;
  };
  const std::string attn = "model.layers.1.self_attn.", mlp = "model.layers.1.mlp.";
  const LayerWeights& layer = weights->layers[1];
  EXPECT_GT(layer.q_b.input_scale, 0);
  EXPECT_EQ(layer.q_b.input_scale, largest(attn, {"q_b_proj"}));
  EXPECT_EQ(layer.q_kv_a.input_scale, largest(attn, {"q_a_proj", "kv_a_proj_with_mqa"}));
  EXPECT_EQ(layer.kv_b.input_scale, largest(attn, {"kv_b_proj"}));
  EXPECT_EQ(layer.uk.input_scale, 0);
  EXPECT_EQ(layer.experts.gate_up.input_scale, largest(mlp, {"gate_proj", "up_proj"}));
  EXPECT_EQ(layer.shared.gate_up.input_scale, layer.experts.gate_up.input_scale);
  EXPECT_EQ(layer.experts.down.input_scale, largest(mlp + "experts.", {"down_proj"}));
  EXPECT_EQ(weights->layers[0].o.type, DType::kBF16);  // ignored
  EXPECT_EQ(weights->layers[0].o.input_scale, 0);
}

// ---- Quantizing while loading ----

LoadOptions quantizing() {
  LoadOptions options = quiet();
  options.quantize_fp8 = true;
  return options;
}

TEST(Weights, QuantisedWhileLoading) {
  for (const DType wide : {DType::kBF16, DType::kF32, DType::kF16}) {
    const TestFolder folder;
    const Checkpoint checkpoint = write_checkpoint(folder, config_text({}, ""), wide);
    Comparison compared(checkpoint, StoredFp8::kKept, quantizing());
    compared.all();
    const LayerWeights& layer = compared.weights.layers[1];
    for (const WeightMatrix& matrix :
         {layer.q_kv_a, layer.q_b, layer.kv_b, layer.uk, layer.uv, layer.o, layer.experts.gate_up,
          layer.experts.down, layer.shared.gate_up, layer.shared.down}) {
      EXPECT_EQ(matrix.type, DType::kF8E4M3);
    }
  }
}

// A model that is already in FP8.
TEST(Weights, OfTheBundledModel) {
  const auto checkpoint = Checkpoint::open("models/fathom-tiny");
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  Comparison(*checkpoint, StoredFp8::kKept, quantizing()).all();
}

// Rows with too many columns for a piece.
TEST(Weights, QuantisedInPiecesOfColumns) {
  const TestFolder folder;
  folder.write("config.json", config_text({.hidden = 128, .dense = 40000, .experts = 2}, ""));
  const auto checkpoint = Checkpoint::open_dummy(folder.path());
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  Comparison(*checkpoint, StoredFp8::kKept, quantizing()).all();
}

TEST(Weights, AreNotQuantisedWhereOneIsNotFinite) {
  const TestFolder folder;
  folder.write("config.json", config_text({}, ""));
  const auto shape = Checkpoint::open_dummy(folder.path());
  ASSERT_TRUE(shape.has_value()) << shape.error().message;
  std::vector<TestTensor> tensors;
  for (const auto& [name, entry] : shape->tensors()) {
    std::vector<bf16> values(static_cast<size_t>(entry.bytes / size_of(entry.dtype)),
                             to_bf16(0.5f));
    const bool wide = entry.dtype == DType::kF32;
    if (name == "model.layers.1.mlp.experts.3.up_proj.weight") {
      values[130 * 256 + 7] = to_bf16(std::numeric_limits<float>::quiet_NaN());
    }
    std::string data = bytes_of(values);
    if (wide) data = bytes_of(std::vector<float>(values.size(), 0.5f));
    tensors.push_back({name, std::string(published_name(entry.dtype)), entry.shape, data});
  }
  folder.write("model.safetensors", shard_of(tensors));
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  const auto loaded = load_whole(*checkpoint, StoredFp8::kKept, quantizing());
  ASSERT_FALSE(loaded.has_value());
  EXPECT_NE(loaded.error().message.find("experts.3.up_proj.weight"), std::string::npos)
      << loaded.error().message;
  EXPECT_NE(loaded.error().message.find("nan at [130, 7]"), std::string::npos)
      << loaded.error().message;
}

// The device's dummy values equal the host's.
TEST(Weights, MadeUp) {
  for (const char* form : {"", kBlocks, kTensorStatic, kRow}) {
    const TestFolder folder;
    folder.write("config.json", config_text({}, form));
    const auto checkpoint = Checkpoint::open_dummy(folder.path());
    ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
    Comparison(*checkpoint, StoredFp8::kKept, quiet()).all();
  }
}

// V2-Lite's widths with fewer experts.
TEST(Weights, OfV2LiteInBlocks) {
  const TestFolder folder;
  folder.write(
      "config.json",
      config_text(
          {.hidden = 2048, .dense = 10944, .width = 1408, .experts = 2, .heads = 16, .q_lora = 0},
          kBlocks));
  const auto checkpoint = Checkpoint::open_dummy(folder.path());
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  Comparison compared(*checkpoint, StoredFp8::kKept, quiet());
  compared.all();
  EXPECT_EQ(compared.weights.layers[0].dense.width, 11008);
  EXPECT_EQ(compared.weights.layers[1].experts.width, 1408);
}

// Small models of all forms, generated by another implementation.
TEST(Weights, OfGoldens) {
  for (const char* name : {"v2_ct_channel", "v2_fp8_tensor", "v3", "v3_fp8", "v3_fp8_e8m0",
                           "v3_fp8_ue8m0", "odd", "kimi"}) {
    const auto checkpoint = Checkpoint::open(std::string("tests/goldens/") + name);
    ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
    Comparison(*checkpoint, StoredFp8::kKept, quiet()).all();
  }
}

}  // namespace
}  // namespace fathom::cuda
