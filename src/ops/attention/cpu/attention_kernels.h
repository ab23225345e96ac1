// The inner loops of attention, one set for each instruction level: attention_scalar.cc,
// attention_avx2.cc and attention_avx512.cc provide them, the drivers in *_attention_cpu.cc call
// them.
//
// This header is included where code is compiled for instructions that not every CPU has. It must
// not define an inline function: the linker could keep that copy for all callers.
//
// A set computes with one element type, bf16 (fp32 sums) or f32; queries, keys, values and
// probabilities are given in it. Keys come in tiles of up to kTileKeys; scores and probabilities of
// a row are kTileKeys apart. Two families over the same tile:
//   direct   every key is a row of its own somewhere in memory and its first `value_dims` elements
//            are the value (the latent cache, in place): nothing is packed, for few query rows
//   packed   keys and values were repacked for this tile, for many query rows
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/math_constants.h"

namespace fathom::cpu {

inline constexpr int64_t kTileKeys = 64;
// Keys that follow a tile: direct_scores prefetches the first half of them, direct_values the
// other, to keep the memory busy all the time.
inline constexpr int64_t kLookahead = kTileKeys;

struct AttentionKernels {
  bool bf16_elements;  // else f32
  // Best number of rows for one call of the packed pair: their scores stay in the L1.
  int64_t strip_rows;

  // Converts count elements of bf16 (source_bf16) or f32 to the set's element type.
  void (*convert)(const void* source, bool source_bf16, int64_t count, void* out);
  // Dequantizes count FP8 codes (e4m3, or e5m2) times scale to the set's element type.
  void (*decode_fp8)(const void* codes, bool e5m2, int64_t count, float scale, void* out);

  // scores[row][key] = q[row] . keys[key], dims long. q rows are q_stride elements apart. num_keys
  // is a multiple of 4.
  void (*direct_scores)(const void* q, int64_t q_stride, int64_t rows, const void* const* keys,
                        int64_t num_keys, int64_t dims, float* scores);
  // out[row] = rescale[row] * out[row] + sum over keys of p[row][key] * values[key], value_dims
  // long; rows of out are out_stride floats apart. Where rescale is 0 out is not read: it need not
  // be initialised.
  void (*direct_values)(const void* p, int64_t rows, const void* const* values, int64_t num_keys,
                        int64_t value_dims, const float* rescale, float* out, int64_t out_stride);

  // One step of the online softmax over a tile (Milakov and Gimelshein 2018), in powers of 2: scale
  // includes log2(e), and so does max. Row r sees the first visible[r] keys (0 … kTileKeys).
  // Updates max and sum, returns the factor of the row's earlier sums (0 at its first tile), and
  // p[r][key] = 2^(scale * score - max), 0 for masked keys.
  void (*softmax)(const float* scores, int64_t rows, const int32_t* visible, float scale,
                  float* max, float* sum, float* rescale, void* p);

  // out[i] = sum over splits of weights[split] * sums[split * part_stride + i], as bf16 or f32.
  void (*merge)(const float* sums, int64_t part_stride, int64_t parts, const float* weights,
                int64_t count, bool out_bf16, void* out);

  // Bytes of a packed tile of keys and of values.
  int64_t (*packed_keys_bytes)(int64_t dims);
  int64_t (*packed_values_bytes)(int64_t dims);
  // Packs columns [first, first + dims) of a tile's keys from rows `stride` elements apart. A tile
  // may be packed from several sources; first is even. Keys from num_keys on are zeroed.
  void (*pack_keys)(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys,
                    int64_t first, int64_t dims, void* packed);
  void (*pack_values)(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys,
                      int64_t dims, void* packed);
  // As the direct ones, over the whole packed tile. q rows have dims elements, zero-padded to an
  // even number. out rows have value_dims floats rounded up to kValuePadding. Rows of q, scores and
  // p up to the next multiple of 16 must be addressable; their contents are ignored.
  void (*packed_scores)(const void* q, int64_t q_stride, int64_t rows, const void* packed,
                        int64_t dims, float* scores);
  void (*packed_values)(const void* p, int64_t rows, const void* packed, int64_t num_keys,
                        int64_t value_dims, const float* rescale, float* out, int64_t out_stride);
};

// At most strip_rows of any set.
inline constexpr int64_t kMaxStripRows = 64;

// Columns that a packed tile of values is padded to.
inline constexpr int64_t kValuePadding = 64;

extern const AttentionKernels kScalarAttention;  // f32
#if defined(__x86_64__)
extern const AttentionKernels kAvx2Attention;           // f32
extern const AttentionKernels kAvx512Attention;         // f32
extern const AttentionKernels kAvx512Bf16Attention;     // bf16
extern const AttentionKernels kAvx512Bf16FmaAttention;  // the same bits where FMAs are faster
const AttentionKernels& amx_bf16_attention();           // bf16; packed tiles by AMX
#endif

}  // namespace fathom::cpu
