// What: out = softmax(scale * [q_latent q_rope] [latent rope]^T) latent, for 1 to 8 new tokens of
// each sequence; all heads of a row tile share each latent row that is read.
//
// Inputs/outputs: latent_decode_cuda.h. Parts of work: latent_decode_plan.h.
//
// Layout: one block a multiprocessor. A stage holds one page: 9 boxes of 64 keys x 64 columns (8
// KB, 128-byte swizzle; box 8 is the rotary key), two stages. Queries lie beside them as 9 boxes of
// [rows, 64 columns], probabilities as [rows, 64 keys]. kGroups warpgroups compute kRows rows each;
// one more warp issues copies.
//
// Algorithm, for each page of a part, transposed so that few rows waste nothing (rows are the N of
// the tensor core's instruction, 64 keys or 64 latent columns its M):
//   1. scores^T [keys, rows] = page [64, 576] q^T, as boxes arrive
//   2. mask, running maximum of each row over the warpgroup, probabilities to shared memory (bf16)
//   3. out^T [512, rows] += latent^T [512, 64] probabilities^T, in registers
// A row tile of several parts is joined within the launch: each block writes its normalised sum and
// its weight (log2 of the sum of exponentials) to scratch memory whose words hold -0 until then,
// and computes an equal share of the row tile's output from all parts, waiting on the data words
// themselves. No counters, no fences, no second launch. Blocks wait for one another, so there are
// never more than multiprocessors.
//
// Determinism: a part is computed by one block in one order, parts are joined in order of their
// number; no atomics. Bits depend on the plan, so on the lengths in the batch.
//
// Limits: 576 columns of bf16. Above 32 rows a sequence has other tiles:
// latent_decode_rows_cuda.cu.
//
// Source: the latent attention of DeepSeek-V2 (2024), section 2.1; split keys and their joining by
// log-sum-exp from FlashDecoding (Dao et al., 2023); data words as flags from NCCL's LL protocol.
//
// Measured: docs/kernels/latent_decode.md.
#include <cuda_bf16.h>

#include <cstddef>

#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/attention/latent_decode_cuda.h"
#include "ops/attention/latent_decode_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int kKeys = 64;        // of a tile: one page
constexpr int kBoxColumns = 64;  // 128 bytes, the swizzle's width
constexpr int kBoxes = kColumns / kBoxColumns, kLatentBoxes = kLatent / kBoxColumns;
constexpr int kBoxBytes = kKeys * 128;
constexpr int kStages = 2;
constexpr int kBoxesAWait = 3;  // of a page: the first scores begin when a third of it is there
constexpr int kWaits = kBoxes / kBoxesAWait;
constexpr int kGroupThreads = 128;

struct Arguments {
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* q_rope;
  const int32_t* block_tables;
  const LatentDecodePart* parts;
  const int32_t* first_part;
  __nv_bfloat16* out;
  float* sums;     // [slots, kGroups, 512 * kRows], in the order of the threads' registers
  float* weights;  // [weights, rows of the tile]: a part's, once for each block that reads it
  int32_t heads;
  float scale_log2;
};

template <int kRows, int kGroups>
struct SharedMemory {
  static constexpr int kTileRows = kRows * kGroups;

  alignas(1024) uint8_t pages[kStages][kBoxes * kBoxBytes];
  alignas(1024) uint8_t queries[kBoxes][kTileRows * 128];
  alignas(1024) uint8_t probabilities[kTileRows * 128];
  float exchange[2][kGroups][4][kRows];  // of a warpgroup's warps
  float weights[kTileRows];
  uint64_t arrived[kStages][kWaits], read[kStages];
};

// Blocks of 16 bytes within a row of 128, as the swizzle permutes them.
__device__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row % 8)) * 16); }

// ---- copies: one warp

template <typename Shared>
__device__ void issue_copies(Shared& shared, const CUtensorMap& map, const Arguments& arguments,
                             int first_part) {
  const int lane = threadIdx.x % 32;
  constexpr int kWithin = LatentDecodePart::kPagesWithin;
  int turn = 0;
  for (int p = first_part, more = 1; more; ++p) {
    const LatentDecodePart part = arguments.parts[p];
    more = part.more;
    const int32_t* table = arguments.block_tables + part.first_page;
    int ahead = 0;  // lane's page of the next 32
    for (int t = 0; t < part.num_tiles; ++t, ++turn) {
      if (t % 32 == kWithin) ahead = t + lane < part.num_tiles ? table[t + lane] : 0;
      const int later = __shfl_sync(~0u, ahead, (t - kWithin) & 31);
      const int page = t < kWithin ? part.pages[t] : later;
      const int stage = turn % kStages;
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

// ---- attention over one part: a warpgroup and its kRows rows
//
// A thread's registers of a [64, kRows] product: element j is row 16 * warp + lane / 4 (+ 8 if j &
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
        group_(threadIdx.x / kGroupThreads),
        thread_(threadIdx.x % kGroupThreads),
        warp_(thread_ / 32),
        lane_(threadIdx.x % 32),
        queries_(shared_address(shared.queries) + group_ * kRows * 128),
        probabilities_(shared_address(shared.probabilities) + group_ * kRows * 128) {}

  __device__ void run(const LatentDecodePart& part) {
    load_queries(part);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      maximum_[i] = -INFINITY;
      sum_[i] = 0;
    }
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) out_[box][j] = 0;
    }
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
    meet();  // the part before has been computed
#pragma unroll
    for (int u = 0; u < kRows * kBoxes * 8 / kGroupThreads; ++u) {
      const int i = thread_ + u * kGroupThreads, chunk = i % (kBoxes * 8);
      const int row = group_ * kRows + i / (kBoxes * 8);
      // Rows beyond the part's compute the first one's again; nobody reads what they give.
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

    float scores[kElements];
    mma_fence();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      if (k % (kBoxesAWait * 4) == 0) {
        barrier_wait(&shared_.arrived[stage][k / (kBoxesAWait * 4)], phase);
        mma_fence();
      }
      const int box = k / 4, bytes = k % 4 * 32;
      const uint64_t keys = swizzled_matrix(page + box * kBoxBytes + bytes, 1024);
      const uint64_t query =
          swizzled_matrix(queries_ + box * (Shared::kTileRows * 128) + bytes, 1024);
      if (k == 0) {
        mma_64x16x16<false, true>(scores, keys, query);
      } else {
        mma_64x16x16<false, false>(scores, keys, query);
      }
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
        mma_64x16x16<true, false>(out_[box],
                                  swizzled_matrix(page + box * kBoxBytes + k * 2048, 1024),
                                  swizzled_matrix(probabilities_ + k * 32, 1024));
      }
    }
    mma_commit();
    mma_wait();
    if (lane_ == 0) barrier_arrive(&shared_.read[stage]);
  }

  // Rows of a page past the sequence's end may hold anything, NaN too: zero times that is not zero.
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
    const int first_limit = part.kv_len - part.num_queries + 1;  // of the first new token
    if (first_key + kKeys <= first_limit) return;
    const int key = first_key + 16 * warp_ + lane_ / 4;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const int row = part.first_row + group_ * kRows + column(j / 4 * 2 + (j & 1));
      if (key + (j & 2 ? 8 : 0) >= first_limit + row / arguments_.heads) scores[j] = -INFINITY;
    }
  }

  // Of each row over the tile's keys, that is over the warpgroup. True where a maximum of this
  // thread's rows has grown: what has been summed is then to be multiplied by its factor.
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
          fmaxf(fmaxf(exchange[0][c], exchange[1][c]), fmaxf(exchange[2][c], exchange[3][c])) *
          arguments_.scale_log2;
      factor[i] = 1;
      if (most > maximum_[i]) {
        factor[i] = exp2_fast(maximum_[i] - most);
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
      // Of a row that has seen no key yet every score is -infinity.
      const float a = maximum_[i] == -INFINITY ? 0 : maximum_[i];
      const float b = maximum_[i + 1] == -INFINITY ? 0 : maximum_[i + 1];
      packed[j / 2] = pack_bf16(exp2_fast(scores[j] * arguments_.scale_log2 - a),
                                exp2_fast(scores[j + 1] * arguments_.scale_log2 - b));
      // The sum of what is multiplied: the rounded values.
      sum_[i] += __uint_as_float(packed[j / 2] << 16);
      sum_[i + 1] += __uint_as_float(packed[j / 2] & 0xFFFF0000u);
    }
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
      const int matrix = lane_ / 8, row = (j + matrix / 2) * 8 + lane_ % 8;
      store_matrices_transposed(probabilities_ + swizzled(row, 2 * warp_ + (matrix & 1)),
                                packed[2 * j], packed[2 * j + 1], packed[2 * j + 2],
                                packed[2 * j + 3]);
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
    }
  }

  __device__ float inverse(int i) const { return sum_[i] > 0 ? 1 / sum_[i] : 0; }

  __device__ void write_out(const LatentDecodePart& part) {
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const int i = j / 4 * 2 + (j & 1), row = group_ * kRows + column(i);
        const int at = box * kBoxColumns + 16 * warp_ + lane_ / 4 + (j & 2 ? 8 : 0);
        if (row >= part.rows) continue;
        arguments_.out[static_cast<size_t>(part.out_row + row) * kLatent + at] =
            __float2bfloat16(out_[box][j] * inverse(i));
      }
    }
  }

  // Adding +0 makes -0 of no sum: -0 says that a word is not there yet.
  __device__ void write_partial(const LatentDecodePart& part) {
    float* sums =
        arguments_.sums +
        (static_cast<size_t>(part.first_slot + part.split) * kGroups + group_) * (kLatent * kRows);
    if (warp_ == 0 && lane_ < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        shared_.weights[group_ * kRows + column(i)] =
            (sum_[i] > 0 ? maximum_[i] + log2f(sum_[i]) : -1e30f) + 0.0f;
      }
    }
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
      for (int j = 0; j < kElements; j += 4) {
        const int i = j / 2;
        store_shared_words(
            sums + (box * kElements + j) * kGroupThreads + thread_ * 4,
            make_float4(out_[box][j] * inverse(i) + 0.0f, out_[box][j + 1] * inverse(i + 1) + 0.0f,
                        out_[box][j + 2] * inverse(i) + 0.0f,
                        out_[box][j + 3] * inverse(i + 1) + 0.0f));
      }
    }
    meet();
    for (int x = thread_; x < part.num_splits * kRows; x += kGroupThreads) {
      const int row = group_ * kRows + x % kRows;
      const size_t reader = part.first_weight + part.split * part.num_splits + x / kRows;
      store_shared_word(arguments_.weights + reader * Shared::kTileRows + row,
                        shared_.weights[row]);
    }
  }

  Shared& shared_;
  const Arguments& arguments_;
  const int group_, thread_, warp_, lane_;
  const uint32_t queries_, probabilities_;
  int turn_ = 0;  // tiles since the launch
  float maximum_[kOwn], sum_[kOwn];
  float out_[kLatentBoxes][kElements];
};

// ---- joining the parts of a row tile: this block's share of the output

// Four values of two neighbouring rows (x and z: the first; y and w: the second) at two columns
// that are 8 apart, the rows' largest weights, and the sums of 2^(weight - largest).
struct Joined {
  float4 value = {0, 0, 0, 0};
  float2 largest = {-1e30f, -1e30f};
  float2 sum = {0, 0};

  // Makes room for a larger weight.
  __device__ void raise(float2 to) {
    const float a = exp2_fast(largest.x - to.x), b = exp2_fast(largest.y - to.y);
    largest = to;
    sum.x *= a, value.x *= a, value.z *= a;
    sum.y *= b, value.y *= b, value.w *= b;
  }
  __device__ void add(float4 other, float2 weight, float2 count) {
    const float a = exp2_fast(weight.x - largest.x), b = exp2_fast(weight.y - largest.y);
    sum.x += a * count.x, value.x += a * other.x, value.z += a * other.z;
    sum.y += b * count.y, value.y += b * other.y, value.w += b * other.w;
  }
};

__device__ bool is_missing(float word) { return __float_as_uint(word) == 0x80000000u; }
__device__ bool is_missing(float2 v) { return is_missing(v.x) || is_missing(v.y); }
__device__ bool is_missing(float4 v) {
  return is_missing(v.x) || is_missing(v.y) || is_missing(v.z) || is_missing(v.w);
}

template <int kRows, int kGroups>
class Join {
 public:
  static constexpr int kTileRows = kRows * kGroups, kThreads = kGroups * kGroupThreads;
  static constexpr int kVectors = kLatent * kTileRows / 4;  // of one part
  static constexpr float kMissing = -0.0f;

  __device__ Join(const LatentDecodePart& part, const Arguments& arguments, Joined* exchange)
      : part_(part),
        arguments_(arguments),
        exchange_(exchange),
        splits_(part.num_splits),
        begin_(kVectors * part.split / splits_),
        end_(kVectors * (part.split + 1) / splits_),
        sums_(arguments.sums + static_cast<size_t>(part.first_slot) * (4 * kVectors)),
        weights_(arguments.weights +
                 static_cast<size_t>(part.first_weight + part.split) * kTileRows) {}

  __device__ void run() {
    const int vectors = end_ - begin_, thread = threadIdx.x;
    if (vectors >= kThreads) {
      // Many vectors, few parts: a thread joins all parts of its vectors.
      if (splits_ > 2) {
        for (int v = begin_ + thread; v < end_; v += kThreads) gather<1, 8>(v, 0, 1);
      } else {
        for (int v = begin_ + thread; v < end_; v += 4 * kThreads) gather<4, 2>(v, 0, 1);
      }
    } else {
      // Few vectors, many parts: several threads share a vector.
      const int sharers = min(splits_, kThreads / vectors);
      if (thread < vectors * sharers)
        gather<1, 8>(begin_ + thread % vectors, thread / vectors, sharers);
      named_barrier(kGroups + 1, kThreads);
      if (thread < vectors) {
        Joined total = exchange_[thread];
        for (int other = 1; other < sharers; ++other) {
          const Joined more = exchange_[thread + other * vectors];
          total.raise(make_float2(fmaxf(total.largest.x, more.largest.x),
                                  fmaxf(total.largest.y, more.largest.y)));
          total.add(more.value, more.largest, more.sum);
        }
        write(begin_ + thread, total);
      }
    }
    named_barrier(kGroups + 1, kThreads);  // all have read the weights
    take_back_weights();
  }

 private:
  // The next launch finds them missing. This share may need few of the rows: a weight that nobody
  // has waited for may still be on its way.
  __device__ void take_back_weights() const {
    constexpr int kAtOnce = 8;
    const int count = splits_ * kTileRows;
    for (int first = threadIdx.x; first < count; first += kAtOnce * kThreads) {
      float word[kAtOnce];
      const auto each = [&](auto visit) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = first + k * kThreads;
          if (i < count) visit(k, weights_of(i / kTileRows) + i % kTileRows);
        }
      };
      each([&](int k, const float* at) { word[k] = load_shared_word(at); });
      for (bool waiting = true; waiting;) {
        waiting = false;
        each([&](int k, const float* at) {
          if (!is_missing(word[k])) return;
          word[k] = load_shared_word(at);
          waiting = true;
        });
      }
      each([&](int, float* at) { store_shared_word(at, kMissing); });
    }
  }
  __device__ float* vector_of(int split, int vector) const {
    return sums_ + (static_cast<size_t>(split) * kVectors + vector) * 4;
  }
  __device__ float* weights_of(int split) const {
    return weights_ + static_cast<size_t>(split) * splits_ * kTileRows;
  }
  // Where the registers of a vector belong: the first of its rows, its first column.
  __device__ static int row_of(int vector) {
    const int group = vector / (kGroupThreads * kRows), within = vector % (kGroupThreads * kRows);
    const int element = within / kGroupThreads * 4 % (kRows / 2);
    return group * kRows + element / 4 * 8 + 2 * (within % 4);
  }
  __device__ static int column_of(int vector) {
    const int within = vector % (kGroupThreads * kRows), thread = within % kGroupThreads;
    return within / kGroupThreads * 4 / (kRows / 2) * kBoxColumns + thread / 32 * 16 +
           thread % 32 / 4;
  }

  // Of kVectorsAtOnce vectors, kThreads apart, every `sharers`-th part from the first, kPartsAtOnce
  // at a time: all that is missing is asked for together until it is there.
  template <int kVectorsAtOnce, int kPartsAtOnce>
  __device__ void gather(int vector, int first, int sharers) {
    Joined joined[kVectorsAtOnce];
    for (int split = first; split < splits_; split += kPartsAtOnce * sharers) {
      float4 value[kVectorsAtOnce][kPartsAtOnce];
      float2 weight[kVectorsAtOnce][kPartsAtOnce];
      const auto each = [&](auto visit) {
#pragma unroll
        for (int v = 0; v < kVectorsAtOnce; ++v) {
#pragma unroll
          for (int s = 0; s < kPartsAtOnce; ++s) {
            visit(v, s, vector + v * kThreads, split + s * sharers);
          }
        }
      };
      each([&](int v, int s, int at, int part) {
        const bool exists = at < end_ && part < splits_;
        value[v][s] = exists ? load_shared_words4(vector_of(part, at)) : make_float4(0, 0, 0, 0);
        weight[v][s] = exists ? load_shared_words2(weights_of(part) + row_of(at))
                              : make_float2(-1e30f, -1e30f);
      });
      for (bool waiting = true; waiting;) {
        waiting = false;
        each([&](int v, int s, int at, int part) {
          if (is_missing(value[v][s])) {
            value[v][s] = load_shared_words4(vector_of(part, at));
            waiting = true;
          }
          if (is_missing(weight[v][s])) {
            weight[v][s] = load_shared_words2(weights_of(part) + row_of(at));
            waiting = true;
          }
        });
      }
#pragma unroll
      for (int v = 0; v < kVectorsAtOnce; ++v) {
        float2 largest = joined[v].largest;
#pragma unroll
        for (int s = 0; s < kPartsAtOnce; ++s) {
          largest = make_float2(fmaxf(largest.x, weight[v][s].x), fmaxf(largest.y, weight[v][s].y));
        }
        joined[v].raise(largest);
      }
      each([&](int v, int s, int at, int part) {
        if (at >= end_ || part >= splits_) return;
        joined[v].add(value[v][s], weight[v][s], make_float2(1, 1));
        // Nobody else reads this vector: the next launch finds it missing.
        store_shared_words(vector_of(part, at),
                           make_float4(kMissing, kMissing, kMissing, kMissing));
      });
    }
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      if (vector + v * kThreads >= end_) break;
      if (end_ - begin_ < kThreads) {
        exchange_[threadIdx.x] = joined[v];
      } else {
        write(vector + v * kThreads, joined[v]);
      }
    }
  }

  __device__ void write(int vector, const Joined& joined) const {
    const int row = row_of(vector);
    __nv_bfloat16* out =
        arguments_.out + static_cast<size_t>(part_.out_row + row) * kLatent + column_of(vector);
    const float a = 1 / joined.sum.x, b = 1 / joined.sum.y;
    if (row < part_.rows) {
      out[0] = __float2bfloat16(joined.value.x * a);
      out[8] = __float2bfloat16(joined.value.z * a);
    }
    if (row + 1 < part_.rows) {
      out[kLatent] = __float2bfloat16(joined.value.y * b);
      out[kLatent + 8] = __float2bfloat16(joined.value.w * b);
    }
  }

  const LatentDecodePart& part_;
  const Arguments& arguments_;
  Joined* exchange_;
  const int splits_, begin_, end_;
  float* sums_;
  float* weights_;
};

// ---- the kernel

// Warpgroups come in fours of warps where registers are moved between them.
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
  __syncthreads();
  wait_for_earlier_launches();
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
    let_next_launch_begin();
    named_barrier(kGroups + 1, kGroups * kGroupThreads);  // the pages' memory is free
    for (int p = first_part, more = 1; more; ++p) {
      const LatentDecodePart part = arguments.parts[p];
      more = part.more;
      if (part.num_splits == 1) continue;
      Join<kRows, kGroups>(part, arguments, reinterpret_cast<Joined*>(shared.pages)).run();
      named_barrier(kGroups + 1, kGroups * kGroupThreads);
    }
  }
}

template <int kRows, int kGroups>
void launch_for(const CUtensorMap& map, const Arguments& arguments, int num_blocks,
                cudaStream_t stream) {
  const auto kernel = latent_decode_kernel<kRows, kGroups>;
  constexpr int kBytes = sizeof(SharedMemory<kRows, kGroups>);
  static const bool prepared = (allow_shared_memory(kernel, kBytes), true);
  static_cast<void>(prepared);
  launch(kernel,
         {.blocks = static_cast<unsigned>(num_blocks),
          .threads = kBlockThreads<kGroups>,
          .shared_bytes = kBytes},
         stream, map, arguments);
}

__global__ void fill_missing(float* words, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    words[i] = -0.0f;
  }
}

}  // namespace

void prepare_latent_decode_scratch(float* scratch, int num_multiprocessors, cudaStream_t stream) {
  fill_missing<<<132, 256, 0, stream>>>(scratch,
                                        latent_decode_scratch(num_multiprocessors).words());
  check(cudaGetLastError(), "preparing the scratch memory of latent_decode");
}

void latent_decode(int tile_rows, int num_multiprocessors, const LatentDecodeArguments& arguments,
                   cudaStream_t stream) {
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
  constexpr float kLog2E = 1.4426950408889634f;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  switch (tile_rows) {
    case 16:
      return launch_for<16, 1>(map, inner, num_multiprocessors, stream);
    case 32:
      return launch_for<16, 2>(map, inner, num_multiprocessors, stream);
    default:
      return latent_decode_rows(tile_rows, num_multiprocessors, arguments, stream);
  }
}

}  // namespace fathom::cuda
