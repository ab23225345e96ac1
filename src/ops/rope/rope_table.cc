// Sources: Llama 3.1's scaling as transformers computes it; YaRN (Peng et al. 2023) as DeepSeek's
// published model code computes it, in fp32: a table computed in double and rounded differs in the
// last bit, which at position 4,400 is 7e-5 radians.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/rope/rope.h"

namespace fathom {
namespace {

// The pair (a real number) whose wavelength fits `rotations` times into the original length.
double correction_dim(double rotations, int64_t dim, double theta, const YarnParameters& yarn) {
  const auto length = static_cast<double>(yarn.original_max_position);
  return static_cast<double>(dim) * std::log(length / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(theta));
}

// The interpolated share of each pair's frequency: 0 below `low`, 1 above `high`.
std::vector<float> interpolation_ramp(int64_t dim, double theta, const YarnParameters& yarn) {
  const double low = std::max(std::floor(correction_dim(yarn.beta_fast, dim, theta, yarn)), 0.0);
  double high = std::min(std::ceil(correction_dim(yarn.beta_slow, dim, theta, yarn)),
                         static_cast<double>(dim - 1));
  if (low == high) high += 0.001;  // a step, not a division by zero
  std::vector<float> ramp(static_cast<size_t>(dim / 2));
  for (size_t k = 0; k < ramp.size(); ++k) {
    const float raw =
        (static_cast<float>(k) - static_cast<float>(low)) / static_cast<float>(high - low);
    ramp[k] = std::clamp(raw, 0.0f, 1.0f);
  }
  return ramp;
}

double attention_factor(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

// Frequencies whose wavelength is longer than original / low_freq_factor are divided by the factor,
// those shorter than original / high_freq_factor stay, and between them the two are mixed.
float scaled_frequency(float frequency, const Llama3Parameters& by) {
  const auto original = static_cast<float>(by.original_max_position);
  const auto factor = static_cast<float>(by.factor);
  const auto low = static_cast<float>(by.low_freq_factor),
             high = static_cast<float>(by.high_freq_factor);
  const float wavelength = 2 * std::numbers::pi_v<float> / frequency;
  if (wavelength > original / low) return frequency / factor;
  if (wavelength < original / high) return frequency;
  const float share = (original / wavelength - low) / (high - low);
  return (1 - share) * frequency / factor + share * frequency;
}

}  // namespace

RopeTable make_rope_table(int64_t dim, double theta, const std::optional<YarnParameters>& yarn,
                          const std::optional<Llama3Parameters>& llama3) {
  FATHOM_CHECK(dim >= 0 && dim % 2 == 0 && theta > 1, "rope of {} with theta {}", dim, theta);
  RopeTable table;
  std::vector<float> ramp;
  if (yarn) {
    ramp = interpolation_ramp(dim, theta, *yarn);
    table.magnitude = static_cast<float>(attention_factor(yarn->factor, yarn->mscale) /
                                         attention_factor(yarn->factor, yarn->mscale_all_dim));
  }
  for (int64_t k = 0; k < dim / 2; ++k) {
    const float wavelength =
        std::pow(static_cast<float>(theta), static_cast<float>(2 * k) / static_cast<float>(dim));
    const float extrapolated = 1.0f / wavelength;
    float frequency = extrapolated;
    if (yarn) {
      const float interpolated = 1.0f / (static_cast<float>(yarn->factor) * wavelength);
      const float share = ramp[static_cast<size_t>(k)];
      frequency = interpolated * share + extrapolated * (1.0f - share);
    }
    if (llama3) frequency = scaled_frequency(frequency, *llama3);
    table.inverse_frequencies.push_back(frequency);
  }
  table.tabulated = tabulate(table, RopeTable::kTabulated);
  return table;
}

std::vector<float> tabulate(const RopeTable& table, int64_t positions) {
  std::vector<float> cos_sin(static_cast<size_t>(positions * table.dim()));
  for (int64_t position = 0; position < positions; ++position) {
    table.compute(static_cast<int32_t>(position), cos_sin.data() + position * table.dim());
  }
  return cos_sin;
}

void RopeTable::compute(int32_t position, float* cos_sin) const {
  for (size_t k = 0; k < inverse_frequencies.size(); ++k) {
    const float angle = static_cast<float>(position) * inverse_frequencies[k];
    cos_sin[2 * k] = std::cos(angle) * magnitude;
    cos_sin[2 * k + 1] = std::sin(angle) * magnitude;
  }
}

}  // namespace fathom
