// What: index scores by matrix tiles (AMX): 16 keys times 16 heads, 32 dimensions an instruction.
//
// Inputs, outputs, layout: index_kernels.h. Queries are packed and keys decoded by the AVX-512
// kernels: 16 words of 16 packed heads are a B tile as they lie, 16 decoded keys an A tile.
//
// Algorithm: 16 keys and a block of up to 64 heads at a time, in 4 tiles of sums, over all
// dimensions; then ReLU and weights by vectors, as there.
//
// Determinism: a key's sums depend on the dimensions and the number of heads only. tdpbf16ps adds
// the products of the even and of the odd dimensions of its 32 apart, flushing subnormals.
//
// Limits: 64 heads of 128 take 16 instructions of 16 cycles for 16 keys, 16 cycles a key where
// vectors take 128; at 3 GHz a core could read 25 GB/s of keys.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (TDPBF16PS).
#include <immintrin.h>

#include "device/cpu/tile_state.h"
#include "ops/indexer/index_kernels.h"
#include "ops/indexer/index_sum_avx512.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kTile = 16;  // keys, heads or words of a tile
static_assert(kTile == kHeadLanes && kIndexTileKeys % kTile == 0);

// Tiles 0 … 3 hold sums, 4 keys, 5 … 7 heads. The instructions name them in their code.

// sums[Z][16 keys][16 heads]: 16 keys, `words` pairs of values each, times Z * 16 packed heads.
template <int Z>
inline __attribute__((always_inline)) void multiply(const uint32_t* q, const uint32_t* keys,
                                                    int64_t words, float (*sums)[kTile * kTile]) {
  constexpr int64_t kHeadStride = Z * kTile * 4;
  _tile_zero(0);
  if constexpr (Z > 1) _tile_zero(1);
  if constexpr (Z > 2) _tile_zero(2);
  if constexpr (Z > 3) _tile_zero(3);
  for (int64_t word = 0; word < words; word += kTile, q += kTile * Z * kTile) {
    _tile_loadd(4, keys + word, words * 4);
    _tile_loadd(5, q, kHeadStride);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (Z > 1) {
      _tile_loadd(6, q + kTile, kHeadStride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (Z > 2) {
      _tile_loadd(7, q + 2 * kTile, kHeadStride);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (Z > 3) {
      _tile_loadd(5, q + 3 * kTile, kHeadStride);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (Z > 1) _tile_stored(1, sums[1], 64);
  if constexpr (Z > 2) _tile_stored(2, sums[2], 64);
  if constexpr (Z > 3) _tile_stored(3, sums[3], 64);
}

// Adds the Z * 16 heads' sums of 16 keys to their partial sums.
template <int Z>
inline __attribute__((always_inline)) void add_heads(const float (*sums)[kTile * kTile],
                                                     const float* weights,
                                                     float (*partial)[kHeadLanes]) {
  for (int64_t k = 0; k < kTile; ++k) {
    __m512 total = _mm512_load_ps(partial[k]);
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) {
      total = add_positive(total, weights + z * kTile, _mm512_load_ps(sums[z] + k * kTile));
    }
    _mm512_store_ps(partial[k], total);
  }
}

// Adds a block of Z * 16 heads to the partial sums of a tile's keys. Tiles are not forwarded from
// stores to loads: the vectors follow one group of 16 keys behind.
template <int Z>
void score_block(const uint32_t* q, const float* weights, const uint32_t* keys, int64_t words,
                 int64_t num_keys, float (*partial)[kHeadLanes]) {
  alignas(64) float sums[2][Z][kTile * kTile];
  int64_t first = 0;
  for (; first < num_keys; first += kTile) {
    multiply<Z>(q, keys + first * words, words, sums[first / kTile % 2]);
    if (first > 0) add_heads<Z>(sums[(first / kTile + 1) % 2], weights, partial + first - kTile);
  }
  add_heads<Z>(sums[(first / kTile + 1) % 2], weights, partial + first - kTile);
}

void score(const void* packed, const float* weights, int64_t heads, const void* keys,
           const float* scales, int64_t num_keys, int64_t dim, float* scores) {
  const int64_t words = dim / 2;
  const auto* q = static_cast<const uint32_t*>(packed);
  const auto* k = static_cast<const uint32_t*>(keys);
  alignas(64) float partial[kIndexTileKeys][kHeadLanes] = {};
  for (int64_t first = 0; first < heads; first += kBlockHeads) {
    const int64_t lanes = lanes_of(heads - first < kBlockHeads ? heads - first : kBlockHeads);
    switch (lanes / kTile) {
      case 1:
        score_block<1>(q, weights + first, k, words, num_keys, partial);
        break;
      case 2:
        score_block<2>(q, weights + first, k, words, num_keys, partial);
        break;
      case 3:
        score_block<3>(q, weights + first, k, words, num_keys, partial);
        break;
      default:
        score_block<4>(q, weights + first, k, words, num_keys, partial);
        break;
    }
    q += words * lanes;
  }
  store_scores(partial, scales, num_keys, scores);
}

void begin() { configure_tiles(); }
void end() { _tile_release(); }

}  // namespace

IndexKernels amx_index_kernels() {
  IndexKernels kernels = kAvx512Bf16Index;
  kernels.score = score;
  kernels.begin = begin;
  kernels.end = end;
  return kernels;
}

}  // namespace fathom::cpu
