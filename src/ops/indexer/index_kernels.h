// The inner loops of index scores, one set for each instruction level and element type:
// index_kernels_scalar.cc, _avx2.cc, _avx512.cc and _amx.cc provide them, index_scores_cpu.cc calls
// them.
//
// This header is included where code is compiled for instructions that not every CPU has. It must
// not define an inline function: the linker could keep that copy for all callers.
//
// A set computes with words: one f32, or a pair of bf16 (whose products are exact in fp32). Heads
// are the lanes: queries are packed once a row as [blocks of kBlockHeads heads][words of a
// dimension][heads of the block, padded to kHeadLanes], and a key's words are broadcast over them,
// so that keys are read as they lie and ReLU and weights need no transposition.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/index_key_layout.h"

namespace fathom::cpu {

inline constexpr int64_t kHeadLanes = 16;
inline constexpr int64_t kBlockHeads = 64;
// Keys a call scores: a multiple of every group of keys that a kernel computes together (6, 8 and
// 12, by the number of heads) and of the 16 whose lanes it adds up together. 48 decoded keys (12
// KB) and the packed queries (16 KB with 64 heads) stay in an L1.
inline constexpr int64_t kIndexTileKeys = 48;

struct IndexKernels {
  bool bf16_elements;  // else f32

  // Packs a row's queries, of the type that goes with `format`, heads `head_stride` elements apart.
  // packed: round_up(heads, kHeadLanes) * dim elements, all written.
  void (*pack)(const void* values, IndexKeyFormat format, int64_t head_stride, int64_t heads,
               int64_t dim, void* packed);
  // `count` cache rows, one behind the other, to keys [count, dim] and their scales (1 where the
  // format has none).
  void (*decode)(const std::byte* rows, int64_t count, IndexKeyFormat format, int64_t dim,
                 void* keys, float* scales);
  // scores[i] = scales[i] * sum over heads of weights[h] * max(0, q[h] . keys[i]), i < num_keys <=
  // kIndexTileKeys. keys [kIndexTileKeys, dim] and scales [kIndexTileKeys] are initialised to the
  // end. weights are padded with 0 to kHeadLanes. scores [kIndexTileKeys]: all may be written.
  void (*score)(const void* packed, const float* weights, int64_t heads, const void* keys,
                const float* scales, int64_t num_keys, int64_t dim, float* scores);
  // Called by a thread before its first and after its last score(), unless null.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

extern const IndexKernels kScalarIndex;  // f32
#if defined(__x86_64__)
extern const IndexKernels kAvx2Index;        // f32
extern const IndexKernels kAvx512Index;      // f32
extern const IndexKernels kAvx512Bf16Index;  // bf16
IndexKernels amx_index_kernels();            // bf16; dimensions: a multiple of 32
#endif

}  // namespace fathom::cpu
