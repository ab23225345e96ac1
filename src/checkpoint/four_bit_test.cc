// Four-bit weights of every format: each is written here by plain code from the published layout
// (four_bit_layout.h), and must be read back to the bits of its values.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/random.h"
#include "checkpoint/inventory.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/quantize_checkpoint.h"
#include "checkpoint/random_checkpoint.h"
#include "checkpoint/test_files.h"

namespace fathom {
namespace {

using testing::HasSubstr;

constexpr int64_t kFourRows = 24, kFourCols = 256;
const std::string kFourModule = "model.layers.0.self_attn.o_proj";

LoadOptions silent() {
  LoadOptions options;
  options.show_progress = false;
  options.read_bytes = 100;  // many reads a tensor
  return options;
}

// Codes, zero points and scales of one weight [24, 256], chosen at random.
struct Weights {
  explicit Weights(int64_t group_size, bool with_zeros = false)
      : group(group_size), groups(kFourCols / group_size), zeros_differ(with_zeros) {
    for (int64_t i = 0; i < kFourRows * kFourCols; ++i) {
      codes.push_back(static_cast<int>(random_bits(1, 1, static_cast<uint64_t>(i)) & 15));
    }
    for (int64_t i = 0; i < kFourRows * groups; ++i) {
      zeros.push_back(
          with_zeros ? static_cast<int>(random_bits(1, 2, static_cast<uint64_t>(i)) & 15) : 8);
      const auto unit = static_cast<float>(random_uniform(1, 3, static_cast<uint64_t>(i)));
      scales.push_back(to_float(to_bf16(0.01f + 0.02f * unit)));
    }
    for (int64_t c = 0; c < kFourCols; ++c) group_of.push_back(static_cast<int32_t>(c / group));
  }

  int code(int64_t row, int64_t col) const {
    return codes[static_cast<size_t>(row * kFourCols + col)];
  }
  size_t at(int64_t row, int64_t col) const {
    return static_cast<size_t>(row * groups + group_of[static_cast<size_t>(col)]);
  }
  float integer(int64_t row, int64_t col) const {
    return static_cast<float>(code(row, col) - zeros[at(row, col)]) * scales[at(row, col)];
  }
  float e2m1(int64_t row, int64_t col) const {
    const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const float size = sizes[code(row, col) % 8];
    return code(row, col) < 8 ? size : -size;
  }

  int64_t group, groups;
  bool zeros_differ;
  std::vector<int> codes, zeros;
  std::vector<float> scales;
  std::vector<int32_t> group_of;
};

// Eight four-bit numbers a word.
std::string words(int64_t outer, int64_t inner, const std::vector<int>& order,
                  const std::function<int(int64_t outer, int64_t inner)>& value) {
  std::vector<uint32_t> out;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < inner; i += 8) {
      uint32_t word = 0;
      for (int k = 0; k < 8; ++k) {
        word |= static_cast<uint32_t>(value(o, i + order[static_cast<size_t>(k)])) << 4 * k;
      }
      out.push_back(word);
    }
  }
  return bytes_of(out);
}

const std::vector<int> kInOrder = {0, 1, 2, 3, 4, 5, 6, 7};
const std::vector<int> kOfAwq = {0, 2, 4, 6, 1, 3, 5, 7};

class FourBitFiles : public testing::Test {
 protected:
  void config(const std::string& quantization) {
    folder_.write("config.json", R"({"model_type":"deepseek_v3","vocab_size":3,"hidden_size":24,
        "num_hidden_layers":1,"max_position_embeddings":8,"rms_norm_eps":1e-6,
        "num_attention_heads":4,"kv_lora_rank":2,"qk_nope_head_dim":1,"qk_rope_head_dim":2,
        "v_head_dim":64,"rope_theta":10000,"intermediate_size":2,"quantization_config":)" +
                                     quantization + "}");
    tensors_.clear();
    const std::string layer = "model.layers.0.";
    wide("model.embed_tokens.weight", {3, 24});
    wide("model.norm.weight", {24});
    wide("lm_head.weight", {3, 24});
    wide(layer + "input_layernorm.weight", {24});
    wide(layer + "post_attention_layernorm.weight", {24});
    wide(layer + "self_attn.q_proj.weight", {12, 24});
    wide(layer + "self_attn.kv_a_proj_with_mqa.weight", {4, 24});
    wide(layer + "self_attn.kv_a_layernorm.weight", {2});
    wide(layer + "self_attn.kv_b_proj.weight", {260, 2});
    wide(layer + "mlp.gate_proj.weight", {2, 24});
    wide(layer + "mlp.up_proj.weight", {2, 24});
    wide(layer + "mlp.down_proj.weight", {24, 2});
  }
  static std::string packed_config(const std::string& weights) {
    return R"({"quant_method":"compressed-tensors","format":"pack-quantized","ignore":["re:.*gate"],
        "config_groups":{"group_0":{"targets":["Linear"],"input_activations":null,"weights":)" +
           weights + "}}}";
  }

  void wide(const std::string& name, std::vector<int64_t> shape) {
    const int64_t count =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    tensors_.push_back({name, "F32", std::move(shape),
                        bytes_of(std::vector<float>(static_cast<size_t>(count), 0.5f))});
  }
  void add(const std::string& suffix, const std::string& dtype, std::vector<int64_t> shape,
           const std::string& data) {
    tensors_.push_back({kFourModule + suffix, dtype, std::move(shape), data});
  }
  TestTensor& stored(const std::string& suffix) {
    return *std::find_if(tensors_.begin(), tensors_.end(), [&](const TestTensor& tensor) {
      return tensor.name == kFourModule + suffix;
    });
  }

  void add_packed(const Weights& w) {
    add(".weight_packed", "I32", {kFourRows, kFourCols / 8},
        words(kFourRows, kFourCols, kInOrder, [&](int64_t r, int64_t c) { return w.code(r, c); }));
    std::vector<bf16> scales;
    for (const float scale : w.scales) scales.push_back(to_bf16(scale));
    add(".weight_scale", "BF16", {kFourRows, w.groups}, bytes_of(scales));
    add(".weight_shape", "I64", {2}, bytes_of(std::vector<int64_t>{kFourRows, kFourCols}));
    if (!w.zeros_differ) return;
    // Along out: the words of eight rows lie beside each other.
    std::vector<uint32_t> zeros(static_cast<size_t>(kFourRows / 8 * w.groups));
    for (int64_t r = 0; r < kFourRows; ++r) {
      for (int64_t g = 0; g < w.groups; ++g) {
        zeros[static_cast<size_t>(r / 8 * w.groups + g)] |=
            static_cast<uint32_t>(w.zeros[static_cast<size_t>(r * w.groups + g)]) << 4 * (r % 8);
      }
    }
    add(".weight_zero_point", "I32", {kFourRows / 8, w.groups}, bytes_of(zeros));
  }

  // AWQ's and GPTQ's zero points and scales, [groups, out].
  void add_transposed(const Weights& w, const std::vector<int>& order, int minus) {
    add(".qzeros", "I32", {w.groups, kFourRows / 8},
        words(w.groups, kFourRows, order, [&](int64_t g, int64_t r) {
          return (w.zeros[static_cast<size_t>(r * w.groups + g)] - minus) & 15;
        }));
    std::vector<f16> scales;
    for (int64_t g = 0; g < w.groups; ++g) {
      for (int64_t r = 0; r < kFourRows; ++r) {
        scales.push_back(to_f16(w.scales[static_cast<size_t>(r * w.groups + g)]));
      }
    }
    add(".scales", "F16", {w.groups, kFourRows}, bytes_of(scales));
  }

  void add_gptq(const Weights& w, int minus) {
    // Words run along in: [in / 8, out].
    std::vector<uint32_t> codes;
    for (int64_t c = 0; c < kFourCols; c += 8) {
      for (int64_t r = 0; r < kFourRows; ++r) {
        uint32_t word = 0;
        for (int k = 0; k < 8; ++k) word |= static_cast<uint32_t>(w.code(r, c + k)) << 4 * k;
        codes.push_back(word);
      }
    }
    add(".qweight", "I32", {kFourCols / 8, kFourRows}, bytes_of(codes));
    add_transposed(w, kInOrder, minus);
    add(".g_idx", "I32", {kFourCols}, bytes_of(w.group_of));
  }

  Result<> load(const std::function<Result<>(const ScaledMatrix&)>& place) {
    folder_.write("model.safetensors", shard_of(tensors_));
    FATHOM_TRY(const Checkpoint checkpoint, Checkpoint::open(folder_.path()));
    FATHOM_RETURN_IF_ERROR(check_stored(checkpoint));
    return load_tensors(checkpoint, {{kFourModule + ".weight", {kFourRows, kFourCols}, place}},
                        silent());
  }

  void expect_values(const std::function<float(int64_t row, int64_t col)>& value) {
    int placed = 0;
    const auto loaded = load([&](const ScaledMatrix& matrix) -> Result<> {
      ++placed;
      EXPECT_TRUE(matrix.is_four_bit());
      for (int64_t r = 0; r < kFourRows; ++r) {
        for (int64_t c = 0; c < kFourCols; ++c) {
          const int64_t column = matrix.columns.empty() ? c : matrix.columns.data<int32_t>()[c];
          EXPECT_EQ(matrix.at(r, c), value(r, column)) << r << ", " << c;
          if (testing::Test::HasFailure()) return {};
        }
      }
      return {};
    });
    EXPECT_TRUE(loaded) << loaded.error().message;
    EXPECT_EQ(placed, 1);
  }

  void expect_refused(std::string_view part) {
    const auto loaded = load([](const ScaledMatrix&) -> Result<> {
      ADD_FAILURE() << "placed";
      return {};
    });
    ASSERT_FALSE(loaded) << part;
    EXPECT_THAT(loaded.error().message, HasSubstr(std::string(part)));
    EXPECT_THAT(loaded.error().message, HasSubstr(folder_.path()));
  }

  TestFolder folder_;
  std::vector<TestTensor> tensors_;
};

constexpr const char* kGroup32 =
    R"({"num_bits":4,"type":"int","strategy":"group","group_size":32,"symmetric":true})";
constexpr const char* kAwqConfig =
    R"({"quant_method":"awq","bits":4,"group_size":64,"zero_point":true,"version":"gemm"})";

std::string gptq_config(const char* more) {
  return R"({"quant_method":"gptq","bits":4,"group_size":64,)" + std::string(more) + "}";
}

TEST_F(FourBitFiles, PackQuantized) {
  for (const auto& [text, group, zeros] :
       {std::tuple(R"("strategy":"group","group_size":32,"symmetric":true)", 32, false),
        {R"("strategy":"group","group_size":128,"symmetric":true)", 128, false},
        {R"("strategy":"channel","symmetric":true)", 256, false},
        {R"("strategy":"group","group_size":32,"symmetric":false)", 32, true}}) {
    config(packed_config(R"({"num_bits":4,"type":"int",)" + std::string(text) + "}"));
    const Weights weights(group, zeros);
    add_packed(weights);
    expect_values([&](int64_t r, int64_t c) { return weights.integer(r, c); });
  }
}

// The columns of a group lie anywhere; weight_g_idx says where.
TEST_F(FourBitFiles, PackQuantizedWithActOrder) {
  config(packed_config(kGroup32));
  Weights weights(32);
  for (size_t c = 0; c < weights.group_of.size(); ++c)
    weights.group_of[c] = static_cast<int32_t>(c * 5 % 8);
  add_packed(weights);
  add(".weight_g_idx", "I32", {kFourCols}, bytes_of(weights.group_of));
  expect_values([&](int64_t r, int64_t c) { return weights.integer(r, c); });
}

TEST_F(FourBitFiles, Awq) {
  config(kAwqConfig);
  const Weights weights(64, true);
  add(".qweight", "I32", {kFourCols, kFourRows / 8},
      words(kFourCols, kFourRows, kOfAwq,
            [&](int64_t c, int64_t r) { return weights.code(r, c); }));
  add_transposed(weights, kOfAwq, 0);
  expect_values([&](int64_t r, int64_t c) { return weights.integer(r, c); });
}

TEST_F(FourBitFiles, GptqOfBothForms) {
  for (const auto& [text, zeros, minus] :
       {std::tuple(R"("sym":true,"desc_act":false)", false, 1),
        {R"("sym":false,"desc_act":false,"checkpoint_format":"gptq")", true, 1},
        {R"("sym":false,"desc_act":false,"checkpoint_format":"gptq_v2")", true, 0}}) {
    config(gptq_config(text));
    const Weights weights(64, zeros);
    add_gptq(weights, minus);
    expect_values([&](int64_t r, int64_t c) { return weights.integer(r, c); });
  }
}

TEST_F(FourBitFiles, GptqWithActOrder) {
  config(gptq_config(R"("sym":false,"desc_act":true)"));
  Weights weights(64, true);
  for (size_t c = 0; c < weights.group_of.size(); ++c)
    weights.group_of[c] = static_cast<int32_t>(c * 7 % 4);
  add_gptq(weights, 1);
  expect_values([&](int64_t r, int64_t c) { return weights.integer(r, c); });
}

TEST_F(FourBitFiles, Fp4) {
  std::string codes;
  const Weights weights(32), fine(16);
  for (int64_t r = 0; r < kFourRows; ++r) {
    for (int64_t c = 0; c < kFourCols; c += 2) {
      codes += static_cast<char>(weights.code(r, c) | weights.code(r, c + 1) << 4);
    }
  }
  const auto fp4 = [](const char* format, int group) {
    return fmt::format(R"({{"quant_method":"compressed-tensors","format":"{}","config_groups":
        {{"g":{{"weights":{{"type":"float","num_bits":4,"group_size":{}}}}}}}}})",
                       format, group);
  };
  config(fp4("mxfp4-pack-quantized", 32));
  std::vector<uint8_t> exponents;
  for (int64_t i = 0; i < kFourRows * 8; ++i)
    exponents.push_back(static_cast<uint8_t>(110 + i % 30));
  add(".weight_packed", "U8", {kFourRows, kFourCols / 2}, codes);
  add(".weight_scale", "U8", {kFourRows, 8}, bytes_of(exponents));
  expect_values([&](int64_t r, int64_t c) {
    return weights.e2m1(r, c) *
           std::ldexp(1.0f, 110 + static_cast<int>((r * 8 + c / 32) % 30) - 127);
  });

  config(fp4("nvfp4-pack-quantized", 16));
  std::vector<e4m3> scales;
  for (const float scale : fine.scales) scales.push_back(to_e4m3(scale * 1000));
  add(".weight_packed", "U8", {kFourRows, kFourCols / 2}, codes);
  add(".weight_scale", "F8_E4M3", {kFourRows, 16}, bytes_of(scales));
  add(".weight_global_scale", "F32", {1}, bytes_of(std::vector<float>{37.5f}));
  add(".input_global_scale", "F32", {1}, bytes_of(std::vector<float>{2}));
  expect_values([&](int64_t r, int64_t c) {
    return fine.e2m1(r, c) * (to_float(scales[static_cast<size_t>(r * 16 + c / 16)]) / 37.5f);
  });
}

TEST_F(FourBitFiles, RefusesWhatDoesNotFit) {
  const auto packed = [&] {
    config(packed_config(kGroup32));
    add_packed(Weights(32));
  };
  packed();
  stored(".weight_packed") = {
      kFourModule + ".weight_packed", "I32", {kFourRows, 16}, std::string(kFourRows * 64, 'x')};
  expect_refused(
      "weight_packed\" has shape [24, 16], a weight of [24, 256] in this form has [24, 32]");
  packed();
  stored(".weight_scale") = {
      kFourModule + ".weight_scale", "BF16", {8, kFourRows}, std::string(kFourRows * 16, 'x')};
  expect_refused("weight_scale\" has shape [8, 24]");
  packed();
  stored(".weight_scale").name = kFourModule + ".scales";
  expect_refused("weight_scale\" is missing beside");
  packed();
  stored(".weight_scale").data[0] = stored(".weight_scale").data[1] = '\x7F';
  stored(".weight_scale").data[0] = '\x80';
  expect_refused("a scale is a finite number");
  packed();
  stored(".weight_shape").data = bytes_of(std::vector<int64_t>{kFourCols, kFourRows});
  expect_refused("weight_shape\" says [256, 24], config.json calls for [24, 256]");
  packed();
  wide(kFourModule + ".weight", {kFourRows, kFourCols});
  expect_refused("there are both");
  packed();
  stored(".weight_packed") = {
      kFourModule + ".weight_packed", "I64", {kFourRows, 32}, std::string(kFourRows * 256, 'x')};
  expect_refused("is stored as i64, expected i32");
}

// The formats whose tensors lie the other way round.
TEST_F(FourBitFiles, RefusesShapesOfWordsThatDoNotFit) {
  const auto reshaped = [&](const char* suffix, std::vector<int64_t> shape, const char* part) {
    stored(suffix).shape = std::move(shape);
    expect_refused(part);
  };
  const auto awq = [&] {
    config(kAwqConfig);
    const Weights weights(64, true);
    add(".qweight", "I32", {kFourCols, kFourRows / 8},
        words(kFourCols, kFourRows, kOfAwq,
              [&](int64_t c, int64_t r) { return weights.code(r, c); }));
    add_transposed(weights, kOfAwq, 0);
  };
  awq();
  reshaped(".qweight", {kFourRows / 8, kFourCols}, "qweight\" has shape [3, 256]");
  awq();
  reshaped(".qzeros", {kFourRows / 8, 4}, "qzeros\" has shape [3, 4]");
  awq();
  reshaped(".scales", {kFourRows, 4}, "scales\" has shape [24, 4]");
  const auto gptq = [&] {
    config(gptq_config(R"("sym":true,"desc_act":true)"));
    add_gptq(Weights(64), 1);
  };
  gptq();
  reshaped(".qweight", {kFourRows, kFourCols / 8}, "qweight\" has shape [24, 32]");
  gptq();
  reshaped(".g_idx", {2, kFourCols / 2}, "g_idx\" has shape [2, 128]");
  config(packed_config(
      R"({"num_bits":4,"type":"int","strategy":"group","group_size":32,"symmetric":false})"));
  add_packed(Weights(32, true));
  reshaped(".weight_zero_point", {8, kFourRows / 8}, "weight_zero_point\" has shape [8, 3]");
}

TEST_F(FourBitFiles, RefusesZeroPointsAndOrdersOutOfRange) {
  Weights weights(64);
  config(gptq_config(R"("sym":true)"));
  weights.zeros[5] = 3;
  add_gptq(weights, 1);
  expect_refused("holds a zero point of 3 for row 1, group 1; quantization_config says symmetric");

  const auto ordered = [&] {
    config(gptq_config(R"("sym":true,"desc_act":true)"));
    add_gptq(Weights(64), 1);
  };
  for (const auto& [value, part] :
       {std::pair(int32_t{4}, "g_idx\" holds 4 at index 9; there are 4 groups"),
        {-1, "g_idx\" holds -1 at index 9; there are 4 groups"},
        {2, "g_idx\" gives 63 columns to group 0; quantization_config.group_size is 64"}}) {
    ordered();
    std::memcpy(stored(".g_idx").data.data() + size_t{4} * 9, &value, 4);
    expect_refused(part);
  }
  // compressed-tensors' order of columns.
  for (const int32_t value : {8, -1}) {
    config(packed_config(kGroup32));
    add_packed(Weights(32));
    weights = Weights(32);
    weights.group_of[9] = value;
    add(".weight_g_idx", "I32", {kFourCols}, bytes_of(weights.group_of));
    expect_refused(fmt::format("weight_g_idx\" holds {} at index 9; there are 8 groups", value));
  }
}

TEST_F(FourBitFiles, TheInventoryCountsFourBits) {
  config(packed_config(kGroup32));
  add_packed(Weights(32));
  folder_.write("model.safetensors", shard_of(tensors_));
  const auto checkpoint = Checkpoint::open(folder_.path());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Inventory inventory = take_inventory(*checkpoint);
  const int64_t others = 12 * 24 + 4 * 24 + 260 * 2;
  EXPECT_EQ(inventory.of(WeightGroup::kAttention).parameters, kFourRows * kFourCols + others);
  EXPECT_EQ(inventory.of(WeightGroup::kAttention).bytes, kFourRows * kFourCols / 2 + 4 * others);
  EXPECT_EQ(inventory.of(WeightGroup::kScales).bytes, kFourRows * 8 * 2 + 16);
}

// ---- written by fathom quantize ----

class FourBitQuantize : public testing::TestWithParam<const char*> {};

TEST_P(FourBitQuantize, ExpertsAreNearestAndPiecesDoNotChangeABit) {
  const TestFolder folder;
  write_random_checkpoint(small_v3_config(64), folder, "source");
  const auto source = Checkpoint::open(folder / "source");
  ASSERT_TRUE(source) << source.error().message;
  QuantizeOptions options;
  options.show_progress = false;
  options.format = *quantize_format_named(GetParam());
  options.output = folder / "whole";
  const auto whole = quantize_checkpoint(*source, options);
  ASSERT_TRUE(whole) << whole.error().message;
  options.output = folder / "pieces";
  options.piece_bytes = 1000;
  ASSERT_TRUE(quantize_checkpoint(*source, options));
  const auto made = Checkpoint::open(folder / "whole");
  ASSERT_TRUE(made) << made.error().message;
  for (const std::string& file : made->files()) {
    const std::string name = std::filesystem::path(file).filename();
    EXPECT_EQ(file_text(file), file_text(folder / ("pieces/" + name))) << name;
  }
  const std::string expert = "model.layers.1.mlp.experts.3.down_proj.weight";
  const std::vector<int64_t> shape = source->find(expert)->shape;
  std::vector<float> stored, written;
  const auto load = [&](const Checkpoint& checkpoint, std::vector<float>* out) {
    return load_tensors(checkpoint,
                        {{expert, shape,
                          [&](const ScaledMatrix& matrix) -> Result<> {
                            for (int64_t r = 0; r < shape[0]; ++r) {
                              for (int64_t c = 0; c < shape[1]; ++c) {
                                out->push_back(matrix.at(r, c));
                              }
                            }
                            return {};
                          }}},
                        silent());
  };
  ASSERT_TRUE(load(*source, &stored));
  ASSERT_TRUE(load(*made, &written));
  const auto group = static_cast<size_t>(options.format.group_cols);
  for (size_t first = 0; first < stored.size(); first += group) {
    float largest = 0;
    for (size_t i = first; i < first + group; ++i) largest = std::max(largest, std::abs(stored[i]));
    // Half a step: of INT4 a 14th of the largest; of E2M1 at most a fourth of it near the top.
    const float bound =
        options.format.kind == QuantizeFormat::Kind::kInt4 ? largest / 13.8f : largest / 3.9f;
    for (size_t i = first; i < first + group; ++i) {
      ASSERT_NEAR(written[i], stored[i], bound) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, FourBitQuantize, testing::Values("int4-g32", "mxfp4"));

}  // namespace
}  // namespace fathom
