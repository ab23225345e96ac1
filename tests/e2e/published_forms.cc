#include "e2e/published_forms.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <span>

#include "base/check.h"
#include "base/json.h"
#include "base/math.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"
#include "tensor/quantize_weight.h"

namespace fathom {
namespace {

constexpr float kLargest = kLargestE4M3;

float largest(std::span<const float> values) {
  float most = 0;
  for (const float value : values) most = std::max(most, std::abs(value));
  return most;
}

// The converted tensors, and bounds on the norms' outputs.
class Rewritten {
 public:
  Rewritten(const Checkpoint& source, PublishedForm form)
      : source_(source), form_(form), config_(source.config()), names_(config_) {
    std::vector<TensorRequest> requests;
    for (const auto& [name, entry] : source.tensors()) {
      if (name.ends_with("weight_scale_inv")) continue;
      requests.push_back({name, entry.shape, [&, key = name](const ScaledMatrix& matrix) {
                            take(key, matrix);
                            return Result<>();
                          }});
    }
    const auto loaded = load_tensors(source, requests, {.show_progress = false});
    FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
    if (form_ == PublishedForm::kStaticActivations) add_input_scales();
  }

  const std::vector<TestTensor>& tensors() const { return tensors_; }

 private:
  void take(const std::string& name, const ScaledMatrix& matrix) {
    const TensorEntry& entry = *source_.find(name);
    if (names_.is_linear(name)) {
      take_linear(name, matrix);
      return;
    }
    const auto* const bytes = static_cast<const char*>(matrix.values.raw());
    const std::scoped_lock lock(mutex_);
    tensors_.push_back({name, std::string(published_name(entry.dtype)), entry.shape,
                        std::string(bytes, static_cast<size_t>(entry.bytes))});
    if (name.ends_with("norm.weight")) {
      float most = 0;
      for (int64_t i = 0; i < matrix.cols(); ++i) most = std::max(most, std::abs(matrix.at(0, i)));
      normed_[name] = most * std::sqrt(static_cast<float>(matrix.cols()));
    }
  }

  void take_linear(const std::string& name, const ScaledMatrix& matrix) {
    std::vector<float> wide;
    for (int64_t row = 0; row < matrix.rows(); ++row) {
      for (int64_t col = 0; col < matrix.cols(); ++col) wide.push_back(matrix.at(row, col));
    }
    if (form_ == PublishedForm::kPowersOfTwo) {
      add_by_blocks(name, matrix.rows(), matrix.cols(), wide);
    } else {
      const int64_t scales = form_ == PublishedForm::kScaleARow ? matrix.rows() : 1;
      add_by_rows(name, matrix.rows(), matrix.cols(), wide, scales);
    }
    if (name.ends_with("kv_b_proj.weight")) take_values(name, matrix.cols(), wide);
  }

  // Adds a scale for each of `count` equal parts of a matrix's rows.
  void add_by_rows(const std::string& name, int64_t rows, int64_t cols, std::span<const float> wide,
                   int64_t count) {
    const size_t part = wide.size() / static_cast<size_t>(count);
    std::vector<e4m3> values;
    std::vector<float> scales;
    for (size_t begin = 0; begin < wide.size(); begin += part) {
      const std::span<const float> its = wide.subspan(begin, part);
      scales.push_back(largest(its) / kLargest);
      for (const float value : its) values.push_back(to_e4m3(value / scales.back()));
    }
    const std::scoped_lock lock(mutex_);
    add_matrix(name, rows, cols, values);
    if (count == 1) {
      add_number(module_of(name) + ".weight_scale", scales[0]);
    } else {
      add_scales(module_of(name) + ".weight_scale", {rows, 1}, scales);
    }
  }

  void add_by_blocks(const std::string& name, int64_t rows, int64_t cols,
                     const std::vector<float>& wide) {
    const int64_t row_blocks = ceil_div(rows, kScaleBlock),
                  col_blocks = ceil_div(cols, kScaleBlock);
    std::vector<e4m3> values(wide.size());
    std::vector<float> scales(static_cast<size_t>(row_blocks * col_blocks));
    const auto done =
        quantize_weights({wide.data(), {rows, cols}}, ScaleForm::kPowerOfTwo,
                         {values.data(), {rows, cols}}, {scales.data(), {row_blocks, col_blocks}});
    FATHOM_CHECK(done.has_value(), "{}", done.error().message);
    const std::scoped_lock lock(mutex_);
    add_matrix(name, rows, cols, values);
    add_scales(name + "_scale_inv", {row_blocks, col_blocks}, scales);
  }

  // Records the length of the longest kv_b_proj row that produces values.
  void take_values(const std::string& name, int64_t cols, std::span<const float> wide) {
    const int64_t head = config_.qk_nope_dim + config_.v_dim;
    float longest = 0;
    for (int64_t row = 0; row < std::ssize(wide) / cols; ++row) {
      if (row % head < config_.qk_nope_dim) continue;
      float squares = 0;
      for (const float value :
           wide.subspan(static_cast<size_t>(row * cols), static_cast<size_t>(cols))) {
        squares += value * value;
      }
      longest = std::max(longest, std::sqrt(squares));
    }
    const std::scoped_lock lock(mutex_);
    values_[name] = longest;
  }

  // The largest possible magnitude of a linear layer's input.
  float most_input(const std::string& name) const {
    const std::string layer = name.substr(0, name.find('.', std::string("model.layers.").size()));
    const auto norm = [&](const std::string& suffix) { return normed_.at(layer + suffix); };
    const auto is = [&](const char* module) { return name.ends_with(module); };
    if (is("q_a_proj.weight") || is("kv_a_proj_with_mqa.weight")) {
      return norm(".input_layernorm.weight");
    }
    if (is("q_b_proj.weight")) return norm(".self_attn.q_a_layernorm.weight");
    const float latent = norm(".self_attn.kv_a_layernorm.weight");  // also its length
    if (is("kv_b_proj.weight")) return latent;
    // Attention's output is a weighted mean of values.
    if (is("o_proj.weight")) return latent * values_.at(layer + ".self_attn.kv_b_proj.weight");
    if (is("down_proj.weight")) return kLargest;  // no matrix is quantized with it
    return norm(".post_attention_layernorm.weight");
  }

  void add_input_scales() {
    std::vector<std::string> linear;
    for (const TestTensor& tensor : tensors_) {
      if (names_.is_linear(tensor.name)) linear.push_back(tensor.name);
    }
    for (const std::string& name : linear) {
      add_number(module_of(name) + ".input_scale", most_input(name) / kLargest);
    }
  }

  void add_matrix(const std::string& name, int64_t rows, int64_t cols,
                  const std::vector<e4m3>& values) {
    tensors_.push_back(
        {name, std::string(published_name(DType::kF8E4M3)), {rows, cols}, bytes_of(values)});
  }
  void add_scales(const std::string& name, std::vector<int64_t> shape,
                  const std::vector<float>& scales) {
    tensors_.push_back(
        {name, std::string(published_name(DType::kF32)), std::move(shape), bytes_of(scales)});
  }
  // Adds a number stored without dimensions, as published.
  void add_number(const std::string& name, float value) { add_scales(name, {}, {value}); }
  static std::string module_of(const std::string& weight) {
    return weight.substr(0, weight.rfind('.'));
  }

  const Checkpoint& source_;
  const PublishedForm form_;
  const ModelConfig& config_;
  const WeightNames names_;
  std::mutex mutex_;
  std::vector<TestTensor> tensors_;
  std::map<std::string, float> normed_;  // a norm's bound on its output's elements and row lengths
  std::map<std::string, float> values_;  // the longest kv_b_proj row that produces values
};

json::object quantization_config(PublishedForm form) {
  switch (form) {
    case PublishedForm::kStaticActivations:
      return {{"quant_method", "fp8"},
              {"activation_scheme", "static"},
              {"ignored_layers", json::array{"lm_head"}}};
    case PublishedForm::kScaleARow: {
      const json::object weights{{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}};
      const json::object activations{
          {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}};
      const json::object group{{"targets", json::array{"Linear"}},
                               {"weights", weights},
                               {"input_activations", activations}};
      return {{"quant_method", "compressed-tensors"},
              {"format", "float-quantized"},
              {"ignore", json::array{"lm_head"}},
              {"config_groups", json::object{{"group_0", group}}}};
    }
    case PublishedForm::kPowersOfTwo:
      break;
  }
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"scale_fmt", "ue8m0"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {kScaleBlock, kScaleBlock}}};
}

}  // namespace

void write_published_form(const Checkpoint& source, PublishedForm form,
                          const std::string& directory) {
  const std::string path = source.directory() + "/config.json";
  const auto text = read_text_file(path, 1 << 20);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  json::value config = *parse_json(*text, path);
  config.as_object()["quantization_config"] = quantization_config(form);
  std::ofstream(directory + "/config.json") << json::serialize(config);
  std::ofstream(directory + "/model.safetensors", std::ios::binary)
      << shard_of(Rewritten(source, form).tensors());
}

}  // namespace fathom
