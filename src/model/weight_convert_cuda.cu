// What: rounds, quantizes, tiles, fills and splits weights during loading.
//
// Inputs/outputs: weight_convert_cuda.h.
//
// Layout: rounding and filling take a thread a value; quantizing takes a CTA of eight warps a block
// of 128x128, a lane four columns of every eighth row, read twice: once for the largest magnitude.
// The split goes through tiles of 32x32 in shared memory. Four-bit codes go into the words of their
// tiles by atomics: gate's and up's share words, and arrive at different times.
//
// Determinism: bitwise identical to ScaledMatrix::at() rounded, quantize_weight_block() and
// fill_dummy().
//
// Limits: PCI Express and disks deliver some 50 GB/s at most; these kernels only have to be faster
// than that.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/error.h"
#include "device/cuda/fp8.cuh"
#include "model/weight_convert_cuda.h"
#include "ops/moe/plans/four_bit_tiles.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes;
constexpr int kBlock = static_cast<int>(kScaleBlock), kPerLane = kBlock / kLanes;
constexpr int kTile = 32, kTileRows = 8;  // threads of a tile's CTA: [kTileRows, kTile]

// ---- Values ----

__device__ float wide(float value) { return value; }
__device__ float wide(bf16 value) { return to_float(value); }
__device__ float wide(f16 value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ float wide(e4m3 value) { return widen_f16(fp8_to_f16<Fp8::kE4M3>(value.bits)).x; }

// Four-bit codes, one a byte. kZero: the code of 0.
struct IntegerCode {
  static constexpr uint32_t kZero = kSymmetricZero;
  uint8_t bits;
};
struct E2m1Code {
  static constexpr uint32_t kZero = 0;
  uint8_t bits;
};
__device__ float wide(IntegerCode value) {
  return static_cast<float>(static_cast<int>(value.bits) - kSymmetricZero);
}
__device__ float wide(E2m1Code value) {
  const int code = value.bits % 8;
  const float magnitude = code < 2 ? 0.5f * static_cast<float>(code)
                                   : static_cast<float>((2 + code % 2) << code / 2) * 0.25f;
  return value.bits < 8 ? magnitude : -magnitude;
}

__device__ void narrow(float value, float* to) { *to = value; }
__device__ void narrow(float value, bf16* to) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ void narrow(float value, f16* to) {
  to->bits = __half_as_ushort(__float2half_rn(value));
}

__device__ float scale_at(const StoredPiece& piece, int row, int col) {
  const int64_t scale_row = (piece.scale_row + piece.first_row + row) / piece.scale_rows;
  const int scale_col = (piece.scale_col + piece.first_col + col) / piece.scale_cols;
  return piece.scales[scale_row * piece.scales_stride + scale_col];
}

// The piece's element in fp32; 0 beyond it.
template <typename T>
__device__ float value_at(const StoredPiece& piece, int row, int col) {
  if (row >= piece.rows || col >= piece.cols) return 0;
  const float value = wide(static_cast<const T*>(piece.values)[int64_t{row} * piece.cols + col]);
  return piece.scales == nullptr ? value : __fmul_rn(value, scale_at(piece, row, col));
}

// ---- Rounding ----

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const __grid_constant__ StoredPiece piece, Out* out, int64_t stride) {
  const int row = static_cast<int>(blockIdx.x);
  for (int col = static_cast<int>(threadIdx.x); col < piece.filled_cols; col += kThreads) {
    narrow(value_at<T>(piece, row, col), out + row * stride + col);
  }
}

// ---- Quantizing ----

__device__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t warps[kWarps];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % kLanes == 0) warps[threadIdx.x / kLanes] = value;
  __syncthreads();
  for (const uint32_t other : warps) value = max(value, other);
  return value;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ StoredPiece piece, uint8_t* out, int64_t stride,
                    float* scales, int64_t scales_stride, int32_t* not_finite) {
  constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;
  const int first_row = static_cast<int>(blockIdx.y) * kBlock;
  const int col =
      static_cast<int>(blockIdx.x) * kBlock + static_cast<int>(threadIdx.x) % kLanes * kPerLane;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int end = min(first_row + kBlock, piece.filled_rows);
  uint32_t largest = 0;  // as bits, which order NaN above infinity above all numbers
  for (int row = first_row + warp; row < end; row += kWarps) {
    for (int i = 0; i < kPerLane; ++i) {
      largest = max(largest, __float_as_uint(value_at<T>(piece, row, col + i)) & kMagnitude);
    }
  }
  largest = block_max(largest);
  if (largest >= kInfinity) {
    *not_finite = 1;
    return;
  }
  const float scale = __fdiv_rn(fmaxf(__uint_as_float(largest), kLeastMagnitude), kLargestE4M3);
  for (int row = first_row + warp; row < end; row += kWarps) {
    float v[kPerLane];
    for (int i = 0; i < kPerLane; ++i) {
      v[i] = __fdiv_rn(value_at<T>(piece, row, col + i), scale);
    }
    *reinterpret_cast<uint32_t*>(out + row * stride + col) =
        pack_fp8<Fp8::kE4M3>(v[0], v[1], v[2], v[3]);
  }
  if (threadIdx.x == 0) scales[blockIdx.y * scales_stride + blockIdx.x] = scale;
}

// ---- Four-bit tiles ----

// A row a CTA; a thread has the four codes of a row in a lane's word.
template <typename T>
__global__ void __launch_bounds__(kThreads) tile_kernel(const __grid_constant__ StoredPiece piece,
                                                        const __grid_constant__ WeightPlace place) {
  const int row = static_cast<int>(blockIdx.x);
  int64_t to_row = piece.first_row + row;
  if (place.tile_rows != WeightPlace::TileRows::kAll) {
    to_row = four_bit_gate_up_row(to_row, place.tile_rows == WeightPlace::TileRows::kUp);
  }
  const int in_tile = static_cast<int>(to_row % kFourBitTileRows);
  const auto code = [&](int col) -> uint32_t {
    if (row >= piece.rows || col >= piece.cols) return T::kZero;
    return static_cast<const T*>(piece.values)[int64_t{row} * piece.cols + col].bits;
  };
  for (int i = static_cast<int>(threadIdx.x); i < piece.filled_cols / 4; i += kThreads) {
    const int col = i / 4 * 16 + i % 4 * 2, to_col = piece.first_col + col;
    auto* const tile =
        static_cast<uint8_t*>(place.values) + four_bit_tile_at(to_row, to_col, place.cols);
    const FourBitPlace at = four_bit_place(in_tile, to_col % kFourBitBlockColumns);
    auto* const word = reinterpret_cast<uint32_t*>(tile + at.at);
    atomicAnd(word, ~(0x0F0F0F0Fu << at.shift));
    atomicOr(word, (code(col) | code(col + 1) << 16 | code(col + 8) << 8 | code(col + 9) << 24)
                       << at.shift);
    if (to_col % kFourBitScaleColumns != 0) continue;
    const bool exists = row < piece.rows && col < piece.cols;
    narrow(
        exists ? scale_at(piece, row, col) : 0.0f,
        reinterpret_cast<bf16*>(tile + four_bit_scale_at(in_tile, to_col % kFourBitBlockColumns)));
  }
}

// ---- Dummy values ----

__device__ void make(const DummyValues& values, int64_t index, e4m3* to) {
  to->bits = dummy_e4m3(values.bits(index, kDummyBytes), index);
}
__device__ void make(const DummyValues& values, int64_t index, IntegerCode* to) {
  to->bits = dummy_code(values.bits(index, kDummyCodes), index);
}
template <typename T>
__device__ void make(const DummyValues& values, int64_t index, T* to) {
  const float unit = dummy_unit(values.bits(index, kDummyUnits), index);
  narrow(__fadd_rn(values.center, __fmul_rn(values.spread, unit)), to);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dummy_kernel(const __grid_constant__ DummyPiece piece, T* out, int64_t stride) {
  const int row = static_cast<int>(blockIdx.x);
  const int64_t first = (int64_t{piece.first_row} + row) * piece.columns + piece.first_col;
  for (int col = static_cast<int>(threadIdx.x); col < piece.filled_cols; col += kThreads) {
    T value{};
    if (row < piece.rows && col < piece.cols) make(piece.values, first + col, &value);
    out[row * stride + col] = value;
  }
}

// ---- kv_b_proj's halves ----

// A head's W_UK or W_UV: `count` of its `rows_a_head` rows from `first` on.
template <typename T>
struct HeadRows {
  const T* values;          // [heads * rows_a_head, cols]
  const float* scales;      // [heads * rows_a_head / 128 rounded up, cols / 128]; null: none
  const float* row_scales;  // [heads * rows_a_head] or null
  int rows_a_head, first, count, cols;
};

template <typename T>
__device__ void move(const HeadRows<T>&, int, int, T value, T* to) {
  *to = value;
}
__device__ void move(const HeadRows<e4m3>& from, int row, int col, e4m3 value, bf16* to) {
  float scale = from.scales[row / kBlock * (from.cols / kBlock) + col / kBlock];
  if (from.row_scales != nullptr) scale = __fmul_rn(scale, from.row_scales[row]);
  narrow(__fmul_rn(wide(value), scale), to);
}

// out [heads, count, cols] or, transposed, [heads, cols, count].
template <bool kTransposed, typename T, typename Out>
__global__ void __launch_bounds__(kTile* kTileRows)
    head_rows_kernel(const __grid_constant__ HeadRows<T> from, Out* out) {
  __shared__ Out tile[kTile][kTile + 4 / sizeof(Out)];
  const int x = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.z);
  const int first_row = static_cast<int>(blockIdx.y) * kTile;
  const int first_col = static_cast<int>(blockIdx.x) * kTile;
  out += int64_t{head} * from.count * from.cols;
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int r = first_row + y, c = first_col + x;
    if (r >= from.count || c >= from.cols) continue;
    const int row = head * from.rows_a_head + from.first + r;
    Out value;
    move(from, row, c, from.values[int64_t{row} * from.cols + c], &value);
    if constexpr (kTransposed) {
      tile[y][x] = value;
    } else {
      out[int64_t{r} * from.cols + c] = value;
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
      const int r = first_row + x, c = first_col + y;
      if (r < from.count && c < from.cols) out[int64_t{c} * from.count + r] = tile[x][y];
    }
  }
}

// ---- Launches ----

template <typename T>
void convert_from(const StoredPiece& piece, const WeightPlace& place, int32_t* not_finite,
                  cudaStream_t stream) {
  const int64_t first = piece.first_row * place.cols + piece.first_col;
  const auto rows = static_cast<unsigned>(piece.filled_rows);
  if (place.type == DType::kBF16) {
    round_kernel<T><<<rows, kThreads, 0, stream>>>(piece, static_cast<bf16*>(place.values) + first,
                                                   place.cols);
  } else if (place.type == DType::kF32) {
    round_kernel<T><<<rows, kThreads, 0, stream>>>(piece, static_cast<float*>(place.values) + first,
                                                   place.cols);
  } else {
    FATHOM_CHECK(piece.first_row % kBlock == 0 && piece.first_col % kBlock == 0 &&
                     piece.filled_cols % kBlock == 0,
                 "a piece of {} columns from [{}, {}] on", piece.filled_cols, piece.first_row,
                 piece.first_col);
    const int64_t grid_cols = place.cols / kBlock;
    const dim3 blocks(static_cast<unsigned>(piece.filled_cols / kBlock),
                      static_cast<unsigned>(ceil_div(piece.filled_rows, kBlock)));
    quantize_kernel<T><<<blocks, kThreads, 0, stream>>>(
        piece, static_cast<uint8_t*>(place.values) + first, place.cols,
        place.scales + piece.first_row / kBlock * grid_cols + piece.first_col / kBlock, grid_cols,
        not_finite);
  }
  check(cudaGetLastError(), "converting weights");
}

template <typename T>
void convert_codes(const StoredPiece& piece, const WeightPlace& place, cudaStream_t stream) {
  FATHOM_CHECK(piece.scales != nullptr, "four-bit codes without scales");
  if (place.type != DType::kU8) return convert_from<T>(piece, place, nullptr, stream);
  FATHOM_CHECK(piece.first_col % kFourBitBlockColumns == 0 &&
                   piece.filled_cols % kFourBitBlockColumns == 0 &&
                   piece.scale_cols % kFourBitScaleColumns == 0 &&
                   piece.scale_col % kFourBitScaleColumns == 0,
               "a piece of {} columns from {} on, scales of {} columns from {} on",
               piece.filled_cols, piece.first_col, piece.scale_cols, piece.scale_col);
  tile_kernel<T><<<static_cast<unsigned>(piece.filled_rows), kThreads, 0, stream>>>(piece, place);
  check(cudaGetLastError(), "tiling four-bit weights");
}

template <bool kTransposed, typename T, typename Out>
void copy_head_rows(const HeadRows<T>& from, int heads, Out* out, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(ceil_div(from.cols, kTile)),
                    static_cast<unsigned>(ceil_div(from.count, kTile)),
                    static_cast<unsigned>(heads));
  head_rows_kernel<kTransposed><<<blocks, dim3(kTile, kTileRows), 0, stream>>>(from, out);
  check(cudaGetLastError(), "splitting kv_b_proj");
}

// Splits T's matrix into uk and uv in Out; sizes in `split` or, for scales, 1/128 of them.
template <typename T, typename Out>
void copy_halves(const KvBSplit& split, int unit, const void* values, void* uk, void* uv,
                 cudaStream_t stream) {
  const int nope = split.nope / unit, v = split.v / unit;
  HeadRows<T> from = {static_cast<const T*>(values),
                      split.kv_b.scales,
                      split.kv_b.row_scales,
                      nope + v,
                      0,
                      nope,
                      split.latent / unit};
  copy_head_rows<true>(from, split.heads, static_cast<Out*>(uk), stream);
  from.first = nope;
  from.count = v;
  copy_head_rows<false>(from, split.heads, static_cast<Out*>(uv), stream);
}

}  // namespace

void convert_piece(const StoredPiece& piece, const WeightPlace& place, int32_t* not_finite,
                   cudaStream_t stream) {
  switch (piece.type) {
    case DType::kF32:
      return convert_from<float>(piece, place, not_finite, stream);
    case DType::kBF16:
      return convert_from<bf16>(piece, place, not_finite, stream);
    case DType::kF16:
      return convert_from<f16>(piece, place, not_finite, stream);
    case DType::kF8E4M3:
      return convert_from<e4m3>(piece, place, not_finite, stream);
    case DType::kU8:
      if (piece.code == FourBitCode::kInteger) {
        return convert_codes<IntegerCode>(piece, place, stream);
      }
      return convert_codes<E2m1Code>(piece, place, stream);
    default:
      FATHOM_CHECK(false, "a weight of type {}", name_of(piece.type));
  }
}

void fill_dummy_piece(const DummyPiece& piece, void* to, int64_t to_stride, cudaStream_t stream) {
  const auto fill = [&]<typename T>(T* out) {
    dummy_kernel<<<static_cast<unsigned>(piece.filled_rows), kThreads, 0, stream>>>(piece, out,
                                                                                    to_stride);
    check(cudaGetLastError(), "making up weights");
  };
  switch (piece.type) {
    case DType::kF32:
      return fill(static_cast<float*>(to));
    case DType::kBF16:
      return fill(static_cast<bf16*>(to));
    case DType::kF16:
      return fill(static_cast<f16*>(to));
    case DType::kF8E4M3:
      return fill(static_cast<e4m3*>(to));
    case DType::kU8:
      return fill(static_cast<IntegerCode*>(to));  // of either form
    default:
      FATHOM_CHECK(false, "a dummy weight of type {}", name_of(piece.type));
  }
}

void split_kv_b(const KvBSplit& split, cudaStream_t stream) {
  const void* const values = split.kv_b.values;
  void *const uk = split.uk.values, *const uv = split.uv.values;
  if (split.kv_b.type == DType::kBF16) {
    return copy_halves<bf16, bf16>(split, 1, values, uk, uv, stream);
  }
  if (split.uk.type == DType::kBF16) {
    return copy_halves<e4m3, bf16>(split, 1, values, uk, uv, stream);
  }
  copy_halves<e4m3, e4m3>(split, 1, values, uk, uv, stream);
  copy_halves<float, float>(split, kBlock, split.kv_b.scales, split.uk.scales, split.uv.scales,
                            stream);
}

}  // namespace fathom::cuda
