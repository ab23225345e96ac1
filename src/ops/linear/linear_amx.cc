// What: bf16 and FP8 GEMMs by matrix tiles (AMX): 16 rows of x times 16 weight rows, 32 columns an
// instruction.
//
// Inputs, outputs: linear_kernels.h, `matrix_*`. Layout: 16 steps of a panel are a B tile as they
// lie in the packed matrix (16 pairs of columns x 16 weight rows); 16 gathered rows of x are an A
// tile. FP8 blocks are dequantized to bf16 in L1 first, by the AVX-512 kernels' table.
//
// Algorithm: up to 16 rows take a whole group (64 weight rows, 4 sums tiles) in one pass, so that
// the weights are read in one ascending stream; more rows take 32 x 32 outputs at a time, two
// blocks of columns deep, so that a pair's weights are read from the L1 by all rows. bf16 sums stay
// in their tile from block to block; FP8 sums leave it after each block, to be scaled. One or two
// rows do the same sums with fp32 vectors: tiles would be nearly empty, and configuring them costs
// time.
//
// Determinism: an output's sum is the same chain in all forms. tdpbf16ps adds the products of the
// even and of the odd columns of its 32 apart, from zero, each with one rounding (fma), flushing
// subnormals; then even + odd to the sum. A tile's rows do not see each other.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (TDPBF16PS).
#include <immintrin.h>

#include "device/cpu/bf16_fma_avx512.h"
#include "device/cpu/tile_state.h"
#include "ops/linear/expand_avx512.h"
#include "ops/linear/linear_kernels.h"

namespace fathom {
namespace {

constexpr int kTile = 16;       // rows of any tile
constexpr int kVectorRows = 2;  // up to so many rows vectors beat tiles
constexpr int kTileSteps = 16;  // steps (pairs of columns) of an instruction
constexpr int kTileColumns = 2 * kTileSteps;
constexpr int kBlockSteps = kBlockColumns / 2;
constexpr int kPanelFloats = 16;
constexpr int64_t kXStride = kBlockColumns * 2;  // bytes between the rows of a gathered block
constexpr int64_t kSumsStride = kPairRows * 4;   // and of the sums
constexpr int kRunBlocks = 2;                    // blocks of a pair that stay in L1: 16 KiB
constexpr int64_t kAhead = 4096;                 // bytes that vectors prefetch ahead
template <bool kFp8>
constexpr int64_t kPairStep = kFp8 ? 64 : 128;  // bytes of a pair's step

// Tiles 0 … 3 hold sums, 4 and 5 rows of x, 5 … 7 weights (5 is the one that the form needs). The
// instructions name them in their code, so constants name nothing but themselves.

// Steps of a block as B tiles: `panel` 0 … 3 of a group begins 64 bytes after the one before it.
struct Steps {
  const std::byte* data;
  int64_t stride;
  int tiles;  // of 16 steps, zero beyond the matrix
};

// Software prefetch: a thread reads one stream, but the hardware prefetcher alone reaches half of
// the memory rate.
class Ahead {
 public:
  // `bytes` from `at` on, in `parts` parts.
  Ahead(const std::byte* at, int64_t bytes, int parts)
      : at_(at), lines_(static_cast<int>((bytes / 64 + parts - 1) / parts)) {}

  // Prefetches the next part into L2. It may lie beyond the matrix: prefetches do not fault.
  inline __attribute__((always_inline)) void fetch() {
    for (int i = 0; i < lines_; ++i, at_ += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
    }
  }

 private:
  const std::byte* at_;
  int lines_;
};

int steps_of(int64_t columns) {
  return static_cast<int>((columns < kBlockColumns ? columns : kBlockColumns) + 1) / 2;
}

// A block of one or two pairs as the tiles want it: in place, unless its last tile is not whole or
// it is FP8. `scratch` holds kBlockSteps steps of two pairs.
template <bool kFp8>
Steps tile_steps(const std::byte* block, int64_t stride, int steps, int pairs, std::byte* scratch) {
  const int tiles = (steps + kTileSteps - 1) / kTileSteps;
  if (!kFp8 && steps % kTileSteps == 0) return {block, stride, tiles};
  const int64_t pair_bytes = 128;
  const int64_t scratch_stride = pairs * pair_bytes;
  for (int pair = 0; pair < pairs; ++pair) {
    std::byte* out = scratch + pair * pair_bytes;
    if constexpr (kFp8) {
      kLinearAvx512.expand_fp8_to_bf16(block + pair * 64, stride, steps, out, scratch_stride);
    } else {
      for (int s = 0; s < steps; ++s) {
        __builtin_memcpy(out + s * scratch_stride, block + pair * pair_bytes + s * stride, 128);
      }
    }
    for (int s = steps; s < tiles * kTileSteps; ++s) {
      __builtin_memset(out + s * scratch_stride, 0, 128);
    }
  }
  return {scratch, scratch_stride, tiles};
}

// sums[rows][16] += tile[rows][16] * scales[16]
inline __attribute__((always_inline)) void add_scaled_tile(const float* tile, int rows,
                                                           const float* scales, float* sums) {
  const __m512 factor = _mm512_loadu_ps(scales);
  for (int r = 0; r < rows; ++r) {
    float* const sum = sums + r * kPairRows;
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(tile + r * kPanelFloats), factor,
                                          _mm512_loadu_ps(sum)));
  }
}

// ---- one or two rows: the tiles' sums by vectors ----

// Splits x [rows][128] of one block into fp32, the even columns in front of the odd ones.
void split_columns(const uint16_t* x, int rows, float* out) {
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int i = 0; i < rows * kBlockSteps; i += 16, x += 32) {
    float* const row = out + i / kBlockSteps * kBlockColumns + i % kBlockSteps;
    const __m512i pairs = _mm512_loadu_si512(x);
    _mm512_storeu_si512(row, _mm512_slli_epi32(pairs, 16));
    _mm512_storeu_si512(row + kBlockSteps, _mm512_and_si512(pairs, odd));
  }
}

// 16 steps (fewer at the matrix' end) of a block for all rows and panels: even and odd sums.
template <bool kFp8, int kRows, int kPairs>
inline __attribute__((always_inline)) void vector_tile(const E4m3Tables& tables,
                                                       const std::byte* weights, int64_t stride,
                                                       int steps, const float* x,
                                                       __m512 (&sums)[kRows][2 * kPairs]) {
  const __m512i odd_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  __m512 even[kRows][2 * kPairs];
  __m512 odd[kRows][2 * kPairs];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < 2 * kPairs; ++p) even[r][p] = odd[r][p] = _mm512_setzero_ps();
  }
  for (int s = 0; s < steps; ++s, weights += stride) {
    __m512i panels[2 * kPairs];
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      const auto* ahead = reinterpret_cast<const char*>(weights) + kAhead + p * kPairStep<kFp8>;
      _mm_prefetch(ahead, _MM_HINT_T1);
      if constexpr (!kFp8) _mm_prefetch(ahead + 64, _MM_HINT_T1);
      if constexpr (kFp8) {
        expand(tables, _mm512_loadu_si512(weights + 64 * p), panels[2 * p], panels[2 * p + 1]);
      } else {
        panels[2 * p] = _mm512_loadu_si512(weights + 128 * p);
        panels[2 * p + 1] = _mm512_loadu_si512(weights + 128 * p + 64);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < 2 * kPairs; ++p) {
      const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(panels[p], 16));
      const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(panels[p], odd_half));
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const float* column = x + r * kBlockColumns + s;
        even[r][p] = _mm512_fmadd_ps(low, _mm512_set1_ps(column[0]), even[r][p]);
        odd[r][p] = _mm512_fmadd_ps(high, _mm512_set1_ps(column[kBlockSteps]), odd[r][p]);
      }
    }
  }
  // A partial tile is filled up with zeros, whose products turn -0 into +0.
  const __m512 filling = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < 2 * kPairs; ++p) {
      if (steps < kTileSteps) {
        even[r][p] = _mm512_add_ps(even[r][p], filling);
        odd[r][p] = _mm512_add_ps(odd[r][p], filling);
      }
      sums[r][p] = _mm512_add_ps(sums[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
    }
  }
}

template <bool kFp8, int kRows, int kPairs>
void vector_rows(const uint16_t* x, const PackedBlocks& weights, int blocks, float* out,
                 int64_t pair_stride) {
  alignas(64) float columns[kRows * kBlockColumns];
  const E4m3Tables tables;
  __m512 totals[kRows][2 * kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < 2 * kPairs; ++p) {
      totals[r][p] = _mm512_loadu_ps(out + p / 2 * pair_stride + r * kPairRows + p % 2 * 16);
    }
  }
  const std::byte* block = weights.data;
  for (int b = 0; b < blocks; ++b, block += weights.block_stride, x += kRows * kBlockColumns) {
    const int steps = steps_of(weights.columns - int64_t{b} * kBlockColumns);
    split_columns(x, kRows, columns);
    __m512 sums[kRows][2 * kPairs];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < 2 * kPairs; ++p) sums[r][p] = kFp8 ? _mm512_setzero_ps() : totals[r][p];
    }
    for (int s = 0; s < steps; s += kTileSteps) {
      const int here = steps - s < kTileSteps ? steps - s : kTileSteps;
      vector_tile<kFp8, kRows, kPairs>(tables, block + s * weights.step_stride, weights.step_stride,
                                       here, columns + s, sums);
    }
    for (int p = 0; p < 2 * kPairs; ++p) {
      if constexpr (kFp8) {
        const __m512 scales = _mm512_loadu_ps(reinterpret_cast<const float*>(
            block + steps * weights.step_stride + weights.scales_shift + 64 * p));
        for (int r = 0; r < kRows; ++r) {
          totals[r][p] = _mm512_fmadd_ps(sums[r][p], scales, totals[r][p]);
        }
      } else {
        for (int r = 0; r < kRows; ++r) totals[r][p] = sums[r][p];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < 2 * kPairs; ++p) {
      _mm512_storeu_ps(out + p / 2 * pair_stride + r * kPairRows + p % 2 * 16, totals[r][p]);
    }
  }
}

// ---- up to 16 rows: all of a group's panels at once ----

template <int kPairs>
inline __attribute__((always_inline)) void multiply_group(const std::byte* x, const Steps& steps,
                                                          Ahead ahead) {
  const std::byte* weights = steps.data;
  for (int t = 0; t < steps.tiles;
       ++t, x += kTileColumns * 2, weights += kTileSteps * steps.stride) {
    ahead.fetch();
    _tile_loadd(4, x, kXStride);
    _tile_loadd(5, weights, steps.stride);
    _tile_loadd(6, weights + 64, steps.stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (kPairs == 2) {
      _tile_loadd(7, weights + 128, steps.stride);
      _tile_loadd(5, weights + 192, steps.stride);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
}

template <bool kFp8, int kPairs>
void few_rows(const uint16_t* x, int rows, const PackedBlocks& weights, int blocks, float* sums,
              int64_t pair_stride) {
  alignas(64) std::byte scratch[kBlockSteps * 128 * kPairs];
  alignas(64) float tile[kTile * kPanelFloats];
  const TileState state(/*narrow=*/5, rows);  // sums and x
  if constexpr (!kFp8) {
    _tile_loadd(0, sums, kSumsStride);
    _tile_loadd(1, sums + kPanelFloats, kSumsStride);
    if constexpr (kPairs == 2) {
      _tile_loadd(2, sums + pair_stride, kSumsStride);
      _tile_loadd(3, sums + pair_stride + kPanelFloats, kSumsStride);
    }
  }
  const std::byte* block = weights.data;
  for (int b = 0; b < blocks; ++b, block += weights.block_stride, x += rows * kBlockColumns) {
    const int steps = steps_of(weights.columns - int64_t{b} * kBlockColumns);
    if constexpr (kFp8) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    multiply_group<kPairs>(
        reinterpret_cast<const std::byte*>(x),
        tile_steps<kFp8>(block, weights.step_stride, steps, kPairs, scratch),
        {block + weights.block_stride, weights.block_stride, kBlockSteps / kTileSteps});
    if constexpr (kFp8) {
      const auto* scales = reinterpret_cast<const float*>(block + steps * weights.step_stride +
                                                          weights.scales_shift);
      _tile_stored(0, tile, 64);
      add_scaled_tile(tile, rows, scales, sums);
      _tile_stored(1, tile, 64);
      add_scaled_tile(tile, rows, scales + 16, sums + kPanelFloats);
      if constexpr (kPairs == 2) {
        _tile_stored(2, tile, 64);
        add_scaled_tile(tile, rows, scales + 32, sums + pair_stride);
        _tile_stored(3, tile, 64);
        add_scaled_tile(tile, rows, scales + 48, sums + pair_stride + kPanelFloats);
      }
    }
  }
  if constexpr (!kFp8) {
    _tile_stored(0, sums, kSumsStride);
    _tile_stored(1, sums + kPanelFloats, kSumsStride);
    if constexpr (kPairs == 2) {
      _tile_stored(2, sums + pair_stride, kSumsStride);
      _tile_stored(3, sums + pair_stride + kPanelFloats, kSumsStride);
    }
  }
}

// ---- more rows: 32 x 32 outputs at a time ----

// One block of 16 or 32 rows (kLower) and one pair.
template <bool kLower>
inline __attribute__((always_inline)) void multiply_pair(const std::byte* x, const Steps& steps,
                                                         Ahead& ahead) {
  const std::byte* weights = steps.data;
  for (int t = 0; t < steps.tiles;
       ++t, x += kTileColumns * 2, weights += kTileSteps * steps.stride) {
    ahead.fetch();
    _tile_loadd(4, x, kXStride);
    _tile_loadd(6, weights, steps.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 64, steps.stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kLower) {
      _tile_loadd(5, x + kTile * kXStride, kXStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// A run of blocks of one pair, dequantized if FP8.
struct Run {
  Steps steps[kRunBlocks];
  const float* scales[kRunBlocks];  // FP8
  int blocks;
};

// sums[rows][32] += the run's products, rows <= 32; x is the run's first row in its first block,
// x_block_stride bytes from block to block.
template <bool kFp8, bool kLower>
void multiply_run(const std::byte* x, int64_t x_block_stride, int rows, const Run& run, Ahead ahead,
                  float* sums) {
  if constexpr (kFp8) {
    alignas(64) float tiles[4 * kTile * kPanelFloats];
    for (int b = 0; b < run.blocks; ++b, x += x_block_stride) {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kLower) {
        _tile_zero(2);
        _tile_zero(3);
      }
      multiply_pair<kLower>(x, run.steps[b], ahead);
      _tile_stored(0, tiles, 64);
      _tile_stored(1, tiles + kTile * kPanelFloats, 64);
      if constexpr (kLower) {
        _tile_stored(2, tiles + 2 * kTile * kPanelFloats, 64);
        _tile_stored(3, tiles + 3 * kTile * kPanelFloats, 64);
      }
      const int upper = rows < kTile ? rows : kTile;
      add_scaled_tile(tiles, upper, run.scales[b], sums);
      add_scaled_tile(tiles + kTile * kPanelFloats, upper, run.scales[b] + 16, sums + kPanelFloats);
      if constexpr (kLower) {
        float* const lower = sums + kTile * kPairRows;
        add_scaled_tile(tiles + 2 * kTile * kPanelFloats, rows - kTile, run.scales[b], lower);
        add_scaled_tile(tiles + 3 * kTile * kPanelFloats, rows - kTile, run.scales[b] + 16,
                        lower + kPanelFloats);
      }
    }
  } else {
    // The tiles are whole: missing rows go through a copy.
    alignas(64) float whole[2 * kTile * kPairRows];
    const bool in_place = rows == (kLower ? 2 * kTile : kTile);
    const auto bytes = static_cast<size_t>(rows) * kSumsStride;
    float* const at = in_place ? sums : whole;
    if (!in_place) __builtin_memcpy(whole, sums, bytes);
    _tile_loadd(0, at, kSumsStride);
    _tile_loadd(1, at + kPanelFloats, kSumsStride);
    if constexpr (kLower) {
      _tile_loadd(2, at + kTile * kPairRows, kSumsStride);
      _tile_loadd(3, at + kTile * kPairRows + kPanelFloats, kSumsStride);
    }
    for (int b = 0; b < run.blocks; ++b, x += x_block_stride) {
      multiply_pair<kLower>(x, run.steps[b], ahead);
    }
    _tile_stored(0, at, kSumsStride);
    _tile_stored(1, at + kPanelFloats, kSumsStride);
    if constexpr (kLower) {
      _tile_stored(2, at + kTile * kPairRows, kSumsStride);
      _tile_stored(3, at + kTile * kPairRows + kPanelFloats, kSumsStride);
    }
    if (!in_place) __builtin_memcpy(sums, whole, bytes);
  }
}

template <bool kFp8>
void many_rows(const uint16_t* x, int rows, const PackedBlocks& weights, int blocks, int pairs,
               float* sums, int64_t pair_stride) {
  alignas(64) std::byte scratch[kRunBlocks][kBlockSteps * 128];
  const TileState state;
  const int64_t x_block_stride = rows * kXStride;
  for (int first = 0; first < blocks; first += kRunBlocks) {
    for (int pair = 0; pair < pairs; ++pair) {
      Run run;
      run.blocks = blocks - first < kRunBlocks ? blocks - first : kRunBlocks;
      for (int b = 0; b < run.blocks; ++b) {
        const int64_t at = first + b;
        const std::byte* block = weights.data + at * weights.block_stride;
        const int steps = steps_of(weights.columns - at * kBlockColumns);
        run.steps[b] = tile_steps<kFp8>(block + pair * kPairStep<kFp8>, weights.step_stride, steps,
                                        1, scratch[b]);
        run.scales[b] = reinterpret_cast<const float*>(block + steps * weights.step_stride +
                                                       weights.scales_shift) +
                        pair * kPairRows;
      }
      const auto* in = reinterpret_cast<const std::byte*>(x) + first * x_block_stride;
      float* out = sums + pair * pair_stride;
      // The first rows of the first pair prefetch the next run, of both pairs.
      Ahead ahead(weights.data + (first + kRunBlocks) * weights.block_stride,
                  pair == 0 ? kRunBlocks * weights.block_stride : 0,
                  kRunBlocks * kBlockSteps / kTileSteps);
      for (int left = rows; left > 0; left -= 2 * kTile) {
        if (left > kTile) {
          multiply_run<kFp8, true>(in, x_block_stride, left < 2 * kTile ? left : 2 * kTile, run,
                                   ahead, out);
        } else {
          multiply_run<kFp8, false>(in, x_block_stride, left, run, ahead, out);
        }
        ahead = Ahead(nullptr, 0, 1);
        in += 2 * kTile * kXStride;
        out += 2 * kTile * kPairRows;
      }
    }
  }
}

template <bool kFp8>
void matrix(const uint16_t* x, int rows, const PackedBlocks& weights, int blocks, int pairs,
            float* sums, int64_t pair_stride) {
  const FlushToZero zero;  // for vectors, as for the tiles
  if (rows > kTile) {
    many_rows<kFp8>(x, rows, weights, blocks, pairs, sums, pair_stride);
  } else if (rows <= kVectorRows) {
    using Kernel = void (*)(const uint16_t*, const PackedBlocks&, int, float*, int64_t);
    static constexpr Kernel kKernels[2][kVectorRows] = {
        {vector_rows<kFp8, 1, 1>, vector_rows<kFp8, 2, 1>},
        {vector_rows<kFp8, 1, 2>, vector_rows<kFp8, 2, 2>}};
    kKernels[pairs - 1][rows - 1](x, weights, blocks, sums, pair_stride);
  } else if (pairs == 2) {
    few_rows<kFp8, 2>(x, rows, weights, blocks, sums, pair_stride);
  } else {
    few_rows<kFp8, 1>(x, rows, weights, blocks, sums, pair_stride);
  }
}

}  // namespace

const LinearKernels& linear_amx() {
  static const LinearKernels kernels = [] {
    LinearKernels with_tiles = kLinearAvx512;
    with_tiles.matrix_bf16 = matrix<false>;
    with_tiles.matrix_fp8 = matrix<true>;
    return with_tiles;
  }();
  return kernels;
}

}  // namespace fathom
