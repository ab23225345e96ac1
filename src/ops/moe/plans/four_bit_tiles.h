// How four-bit weights lie in a GPU's memory: in the order in which the lanes of a warp hold the
// left operand of an m16n8k16 or m64k16 tensor core instruction, so that a lane's codes of 64
// columns are 16 contiguous bytes. Constants and places; host and device code.
//
// A matrix [n, k] is panels of 32 rows, a panel blocks of 64 columns, a block two tiles of 16 rows:
//
//   [n / 32][k / 64][2][kFourBitTileBytes]
//
// A tile is 32 lanes of 16 bytes of codes and then 64 bytes of scales. Lane l has rows l / 4 and
// l / 4 + 8. Its 32-bit word s has the codes of columns 16 s to 16 s + 15 of the block, two of each
// nibble position i, the lower column in the lower half of the word:
//
//   i = 0: row l / 4,     columns 16 s + 2 (l % 4) and the next
//   i = 1: row l / 4 + 8, the same columns
//   i = 2, 3: the same rows, 8 columns further
//
// Scales are bf16, one for 32 columns of a row: [8][2][2]: row r, then r + 8; each columns 0 to 31,
// then 32 to 63.
//
// Gate and up are one matrix of 2 * inter rows: 8 rows of gate and the same 8 of up in turn, so
// that one lane holds both values of an activation.
#pragma once

#include <cstdint>

namespace fathom::cuda {

inline constexpr int kFourBitPanelRows = 32, kFourBitBlockColumns = 64;
inline constexpr int kFourBitTileRows = 16, kFourBitTileBytes = 32 * 16 + 64;
inline constexpr int kFourBitBlockBytes = 2 * kFourBitTileBytes;
inline constexpr int kFourBitScaleColumns = 32;  // of a row that share a scale

// Bytes of [rows, columns], multiples of a panel's rows and of a block's columns.
constexpr int64_t four_bit_bytes(int64_t rows, int64_t columns) {
  return rows / kFourBitPanelRows * (columns / kFourBitBlockColumns) * kFourBitBlockBytes;
}

// Where the tile of a row and a column begins, in bytes.
constexpr int64_t four_bit_tile_at(int64_t row, int64_t column, int64_t columns) {
  const int64_t block =
      row / kFourBitPanelRows * (columns / kFourBitBlockColumns) + column / kFourBitBlockColumns;
  return block * kFourBitBlockBytes +
         row % kFourBitPanelRows / kFourBitTileRows * kFourBitTileBytes;
}

// A code in its tile: bits `shift` to `shift + 3` of the 32-bit word at byte `at`.
struct FourBitPlace {
  int at = 0, shift = 0;
};
constexpr FourBitPlace four_bit_place(int row, int column) {  // row % 16, column % 64
  const int word = column / 16, within = column % 16;
  const int lane = row % 8 * 4 + within % 8 / 2;
  const int nibble = row / 8 + within / 8 * 2;
  return {lane * 16 + word * 4, 4 * nibble + within % 2 * 16};
}

// The byte in its tile where the scale of a row (% 16) and a column (% 64) begins.
constexpr int four_bit_scale_at(int row, int column) {
  return 32 * 16 + row % 8 * 8 + row / 8 * 4 + column / kFourBitScaleColumns * 2;
}

// The row in the joint matrix of gate and up.
constexpr int64_t four_bit_gate_up_row(int64_t row, bool is_up) {
  return row / 8 * 16 + (is_up ? 8 : 0) + row % 8;
}

}  // namespace fathom::cuda
