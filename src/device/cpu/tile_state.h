// Configuration of a thread's matrix tiles (AMX).
//
// Local to the vector files that include it: they are compiled for instructions that not every CPU
// has.
#pragma once

#if defined(__AMX_TILE__)

#include <immintrin.h>

#include <cstdint>

namespace fathom {
namespace {

// The layout of the instruction's operand (Intel's manual, volume 1, chapter 18).
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

// Eight tiles of 16 rows x 64 bytes; the first `narrow` of them have `rows` rows. Setting the
// shapes costs about 200 cycles and zeroes all tiles. Live tile state makes every thread switch
// more expensive: _tile_release() behind the last use.
inline void configure_tiles(int narrow = 0, int rows = 16) {
  TileShapes shapes;
  for (int tile = 0; tile < narrow; ++tile) shapes.rows[tile] = static_cast<uint8_t>(rows);
  // GCC 12's intrinsic names the first 8 of the 64 bytes as its input: without this the compiler
  // leaves out stores to the others.
  __asm__ volatile("" : : "m"(shapes));
  _tile_loadconfig(&shapes);
}

// The same for the lifetime of the object.
class TileState {
 public:
  explicit TileState(int narrow = 0, int rows = 16) { configure_tiles(narrow, rows); }
  ~TileState() { _tile_release(); }
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;
};

}  // namespace
}  // namespace fathom

#endif
