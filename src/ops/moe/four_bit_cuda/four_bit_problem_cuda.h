// Four-bit experts and their reference in double precision, for the tests and benchmarks of MoE
// with four-bit experts on a GPU.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"

namespace fathom::cuda {

// Codes and scales of the experts' matrices one after another, by rows.
struct FourBitHostMatrix {
  int64_t rows = 0, columns = 0;      // of all experts, of one
  std::vector<uint8_t> codes = {};    // [rows, columns]
  std::vector<uint16_t> scales = {};  // [rows, columns / 32] bf16
  FourBitCode code = FourBitCode::kInteger;

  double at(int64_t row, int64_t column) const;
};

// Random codes; scales that give the weights a deviation of about 1 / sqrt(columns).
FourBitHostMatrix random_four_bit(int64_t rows, int64_t columns, FourBitCode code,
                                  std::mt19937& random);

// The bytes in the layout of four_bit_tiles.h.
std::vector<uint8_t> gate_up_in_tiles(const FourBitHostMatrix& gate_up, int64_t inter);
std::vector<uint8_t> down_in_tiles(const FourBitHostMatrix& down);

struct FourBitExperts {
  MoeShape shape;
  FourBitHostMatrix gate_up, down;  // gate's rows, then up's, expert by expert

  FourBitExperts(const MoeShape& shape, FourBitCode code, uint32_t seed);
  // mlp_e(x) times `weight` is added to `out`. Activations are rounded to bf16, and weights if
  // asked.
  void add_mlp(int64_t expert, const uint16_t* x, double weight, bool rounds_weights,
               std::vector<double>& out) const;
};

struct FourBitTokens {
  int32_t rows = 0;
  std::vector<uint16_t> x = {};       // [rows, hidden] bf16
  std::vector<int32_t> ids = {};      // [rows, experts_per_token]
  std::vector<float> weights = {};    // the same
  std::vector<uint16_t> addend = {};  // [rows, hidden] bf16, or empty
};

}  // namespace fathom::cuda
