// Three layers of decode_layers() against float64, for every shape and cache format, at lengths
// around those at which a CTA, a warp or a page gains a key. Each comparison stands for itself: no
// mean and no best of several. Keys make each head attend to one of them almost alone and no router
// choice is close, so the remaining error is rounding: bf16 between CTAs, 0.1 % a step.
#include "ops/decode_layers/decode_layers_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "base/random.h"
#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/decode_layers/decode_layers_oracle.h"
#include "ops/rope/rope.h"

namespace fathom::cuda {
namespace {

using Shape = DecodeLayersOracleShape;

constexpr int64_t kLayers = 3;
constexpr int64_t kPatternValues = 20 << 20, kPatternOffsets = 4 << 20;
// Below this margin a different rounding may choose a different expert. Of sigmoids; four times as
// much of logits.
constexpr double kLeastMargin = 0.005;
// Relative to the root mean square: RMS error over all values, and largest error of one value.
constexpr double kMostError = 0.02, kMostErrorOfOne = 0.12;

const double kSoftmaxScale = 1 / std::sqrt(192.0);

struct Form {
  const char* name;
  DecodeLayersKind kind;
  CacheFormat format;

  bool is_v3() const { return kind == DecodeLayersKind::kV3Eighth; }
  bool is_bf16() const { return kind == DecodeLayersKind::kV2LiteBf16; }
  Shape shape() const { return is_v3() ? Shape::v3_eighth() : Shape::v2_lite(); }
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
  int64_t pages() const { return is_v3() ? 64 : 160; }
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
    ASSERT_LE(offset(matrix) + count, kPatternValues);
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

struct Error {
  double all = 0, most = 0;  // shares of the expected values' root mean square
};

template <typename T>
Error error_of(const std::vector<T>& actual, const std::vector<double>& expected) {
  double squares = 0, errors = 0, most = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = static_cast<double>(actual[i]) - expected[i];
    squares += expected[i] * expected[i];
    errors += error * error;
    // NaN counts as the largest error.
    most = std::isfinite(error) ? std::max(most, std::abs(error)) : INFINITY;
    if (most == INFINITY) break;
  }
  const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
  return {std::isfinite(most) ? std::sqrt(errors / squares) : INFINITY, most / rms};
}

// Keys that heads attend to: the newest ones, the first ones, those around the boundaries of warps'
// runs and of pages, each once.
OracleNeedles needles_for(int32_t position) {
  OracleNeedles needles;
  for (const int32_t key :
       {position - 1, position - 2, position - 16, 0, 1, 15, 16, 63, 64, 127, 128, position / 2,
        position / 3, (position - 1) / 64 * 64, (position - 1) / 128 * 128 + 17}) {
    const bool is_new =
        std::find(needles.keys.begin(), needles.keys.end(), key) == needles.keys.end();
    needles.keys.push_back(is_new && key >= 0 && key < position ? key : -1);
  }
  needles.keys.push_back(-1);  // the last head
  needles.far_background = position > 20;
  return needles;
}

// What a launch has left.
struct Found {
  std::vector<float> residual;
  std::vector<float> delta;
  std::vector<std::byte> cache;
  std::vector<std::vector<std::byte>> rows;  // the token's, of each layer
};

class DecodeLayersCuda : public testing::TestWithParam<Form> {
 protected:
  static void SetUpTestSuite() {
    cos_sin_ = tabulate(make_rope_table(Shape::kRope, 10000, std::nullopt), 160 * kPageSize);
    device_cos_sin_ = DeviceArray<float>(cos_sin_);
  }
  // Tests of a shape follow one another: the weights of one at a time.
  void SetUp() override {
    if (weights_ != nullptr && weights_of_ == GetParam().kind) return;
    weights_.reset();
    weights_ = std::make_unique<Weights>(GetParam());
    weights_of_ = GetParam().kind;
    const auto bytes = static_cast<size_t>(decode_layers_exchange_bytes(weights_of_));
    exchange_ = DeviceArray<std::byte>(std::vector<std::byte>(bytes));
  }
  static void TearDownTestSuite() {
    weights_.reset();
    exchange_ = {};
    device_cos_sin_ = {};
  }

  OracleSequence sequence_at(int32_t position) const {
    OracleSequence sequence;
    sequence.layout = {GetParam().format, Shape::kLatent, Shape::kRope};
    const auto pages = static_cast<int32_t>(GetParam().pages());
    sequence.layer_bytes = (pages + 1) * sequence.layout.page_bytes();
    // 27 has no factor in common with the number of pages: all but the first are used once.
    for (int32_t page = 0; page < pages; ++page) {
      sequence.block_table.push_back(page * 27 % pages + 1);
    }
    sequence.position = position;
    return sequence;
  }

  // The cache before a test plants its keys: generated once for each format.
  static const std::vector<std::byte>& random_rows(const OracleSequence& sequence) {
    static std::map<std::pair<CacheFormat, int64_t>, std::vector<std::byte>> made;
    const LatentLayout& layout = sequence.layout;
    std::vector<std::byte>& cache = made[{layout.format, sequence.layer_bytes}];
    if (!cache.empty()) return cache;
    std::mt19937 random(3);
    const int64_t rows = kLayers * sequence.layer_bytes / layout.row_bytes();
    const std::vector<float> latent = random_f32(1 << 20, 1, random),
                             rope = random_f32(1 << 20, 1, random);
    cache.resize(static_cast<size_t>(rows * layout.row_bytes()));
    for (int64_t row = 0; row < rows; ++row) {
      encode_row(layout, latent.data() + random() % ((1 << 20) - Shape::kLatent),
                 rope.data() + random() % ((1 << 20) - Shape::kRope),
                 cache.data() + row * layout.row_bytes());
    }
    return cache;
  }

  Found launch(const OracleSequence& sequence, const std::vector<float>& residual,
               const std::vector<uint16_t>& delta_in, const std::vector<std::byte>& cache) const;
  void compare(int32_t position);

  static std::unique_ptr<Weights> weights_;
  static DecodeLayersKind weights_of_;
  static DeviceArray<std::byte> exchange_;
  static std::vector<float> cos_sin_;
  static DeviceArray<float> device_cos_sin_;
};

std::unique_ptr<Weights> DecodeLayersCuda::weights_;
DecodeLayersKind DecodeLayersCuda::weights_of_ = DecodeLayersKind::kNone;
DeviceArray<std::byte> DecodeLayersCuda::exchange_;
std::vector<float> DecodeLayersCuda::cos_sin_;
DeviceArray<float> DecodeLayersCuda::device_cos_sin_;

Found DecodeLayersCuda::launch(const OracleSequence& sequence, const std::vector<float>& residual,
                               const std::vector<uint16_t>& delta_in,
                               const std::vector<std::byte>& cache) const {
  const DeviceArray<std::byte> device_cache(cache);
  const DeviceArray<float> device_residual(residual);
  const DeviceArray<uint16_t> device_delta(delta_in);
  const DeviceArray<uint16_t> delta_out(std::vector<uint16_t>(residual.size(), 0x7FC0));
  const DeviceArray<int32_t> device_position(std::vector<int32_t>{sequence.position}),
      block_table(sequence.block_table);
  const DeviceArray<int64_t> slot(std::vector<int64_t>{sequence.slot(sequence.position)});
  decode_layers({.kind = GetParam().kind,
                 .layers = weights_->layers(),
                 .num_layers = kLayers,
                 .residual = device_residual.data(),
                 .delta_in = device_delta.data(),
                 .delta_out = delta_out.data(),
                 .eps = static_cast<float>(Shape::kEps),
                 .inner_eps = static_cast<float>(Shape::kEps),
                 .cos_sin = device_cos_sin_.data(),
                 .position = device_position.data(),
                 .slot = slot.data(),
                 .block_table = block_table.data(),
                 .pages = device_cache.data(),
                 .layer_bytes = sequence.layer_bytes,
                 .format = GetParam().format,
                 .softmax_scale = static_cast<float>(kSoftmaxScale),
                 .gate = GetParam().gate(),
                 .exchange = exchange_.data()},
                nullptr);
  check(cudaDeviceSynchronize(), "the layers");
  Found found{device_residual.to_host(), widen(delta_out.to_host()), device_cache.to_host(), {}};
  for (int64_t l = 0; l < kLayers; ++l) {
    const auto row =
        found.cache.begin() + static_cast<std::ptrdiff_t>(sequence.row_at(l, sequence.position));
    found.rows.emplace_back(row, row + static_cast<std::ptrdiff_t>(sequence.layout.row_bytes()));
  }
  return found;
}

void DecodeLayersCuda::compare(int32_t position) {
  const OracleSequence sequence = sequence_at(position);
  const Shape shape = GetParam().shape();
  const double least_margin = GetParam().least_margin();
  std::mt19937 random(static_cast<uint32_t>(position) + 1);
  const std::vector<std::byte>& rows = random_rows(sequence);
  const OracleNeedles no_needles{std::vector<int32_t>(Shape::kHeads, -1)};
  std::vector<std::byte> cache;
  std::vector<float> residual;
  OracleResult expected;
  Found found;
  std::vector<double> sum;
  for (int draw = 0; draw < 40 && expected.margin < least_margin; ++draw) {
    residual = random_f32(shape.hidden, 1, random);
    const std::vector<uint16_t> delta_in = random_bf16(shape.hidden, 0.5f, random);
    sum.assign(residual.begin(), residual.end());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += from_bf16(delta_in[i]);
    cache = rows;
    expected = run_oracle(shape, weights_->oracle(), sum, sequence, needles_for(position), cos_sin_,
                          kSoftmaxScale, least_margin, cache);
    if (expected.margin < least_margin) continue;
    found = launch(sequence, residual, delta_in, cache);
    expected = run_oracle(shape, weights_->oracle(), sum, sequence, no_needles, cos_sin_,
                          kSoftmaxScale, least_margin, cache, found.rows);
  }
  ASSERT_GE(expected.margin, least_margin) << "no token whose experts are sure";

  // Compares what the layers added to the residual; the residual itself would hide errors.
  std::vector<double> added, expected_added;
  for (size_t i = 0; i < sum.size(); ++i) {
    added.push_back(double{found.residual[i]} - sum[i]);
    expected_added.push_back(expected.residual[i] - sum[i]);
  }
  const Error in_residual = error_of(added, expected_added),
              in_delta = error_of(found.delta, expected.delta);
  std::printf("%5d: residual %.4f off, %.4f at most; experts %.4f, %.4f; margin %.4f\n", position,
              in_residual.all, in_residual.most, in_delta.all, in_delta.most, expected.margin);
  EXPECT_LE(in_residual.all, kMostError) << position;
  EXPECT_LE(in_residual.most, kMostErrorOfOne) << position;
  EXPECT_LE(in_delta.all, kMostError) << position;
  EXPECT_LE(in_delta.most, kMostErrorOfOne) << position;

  // Each layer's cache row of the token equals the float64 row up to the format's rounding. No
  // other byte is written.
  std::vector<std::byte>& written = found.cache;
  const LatentLayout& layout = sequence.layout;
  const auto row_bytes = static_cast<std::ptrdiff_t>(layout.row_bytes());
  const double most = layout.format == CacheFormat::kBF16   ? 0.01
                      : layout.format == CacheFormat::kE5M2 ? 0.08
                                                            : 0.04;
  for (int64_t l = 0; l < kLayers; ++l) {
    const auto at = static_cast<std::ptrdiff_t>(sequence.row_at(l, position));
    const auto decoded = [&](const std::byte* row) {
      std::vector<float> latent(Shape::kLatent), rope(Shape::kRope);
      decode_row(layout, row, latent.data(), rope.data());
      latent.insert(latent.end(), rope.begin(), rope.end());
      return std::vector<double>(latent.begin(), latent.end());
    };
    const Error in_row = error_of(decoded(found.rows[static_cast<size_t>(l)].data()),
                                  decoded(expected.rows[static_cast<size_t>(l)].data()));
    EXPECT_LE(in_row.all, most) << "position " << position << ", layer " << l;
    std::copy_n(cache.begin() + at, row_bytes, written.begin() + at);
  }
  const auto [first, was] = std::mismatch(written.begin(), written.end(), cache.begin());
  EXPECT_TRUE(first == written.end())
      << "position " << position << ": byte " << first - written.begin() << ", row "
      << (first - written.begin()) / row_bytes << " of all layers' is another";
}

TEST_P(DecodeLayersCuda, EqualFloat64AtAnyLength) {
  for (const int32_t position :
       {0, 1, 2, 15, 16, 17, 63, 64, 127, 128, 129, 1023, 1024, 1025, 2048, 3001, 4094, 4095}) {
    compare(position);
  }
  if (GetParam().is_v3()) return;
  for (const int32_t position : {4096, 4097, 8191, 8192, 10001}) compare(position);
}

// A short case for sanitizers, which are slow.
TEST_P(DecodeLayersCuda, ShortText) { compare(130); }

constexpr DecodeLayersKind kV3 = DecodeLayersKind::kV3Eighth,
                           kV2Bf16 = DecodeLayersKind::kV2LiteBf16,
                           kV2E4M3 = DecodeLayersKind::kV2LiteE4M3;

INSTANTIATE_TEST_SUITE_P(
    Formats, DecodeLayersCuda,
    testing::Values(Form{"V3EighthFp8Scaled", kV3, CacheFormat::kFp8Scaled},
                    Form{"V3EighthBf16", kV3, CacheFormat::kBF16},
                    Form{"V3EighthE4M3", kV3, CacheFormat::kE4M3},
                    Form{"V3EighthE5M2", kV3, CacheFormat::kE5M2},
                    Form{"V2LiteInBf16Bf16", kV2Bf16, CacheFormat::kBF16},
                    Form{"V2LiteInBf16Fp8Scaled", kV2Bf16, CacheFormat::kFp8Scaled},
                    Form{"V2LiteInBf16E4M3", kV2Bf16, CacheFormat::kE4M3},
                    Form{"V2LiteInBf16E5M2", kV2Bf16, CacheFormat::kE5M2},
                    Form{"V2LiteInE4M3Bf16", kV2E4M3, CacheFormat::kBF16},
                    Form{"V2LiteInE4M3Fp8Scaled", kV2E4M3, CacheFormat::kFp8Scaled},
                    Form{"V2LiteInE4M3E4M3", kV2E4M3, CacheFormat::kE4M3},
                    Form{"V2LiteInE4M3E5M2", kV2E4M3, CacheFormat::kE5M2}),
    [](const auto& form) { return std::string(form.param.name); });

}  // namespace
}  // namespace fathom::cuda
