#include "checkpoint/load_plan.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <mutex>

#include "base/random.h"
#include "checkpoint/inventory.h"
#include "checkpoint/test_files.h"
#include "tensor/quantize_weight.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kTrained = std::string(FATHOM_SOURCE_DIR) + "/models/fathom-tiny";
constexpr const char* kModule = "model.layers.0.self_attn.o_proj";

LoadOptions quiet(int threads = 0) {
  LoadOptions options;
  options.show_progress = false;
  options.num_threads = threads;
  return options;
}

bool is_scale(std::string_view name) { return name.find("_scale") != std::string_view::npos; }

// The smallest model of this family: one dense layer, all tensors of a few elements, except an
// o_proj of [130, 260] (partial blocks at both edges) that the tests replace.
class LoadPlan : public testing::Test {
 protected:
  static constexpr int64_t kRows = 130, kCols = 260;

  LoadPlan() {
    folder_.write("config.json", R"({"model_type":"deepseek_v3","vocab_size":3,"hidden_size":130,
        "num_hidden_layers":1,"max_position_embeddings":8,"rms_norm_eps":1e-6,
        "num_attention_heads":26,"kv_lora_rank":2,"qk_nope_head_dim":1,"qk_rope_head_dim":2,
        "v_head_dim":10,"rope_theta":10000,"intermediate_size":2})");
    const std::string layer = "model.layers.0.";
    add_floats("model.embed_tokens.weight", {3, 130});
    add_floats("model.norm.weight", {130});
    add_floats("lm_head.weight", {3, 130});
    add_floats(layer + "input_layernorm.weight", {130});
    add_floats(layer + "post_attention_layernorm.weight", {130});
    add_floats(layer + "self_attn.q_proj.weight", {78, 130});
    add_floats(layer + "self_attn.kv_a_proj_with_mqa.weight", {4, 130});
    add_floats(layer + "self_attn.kv_a_layernorm.weight", {2});
    add_floats(layer + "self_attn.kv_b_proj.weight", {286, 2});
    add_floats(layer + "mlp.gate_proj.weight", {2, 130});
    add_floats(layer + "mlp.up_proj.weight", {2, 130});
    add_floats(layer + "mlp.down_proj.weight", {130, 2});
  }

  void add_floats(const std::string& name, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(i));
    tensors_.push_back({name, "F32", std::move(shape), bytes_of(values)});
  }

  // o_proj in e4m3: byte i is a known function of i, without NaN.
  static uint8_t weight_byte(int64_t i) {
    const auto byte = static_cast<uint8_t>(mix64(static_cast<uint64_t>(i)));
    return (byte & 0x7F) == 0x7F ? 0x38 : byte;
  }

  void add_fp8_weight() {
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < kRows * kCols; ++i) bytes.push_back(weight_byte(i));
    tensors_.push_back(
        {std::string(kModule) + ".weight", "F8_E4M3", {kRows, kCols}, bytes_of(bytes)});
  }

  void add_scale(const std::string& suffix, std::vector<int64_t> shape, const std::string& dtype,
                 const std::string& data) {
    tensors_.push_back({kModule + suffix, dtype, std::move(shape), data});
  }

  Result<Checkpoint> open() {
    folder_.write("model.safetensors", shard_of(tensors_));
    return Checkpoint::open(folder_.path());
  }

  // Loads o_proj and compares every element with `scale`.
  void expect_weight(const std::function<float(int64_t row, int64_t col)>& scale) {
    const auto checkpoint = open();
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    int placed = 0;
    const auto place = [&](const ScaledMatrix& matrix) -> Result<> {
      ++placed;
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t col = 0; col < kCols; ++col) {
          const float value = to_float(e4m3{weight_byte(row * kCols + col)});
          EXPECT_EQ(matrix.at(row, col), value * scale(row, col)) << row << ", " << col;
          if (testing::Test::HasFailure()) return {};
        }
      }
      return {};
    };
    const auto loaded = load_tensors(
        *checkpoint, {{std::string(kModule) + ".weight", {kRows, kCols}, place}}, quiet());
    EXPECT_TRUE(loaded) << loaded.error().message;
    EXPECT_EQ(placed, 1);
  }

  void expect_refused(const std::string& name, std::vector<int64_t> shape, std::string_view part) {
    const auto checkpoint = open();
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const auto place = [](const ScaledMatrix&) -> Result<> {
      ADD_FAILURE() << "placed";
      return {};
    };
    const auto loaded = load_tensors(*checkpoint, {{name, std::move(shape), place}}, quiet());
    ASSERT_FALSE(loaded) << part;
    EXPECT_THAT(loaded.error().message, HasSubstr(std::string(part)));
    EXPECT_THAT(loaded.error().message, HasSubstr(folder_.path()));
  }

  TestFolder folder_;
  std::vector<TestTensor> tensors_;
};

TEST_F(LoadPlan, BlockScales) {
  add_fp8_weight();
  const std::vector<float> scales = {1, 2, 3, 4, 5, 6};  // [2, 3]
  add_scale(".weight_scale_inv", {2, 3}, "F32", bytes_of(scales));
  expect_weight([&](int64_t row, int64_t col) {
    return scales[static_cast<size_t>(row / 128 * 3 + col / 128)];
  });
}

TEST_F(LoadPlan, BlockScalesInOtherTypes) {
  add_fp8_weight();
  const std::vector<uint8_t> exponents = {127, 128, 129, 130, 126, 125};
  add_scale(".weight_scale_inv", {2, 3}, "F8_E8M0", bytes_of(exponents));
  const auto scale = [&](int64_t row, int64_t col) {
    return std::ldexp(1.0f, exponents[static_cast<size_t>(row / 128 * 3 + col / 128)] - 127);
  };
  expect_weight(scale);
  tensors_.pop_back();
  std::vector<bf16> narrow;
  narrow.reserve(exponents.size());
  for (const uint8_t exponent : exponents)
    narrow.push_back(to_bf16(std::ldexp(1.0f, exponent - 127)));
  add_scale(".weight_scale", {2, 3}, "BF16", bytes_of(narrow));
  expect_weight(scale);
}

TEST_F(LoadPlan, OneScale) {
  for (const auto& shape : {std::vector<int64_t>{}, {1}, {1, 1}}) {
    tensors_.resize(12);
    add_fp8_weight();
    add_scale(".weight_scale", shape, "F32", bytes_of<float>({0.375f}));
    add_scale(".input_scale", {1}, "F32", bytes_of<float>({7}));
    expect_weight([](int64_t, int64_t) { return 0.375f; });
  }
}

TEST_F(LoadPlan, RowScales) {
  std::vector<float> scales;
  for (int64_t row = 0; row < kRows; ++row) scales.push_back(0.25f * static_cast<float>(row + 1));
  for (const auto& shape : {std::vector<int64_t>{kRows}, {kRows, 1}}) {
    tensors_.resize(12);
    add_fp8_weight();
    add_scale(".weight_scale", shape, "F32", bytes_of(scales));
    expect_weight([&](int64_t row, int64_t) { return scales[static_cast<size_t>(row)]; });
  }
}

// The bytes that place() gets for o_proj: its values', then its scales'.
std::string loaded_bytes(const Checkpoint& checkpoint, const std::string& name,
                         std::vector<int64_t> shape, const LoadOptions& options) {
  std::string bytes;
  const auto place = [&](const ScaledMatrix& matrix) -> Result<> {
    const auto append = [&](const ConstTensorView& view) {
      bytes.append(static_cast<const char*>(view.raw()),
                   static_cast<size_t>(view.num_elements() * size_of(view.dtype())));
    };
    append(matrix.values);
    if (!matrix.scales.empty()) append(matrix.scales);
    return {};
  };
  const auto loaded = load_tensors(checkpoint, {{name, std::move(shape), place}}, options);
  EXPECT_TRUE(loaded) << loaded.error().message;
  return bytes;
}

TEST_F(LoadPlan, QuantisesLinearLayersIfAsked) {
  add_floats(std::string(kModule) + ".weight", {kRows, kCols});
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  LoadOptions options = quiet();
  options.quantize_fp8 = true;
  std::vector<float> weights;
  for (int64_t i = 0; i < kRows * kCols; ++i) weights.push_back(static_cast<float>(i));
  std::vector<e4m3> values(weights.size());
  std::vector<float> scales(6);
  ASSERT_TRUE(quantize_weights(ConstTensorView(weights.data(), {kRows, kCols}), ScaleForm::kF32,
                               TensorView(values.data(), {kRows, kCols}),
                               TensorView(scales.data(), {2, 3})));
  EXPECT_EQ(loaded_bytes(*checkpoint, std::string(kModule) + ".weight", {kRows, kCols}, options),
            bytes_of(values) + bytes_of(scales));
  // All other tensors are unchanged.
  for (const auto& [name, rows] : {std::pair("lm_head.weight", 3), {"model.norm.weight", 0}}) {
    const std::vector<int64_t> shape =
        rows > 0 ? std::vector<int64_t>{rows, 130} : std::vector<int64_t>{130};
    EXPECT_EQ(loaded_bytes(*checkpoint, name, shape, options),
              loaded_bytes(*checkpoint, name, shape, quiet()));
  }
  // The inventory predicts this: 7 matrices with one byte per element, and their scales.
  const Inventory stored = take_inventory(*checkpoint);
  const Inventory loaded = take_loaded_inventory(*checkpoint, options);
  const int64_t linear =
      stored.of(WeightGroup::kAttention).parameters + stored.of(WeightGroup::kDenseMlp).parameters;
  EXPECT_EQ(stored.total().parameters, loaded.total().parameters);
  EXPECT_EQ(loaded.of(WeightGroup::kScales).bytes, 4 * (2 + 2 + 3 + 6 + 2 + 2 + 2));
  EXPECT_EQ(loaded.total().bytes,
            stored.total().bytes - 3 * linear + loaded.of(WeightGroup::kScales).bytes);
}

TEST_F(LoadPlan, QuantisingNamesAWeightThatIsNotFinite) {
  add_floats(std::string(kModule) + ".weight", {kRows, kCols});
  std::vector<float> weights(kRows * kCols, 1);
  weights[129 * kCols + 200] = INFINITY;
  tensors_.back().data = bytes_of(weights);
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  LoadOptions options = quiet();
  options.quantize_fp8 = true;
  const auto place = [](const ScaledMatrix&) -> Result<> { return {}; };
  const auto loaded = load_tensors(
      *checkpoint, {{std::string(kModule) + ".weight", {kRows, kCols}, place}}, options);
  ASSERT_FALSE(loaded);
  EXPECT_THAT(
      loaded.error().message,
      HasSubstr("model.safetensors: tensor \"model.layers.0.self_attn.o_proj.weight\" holds "
                "inf at [129, 200]"));
}

// With many reads per tensor, as in real models.
TEST_F(LoadPlan, EachPieceOfATensorComesFromItsOwnPlace) {
  add_fp8_weight();
  const std::vector<float> scales = {1, 2, 3, 4, 5, 6};
  add_scale(".weight_scale_inv", {2, 3}, "F32", bytes_of(scales));
  const std::string stored = tensors_[tensors_.size() - 2].data + bytes_of(scales);
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  for (const int64_t bytes : {int64_t{7}, int64_t{1000}, kRows * kCols - 1, kRows * kCols}) {
    LoadOptions options = quiet();
    options.read_bytes = bytes;
    EXPECT_TRUE(loaded_bytes(*checkpoint, std::string(kModule) + ".weight", {kRows, kCols},
                             options) == stored)
        << bytes;
  }
}

// place_unread reads parts of a tensor's bytes in any order.
TEST_F(LoadPlan, LeavesReadingToWhoAsks) {
  add_fp8_weight();
  add_scale(".weight_scale_inv", {2, 3}, "F32", bytes_of(std::vector<float>{1, 2, 3, 4, 5, 6}));
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  TensorRequest request;
  request.name = std::string(kModule) + ".weight";
  request.shape = {kRows, kCols};
  std::vector<std::byte> bytes(kRows * kCols);
  request.place_unread = [&](const ScaledMatrix& matrix, const ReadValues& read) -> Result<> {
    EXPECT_EQ(matrix.rows(), kRows);
    EXPECT_EQ(matrix.cols(), kCols);
    EXPECT_EQ(matrix.values.dtype(), DType::kF8E4M3);
    EXPECT_EQ(matrix.scale_at(129, 259), 6);
    const std::span<std::byte> all(bytes);
    FATHOM_RETURN_IF_ERROR(read(1000, all.subspan(1000)));
    return read(0, all.first(1000));
  };
  for (const int64_t read_bytes : {int64_t{700}, LoadOptions().read_bytes}) {
    LoadOptions options = quiet();
    options.read_bytes = read_bytes;
    std::fill(bytes.begin(), bytes.end(), std::byte{0});
    const auto loaded = load_tensors(*checkpoint, {request}, options);
    ASSERT_TRUE(loaded) << loaded.error().message;
    for (int64_t i = 0; i < kRows * kCols; ++i) {
      ASSERT_EQ(static_cast<uint8_t>(bytes[static_cast<size_t>(i)]), weight_byte(i)) << i;
    }
  }
  request.place_unread = [](const ScaledMatrix&, const ReadValues&) -> Result<> {
    return invalid("no");
  };
  const auto refused = load_tensors(*checkpoint, {request}, quiet());
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message,
              HasSubstr("model.safetensors: tensor \"" + request.name + "\": no"));
}

TEST(LoadGoldens, WhatIsFp8AlreadyIsNotQuantisedAgain) {
  const std::string goldens = std::string(FATHOM_SOURCE_DIR) + "/tests/goldens/";
  LoadOptions options = quiet();
  options.quantize_fp8 = true;
  for (const char* name : {"v2_fp8_tensor", "v2_ct_channel"}) {
    const auto checkpoint = Checkpoint::open(goldens + name);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const auto checked = check_load_options(*checkpoint, options);
    ASSERT_FALSE(checked) << name;
    EXPECT_THAT(checked.error().message, HasSubstr("quantised already"));
  }
  // The weights already have the requested form, so nothing is quantized.
  const auto blocks = Checkpoint::open(kTrained);
  ASSERT_TRUE(blocks) << blocks.error().message;
  EXPECT_TRUE(check_load_options(*blocks, options));
  EXPECT_EQ(take_loaded_inventory(*blocks, options).total().bytes,
            take_inventory(*blocks).total().bytes);
}

TEST_F(LoadPlan, RefusesScalesThatDoNotFit) {
  const std::string weight = std::string(kModule) + ".weight";
  add_fp8_weight();
  expect_refused(weight, {kRows, kCols}, "without a weight_scale_inv or weight_scale");
  add_scale(".weight_scale_inv", {3, 2}, "F32", bytes_of(std::vector<float>(6, 1)));
  expect_refused(weight, {kRows, kCols}, "has shape [3, 2]");
  tensors_.pop_back();
  add_scale(".weight_scale", {1, kRows}, "F32", bytes_of(std::vector<float>(kRows, 1)));
  expect_refused(weight, {kRows, kCols}, "has shape [1, 130]");
  tensors_.pop_back();
  add_scale(".weight_scale", {0}, "F32", "");
  expect_refused(weight, {kRows, kCols}, "has shape [0]");
  tensors_.pop_back();
  add_scale(".weight_scale", {1}, "U8", "x");
  expect_refused(weight, {kRows, kCols}, "stored as u8");
  tensors_.pop_back();
  add_scale(".weight_scale", {1}, "F32", bytes_of<float>({NAN}));
  expect_refused(weight, {kRows, kCols}, "holds nan");
  tensors_.pop_back();
  add_scale(".weight_scale", {1}, "F32", bytes_of<float>({1}));
  add_scale(".weight_scale_inv", {1}, "F32", bytes_of<float>({1}));
  expect_refused(weight, {kRows, kCols}, "both");
}

TEST_F(LoadPlan, RefusesWhatTheModelDidNotAskFor) {
  add_floats(std::string(kModule) + ".weight", {kRows, kCols});
  expect_refused("model.layers.0.nothing.weight", {2},
                 "\"model.layers.0.nothing.weight\" is missing");
  expect_refused("model.norm.weight", {131}, "has shape [130], config.json calls for [131]");
  expect_refused("lm_head.weight", {130, 3}, "has shape [3, 130]");
  add_scale(".weight_scale", {1}, "F32", bytes_of<float>({1}));
  expect_refused(std::string(kModule) + ".weight", {kRows, kCols},
                 "which is stored as f32, not e4m3");
  tensors_.pop_back();
  tensors_.back().dtype = "I32";
  expect_refused(std::string(kModule) + ".weight", {kRows, kCols}, "stored as i32");
  tensors_.back().dtype = "F32";
  tensors_[1].dtype = "F8_E4M3";
  tensors_[1].data.resize(130);
  expect_refused("model.norm.weight", {130}, "norms and biases");
}

TEST_F(LoadPlan, AVectorMayBeStoredAsARow) {
  add_floats(std::string(kModule) + ".weight", {kRows, kCols});
  tensors_[1].shape = {1, 130};
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const auto place = [](const ScaledMatrix& matrix) -> Result<> {
    EXPECT_EQ(matrix.rows(), 1);
    EXPECT_EQ(matrix.at(0, 129), 129);
    EXPECT_TRUE(matrix.scales.empty());
    return {};
  };
  EXPECT_TRUE(load_tensors(*checkpoint, {{"model.norm.weight", {130}, place}}, quiet()));
}

TEST_F(LoadPlan, AFileThatShrinksIsAnError) {
  add_floats(std::string(kModule) + ".weight", {kRows, kCols});
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  // The last tensor in the file, so that reading it hits the new end.
  const std::string name = std::string(kModule) + ".weight";
  fs::resize_file(folder_ / "model.safetensors",
                  static_cast<uintmax_t>(checkpoint->find(name)->offset + 8));
  const auto place = [](const ScaledMatrix&) -> Result<> {
    ADD_FAILURE() << "placed";
    return {};
  };
  const auto loaded = load_tensors(*checkpoint, {{name, {kRows, kCols}, place}}, quiet());
  ASSERT_FALSE(loaded);
  EXPECT_THAT(loaded.error().message, HasSubstr(folder_ / "model.safetensors: ended at byte"));
  fs::remove(folder_ / "model.safetensors");
  EXPECT_THAT(load_tensors(*checkpoint, {{name, {kRows, kCols}, place}}, quiet()).error().message,
              HasSubstr("model.safetensors: cannot be read"));
}

// Requests for all of a checkpoint's tensors except scales.
std::vector<TensorRequest> all_requests(
    const Checkpoint& checkpoint,
    const std::function<Result<>(const std::string&, const ScaledMatrix&)>& place) {
  std::vector<TensorRequest> requests;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    if (is_scale(name)) continue;
    requests.push_back({name, entry.shape, [place, key = name](const ScaledMatrix& matrix) {
                          return place(key, matrix);
                        }});
  }
  return requests;
}

TEST(LoadBundled, EveryTensorEqualsTheFilesBytes) {
  const auto checkpoint = Checkpoint::open(kTrained);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  // Independent of the reader: whole files, and the entries' offsets.
  std::vector<std::string> files;
  for (const std::string& path : checkpoint->files()) files.push_back(file_text(path));
  const auto stored = [&](const TensorEntry& entry) {
    return files[static_cast<size_t>(entry.file)].substr(static_cast<size_t>(entry.offset),
                                                         static_cast<size_t>(entry.bytes));
  };
  std::atomic<int> placed = 0, with_scales = 0;
  const auto place = [&](const std::string& name, const ScaledMatrix& matrix) -> Result<> {
    ++placed;
    const TensorEntry& entry = *checkpoint->find(name);
    EXPECT_EQ(matrix.values.dtype(), entry.dtype);
    const std::string bytes = stored(entry);
    EXPECT_EQ(std::memcmp(matrix.values.raw(), bytes.data(), bytes.size()), 0) << name;
    if (entry.dtype != DType::kF8E4M3) return {};
    ++with_scales;
    const std::string scales = stored(*checkpoint->find(name + "_scale_inv"));
    EXPECT_EQ(std::memcmp(matrix.scales.raw(), scales.data(), scales.size()), 0) << name;
    EXPECT_EQ(matrix.scale_rows, matrix.scale_cols);
    return {};
  };
  for (const int threads : {0, 1, 7}) {
    placed = with_scales = 0;
    const auto loaded = load_tensors(*checkpoint, all_requests(*checkpoint, place), quiet(threads));
    ASSERT_TRUE(loaded) << loaded.error().message;
    EXPECT_EQ(placed, 517);
    EXPECT_EQ(with_scales, 456);
  }
}

// Small checkpoints of all forms that the model is compared on.
TEST(LoadGoldens, EveryFormLoads) {
  int forms = 0;
  for (const auto& folder :
       fs::directory_iterator(std::string(FATHOM_SOURCE_DIR) + "/tests/goldens")) {
    if (!fs::exists(folder.path() / "config.json")) continue;
    ++forms;
    const auto checkpoint = Checkpoint::open(folder.path().string());
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const bool has_pictures = folder.path().filename() == "kimi_k25";
    EXPECT_EQ(take_inventory(*checkpoint).unused.tensors, has_pictures ? 2 : 0) << folder.path();
    std::atomic<int64_t> placed = 0;
    const auto place = [&](const std::string& name, const ScaledMatrix& matrix) -> Result<> {
      ++placed;
      EXPECT_EQ(matrix.scales.empty(), matrix.values.dtype() != DType::kF8E4M3) << name;
      EXPECT_TRUE(std::isfinite(matrix.at(matrix.rows() - 1, matrix.cols() - 1))) << name;
      return {};
    };
    const auto requests = all_requests(*checkpoint, place);
    const auto loaded = load_tensors(*checkpoint, requests, quiet());
    EXPECT_TRUE(loaded) << loaded.error().message;
    EXPECT_EQ(placed, static_cast<int64_t>(requests.size())) << folder.path();
  }
  EXPECT_GE(forms, 10);
}

TEST(LoadBundled, ThePlacesErrorEndsTheLoad) {
  const auto checkpoint = Checkpoint::open(kTrained);
  ASSERT_TRUE(checkpoint);
  const auto place = [&](const std::string& name, const ScaledMatrix&) -> Result<> {
    if (name == "lm_head.weight") return error(Code::kResourceExhausted, "no room");
    return {};
  };
  const auto loaded = load_tensors(*checkpoint, all_requests(*checkpoint, place), quiet());
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().message, "lm_head.weight: no room");
  EXPECT_EQ(loaded.error().code, Code::kResourceExhausted);
  EXPECT_TRUE(load_tensors(*checkpoint, {}, quiet()));
}

// A sum over all bits of all tensors that does not depend on the order of threads.
struct DummySum {
  uint64_t hash = 0;
  // Deviation from 1 of cols * variance, the largest of the large matrices.
  double worst_variance = 0;
};

DummySum load_dummy(const Checkpoint& checkpoint, uint64_t seed, int threads) {
  DummySum sum;
  std::mutex mutex;
  const auto place = [&](const std::string& name, const ScaledMatrix& matrix) -> Result<> {
    double squares = 0;
    uint64_t hash = 0;
    for (int64_t row = 0; row < matrix.rows(); ++row) {
      for (int64_t col = 0; col < matrix.cols(); ++col) {
        const float value = matrix.at(row, col);
        EXPECT_TRUE(std::isfinite(value)) << name;
        squares += static_cast<double>(value) * value;
        hash = mix64(hash ^ std::bit_cast<uint32_t>(value));
      }
    }
    const int64_t count = matrix.rows() * matrix.cols();
    const std::scoped_lock lock(mutex);
    sum.hash += hash;
    if (matrix.rows() > 1 && count > 10'000) {
      const double variance =
          squares / static_cast<double>(count) * static_cast<double>(matrix.cols());
      sum.worst_variance = std::max(sum.worst_variance, std::abs(variance - 1));
    } else if (name.find("norm") != std::string::npos) {
      EXPECT_NEAR(matrix.at(0, 0), 1, 0.11) << name;
    }
    return {};
  };
  LoadOptions options = quiet(threads);
  options.dummy_seed = seed;
  const auto loaded = load_tensors(checkpoint, all_requests(checkpoint, place), options);
  EXPECT_TRUE(loaded) << loaded.error().message;
  return sum;
}

TEST(LoadDummy, IsReproducibleAndSensible) {
  const TestFolder folder;
  folder.write("config.json", file_text(kTrained + "/config.json"));
  const auto dummy = Checkpoint::open_dummy(folder.path());
  ASSERT_TRUE(dummy) << dummy.error().message;
  EXPECT_TRUE(dummy->is_dummy());
  // The tensors equal those of the published form in name, shape and type.
  const auto real = Checkpoint::open(kTrained);
  ASSERT_EQ(dummy->tensors().size(), real->tensors().size());
  for (const auto& [name, entry] : real->tensors()) {
    const TensorEntry* other = dummy->find(name);
    ASSERT_NE(other, nullptr) << name;
    EXPECT_EQ(other->shape, entry.shape) << name;
    EXPECT_EQ(other->dtype, entry.dtype) << name;
    EXPECT_EQ(other->bytes, entry.bytes) << name;
  }
  const DummySum one = load_dummy(*dummy, 5, 1);
  EXPECT_EQ(load_dummy(*dummy, 5, 4).hash, one.hash);
  EXPECT_NE(load_dummy(*dummy, 6, 4).hash, one.hash);
  EXPECT_LT(one.worst_variance, 0.3);
}

TEST(LoadDummy, FewerLayers) {
  const auto dummy = Checkpoint::open_dummy(kTrained, 2);
  ASSERT_TRUE(dummy) << dummy.error().message;
  EXPECT_EQ(dummy->config().num_layers, 2);
  EXPECT_NE(dummy->find("model.layers.1.mlp.experts.0.up_proj.weight"), nullptr);
  EXPECT_EQ(dummy->find("model.layers.2.input_layernorm.weight"), nullptr);
  EXPECT_EQ(dummy->find("model.layers.2.eh_proj.weight"), nullptr);
  for (const int64_t layers : {int64_t{0}, int64_t{-1}, int64_t{9}}) {
    EXPECT_FALSE(Checkpoint::open_dummy(kTrained, layers)) << layers;
  }
}

}  // namespace
}  // namespace fathom
