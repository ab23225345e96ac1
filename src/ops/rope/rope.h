// Rotary position embedding (Su et al. 2021) with YaRN's or Llama 3's frequencies, and the
// operations fused with it: splitting the query, norming and storing the latent.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "cache/latent_layout.h"
#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

// YaRN's parameters (Peng et al. 2023), as rope_scaling gives them.
struct YarnParameters {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  int64_t original_max_position = 4096;
  double mscale = 1;
  double mscale_all_dim = 0;
};

// Llama 3.1's scaling of long wavelengths: rope_type "llama3".
struct Llama3Parameters {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position = 8192;
};

// Which values of a rotated part of `dim` values are a pair.
enum class RopePairs {
  kAdjacent,  // (2i, 2i + 1): DeepSeek
  kHalves,    // (i, i + dim / 2): Llama
};

// Frequencies of the dim/2 pairs, computed in fp32 as the reference implementations do, and the
// factor g(mscale)/g(mscale_all_dim) on cos and sin.
struct RopeTable {
  // Positions whose sines are stored: computing 32 of them costs 0.6 us, and a decode step needs
  // them twice a layer. Later positions are computed on demand, by the same function.
  static constexpr int32_t kTabulated = 4096;

  std::vector<float> inverse_frequencies;  // [dim / 2]
  float magnitude = 1;
  std::vector<float> tabulated;  // [kTabulated, dim / 2, 2]: cos and sin, times magnitude
  RopePairs pairs = RopePairs::kAdjacent;

  int64_t dim() const { return static_cast<int64_t>(2 * inverse_frequencies.size()); }
  // cos_sin [dim / 2, 2]
  void compute(int32_t position, float* cos_sin) const;
};
// dim is even; 0: nothing is rotated.
RopeTable make_rope_table(int64_t dim, double theta, const std::optional<YarnParameters>& yarn,
                          const std::optional<Llama3Parameters>& llama3 = std::nullopt);

// cos and sin of positions 0 … positions - 1, [positions, dim / 2, 2]: the GPU's lookup table.
std::vector<float> tabulate(const RopeTable& table, int64_t positions);

// q [rows, H, nope + rope] f32 -> q_nope [rows, H, nope], q_rope [rows, H, rope] (rotated), each
// bf16 or f32. positions [rows]. rope is a multiple of the table's dim: the values of several heads
// beside one another, each rotated by the table.
void split_rope_query(const Stream& stream, ConstTensorView q, std::span<const int32_t> positions,
                      const RopeTable& table, TensorView q_nope, TensorView q_rope);

// kv_a [rows, latent + rope] f32 (rows may be strided): norms the latent part with weight [latent]
// f32 and eps (an empty weight: leaves it), rotates the rest, a multiple of the table's dim, and
// stores both as one cache row at slots[row] = page * kPageSize + slot.
void norm_rope_cache_write(const Stream& stream, ConstTensorView kv_a,
                           std::span<const int32_t> positions, std::span<const int64_t> slots,
                           ConstTensorView norm_weight, float eps, const RopeTable& table,
                           const LatentPages& pages);

}  // namespace fathom
