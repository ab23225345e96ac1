// Weights of a few layers with random values, on the device and for the oracle: for the tests and
// the benchmark of decode_layers().
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/decode_layers/decode_layers_cuda.h"
#include "ops/decode_layers/decode_layers_oracle.h"

namespace fathom::cuda::decode_layers_trial {

using Shape = DecodeLayersOracleShape;

constexpr int64_t kLayers = 3;
constexpr int64_t kPatternValues = 20 << 20, kPatternOffsets = 4 << 20;
// Below this margin, of sigmoids, a different rounding may choose a different expert; logits need
// four times as much.
constexpr double kLeastMargin = 0.005;

inline const double kSoftmaxScale = 1 / std::sqrt(192.0);

struct Form {
  const char* name;
  DecodeLayersKind kind;
  CacheFormat format;

  bool is_v3() const { return kind == DecodeLayersKind::kV3Tp8; }
  bool is_bf16() const { return kind == DecodeLayersKind::kV2LiteBf16; }
  Shape shape() const { return is_v3() ? Shape::v3_tp8() : Shape::v2_lite(); }
  GateOptions gate() const {
    const Shape s = shape();
    return is_v3()
               ? GateOptions{GateScoring::kSigmoidBias,
                             s.groups,
                             s.groups_per_token,
                             s.chosen,
                             true,
                             static_cast<float>(s.scaling)}
               : GateOptions{.scoring = GateScoring::kSoftmaxGreedy, .experts_per_token = s.chosen};
  }
  double least_margin() const { return is_v3() ? kLeastMargin : 4 * kLeastMargin; }
  // One page more belongs to another sequence.
  static constexpr int64_t kPages = 160;
};

// All matrices are slices of the same random values at different offsets: any finite e4m3, or bf16
// up to 1 times a power of two for each matrix.
class Pattern {
 public:
  explicit Pattern(bool is_bf16) : is_bf16_(is_bf16), values_(kPatternValues) {
    bytes_.resize(values_.size() * static_cast<size_t>(size()));
    for (size_t i = 0; i < values_.size(); i += 8) {
      const uint64_t bits = random_bits(7, 0, i);
      for (size_t j = 0; j < 8; ++j) {
        const auto byte = static_cast<uint8_t>(bits >> (8 * j));
        values_[i + j] = is_bf16_ ? random_bf16_at(i + j) : e4m3_at(i + j, byte);
        squares_ += double{values_[i + j]} * values_[i + j];
      }
    }
    if (is_bf16_) return;
    devices_[0] = DeviceArray<uint8_t>(bytes_);
  }

  int64_t size() const { return is_bf16_ ? 2 : 1; }  // bytes of a value
  bool is_bf16() const { return is_bf16_; }
  // A multiple of 16.
  static int64_t offset(uint64_t matrix) {
    return static_cast<int64_t>(random_bits(8, 0, matrix) % (kPatternOffsets / 16)) * 16;
  }
  const float* values(uint64_t matrix) const { return values_.data() + offset(matrix); }
  // bf16: values times 2^exponent.
  void copy(uint64_t matrix, int exponent, uint8_t* to, int64_t count) {
    FATHOM_CHECK(offset(matrix) + count <= kPatternValues, "a matrix of {} values", count);
    check(cudaMemcpy(to, device(exponent) + offset(matrix) * size(),
                     static_cast<size_t>(count * size()), cudaMemcpyDeviceToDevice),
          "copying weights");
  }
  double rms() const { return std::sqrt(squares_ / static_cast<double>(kPatternValues)); }

 private:
  float e4m3_at(size_t i, uint8_t byte) {
    bytes_[i] = (byte & 0x7F) == 0x7F ? static_cast<uint8_t>(byte - 1) : byte;
    return to_float(e4m3{bytes_[i]});
  }
  static float random_bf16_at(size_t i) {
    return from_bf16(bf16_bits(static_cast<float>(2 * random_uniform(7, 1, i) - 1)));
  }
  const uint8_t* device(int exponent) {
    DeviceArray<uint8_t>& found = devices_[exponent];
    if (found.size() > 0) return found.data();
    for (size_t i = 0; i < values_.size(); ++i) {
      const uint16_t bits = bf16_bits(std::ldexp(values_[i], exponent));
      std::memcpy(bytes_.data() + 2 * i, &bits, 2);
    }
    found = DeviceArray<uint8_t>(bytes_);
    return found.data();
  }

  const bool is_bf16_;
  std::vector<uint8_t> bytes_;
  std::vector<float> values_;
  double squares_ = 0;
  std::map<int, DeviceArray<uint8_t>> devices_;  // by exponent
};

// A batch of contiguous matrices [n, k]; n is a multiple of 128 if there are several.
class Matrices {
 public:
  Matrices(Pattern& pattern, uint64_t name, int64_t count, int64_t n, int64_t k)
      : pattern_(pattern), name_(name), n_(n), k_(k), values_(count * n * k * pattern.size()) {
    const int64_t scales = count * blocks();
    const double middle = 1 / (pattern.rms() * std::sqrt(static_cast<double>(k)));
    const int exponent = pattern.is_bf16() ? static_cast<int>(std::round(std::log2(middle))) : 0;
    for (int64_t i = 0; i < count; ++i) {
      pattern.copy(piece(i), exponent, values_.data() + i * n * k * pattern.size(), n * k);
    }
    for (int64_t i = 0; i < scales; ++i) {
      scales_.push_back(
          pattern.is_bf16()
              ? static_cast<float>(std::ldexp(1.0, exponent))
              : static_cast<float>(middle *
                                   (0.5 + random_uniform(9, name, static_cast<uint64_t>(i)))));
    }
    if (!pattern.is_bf16()) device_scales_ = DeviceArray<float>(scales_);
  }

  // Starts at matrix `first`.
  ScaledMatrix on_device(int64_t first = 0) const {
    return {values_.data() + first * n_ * k_ * pattern_.size(),
            pattern_.is_bf16() ? nullptr : device_scales_.data() + first * blocks()};
  }
  OracleMatrix oracle(int64_t i = 0) const {
    return {pattern_.values(piece(i)), scales_.data() + i * blocks(), k_};
  }

 private:
  uint64_t piece(int64_t i) const { return name_ * 1000 + static_cast<uint64_t>(i); }
  int64_t blocks() const { return (n_ + 127) / 128 * (k_ / 128); }

  const Pattern& pattern_;
  const uint64_t name_;
  const int64_t n_, k_;
  DeviceArray<uint8_t> values_;
  std::vector<float> scales_;
  DeviceArray<float> device_scales_;
};

// The weights of kLayers, on the device and for the oracle. In one array, each layer's routed
// experts start one expert after those of the layer before.
class Weights {
 public:
  explicit Weights(const Form& form)
      : shape_(form.shape()),
        pattern_(form.is_bf16()),
        gate_up_(pattern_, 1, shape_.experts + kLayers, 2 * shape_.inter, shape_.hidden),
        down_(pattern_, 2, shape_.experts + kLayers, shape_.hidden, shape_.inter) {
    constexpr int64_t kQueryRows = Shape::kHeads * (Shape::kNope + Shape::kRope);
    std::mt19937 random(11);
    std::vector<DecodeLayer> layers;
    for (int64_t l = 0; l < kLayers; ++l) {
      OracleLayer& oracle = oracle_.emplace_back();
      DecodeLayer layer;
      layer.input_norm = norm(shape_.hidden, random, oracle.input_norm);
      if (shape_.q_lora > 0) layer.q_a_norm = norm(shape_.q_lora, random, oracle.q_a_norm);
      layer.kv_a_norm = norm(Shape::kLatent, random, oracle.kv_a_norm);
      layer.post_attention_norm = norm(shape_.hidden, random, oracle.post_attention_norm);
      const int64_t query_rows = shape_.q_lora > 0 ? shape_.q_lora : kQueryRows;
      layer.q_kv_a =
          matrix(l, 0, query_rows + Shape::kLatent + Shape::kRope, shape_.hidden, oracle.q_kv_a);
      if (shape_.q_lora > 0) layer.q_b = matrix(l, 1, kQueryRows, shape_.q_lora, oracle.q_b);
      layer.uk = matrix(l, 2, Shape::kHeads * Shape::kLatent, Shape::kNope, oracle.uk);
      layer.uv = matrix(l, 3, Shape::kHeads * Shape::kV, Shape::kLatent, oracle.uv);
      layer.o = matrix(l, 4, shape_.hidden, Shape::kHeads * Shape::kV, oracle.o);
      const std::vector<uint16_t> router = random_bf16(
          shape_.experts * shape_.hidden, 2 / std::sqrt(static_cast<float>(shape_.hidden)), random);
      oracle.router = widen(router);
      layer.router = routers_.emplace_back(router).data();
      if (shape_.groups > 0) {
        oracle.router_bias = random_f32(shape_.experts, 0.5f, random);
        layer.router_bias = floats_.emplace_back(oracle.router_bias).data();
      }
      layer.gate_up = gate_up_.on_device(l);
      layer.down = down_.on_device(l);
      for (int64_t e = 0; e < shape_.experts; ++e) {
        oracle.gate_up.push_back(gate_up_.oracle(l + e));
        oracle.down.push_back(down_.oracle(l + e));
      }
      layer.shared_gate_up =
          matrix(l, 5, 2 * shape_.shared_inter, shape_.hidden, oracle.gate_up.emplace_back());
      layer.shared_down =
          matrix(l, 6, shape_.hidden, shape_.shared_inter, oracle.down.emplace_back());
      layers.push_back(layer);
    }
    layers_ = DeviceArray<DecodeLayer>(layers);
  }

  const DecodeLayer* layers() const { return layers_.data(); }
  const std::vector<OracleLayer>& oracle() const { return oracle_; }

 private:
  const float* norm(int64_t n, std::mt19937& random, std::vector<float>& values) {
    values = random_f32(n, 0.1f, random);
    for (float& value : values) value += 1;
    return floats_.emplace_back(values).data();
  }
  ScaledMatrix matrix(int64_t layer, uint64_t name, int64_t n, int64_t k, OracleMatrix& oracle) {
    matrices_.push_back(std::make_unique<Matrices>(
        pattern_, 10 + static_cast<uint64_t>(layer) * 10 + name, 1, n, k));
    oracle = matrices_.back()->oracle();
    return matrices_.back()->on_device();
  }

  const Shape shape_;
  Pattern pattern_;
  const Matrices gate_up_, down_;
  std::vector<std::unique_ptr<Matrices>> matrices_;
  std::vector<DeviceArray<float>> floats_;
  std::vector<DeviceArray<uint16_t>> routers_;
  std::vector<OracleLayer> oracle_;
  DeviceArray<DecodeLayer> layers_;
};

}  // namespace fathom::cuda::decode_layers_trial
