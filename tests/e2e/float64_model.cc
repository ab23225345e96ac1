#include "e2e/float64_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "base/math.h"
#include "checkpoint/dummy_weights.h"
#include "model/layer_options.h"
#include "ops/scaled_linear/quantize_rows.h"

namespace fathom {
namespace {

constexpr int64_t kMostPositions = 4096, kBlock = 128;

// Calls body(i) for each i below `count`, on all cores.
template <typename Body>
void for_each(int64_t count, const Body& body) {
  const int64_t threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  std::vector<std::jthread> running;
  for (int64_t t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      for (int64_t i = t; i < count; i += threads) body(i);
    });
  }
}

// A tensor's dequantized values, row by row.
class DummyTensor {
 public:
  DummyTensor(const Checkpoint& checkpoint, const std::string& name, int64_t cols) : cols_(cols) {
    const TensorEntry* const entry = checkpoint.find(name);
    FATHOM_CHECK(entry != nullptr, "no tensor {}", name);
    type_ = entry->dtype;
    values_.resize(static_cast<size_t>(entry->bytes));
    fill_dummy(name, type_, cols, 0, values_);
    if (type_ != DType::kF8E4M3) return;
    const int64_t rows = entry->bytes / cols;
    scales_.resize(static_cast<size_t>(ceil_div(rows, kBlock) * ceil_div(cols, kBlock)));
    fill_dummy_scales(name + "_scale_inv", cols,
                      checkpoint.config().quantization.scales_are_powers_of_two, 0, scales_);
  }

  DType type() const { return type_; }
  void read_row(int64_t row, double* out) const {
    for (int64_t c = 0; c < cols_; ++c) out[c] = at(row, c);
  }

 private:
  double at(int64_t row, int64_t col) const {
    const int64_t i = row * cols_ + col;
    switch (type_) {
      case DType::kF32:
        return reinterpret_cast<const float*>(values_.data())[i];
      case DType::kBF16:
        return to_float(reinterpret_cast<const bf16*>(values_.data())[i]);
      case DType::kF8E4M3:
        return double{to_float(reinterpret_cast<const e4m3*>(values_.data())[i])} *
               scales_[static_cast<size_t>(row / kBlock * ceil_div(cols_, kBlock) + col / kBlock)];
      default:
        FATHOM_CHECK(false, "a dummy of type {}", name_of(type_));
    }
  }

  int64_t cols_;
  DType type_;
  std::vector<std::byte> values_;
  std::vector<float> scales_;
};

// Quantizes rows of whole 128-column blocks to e4m3 and back.
std::vector<double> through_e4m3(const std::vector<double>& x, const ModelConfig& config) {
  const ScaleForm form =
      config.quantization.scales_are_powers_of_two ? ScaleForm::kPowerOfTwo : ScaleForm::kF32;
  std::vector<double> result;
  for (size_t first = 0; first < x.size(); first += kBlock) {
    bf16 block[kBlock];
    e4m3 values[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      block[i] = to_bf16(static_cast<float>(x[first + static_cast<size_t>(i)]));
    }
    const float scale = quantize_block(block, form, values);
    for (const e4m3 value : values) result.push_back(double{to_float(value)} * scale);
  }
  return result;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

Float64Model::Float64Model(const Checkpoint& checkpoint, bool quantised_activations)
    : checkpoint_(checkpoint),
      config_(checkpoint.config()),
      quantised_activations_(quantised_activations),
      cos_sin_(tabulate(rope_table(config_), kMostPositions)) {
  FATHOM_CHECK(config_.gate != GateKind::kSoftmaxGroupLimited, "groups by their maximum");
}

std::vector<double> Float64Model::logits(const std::vector<int32_t>& ids, bool texts_of_one) {
  const int64_t hidden = config_.hidden;
  texts_of_one_ = texts_of_one;
  tokens_ = std::ssize(ids);
  Rows residual(static_cast<size_t>(tokens_ * hidden));
  const DummyTensor embedding(checkpoint_, "model.embed_tokens.weight", hidden);
  for (int64_t t = 0; t < tokens_; ++t) {
    embedding.read_row(ids[static_cast<size_t>(t)], residual.data() + t * hidden);
  }
  const auto add = [&](const Rows& delta) {
    for (size_t i = 0; i < residual.size(); ++i) residual[i] += delta[i];
  };
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const double eps = config_.rms_norm_eps;
    add(attention(prefix + "self_attn.",
                  norm(prefix + "input_layernorm.weight", residual, hidden, eps)));
    const Rows x = norm(prefix + "post_attention_layernorm.weight", residual, hidden, eps);
    add(config_.is_moe_layer(layer) ? experts(prefix + "mlp.", x)
                                    : mlp(prefix + "mlp.", x, config_.intermediate));
  }
  const Rows x = norm("model.norm.weight", residual, hidden, config_.rms_norm_eps);
  return product("lm_head.weight", x, config_.vocab_size, hidden);
}

// x [tokens, k] times W^T.
Float64Model::Rows Float64Model::product(const std::string& name, const Rows& x, int64_t n,
                                         int64_t k) const {
  const DummyTensor weight(checkpoint_, name, k);
  const int64_t rows = std::ssize(x) / k;
  const bool quantised = quantised_activations_ && weight.type() == DType::kF8E4M3;
  const Rows narrow = quantised ? through_e4m3(x, config_) : Rows();
  const Rows& taken = quantised ? narrow : x;
  Rows out(static_cast<size_t>(rows * n));
  for_each(n, [&](int64_t i) {
    std::vector<double> row(static_cast<size_t>(k));
    weight.read_row(i, row.data());
    for (int64_t t = 0; t < rows; ++t) {
      out[static_cast<size_t>(t * n + i)] =
          std::inner_product(row.begin(), row.end(), taken.begin() + t * k, 0.0);
    }
  });
  return out;
}

Float64Model::Rows Float64Model::norm(const std::string& name, const Rows& x, int64_t n,
                                      double eps) const {
  std::vector<double> weight(static_cast<size_t>(n));
  DummyTensor(checkpoint_, name, n).read_row(0, weight.data());
  Rows out(x.size());
  for (int64_t first = 0; first < std::ssize(x); first += n) {
    double squares = 0;
    for (int64_t i = first; i < first + n; ++i)
      squares += x[static_cast<size_t>(i)] * x[static_cast<size_t>(i)];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
    for (int64_t i = 0; i < n; ++i) {
      out[static_cast<size_t>(first + i)] =
          x[static_cast<size_t>(first + i)] * scale * weight[static_cast<size_t>(i)];
    }
  }
  return out;
}

void Float64Model::rotate(double* values, int64_t position) const {
  const float* const table = cos_sin_.data() + position * config_.qk_rope_dim;
  for (int64_t i = 0; i < config_.qk_rope_dim; i += 2) {
    const double cos = table[i], sin = table[i + 1], x = values[i], y = values[i + 1];
    values[i] = x * cos - y * sin;
    values[i + 1] = x * sin + y * cos;
  }
}

Float64Model::Rows Float64Model::attention(const std::string& prefix, const Rows& x) const {
  const int64_t heads = config_.num_heads, nope = config_.qk_nope_dim, rope = config_.qk_rope_dim;
  const int64_t v = config_.v_dim, latent = config_.kv_lora_rank, hidden = config_.hidden;
  const int64_t q_columns = heads * (nope + rope), kv_columns = heads * (nope + v);
  Rows q;
  if (config_.q_lora_rank > 0) {
    const Rows q_a = norm(prefix + "q_a_layernorm.weight",
                          product(prefix + "q_a_proj.weight", x, config_.q_lora_rank, hidden),
                          config_.q_lora_rank, kInnerNormEps);
    q = product(prefix + "q_b_proj.weight", q_a, q_columns, config_.q_lora_rank);
  } else {
    q = product(prefix + "q_proj.weight", x, q_columns, hidden);
  }
  const Rows kv_a = product(prefix + "kv_a_proj_with_mqa.weight", x, config_.latent_dim(), hidden);
  Rows key_latent, key_rope;
  for (int64_t t = 0; t < tokens_; ++t) {
    const auto row = kv_a.begin() + t * config_.latent_dim();
    key_latent.insert(key_latent.end(), row, row + latent);
    key_rope.insert(key_rope.end(), row + latent, row + config_.latent_dim());
    const int64_t position = texts_of_one_ ? 0 : t;
    rotate(key_rope.data() + t * rope, position);
    for (int64_t h = 0; h < heads; ++h) {
      rotate(q.data() + t * q_columns + h * (nope + rope) + nope, position);
    }
  }
  const Rows kv = product(prefix + "kv_b_proj.weight",
                          norm(prefix + "kv_a_layernorm.weight", key_latent, latent, kInnerNormEps),
                          kv_columns, latent);
  Rows out(static_cast<size_t>(tokens_ * heads * v), 0.0);
  for_each(tokens_ * heads, [&](int64_t i) {
    const int64_t t = i / heads, h = i % heads, first = texts_of_one_ ? t : 0;
    const double* const query = q.data() + t * q_columns + h * (nope + rope);
    std::vector<double> scores;
    for (int64_t key = first; key <= t; ++key) {
      const double* const straight = kv.data() + key * kv_columns + h * (nope + v);
      const double score =
          std::inner_product(query, query + nope, straight, 0.0) +
          std::inner_product(query + nope, query + nope + rope, key_rope.data() + key * rope, 0.0);
      scores.push_back(score * config_.softmax_scale());
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - most);
    double* const to = out.data() + i * v;
    for (int64_t key = first; key <= t; ++key) {
      const double* const value = kv.data() + key * kv_columns + h * (nope + v) + nope;
      for (int64_t c = 0; c < v; ++c)
        to[c] += scores[static_cast<size_t>(key - first)] / sum * value[c];
    }
  });
  return product(prefix + "o_proj.weight", out, hidden, heads * v);
}

Float64Model::Rows Float64Model::mlp(const std::string& prefix, const Rows& x,
                                     int64_t intermediate) const {
  Rows gate = product(prefix + "gate_proj.weight", x, intermediate, config_.hidden);
  const Rows up = product(prefix + "up_proj.weight", x, intermediate, config_.hidden);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] *= sigmoid(gate[i]) * up[i];
  return product(prefix + "down_proj.weight", gate, config_.hidden, intermediate);
}

Float64Model::Rows Float64Model::experts(const std::string& prefix, const Rows& x) const {
  const int64_t hidden = config_.hidden;
  Rows out =
      mlp(prefix + "shared_experts.", x, config_.num_shared_experts * config_.moe_intermediate);
  const Rows weights = expert_weights(prefix, x);
  for (int64_t e = 0; e < config_.num_experts; ++e) {
    std::vector<int64_t> tokens;
    Rows rows;
    for (int64_t t = 0; t < tokens_; ++t) {
      if (weights[static_cast<size_t>(t * config_.num_experts + e)] == 0) continue;
      tokens.push_back(t);
      rows.insert(rows.end(), x.begin() + t * hidden, x.begin() + (t + 1) * hidden);
    }
    if (tokens.empty()) continue;
    const Rows result =
        mlp(fmt::format("{}experts.{}.", prefix, e), rows, config_.moe_intermediate);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const double weight = weights[static_cast<size_t>(tokens[i] * config_.num_experts + e)];
      for (int64_t c = 0; c < hidden; ++c) {
        out[static_cast<size_t>(tokens[i] * hidden + c)] +=
            weight * result[i * static_cast<size_t>(hidden) + static_cast<size_t>(c)];
      }
    }
  }
  return out;
}

// Sigmoids: selects groups by the sum of their two best scores, then the best experts of these
// groups; the bias affects the selection only. Softmax: the best experts.
Float64Model::Rows Float64Model::expert_weights(const std::string& prefix, const Rows& x) const {
  const bool has_groups = config_.gate == GateKind::kSigmoidBias;
  const int64_t experts = config_.num_experts;
  const int64_t size = has_groups ? experts / config_.num_groups : experts;
  const Rows logits = product(prefix + "gate.weight", x, experts, config_.hidden);
  std::vector<double> bias(static_cast<size_t>(experts));
  if (has_groups) {
    DummyTensor(checkpoint_, prefix + "gate.e_score_correction_bias", experts)
        .read_row(0, bias.data());
  }
  Rows weights(logits.size(), 0.0);
  const auto best = [](std::vector<int64_t> ids, int64_t count, const auto& score_of) {
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int64_t a, int64_t b) { return score_of(a) > score_of(b); });
    ids.resize(static_cast<size_t>(count));
    return ids;
  };
  const auto range = [](int64_t first, int64_t count) {
    std::vector<int64_t> ids(static_cast<size_t>(count));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
  };
  for (int64_t t = 0; t < tokens_; ++t) {
    const double* const of_token = logits.data() + t * experts;
    const double all =
        std::accumulate(of_token, of_token + experts, 0.0,
                        [](double sum, double logit) { return sum + std::exp(logit); });
    const auto score = [&](int64_t e) {
      return has_groups ? sigmoid(of_token[e]) : std::exp(of_token[e]) / all;
    };
    const auto biased = [&](int64_t e) { return score(e) + bias[static_cast<size_t>(e)]; };
    const auto of_group = [&](int64_t group) {
      const auto two = best(range(group * size, size), 2, biased);
      return biased(two[0]) + biased(two[1]);
    };
    const auto groups = has_groups
                            ? best(range(0, config_.num_groups), config_.groups_per_token, of_group)
                            : range(0, 1);
    std::vector<int64_t> candidates;
    for (const int64_t group : groups) {
      const auto members = range(group * size, size);
      candidates.insert(candidates.end(), members.begin(), members.end());
    }
    const auto chosen = best(candidates, config_.experts_per_token, biased);
    double sum = 0;
    for (const int64_t e : chosen) sum += score(e);
    for (const int64_t e : chosen) {
      weights[static_cast<size_t>(t * experts + e)] =
          config_.routed_scaling * score(e) / (config_.normalize_weights ? sum : 1);
    }
  }
  return weights;
}

}  // namespace fathom
