#include "ops/moe/e4m3_cuda/scaled_moe_problem_cuda.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "base/math.h"
#include "device/cuda/random_data.h"
#include "tensor/dtype.h"

namespace fathom::cuda {
namespace {

// Poison between rows and the stride of x's scales: it must not be read.
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<uint8_t> random_values(int64_t count, std::mt19937& random) {
  // Draws from 1,021 approximately normal values.
  std::array<uint8_t, 1021> some;
  for (uint8_t& value : some) value = to_e4m3(random_f32(1, 60, random)[0]).bits;
  std::vector<uint8_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = some[(random() >> 7) % some.size()];
  }
  return values;
}

std::vector<float> random_scales(int64_t count, float about, std::mt19937& random) {
  std::uniform_real_distribution<float> exponent(-1, 1);
  std::vector<float> scales(static_cast<size_t>(count));
  for (float& scale : scales) scale = about * std::exp2(exponent(random));
  return scales;
}

ScaledMatrices random_matrices(int64_t matrices, int64_t n, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t elements = matrices * n * k;
  const auto some = random_values(std::min<int64_t>(elements, (1 << 23) + 16 * 37), random);
  ScaledMatrices made{DeviceArray<uint8_t>(std::max<int64_t>(elements, 16)),
                      DeviceArray<float>(random_scales(
                          std::max<int64_t>(matrices * (n / 128) * (k / 128), 4), 1e-3f, random))};
  for (int64_t at = 0; at < elements;) {
    // The first piece from here, then twice what is there.
    const int64_t count = std::min(std::max(std::ssize(some), at), elements - at);
    check(cudaMemcpy(made.values.data() + at, at == 0 ? some.data() : made.values.data(),
                     static_cast<size_t>(std::min(count, at == 0 ? std::ssize(some) : count)),
                     cudaMemcpyDefault),
          "filling matrices");
    at += count;
  }
  return made;
}

double widened(uint8_t bits) {
  static const auto table = [] {
    std::array<double, 256> values;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = to_float(e4m3{static_cast<uint8_t>(i)});
    }
    return values;
  }();
  return table[bits];
}

// Round-trips a block of doubles as quantize_block() does.
void round_block(std::span<double> block, ScaleForm form) {
  float magnitude = kLeastMagnitude;
  for (const double value : block) {
    magnitude = std::max(magnitude, static_cast<float>(std::abs(value)));
  }
  float scale = magnitude / kLargestE4M3, inverse = kLargestE4M3 / magnitude;
  if (form == ScaleForm::kPowerOfTwo) {
    constexpr uint32_t kMantissa = 0x7FFFFF;
    scale = std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + kMantissa) & ~kMantissa);
    inverse = 1 / scale;
  }
  for (double& value : block) {
    value = double{to_float(to_e4m3(static_cast<float>(value) * inverse))} * scale;
  }
}

}  // namespace

ScaledMoeProblem::ScaledMoeProblem(const MoeShape& s, int32_t num_rows,
                                   const std::vector<int32_t>& id_list, uint32_t seed)
    : shape(s),
      rows(num_rows),
      expert_ids(id_list),
      x_scales_stride(round_up(num_rows, 4) + 4),
      ids(id_list),
      gate_up(random_matrices(s.num_experts, 2 * int64_t{s.inter}, s.hidden, seed + 1)),
      down(random_matrices(s.num_experts, s.hidden, s.inter, seed + 2)),
      shared_gate_up(random_matrices(1, 2 * int64_t{s.shared_inter}, s.hidden, seed + 3)),
      shared_down(random_matrices(1, s.hidden, s.shared_inter, seed + 4)),
      out(int64_t{num_rows} * s.hidden),
      workspace(scaled_moe_many_rows_workspace_bytes(s, num_rows)),
      progress(std::vector<uint64_t>(kScaledMoeProgressWords)) {
  std::mt19937 random(seed + 5);
  x = DeviceArray<uint8_t>(random_values(int64_t{num_rows} * s.hidden, random));
  auto scales = random_scales(s.hidden / 128 * x_scales_stride, 1 / 60.0f, random);
  for (size_t i = 0; i < scales.size(); ++i) {
    if (static_cast<int64_t>(i) % x_scales_stride >= rows) scales[i] = kNan;
  }
  x_scales = DeviceArray<float>(scales);
  std::vector<float> values(id_list.size());
  for (float& value : values) value = 0.05f + static_cast<float>(random() % 1000) / 2000;
  weights = DeviceArray<float>(values);
}

ScaledMoeArguments ScaledMoeProblem::arguments(DType out_type) const {
  return {.shape = shape,
          .rows = rows,
          .x = x.data(),
          .x_scales = x_scales.data(),
          .x_scales_stride = x_scales_stride,
          .expert_ids = ids.data(),
          .expert_weights = weights.data(),
          .gate_up = gate_up.values.data(),
          .gate_up_scales = gate_up.scales.data(),
          .down = down.values.data(),
          .down_scales = down.scales.data(),
          .shared_gate_up = shared_gate_up.values.data(),
          .shared_gate_up_scales = shared_gate_up.scales.data(),
          .shared_down = shared_down.values.data(),
          .shared_down_scales = shared_down.scales.data(),
          .out = out.data(),
          .out_type = out_type,
          .workspace = workspace.data(),
          .progress = progress.data()};
}

double ScaledMoeProblem::flop() const {
  const auto pairs = std::ranges::count_if(expert_ids, [](int32_t id) { return id >= 0; });
  return 6.0 * shape.hidden *
         (static_cast<double>(pairs) * shape.inter + double{1} * rows * shape.shared_inter);
}

ScaledMoeReference::ScaledMoeReference(const ScaledMoeProblem& p, ScaleForm form)
    : shape_(p.shape),
      form_(form),
      ids_(p.expert_ids),
      x_(p.x.to_host()),
      x_scales_(p.x_scales.to_host()),
      weights_(p.weights.to_host()),
      x_scales_stride_(p.x_scales_stride) {
  const auto taken = [](const ScaledMatrices& m, int64_t n, int64_t k) {
    return Matrices{m.values.to_host(), m.scales.to_host(), n, k};
  };
  gate_up_ = taken(p.gate_up, 2 * int64_t{shape_.inter}, shape_.hidden);
  down_ = taken(p.down, shape_.hidden, shape_.inter);
  shared_gate_up_ = taken(p.shared_gate_up, 2 * int64_t{shape_.shared_inter}, shape_.hidden);
  shared_down_ = taken(p.shared_down, shape_.hidden, shape_.shared_inter);
}

void ScaledMoeReference::Matrices::multiply(int64_t e, int64_t first, int64_t count,
                                            const std::vector<double>& x, double weight,
                                            double* out) const {
  for (int64_t row = first; row < first + count; ++row) {
    const uint8_t* bytes = values.data() + (e * n + row) * k;
    const float* scale = scales.data() + (e * n + row) / 128 * (k / 128);
    double sum = 0;
    for (int64_t block = 0; block < k / 128; ++block) {
      double part = 0;
      for (int64_t i = block * 128; i < (block + 1) * 128; ++i) {
        part += widened(bytes[i]) * x[static_cast<size_t>(i)];
      }
      sum += part * scale[block];
    }
    out[row - first] += weight * sum;
  }
}

void ScaledMoeReference::add_mlp(const Matrices& gate_up, const Matrices& down, int64_t expert,
                                 const std::vector<double>& x, double weight,
                                 std::vector<double>& out) const {
  const int64_t inter = down.k;
  std::vector<double> both(static_cast<size_t>(2 * inter)), activations(static_cast<size_t>(inter));
  gate_up.multiply(expert, 0, 2 * inter, x, 1, both.data());
  for (size_t i = 0; i < activations.size(); ++i) {
    activations[i] = both[i] / (1 + std::exp(-both[i])) * both[i + activations.size()];
  }
  for (size_t i = 0; i < activations.size(); i += 128) {
    round_block(std::span(activations).subspan(i, 128), form_);
  }
  down.multiply(expert, 0, down.n, activations, weight, out.data());
}

std::vector<double> ScaledMoeReference::row(int32_t row) const {
  const auto hidden = static_cast<size_t>(shape_.hidden);
  std::vector<double> out(hidden), x(hidden);
  for (size_t i = 0; i < hidden; ++i) {
    const auto block = static_cast<int64_t>(i) / 128;
    x[i] = widened(x_[static_cast<size_t>(row) * hidden + i]) *
           x_scales_[static_cast<size_t>(block * x_scales_stride_ + row)];
  }
  for (int j = 0; j < shape_.experts_per_token; ++j) {
    const auto pair = static_cast<size_t>(row) * static_cast<size_t>(shape_.experts_per_token) +
                      static_cast<size_t>(j);
    if (ids_[pair] >= 0) add_mlp(gate_up_, down_, ids_[pair], x, weights_[pair], out);
  }
  if (shape_.shared_inter > 0) add_mlp(shared_gate_up_, shared_down_, 0, x, 1, out);
  return out;
}

}  // namespace fathom::cuda
