#include "ops/moe/four_bit_cuda/four_bit_problem_cuda.h"

#include <cmath>
#include <cstring>

#include "device/cuda/random_data.h"
#include "ops/moe/plans/four_bit_tiles.h"
#include "tensor/four_bit.h"

namespace fathom::cuda {
namespace {

void put_tile_bits(std::vector<uint8_t>& bytes, int64_t at, uint32_t bits) {
  uint32_t word = 0;
  std::memcpy(&word, bytes.data() + at, 4);
  word |= bits;
  std::memcpy(bytes.data() + at, &word, 4);
}

// row_of: a row's place in the layout.
template <typename RowOf>
std::vector<uint8_t> in_tiles(const FourBitHostMatrix& m, const RowOf& row_of) {
  std::vector<uint8_t> bytes(static_cast<size_t>(four_bit_bytes(m.rows, m.columns)));
  for (int64_t r = 0; r < m.rows; ++r) {
    const int64_t row = row_of(r);
    const int within = static_cast<int>(row % kFourBitTileRows);
    for (int64_t c = 0; c < m.columns; ++c) {
      const int column = static_cast<int>(c % kFourBitBlockColumns);
      const int64_t tile = four_bit_tile_at(row, c, m.columns);
      const FourBitPlace place = four_bit_place(within, column);
      put_tile_bits(bytes, tile + place.at,
                    uint32_t{m.codes[static_cast<size_t>(r * m.columns + c)]} << place.shift);
      if (c % kFourBitScaleColumns != 0) continue;
      std::memcpy(bytes.data() + tile + four_bit_scale_at(within, column),
                  &m.scales[static_cast<size_t>((r * m.columns + c) / kFourBitScaleColumns)], 2);
    }
  }
  return bytes;
}

}  // namespace

double FourBitHostMatrix::at(int64_t row, int64_t column) const {
  const auto i = static_cast<size_t>(row * columns + column);
  return double{four_bit_value(code, codes[i], kSymmetricZero)} *
         from_bf16(scales[i / kFourBitScaleColumns]);
}

FourBitHostMatrix random_four_bit(int64_t rows, int64_t columns, FourBitCode code,
                                  std::mt19937& random) {
  FourBitHostMatrix m{.rows = rows, .columns = columns, .code = code};
  m.codes.resize(static_cast<size_t>(rows * columns));
  for (size_t i = 0; i < m.codes.size(); i += 8) {
    const auto bits = static_cast<uint32_t>(random());
    for (size_t j = 0; j < 8; ++j) m.codes[i + j] = static_cast<uint8_t>(bits >> 4 * j & 15);
  }
  m.scales.resize(static_cast<size_t>(rows * columns / kFourBitScaleColumns));
  const float usual = 0.25f / std::sqrt(static_cast<float>(columns));
  for (uint16_t& scale : m.scales) {
    const float factor = 0.5f + static_cast<float>(random() % 1024) / 1024;
    scale = bf16_bits(code == FourBitCode::kE2m1 ? std::exp2(std::round(std::log2(usual * factor)))
                                                 : usual * factor);
  }
  return m;
}

std::vector<uint8_t> gate_up_in_tiles(const FourBitHostMatrix& gate_up, int64_t inter) {
  return in_tiles(gate_up, [inter](int64_t row) {
    const int64_t within = row % (2 * inter);
    return row - within + four_bit_gate_up_row(within % inter, within >= inter);
  });
}

std::vector<uint8_t> down_in_tiles(const FourBitHostMatrix& down) {
  return in_tiles(down, [](int64_t row) { return row; });
}

FourBitExperts::FourBitExperts(const MoeShape& s, FourBitCode code, uint32_t seed) : shape(s) {
  std::mt19937 random(seed);
  gate_up = random_four_bit(int64_t{s.num_experts} * 2 * s.inter, s.hidden, code, random);
  down = random_four_bit(int64_t{s.num_experts} * s.hidden, s.inter, code, random);
}

void FourBitExperts::add_mlp(int64_t expert, const uint16_t* x, double weight, bool rounds_weights,
                             std::vector<double>& out) const {
  const int64_t hidden = shape.hidden, inter = shape.inter;
  std::vector<double> wide(static_cast<size_t>(hidden)), activations(static_cast<size_t>(inter));
  for (int64_t c = 0; c < hidden; ++c) wide[static_cast<size_t>(c)] = from_bf16(x[c]);
  const auto dot = [&](const FourBitHostMatrix& m, int64_t row, const std::vector<double>& v) {
    double sum = 0;
    for (int64_t c = 0; c < m.columns; ++c) {
      const double w = m.at(row, c);
      sum += (rounds_weights ? from_bf16(bf16_bits(static_cast<float>(w))) : w) *
             v[static_cast<size_t>(c)];
    }
    return sum;
  };
  for (int64_t i = 0; i < inter; ++i) {
    const double gate = dot(gate_up, expert * 2 * inter + i, wide);
    const double up = dot(gate_up, expert * 2 * inter + inter + i, wide);
    activations[static_cast<size_t>(i)] =
        from_bf16(bf16_bits(static_cast<float>(gate / (1 + std::exp(-gate)) * up)));
  }
  for (int64_t c = 0; c < hidden; ++c) {
    out[static_cast<size_t>(c)] += weight * dot(down, expert * hidden + c, activations);
  }
}

}  // namespace fathom::cuda
