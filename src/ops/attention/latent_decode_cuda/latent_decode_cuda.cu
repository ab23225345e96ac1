// What: out = softmax(scale * [q_latent q_rope] [latent rope]^T) latent, for 1 to 8 new tokens of
// each sequence; all heads of a row tile share each latent row that is read.
//
// Inputs/outputs: latent_decode_cuda.h. Splits: latent_decode_plan.h.
//
// Layout: one CTA per SM. A stage holds one page: 9 boxes of 64 keys x 64 columns (8 KB, 128-byte
// swizzle; box 8 is the rotary key); two stages. Queries lie beside them as 9 boxes of [rows, 64
// columns], probabilities as [rows, 64 keys]. kGroups consumer warpgroups compute kRows rows each;
// one producer warp.
//
// Algorithm, for each page of a split, transposed so that few rows waste nothing (rows are N of
// wgmma, 64 keys or 64 latent columns its M):
//   1. scores^T [keys, rows] = page [64, 576] q^T, as boxes arrive
//   2. mask, running maximum of each row over the warpgroup, probabilities to shared memory (bf16)
//   3. out^T [512, rows] += latent^T [512, 64] probabilities^T, in registers
// Row tiles with several splits are combined within the launch: latent_decode_join_cuda.cuh.
//
// The plan, the block tables and the pages without new tokens are read before the PDL wait
// (latent_decode_cuda.h says who may have written them). Code that runs once a launch is kept
// short: it runs on one warp of each scheduler with a cold instruction cache.
//
// Determinism: a split is computed by one CTA in one order, splits are combined in order of their
// number; no atomics. Bits depend on the plan, so on the lengths in the batch.
//
// Limits: 576 columns of bf16. Above 32 rows a sequence has other tiles:
// latent_decode_rows_cuda.cu.
//
// Source: the latent attention of DeepSeek-V2 (2024), section 2.1; split-KV from FlashDecoding (Dao
// et al., 2023).
//
// Measured: docs/kernels/latent_decode.md.
#include <cuda_bf16.h>

#include <cstddef>

#include "base/math_constants.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "device/cuda/wgmma.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_cuda.h"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_rows_cuda.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_cuda.h"
#include "ops/attention/latent_decode_cuda/score_reference_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int kKeys = 64;        // keys of a tile: one page
constexpr int kBoxColumns = 64;  // 128 bytes, the swizzle's width
constexpr int kBoxes = kColumns / kBoxColumns, kLatentBoxes = kLatent / kBoxColumns;
constexpr int kBoxBytes = kKeys * 128;
constexpr int kStages = 2;
constexpr int kBoxesAWait = 3;  // the first scores begin when a third of the page has arrived
constexpr int kWaits = kBoxes / kBoxesAWait;
constexpr int kGroupThreads = 128;
constexpr int kPagesBeforeWait = 2;

struct Arguments {
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* q_rope;
  const int32_t* block_tables;
  const LatentDecodePart* parts;
  const int32_t* first_part;
  __nv_bfloat16* out;
  float* sums;  // [slots, kGroups, 512 * kRows / 2]: pairs of bf16 in the threads' register layout
  float* weights;  // [weights, rows of the tile]: a split's, once for each CTA that reads it
  int32_t heads;
  float scale_log2;
};

template <int kRows, int kGroups>
struct SharedMemory {
  static constexpr int kTileRows = kRows * kGroups;

  alignas(1024) uint8_t pages[kStages][kBoxes * kBoxBytes];
  alignas(1024) uint8_t queries[kBoxes][kTileRows * 128];
  alignas(1024) uint8_t probabilities[kTileRows * 128];
  float exchange[2][kGroups][4][kRows];  // per warp of a warpgroup
  alignas(16) float weights[kTileRows];
  uint64_t arrived[kStages][kWaits], read[kStages];
};

// Address field of a wgmma matrix descriptor for rows of 128 bytes.
__device__ uint32_t matrix_address(uint32_t shared) { return (shared & 0x3FFFF) >> 4 | 1u << 16; }
__device__ uint64_t swizzled_matrix_at(uint32_t address) {
  uint64_t matrix;
  asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(address), "r"(1024u >> 4 | 1u << 30));
  return matrix;
}

// Offset of a 16-byte chunk in the 128-byte swizzle.
__device__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row % 8)) * 16); }

// ---- producer: one warp

// Pages without new tokens were written by earlier steps: their loads are issued before the PDL
// wait.
template <typename Shared>
__device__ void issue_copies(Shared& shared, const CUtensorMap& map, const Arguments& arguments,
                             int first_part) {
  const int lane = threadIdx.x % 32;
  constexpr int kWithin = LatentDecodePart::kPagesWithin;
  int turn = 0;
  for (int p = first_part, more = 1; more; ++p) {
    const LatentDecodePart& part = arguments.parts[p];
    more = part.more;
    const int num_tiles = part.num_tiles;
    const int32_t* table = arguments.block_tables + part.first_page;
    int next = part.pages[lane % kWithin];           // each lane's page of the next few
    int ahead = lane < num_tiles ? table[lane] : 0;  // and of the next 32
    for (int t = 0; t < num_tiles; ++t, ++turn) {
      if (t == kWithin) next = ahead;
      if (t > 0 && t % 32 == 0) next = t + lane < num_tiles ? table[t + lane] : 0;
      const int page = __shfl_sync(~0u, next, t % 32);
      const int stage = turn % kStages;
      if (t == part.old_tiles || turn == kPagesBeforeWait) wait_for_earlier_launches();
      if (lane != 0) continue;
      if (turn >= kStages) barrier_wait(&shared.read[stage], (turn / kStages - 1) & 1);
      for (int box = 0; box < kBoxes; ++box) {
        uint64_t* arrived = &shared.arrived[stage][box / kBoxesAWait];
        if (box % kBoxesAWait == 0) barrier_expect(arrived, kBoxesAWait * kBoxBytes);
        copy_box(shared.pages[stage] + box * kBoxBytes, &map, arrived, box * kBoxColumns,
                 page * kKeys);
      }
    }
  }
}

// ---- attention over one split: a warpgroup and its kRows rows
//
// A thread's accumulators of a [64, kRows] wgmma: element j is row 16 * warp + lane / 4 (+ 8 if j &
// 2) of M and column 8 * (j / 4) + 2 * (lane % 4) + (j & 1) of N, so a thread has kRows / 4 of the
// query rows; column(i) is the i-th.

template <int kRows, int kGroups>
class Attention {
 public:
  static constexpr int kElements = kRows / 2, kOwn = kRows / 4;
  using Shared = SharedMemory<kRows, kGroups>;

  __device__ Attention(Shared& shared, const Arguments& arguments)
      : shared_(shared),
        arguments_(arguments),
        group_(kGroups > 1 ? threadIdx.x / kGroupThreads : 0),
        thread_(threadIdx.x % kGroupThreads),
        warp_(thread_ / 32),
        lane_(threadIdx.x % 32),
        queries_(shared_address(shared.queries) + group_ * kRows * 128),
        probabilities_(shared_address(shared.probabilities) + group_ * kRows * 128) {}

  __device__ void run(const LatentDecodePart& part) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = part.first_row + group_ * kRows + column(i);
      limit_[i] = part.kv_len - part.num_queries + 1 + row / arguments_.heads;
      maximum_[i] = kNoReference;
      sum_[i] = 0;
    }
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) out_[box][j] = 0;
    }
    load_queries(part);
    for (int t = 0; t < part.num_tiles; ++t, ++turn_) tile(part, (part.first_tile + t) * kKeys);
    add_up_sums();
    if (part.num_splits == 1) {
      write_out(part);
    } else {
      write_partial(part);
    }
  }

 private:
  __device__ int column(int i) const { return i / 2 * 8 + 2 * (lane_ % 4) + (i & 1); }
  __device__ void meet() const { named_barrier(1 + group_, kGroupThreads); }
  __device__ void meet_all() const { named_barrier(kGroups + 1, kGroups * kGroupThreads); }

  __device__ void load_queries(const LatentDecodePart& part) {
    wait_for_earlier_launches();
    meet();  // the previous split is done
#pragma unroll
    for (int u = 0; u < kRows * kBoxes * 8 / kGroupThreads; ++u) {
      const int i = thread_ + u * kGroupThreads, chunk = i % (kBoxes * 8);
      const int row = group_ * kRows + i / (kBoxes * 8);
      // Rows beyond the split's repeat its first one; their results are discarded.
      const size_t from = part.out_row + (row < part.rows ? row : 0);
      const __nv_bfloat16* source =
          chunk < kLatent / 8 ? arguments_.q_latent + from * kLatent + chunk * 8
                              : arguments_.q_rope + from * kRope + (chunk - kLatent / 8) * 8;
      copy_16(shared_address(shared_.queries[chunk / 8]) + swizzled(row, chunk % 8), source);
    }
    wait_for_copies();
    fence_async_proxy();
    meet();
  }

  __device__ void tile(const LatentDecodePart& part, int first_key) {
    const int stage = turn_ % kStages, phase = (turn_ / kStages) & 1;
    const uint32_t page = shared_address(shared_.pages[stage]);
    if (part.kv_len - first_key < kKeys) clear_beyond(stage, phase, part.kv_len - first_key);

    // One shuffle makes the value warp-uniform for the compiler.
    const uint32_t keys = __shfl_sync(~0u, matrix_address(page), 0);
    const uint32_t queries = __shfl_sync(~0u, matrix_address(queries_), 0);
    const uint32_t probabilities = __shfl_sync(~0u, matrix_address(probabilities_), 0);
    float scores[kElements];
    mma_fence();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      if (k % (kBoxesAWait * 4) == 0) {
        barrier_wait(&shared_.arrived[stage][k / (kBoxesAWait * 4)], phase);
        mma_fence();
      }
      const int box = k / 4, bytes = k % 4 * 32;
      const uint64_t key = swizzled_matrix_at(keys + (box * kBoxBytes + bytes) / 16);
      const uint64_t query =
          swizzled_matrix_at(queries + (box * (Shared::kTileRows * 128) + bytes) / 16);
      mma_64(scores, key, query, k > 0);
    }
    mma_commit();
    mma_wait();

    mask(part, first_key, scores);
    float factor[kOwn];
    const bool grew = update_maximum(scores, factor);
    write_probabilities(scores);
    if (__any_sync(~0u, grew)) {
#pragma unroll
      for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) out_[box][j] *= factor[j / 4 * 2 + (j & 1)];
      }
    }
    fence_async_proxy();
    meet();

    mma_fence();
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        mma_64<KAlong::kRows>(out_[box],
                              swizzled_matrix_at(keys + (box * kBoxBytes + k * 2048) / 16),
                              swizzled_matrix_at(probabilities + k * 32 / 16), 1);
      }
    }
    mma_commit();
    mma_wait();
    if (lane_ == 0) barrier_arrive(&shared_.read[stage]);
  }

  // Rows of a page past the sequence's end may hold anything, including NaN, which a zero
  // probability does not cancel.
  __device__ void clear_beyond(int stage, int phase, int valid) {
    for (int wait = 0; wait < kWaits; ++wait) barrier_wait(&shared_.arrived[stage][wait], phase);
    const int rows = kKeys - valid;
    for (int i = threadIdx.x; i < kLatentBoxes * rows * 8; i += kGroups * kGroupThreads) {
      const int box = i / (rows * 8), row = valid + i / 8 % rows;
      *reinterpret_cast<uint4*>(shared_.pages[stage] + box * kBoxBytes + row * 128 + i % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    meet_all();
  }

  __device__ void mask(const LatentDecodePart& part, int first_key, float (&scores)[kElements]) {
    if (first_key + kKeys <= part.kv_len - part.num_queries + 1) return;
    const int key = first_key + 16 * warp_ + lane_ / 4;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      if (key + (j & 2 ? 8 : 0) >= limit_[j / 4 * 2 + (j & 1)]) scores[j] = -INFINITY;
    }
  }

  // Updates each row's maximum over the tile's keys across the warpgroup. Returns true if a maximum
  // of this thread's rows has grown: earlier sums must then be rescaled by its factor.
  __device__ bool update_maximum(const float (&scores)[kElements], float (&factor)[kOwn]) {
    float(*exchange)[kRows] = shared_.exchange[turn_ & 1][group_];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int j = i / 2 * 4 + (i & 1);
      float most = fmaxf(scores[j], scores[j + 2]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
      }
      if (lane_ < 4) exchange[warp_][column(i)] = most;
    }
    meet();
    bool grew = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = column(i);
      const float most =
          fmaxf(fmaxf(exchange[0][c], exchange[1][c]), fmaxf(exchange[2][c], exchange[3][c]));
      factor[i] = 1;
      if (most > maximum_[i]) {
        factor[i] = exp2_fast(above_reference(maximum_[i], most, arguments_.scale_log2));
        maximum_[i] = most;
        sum_[i] *= factor[i];
        grew = true;
      }
    }
    return grew;
  }

  __device__ void write_probabilities(const float (&scores)[kElements]) {
    uint32_t packed[kElements / 2];  // 2j + h: columns 8j …, keys h * 8 …
#pragma unroll
    for (int j = 0; j < kElements; j += 2) {
      const int i = j / 4 * 2;
      packed[j / 2] = pack_bf16(
          exp2_fast(above_reference(scores[j], maximum_[i], arguments_.scale_log2)),
          exp2_fast(above_reference(scores[j + 1], maximum_[i + 1], arguments_.scale_log2)));
      // Sums the rounded values, because those are multiplied.
      sum_[i] += __uint_as_float(packed[j / 2] << 16);
      sum_[i + 1] += __uint_as_float(packed[j / 2] & 0xFFFF0000u);
    }
    store_transposed(probabilities_, packed);
  }

  // Stores pairs of columns of a [64, kRows] accumulator as [kRows, 64] of bf16.
  __device__ void store_transposed(uint32_t to, const uint32_t (&packed)[kElements / 2]) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
      const int matrix = lane_ / 8, row = (j + matrix / 2) * 8 + lane_ % 8;
      store_matrices_transposed(to + swizzled(row, 2 * warp_ + (matrix & 1)), packed[2 * j],
                                packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
    }
  }

  __device__ void add_up_sums() {
    float(*exchange)[kRows] = shared_.exchange[turn_ & 1][group_];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum_[i] += __shfl_xor_sync(~0u, sum_[i], distance);
      }
      if (lane_ < 4) exchange[warp_][column(i)] = sum_[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = column(i);
      sum_[i] = exchange[0][c] + exchange[1][c] + exchange[2][c] + exchange[3][c];
      inverse_[i] = sum_[i] > 0 ? reciprocal_fast(sum_[i]) : 0;
    }
  }

  // Writes the output, staged in the queries' shared memory, which is free: rows leave in runs of
  // 512 bytes.
  __device__ void write_out(const LatentDecodePart& part) {
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
      uint32_t packed[kElements / 2];
#pragma unroll
      for (int j = 0; j < kElements; j += 2) {
        const int i = j / 4 * 2;
        packed[j / 2] = pack_bf16(out_[box][j] * inverse_[i], out_[box][j + 1] * inverse_[i + 1]);
      }
      store_transposed(queries_ + box * (Shared::kTileRows * 128), packed);
    }
    meet();
    const int rows = part.rows - group_ * kRows;
    uint4* const out = reinterpret_cast<uint4*>(
        arguments_.out + static_cast<size_t>(part.out_row + group_ * kRows) * kLatent);
    constexpr int kChunks = kLatent / 8;
#pragma unroll
    for (int u = 0; u < kRows * kChunks / kGroupThreads; ++u) {
      const int i = thread_ + u * kGroupThreads, row = i / kChunks, chunk = i % kChunks;
      if (row < rows) {
        out[i] = *reinterpret_cast<const uint4*>(shared_.queries[chunk / 8] +
                                                 group_ * (kRows * 128) + swizzled(row, chunk % 8));
      }
    }
  }

  __device__ void write_partial(const LatentDecodePart& part) {
    if (warp_ == 0 && lane_ < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        shared_.weights[group_ * kRows + column(i)] = present(
            sum_[i] > 0 ? fmaf(maximum_[i], arguments_.scale_log2, log2_fast(sum_[i])) : -1e30f);
      }
    }
    meet();
    // Each reader's weights are contiguous over all splits.
    for (int x = thread_; x < part.num_splits * (kRows / 4); x += kGroupThreads) {
      const int row = group_ * kRows + x % (kRows / 4) * 4;
      const size_t at = part.first_weight + x / (kRows / 4) * part.num_splits + part.split;
      store_shared_words(arguments_.weights + at * Shared::kTileRows + row,
                         *reinterpret_cast<const float4*>(shared_.weights + row));
    }
    float* sums = arguments_.sums +
                  (static_cast<size_t>(part.first_slot + part.split) * kGroups + group_) *
                      (kLatent * kRows / 2) +
                  thread_ * 4;
#pragma unroll
    for (int box = 0; box < kLatentBoxes; box += 2) {
#pragma unroll
      for (int j = 0; j < kElements; j += 4) {
        const auto pair = [&](int b, int next) {
          const float factor = inverse_[j / 2 + next];
          return present_pair(out_[b][j + next] * factor, out_[b][j + 2 + next] * factor);
        };
        store_shared_words(
            sums + (box / 2 * (kElements / 4) + j / 4) * (4 * kGroupThreads),
            make_float4(pair(box, 0), pair(box, 1), pair(box + 1, 0), pair(box + 1, 1)));
      }
    }
  }

  Shared& shared_;
  const Arguments& arguments_;
  const int group_, thread_, warp_, lane_;
  const uint32_t queries_, probabilities_;
  int turn_ = 0;     // tiles since the launch
  int limit_[kOwn];  // the first key that a row does not see
  float maximum_[kOwn], sum_[kOwn], inverse_[kOwn];
  float out_[kLatentBoxes][kElements];
};

// Scratch layout of write_partial(): a vector has two adjacent rows and two boxes; a word's columns
// are 8 apart.
template <int kRows_, int kGroups>
struct PartLayout {
  static constexpr int kRows = kRows_ * kGroups, kThreads = kGroups * kGroupThreads;
  static constexpr int kBarrier = kGroups + 1;
  static constexpr int kVectors = kLatent * kRows / 8, kGroupVectors = kVectors / kGroups;
  static constexpr int kSecondRow = 1, kSecondColumn = kBoxColumns, kPairColumn = 8;

  __device__ static int row_of(uint32_t vector) {
    const uint32_t group = kGroups > 1 ? vector / kGroupVectors : 0;
    return group * kRows_ + vector / kGroupThreads % (kRows_ / 8) * 8 + 2 * (vector % 4);
  }
  __device__ static int column_of(uint32_t vector) {
    const uint32_t within = vector % kGroupVectors, thread = within % kGroupThreads;
    return within / (kGroupThreads * kRows_ / 8) * (2 * kBoxColumns) + thread / 32 * 16 +
           thread % 32 / 4;
  }
  __device__ static int weight_at(uint32_t vector) { return row_of(vector); }
};

// ---- the kernel

// Warps are padded to warpgroups, as setmaxnreg requires.
template <int kGroups>
constexpr int kBlockThreads = kGroups* kGroupThreads + (kGroups > 1 ? kGroupThreads : 32);

template <int kRows, int kGroups>
__global__ void __launch_bounds__(kBlockThreads<kGroups>, 1)
    latent_decode_kernel(const __grid_constant__ CUtensorMap map,
                         const __grid_constant__ Arguments arguments) {
  using Shared = SharedMemory<kRows, kGroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (uint64_t& arrived : shared.arrived[stage]) barrier_init(&arrived, 1);
      barrier_init(&shared.read[stage], kGroups * 4);
    }
    fence_barrier_init();
    prefetch_map(&map);
  }
  let_next_launch_begin();
  __syncthreads();
  const int first_part = __shfl_sync(~0u, arguments.first_part[blockIdx.x], 0);

  if (warp >= kGroups * 4) {
    if constexpr (kGroups > 1) give_registers<24>();
    if (warp == kGroups * 4) issue_copies(shared, map, arguments, first_part);
  } else {
    if constexpr (kGroups > 1) take_registers<240>();
    {
      Attention<kRows, kGroups> attention(shared, arguments);
      for (int p = first_part, more = 1; more; ++p) {
        const LatentDecodePart part = arguments.parts[p];
        more = part.more;
        attention.run(part);
      }
    }
    named_barrier(kGroups + 1, kGroups * kGroupThreads);  // the pages' memory is free
    for (int p = first_part, more = 1; more; ++p) {
      const LatentDecodePart part = arguments.parts[p];
      more = part.more;
      if (part.num_splits == 1) continue;
      using Joining = JoinedShare<PartLayout<kRows, kGroups>>;
      static_assert(sizeof(typename Joining::Memory) <= sizeof(Shared::pages));
      constexpr int kTileRows = Shared::kTileRows;
      Joining(
          part, part.rows,
          arguments.sums + static_cast<size_t>(part.first_slot) * (kLatent * kTileRows / 2),
          Joining::kVectors,
          arguments.weights +
              (static_cast<size_t>(part.first_weight) + part.split * part.num_splits) * kTileRows,
          kTileRows, arguments.out + static_cast<size_t>(part.out_row) * kLatent,
          reinterpret_cast<typename Joining::Memory&>(shared.pages))
          .run();
      named_barrier(kGroups + 1, kGroups * kGroupThreads);
    }
  }
}

template <int kRows, int kGroups>
void launch_for(const CUtensorMap& map, const Arguments& arguments, int num_blocks,
                GpuStream stream) {
  const auto kernel = latent_decode_kernel<kRows, kGroups>;
  constexpr int kBytes = sizeof(SharedMemory<kRows, kGroups>);
  stream.device().allow_shared_memory(kernel, kBytes);
  launch_co_resident("latent_decode", kernel,
                     {.blocks = static_cast<unsigned>(num_blocks),
                      .threads = kBlockThreads<kGroups>,
                      .shared_bytes = kBytes},
                     num_blocks, stream, map, arguments);
}

__global__ void fill_missing(float* words, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    words[i] = -0.0f;
  }
}

}  // namespace

void prepare_latent_decode_scratch(float* scratch, int num_multiprocessors, GpuStream stream) {
  fill_missing<<<132, 256, 0, stream>>>(scratch,
                                        latent_decode_scratch(num_multiprocessors).words());
  check(cudaGetLastError(), "preparing the scratch memory of latent_decode");
}

void latent_decode(int tile_rows, int num_multiprocessors, const LatentDecodeArguments& arguments,
                   GpuStream stream) {
  check(
      num_multiprocessors <= kMostLatentDecodeBlocks ? cudaSuccess : cudaErrorInvalidConfiguration,
      "launching latent_decode on so many multiprocessors");
  if (arguments.format != CacheFormat::kBF16) {
    const auto decode = tile_rows > 32 ? latent_decode_8_bit_rows : latent_decode_8_bit;
    return decode(tile_rows, num_multiprocessors, arguments, stream);
  }
  if (tile_rows > 32) {
    return latent_decode_rows(tile_rows, num_multiprocessors, arguments, stream);
  }
  const CUtensorMap map =
      bf16_map(arguments.pages, {.rows = arguments.num_pages * kKeys, .columns = kColumns},
               {.rows = kKeys, .columns = kBoxColumns});
  Arguments inner;
  inner.q_latent = static_cast<const __nv_bfloat16*>(arguments.q_latent);
  inner.q_rope = static_cast<const __nv_bfloat16*>(arguments.q_rope);
  inner.block_tables = arguments.block_tables;
  inner.parts = arguments.parts;
  inner.first_part = arguments.first_part;
  inner.out = static_cast<__nv_bfloat16*>(arguments.out);
  inner.sums = arguments.scratch;
  inner.weights = arguments.scratch + latent_decode_scratch(num_multiprocessors).sums;
  inner.heads = arguments.heads;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  const auto launch_rows = tile_rows == 16 ? launch_for<16, 1> : launch_for<16, 2>;
  launch_rows(map, inner, num_multiprocessors, stream);
}

}  // namespace fathom::cuda
