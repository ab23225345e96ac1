#include "e2e/static_activations.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "base/json.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"

namespace fathom {
namespace {

constexpr float kLargest = 448;  // of e4m3

// What a checkpoint's tensors become, and how large what the norms give can be.
class StaticForm {
 public:
  explicit StaticForm(const Checkpoint& source)
      : source_(source), config_(source.config()), names_(config_) {
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
    add_input_scales();
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
    float most = 0, longest = 0;  // element, row of values
    const int64_t head = config_.qk_nope_dim + config_.v_dim;
    for (int64_t row = 0; row < matrix.rows(); ++row) {
      float squares = 0;
      for (int64_t col = 0; col < matrix.cols(); ++col) {
        wide.push_back(matrix.at(row, col));
        most = std::max(most, std::abs(wide.back()));
        squares += wide.back() * wide.back();
      }
      if (row % head >= config_.qk_nope_dim) longest = std::max(longest, std::sqrt(squares));
    }
    const float scale = most / kLargest;
    std::vector<e4m3> values;
    for (const float value : wide) values.push_back(to_e4m3(value / scale));
    const std::scoped_lock lock(mutex_);
    tensors_.push_back({name,
                        std::string(published_name(DType::kF8E4M3)),
                        {matrix.rows(), matrix.cols()},
                        bytes_of(values)});
    add_number(module_of(name) + ".weight_scale", scale);
    if (name.ends_with("kv_b_proj.weight")) values_[name] = longest;
  }

  // The largest magnitude that a linear layer's input can have.
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
    // A mean of values.
    if (is("o_proj.weight")) return latent * values_.at(layer + ".self_attn.kv_b_proj.weight");
    if (is("down_proj.weight")) return kLargest;  // nobody quantises by it
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

  // Stored without a dimension, as it is published.
  void add_number(const std::string& name, float value) {
    tensors_.push_back(
        {name, std::string(published_name(DType::kF32)), {}, bytes_of(std::vector<float>{value})});
  }
  static std::string module_of(const std::string& weight) {
    return weight.substr(0, weight.rfind('.'));
  }

  const Checkpoint& source_;
  const ModelConfig& config_;
  const WeightNames names_;
  std::mutex mutex_;
  std::vector<TestTensor> tensors_;
  std::map<std::string, float> normed_;  // a norm's largest element, and its rows' largest length
  std::map<std::string, float> values_;  // the longest row of kv_b_proj that gives a value
};

}  // namespace

void write_static_activations(const Checkpoint& source, const std::string& directory) {
  const std::string path = source.directory() + "/config.json";
  const auto text = read_text_file(path, 1 << 20);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  json::value config = *parse_json(*text, path);
  config.as_object()["quantization_config"] = {
      {"quant_method", "fp8"}, {"activation_scheme", "static"}, {"ignored_layers", {"lm_head"}}};
  std::ofstream(directory + "/config.json") << json::serialize(config);
  std::ofstream(directory + "/model.safetensors", std::ios::binary)
      << shard_of(StaticForm(source).tensors());
}

}  // namespace fathom
