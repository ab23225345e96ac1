// What: the packed pair of attention's inner loops by AMX tiles, in bf16; the rest is that of
// attention_avx512.cc.
//
// Inputs, outputs: attention_kernels.h. Layout: 16 words of a packed tile, keys or values, are in
// place the rows of a B tile; 16 queries (or rows of probabilities) are an A tile.
//
// Algorithm: 32 rows x 32 columns at a time in four accumulator tiles. Values are zero-padded
// behind the last key, so that every tile of keys takes the same multiply-adds.
//
// Determinism: a row's sums are the same chain of tile multiply-adds whatever rows are beside it.
//
// Limits: scores need a multiple of 32 dimensions, as all published models have; others take the
// AVX-512 loop.
#include <immintrin.h>

#include "device/cpu/tile_state.h"
#include "ops/attention/cpu/attention_kernels.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kTile = 16;       // rows of a tile
constexpr int64_t kTileWords = 16;  // pairs of bf16 in a row of A, rows of B
constexpr int64_t kTileBytes = 4 * kTileWords;
constexpr int64_t kKeyWords = kTileKeys / 2;
constexpr int64_t kScoresStride = kTileKeys * 4;  // bytes
constexpr int64_t kProbabilityStride = kTileKeys * 2;

int64_t padded(int64_t dims) { return (dims + kValuePadding - 1) / kValuePadding * kValuePadding; }

// Tiles 0 and 1 (rows 0 … 15) and, with kLower, 2 and 3 (rows 16 … 31) = a times 32 columns of b;
// strides in bytes, `tiles` of 16 words.
template <bool kLower>
inline __attribute__((always_inline)) void product(const std::byte* a, int64_t a_stride,
                                                   const std::byte* b, int64_t b_stride,
                                                   int64_t tiles) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t t = 0; t < tiles; ++t, a += kTileBytes, b += kTileWords * b_stride) {
    _tile_loadd(4, a, a_stride);
    _tile_loadd(6, b, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, b_stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kLower) {
      _tile_loadd(5, a + kTile * a_stride, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Stores the tiles that product() left: 32 columns, `stride` bytes from row to row.
template <bool kLower>
inline __attribute__((always_inline)) void store(float* out, int64_t stride) {
  _tile_stored(0, out, stride);
  _tile_stored(1, out + kTile, stride);
  if constexpr (kLower) {
    float* const lower = out + kTile * stride / 4;
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + kTile, stride);
  }
}

template <bool kLower>
void scores_rows(const std::byte* q, int64_t q_stride, const std::byte* packed, int64_t tiles,
                 float* scores) {
  for (int64_t key = 0; key < kTileKeys; key += 2 * kTile) {
    product<kLower>(q, q_stride, packed + key * 4, kTileKeys * 4, tiles);
    store<kLower>(scores + key, kScoresStride);
  }
}

void packed_scores(const void* q, int64_t q_stride, int64_t rows, const void* packed, int64_t dims,
                   float* scores) {
  const int64_t words = (dims + 1) / 2;
  if (words % kTileWords != 0) {
    kAvx512Bf16Attention.packed_scores(q, q_stride, rows, packed, dims, scores);
    return;
  }
  const TileState state;
  const int64_t stride = q_stride * 2;
  const auto* query = static_cast<const std::byte*>(q);
  const auto* keys = static_cast<const std::byte*>(packed);
  for (; rows > 0; rows -= 2 * kTile) {
    if (rows > kTile) {
      scores_rows<true>(query, stride, keys, words / kTileWords, scores);
    } else {
      scores_rows<false>(query, stride, keys, words / kTileWords, scores);
    }
    query += 2 * kTile * stride;
    scores += 2 * kTile * kTileKeys;
  }
}

void pack_values(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys, int64_t dims,
                 void* packed) {
  kAvx512Bf16Attention.pack_values(rows, stride, rows_bf16, num_keys, dims, packed);
  const int64_t words = (num_keys + 1) / 2;
  const int64_t columns = padded(dims);
  __builtin_memset(static_cast<uint32_t*>(packed) + words * columns, 0,
                   static_cast<size_t>((kKeyWords - words) * columns) * 4);
}

template <bool kLower>
void values_rows(const std::byte* p, int64_t rows, const std::byte* packed, int64_t columns,
                 const float* rescale, float* out, int64_t out_stride) {
  alignas(64) float sums[2 * kTile][2 * kTile];
  for (int64_t column = 0; column < columns; column += 2 * kTile) {
    product<kLower>(p, kProbabilityStride, packed + column * 4, columns * 4,
                    kKeyWords / kTileWords);
    store<kLower>(sums[0], sizeof sums[0]);
    for (int64_t row = 0; row < rows; ++row) {
      float* const result = out + row * out_stride + column;
      __m512 low = _mm512_load_ps(sums[row]);
      __m512 high = _mm512_load_ps(sums[row] + kTile);
      if (rescale[row] != 0.0f) {
        const __m512 factor = _mm512_set1_ps(rescale[row]);
        low = _mm512_fmadd_ps(factor, _mm512_loadu_ps(result), low);
        high = _mm512_fmadd_ps(factor, _mm512_loadu_ps(result + kTile), high);
      }
      _mm512_storeu_ps(result, low);
      _mm512_storeu_ps(result + kTile, high);
    }
  }
}

void packed_values(const void* p, int64_t rows, const void* packed, int64_t /*num_keys*/,
                   int64_t value_dims, const float* rescale, float* out, int64_t out_stride) {
  const TileState state;
  const auto* weights = static_cast<const std::byte*>(p);
  const auto* values = static_cast<const std::byte*>(packed);
  const int64_t columns = padded(value_dims);
  for (; rows > 0; rows -= 2 * kTile) {
    if (rows > kTile) {
      values_rows<true>(weights, rows < 2 * kTile ? rows : 2 * kTile, values, columns, rescale, out,
                        out_stride);
    } else {
      values_rows<false>(weights, rows, values, columns, rescale, out, out_stride);
    }
    weights += 2 * kTile * kProbabilityStride;
    rescale += 2 * kTile;
    out += 2 * kTile * out_stride;
  }
}

}  // namespace

const AttentionKernels& amx_bf16_attention() {
  static const AttentionKernels kernels = [] {
    AttentionKernels with_tiles = kAvx512Bf16FmaAttention;  // CPUs with AMX are Intel's
    with_tiles.strip_rows = kMaxStripRows;
    with_tiles.pack_values = pack_values;
    with_tiles.packed_scores = packed_scores;
    with_tiles.packed_values = packed_values;
    return with_tiles;
  }();
  return kernels;
}

}  // namespace fathom::cpu
