// What: a row of logits to a token, by the rules and with the arithmetic of sample().
//
// Inputs/outputs: sample_cuda.h.
//
// Layout: a cluster of 8 blocks has a row. Chunks of 256 ids go round the blocks, so that each has
// its part of the frequent tokens; a block keeps its chunks in shared memory, a warp reads a chunk
// at a time, eight values a lane. Block 0 decides.
//
// Algorithm:
//   1. load, NaN as -infinity; of rows with log-probabilities the sum of exponentials
//   2. bias, penalties, masks, in shared memory; the largest logit of the row
//   3. top-k, top-p: each block sends the candidates above a bound of its own, at which 96 of its
//      threads' largest lie (found bit by bit: a barrier that counts costs 40 clocks). Above the
//      highest of the bounds block 0 has all that there are: it sorts them, finds the border, sorts
//      what is kept by id and draws. Where that is not enough (a flat row, a thousand equals, a
//      large k) the border is found bit by bit over the whole row, 52 times counting or adding.
//   4. otherwise the chunks' sums go to block 0, which finds the chunk and in it the token.
// Sums are integers (logit_row.h), so that none of it depends on an order.
//
// Determinism: the token is a function of the row alone; the same as the CPU's.
//
// Limits: 400,000 tokens, as what 8 multiprocessors' shared memory holds.
//
// Source: FlashInfer's sampling without sorting (2025) for what to avoid; select_top of
// truncation.cc for the bound.
//
// Measured: docs/kernels/sampling.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/block_integers.cuh"
#include "device/cuda/cluster_memory.cuh"
#include "device/cuda/launch.h"
#include "ops/sampling/logit_order_cuda.cuh"
#include "ops/sampling/sample_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kBlocks = 8, kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kChunk = 256;
constexpr int kLoadsAhead = 3;  // chunks of a warp that are read together
constexpr int kGuess = 96;      // candidates that a block looks for
constexpr int kRoom = 128;      // and has room for
constexpr int kCandidates = kBlocks * kRoom;
constexpr int64_t kMaxVocab = 400'000;
constexpr uint64_t kLowestFinite = uint64_t{kLowestFiniteKey} << kIdBits;
constexpr uint32_t kInPrompt = 0x80000000;
constexpr double kUnits = 0x1p40;  // units_of(1)

struct Arguments : SampleArguments {
  int64_t counts_stride;
};

struct alignas(16) Shared {
  DeviceSampleRow row;
  uint64_t candidates[kCandidates];   // block 0's: orders, a part for each block
  uint64_t units_up_to[kCandidates];  // block 0's: of the sorted candidates
  uint64_t exchanged[2][kBlocks][2];  // two words of each block, in turn
  uint64_t parts[kWarps];
  uint64_t units_before;
  int32_t chunk, id;
  uint32_t count;
};

struct Exchanged {
  uint64_t words[kBlocks][2];
};

class Sampler {
 public:
  __device__ Sampler(const Arguments& arguments, Shared& shared, float* values)
      : arguments_(arguments),
        row_(shared.row),
        shared_(shared),
        values_(values),
        chunk_units_(reinterpret_cast<uint64_t*>(values + own_chunks(num_chunks()) * kChunk)),
        integers_(shared.parts),
        rank_(static_cast<int>(cluster_rank())),
        warp_(threadIdx.x / kWarp),
        lane_(threadIdx.x % kWarp) {}

  // Chunks of one block, and words of its shared memory, for so many chunks of the row.
  __host__ __device__ static constexpr int64_t own_chunks(int64_t chunks) {
    return (chunks + kBlocks - 1) / kBlocks;
  }

  // The token, in block 0; written there.
  __device__ void run(int64_t out) {
    for (int i = threadIdx.x; i < kCandidates; i += kThreads) shared_.candidates[i] = 0;
    const bool wants_logprob = row_.num_logprobs >= 0;
    load();
    if (wants_logprob) find_logprobs(out);
    int id = row_.given_id;
    if (id < 0) {
      change();
      id = choose();
    }
    if (wants_logprob && !raw_finite_) id = -1;
    if (rank_ == 0 && threadIdx.x == 0) write(out, id);
    // Block 0 may have been reading another's memory.
    cluster_arrive();
    cluster_wait();
  }

 private:
  __device__ int num_chunks() const {
    return static_cast<int>((arguments_.vocab + kChunk - 1) / kChunk);
  }
  __device__ bool changes() const {
    return row_.num_biases > 0 || row_.has_penalties || row_.num_masked > 0 ||
           row_.allowed_row >= 0;
  }
  // Whether values are looked at again after they have been loaded.
  __device__ bool keeps() const {
    return row_.num_logprobs >= 0 || row_.inverse_temperature != 0 || changes();
  }

  // ---- this thread's values: chunk i * kBlocks + rank is the block's i-th, and warp i % kWarps
  // has it

  __device__ float4* at(int own_chunk, int half) const {
    return reinterpret_cast<float4*>(values_ + own_chunk * kChunk + half * (kChunk / 2) +
                                     lane_ * 4);
  }
  __device__ int first_id(int own_chunk, int half) const {
    return (own_chunk * kBlocks + rank_) * kChunk + half * (kChunk / 2) + lane_ * 4;
  }

  // of(value, id) for each of them, ids ascending.
  template <typename Of>
  __device__ void for_each(Of of) const {
    for (int i = warp_; i * kBlocks + rank_ < num_chunks(); i += kWarps) {
      for_chunk(i, of);
    }
  }
  template <typename Of>
  __device__ void for_chunk(int i, Of of) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4& values = *at(i, half);
      const int id = first_id(i, half);
      of(values.x, id);
      of(values.y, id + 1);
      of(values.z, id + 2);
      of(values.w, id + 3);
    }
  }

  __device__ void see(float value, int id) {
    if (value > best_) {
      best_ = value;
      best_id_ = id;
    }
  }

  // ---- 1. loading

  __device__ void load() {
    const float* const row = arguments_.logits + row_.row * arguments_.logits_stride;
    const bool keeps_values = keeps();
    for (int first = warp_; first * kBlocks + rank_ < num_chunks(); first += kWarps * kLoadsAhead) {
      float4 loaded[kLoadsAhead][2];
#pragma unroll
      for (int ahead = 0; ahead < kLoadsAhead; ++ahead) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int id = first_id(first + ahead * kWarps, half);
          loaded[ahead][half] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
          if (id < arguments_.vocab) {
            loaded[ahead][half] = *reinterpret_cast<const float4*>(row + id);
          }
        }
      }
#pragma unroll
      for (int ahead = 0; ahead < kLoadsAhead; ++ahead) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first + ahead * kWarps, id = first_id(i, half);
          float4& x = loaded[ahead][half];
          x.x = comparable(x.x);
          x.y = id + 1 < arguments_.vocab ? comparable(x.y) : -INFINITY;
          x.z = id + 2 < arguments_.vocab ? comparable(x.z) : -INFINITY;
          x.w = id + 3 < arguments_.vocab ? comparable(x.w) : -INFINITY;
          see(x.x, id);
          see(x.y, id + 1);
          see(x.z, id + 2);
          see(x.w, id + 3);
          if (keeps_values && i * kBlocks + rank_ < num_chunks()) *at(i, half) = x;
        }
      }
    }
    __syncthreads();
  }

  // ---- what the blocks tell one another: two words each, which everyone then has

  __device__ Exchanged exchange(uint64_t a, uint64_t b) {
    uint64_t(*const words)[2] = shared_.exchanged[turn_];
    if (threadIdx.x < kBlocks) {
      const uint32_t there = address_in_block(shared_address(words[rank_]), threadIdx.x);
      store_word_in_block(there, a);
      store_word_in_block(there + sizeof(uint64_t), b);
    }
    __syncwarp();
    meet();
    // The other turn's words are written next: everyone has read them by then.
    turn_ ^= 1;
    Exchanged all;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      all.words[block][0] = words[block][0];
      all.words[block][1] = words[block][1];
    }
    return all;
  }
  __device__ void meet() {
    cluster_arrive();
    cluster_wait();
  }

  // Over the row.
  __device__ uint64_t sum_of_all(uint64_t own) {
    const Exchanged all = exchange(integers_.sum(own), 0);
    uint64_t sum = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) sum += all.words[block][0];
    return sum;
  }
  __device__ uint64_t largest_of_all(uint64_t own) {
    const Exchanged all = exchange(integers_.largest(own), 0);
    uint64_t most = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) most = max(most, all.words[block][0]);
    return most;
  }

  // The largest logit of what see() has seen, which is no -infinity; 0: there is none.
  __device__ uint64_t best_order() {
    return largest_of_all(best_id_ < 0 ? 0 : order_of(best_, best_id_));
  }
  __device__ static bool is_finite(uint64_t order) {
    return order != 0 && logit_in(order) != INFINITY;
  }

  __device__ uint64_t own_units(uint64_t lowest, float inverse_temperature) const {
    uint64_t sum = 0;
    for_each([&](float value, int id) {
      if (order_of(value, id) >= lowest) {
        sum += units_of(exp_term(value, max_, inverse_temperature));
      }
    });
    return sum;
  }

  // ---- log-probabilities, of the row as it came

  __device__ void find_logprobs(int64_t out) {
    const uint64_t best = best_order();
    raw_finite_ = is_finite(best);
    if (!raw_finite_) return;
    max_ = logit_in(best);
    log_sum_ = max_ + log(__ull2double_rn(sum_of_all(own_units(0, 1))) / kUnits);
    const int count = min(row_.num_logprobs, static_cast<int>(arguments_.vocab));
    if (count == 0) return;
    if (!gather(local_bound()).holds(count)) {
      const uint64_t border = find_border<false>(count, 0, 1);
      clear_candidates();
      meet();
      gather_from(max(border, kLowestFinite));
    }
    if (rank_ == 0) {
      integers_.sort(shared_.candidates, kCandidates);
      for (int i = threadIdx.x; i < kDeviceTopLogprobs; i += kThreads) {
        const uint64_t order = i < count ? shared_.candidates[i] : 0;
        const int64_t to = out * kDeviceTopLogprobs + i;
        arguments_.top_ids[to] = order == 0 ? -1 : id_in(order);
        arguments_.top_logprobs[to] =
            order == 0 ? 0 : static_cast<float>(logit_in(order) - log_sum_);
      }
    }
    clear_candidates();
    // Nobody sends candidates again before the largest logit has been exchanged.
  }

  __device__ void clear_candidates() {
    __syncthreads();
    for (int i = threadIdx.x; i < kCandidates; i += kThreads) shared_.candidates[i] = 0;
  }

  // ---- 2. bias, penalties, masks

  __device__ void change() {
    if (!changes()) return;
    for (int i = threadIdx.x; i < row_.num_biases; i += kThreads) {
      float* const value = own_value(arguments_.bias_ids[row_.first_bias + i]);
      if (value != nullptr) {
        *value = comparable(__fadd_rn(*value, arguments_.bias_values[row_.first_bias + i]));
      }
    }
    __syncthreads();
    if (row_.has_penalties) penalise();
    for (int i = threadIdx.x; i < row_.num_masked; i += kThreads) {
      float* const value = own_value(arguments_.masked_ids[row_.first_masked + i]);
      if (value != nullptr) *value = -INFINITY;
    }
    __syncthreads();
    best_ = -INFINITY;
    best_id_ = -1;
    const uint32_t* const allowed =
        row_.allowed_row < 0
            ? nullptr
            : arguments_.allowed + row_.allowed_row * ((arguments_.vocab + 31) / 32);
    for_each([&](float& value, int id) {
      if (allowed != nullptr && id < arguments_.vocab && !(allowed[id / 32] >> id % 32 & 1)) {
        value = -INFINITY;
      }
      see(value, id);
    });
    __syncthreads();
  }

  // Where this block has the value of this id; null: another has it.
  __device__ float* own_value(int id) const {
    const int chunk = id / kChunk;
    if (chunk % kBlocks != rank_) return nullptr;
    return values_ + chunk / kBlocks * kChunk + id % kChunk;
  }

  __device__ void penalise() {
    const uint32_t* const counts = arguments_.counts + row_.counts_slot * arguments_.counts_stride;
    for_each([&](float& value, int id) {
      const uint32_t word = id < arguments_.vocab ? counts[id] : 0;
      if (word == 0 || value == -INFINITY) return;
      const uint32_t count = word & ~kInPrompt;
      double logit = value;
      logit = logit > 0 ? __ddiv_rn(logit, row_.repetition_penalty)
                        : __dmul_rn(logit, row_.repetition_penalty);
      logit = __dsub_rn(logit, __dmul_rn(row_.frequency_penalty, count));
      if (count > 0) logit = __dsub_rn(logit, row_.presence_penalty);
      value = comparable(__double2float_rn(logit));
    });
    __syncthreads();
  }

  // ---- 3. the largest few of the row

  struct Candidates {
    uint64_t lowest;  // block 0 has all of the row from this order on
    bool overflowed;  // a block had more than it has room for
    bool all;         // that is all that the row has
    int count;        // from `lowest` on; block 0 only, once they are sorted

    // At least the row's `wanted` largest.
    __device__ bool holds(int wanted) const { return !overflowed && (all || wanted <= kGuess); }
  };

  // The highest key that kGuess of the threads' largest reach.
  __device__ uint32_t local_bound() const {
    const uint32_t key = best_id_ < 0 ? 0 : key_of(best_);
    uint32_t bound = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t pivot = bound | 1u << bit;
      if (__syncthreads_count(key >= pivot) >= kGuess) bound = pivot;
    }
    return max(bound, kLowestFiniteKey);
  }

  __device__ Candidates gather(uint32_t bound) {
    return gather_from(static_cast<uint64_t>(bound) << kIdBits);
  }

  // Sends block 0 this block's values from `lowest` on.
  __device__ Candidates gather_from(uint64_t lowest) {
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
    if (best_id_ >= 0 && order_of(best_, best_id_) >= lowest) {
      for_each([&](float value, int id) {
        const uint64_t order = order_of(value, id);
        if (order < lowest) return;
        const uint32_t place = atomicAdd(&shared_.count, 1);
        if (place < kRoom) {
          store_word_in_block(
              address_in_block(shared_address(&shared_.candidates[rank_ * kRoom + place]), 0),
              order);
        }
      });
    }
    __syncthreads();
    const Exchanged all = exchange(lowest, shared_.count);
    Candidates gathered = {0, false, true, 0};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      gathered.lowest = max(gathered.lowest, all.words[block][0]);
      gathered.overflowed |= all.words[block][1] > kRoom;
      gathered.all &= key_in(all.words[block][0]) == kLowestFiniteKey;
    }
    return gathered;
  }

  // Sorts block 0's candidates and forgets those that are not all that there are of their kind.
  __device__ void sort_candidates(Candidates& gathered) const {
    integers_.sort(shared_.candidates, kCandidates);
    gathered.count = 0;
#pragma unroll
    for (int part = 0; part < kCandidates / kThreads; ++part) {
      gathered.count +=
          __syncthreads_count(shared_.candidates[part * kThreads + threadIdx.x] >= gathered.lowest);
    }
  }

  // units_up_to[i] = the units of candidates 0 … i, zeros beyond `count`. Block 0.
  template <typename UnitsOf>
  __device__ uint64_t add_up(int count, UnitsOf units) const {
    const int first = threadIdx.x * 2;
    const uint64_t a = first < count ? units(first) : 0;
    const uint64_t b = first + 1 < count ? units(first + 1) : 0;
    uint64_t total = 0;
    const uint64_t before = integers_.sum_before(a + b, &total);
    __syncthreads();
    shared_.units_up_to[first] = before + a;
    shared_.units_up_to[first + 1] = before + a + b;
    __syncthreads();
    return total;
  }

  // How many of the first `count` candidates satisfy this. Block 0.
  template <typename Condition>
  __device__ int count_candidates(int count, Condition condition) const {
    int sum = 0;
#pragma unroll
    for (int part = 0; part < kCandidates / kThreads; ++part) {
      const int i = part * kThreads + static_cast<int>(threadIdx.x);
      sum += __syncthreads_count(i < count && condition(i));
    }
    return sum;
  }

  // The token, if top-k and top-p can be decided among the candidates; -1 if not. Block 0.
  // `row_units` are those of the whole row, known where top-p cuts it.
  __device__ int choose_among(Candidates gathered, uint64_t row_units) {
    if (gathered.overflowed) return -1;
    sort_candidates(gathered);
    int limit = gathered.count;
    if (row_.top_k > 0) {
      if (row_.top_k > limit && !gathered.all) return -1;
      limit = min(limit, row_.top_k);
    }
    add_up(limit, [&](int i) {
      return units_of(exp_term(logit_in(shared_.candidates[i]), max_, row_.inverse_temperature));
    });
    if (row_.top_p < 1) {
      const uint64_t total = row_.top_k > 0 ? shared_.units_up_to[limit - 1] : row_units;
      const uint64_t wanted = wanted_units(row_.top_p, total);
      const int below =
          count_candidates(limit, [&](int i) { return shared_.units_up_to[i] < wanted; });
      if (below == limit) return -1;
      limit = below + 1;
    }
    const uint64_t border = min_p_border();
    limit = count_candidates(limit, [&](int i) { return shared_.candidates[i] >= border; });
    return draw_among(limit);
  }

  // Draws among the first `count` candidates, by ascending id.
  __device__ int draw_among(int count) {
    int size = 2;
    while (size < count) size *= 2;
    constexpr int kIndexBits = 10;
    static_assert(kCandidates == 1 << kIndexBits);
    const uint64_t target = drawn_units(row_.uniform, shared_.units_up_to[count - 1]);
    uint64_t by_id[kCandidates / kThreads];
#pragma unroll
    for (int part = 0; part < kCandidates / kThreads; ++part) {
      const int i = part * kThreads + static_cast<int>(threadIdx.x);
      // The lower 20 bits of an order descend with the id.
      by_id[part] = i < count ? (shared_.candidates[i] & kIdMask) << kIndexBits | i : 0;
    }
    // Their units take the place of the sums: of the sorted candidates, by number.
    uint64_t units[2];
    const int first = static_cast<int>(threadIdx.x) * 2;
    const uint64_t up_to_before = first == 0 ? 0 : shared_.units_up_to[first - 1];
    units[0] = shared_.units_up_to[first] - up_to_before;
    units[1] = shared_.units_up_to[first + 1] - shared_.units_up_to[first];
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kCandidates / kThreads; ++part) {
      shared_.candidates[part * kThreads + threadIdx.x] = by_id[part];
    }
    shared_.units_up_to[first] = units[0];
    shared_.units_up_to[first + 1] = units[1];
    integers_.sort(shared_.candidates, size);
    constexpr uint64_t kIndexMask = kCandidates - 1;
    uint64_t own[2] = {0, 0}, total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + i < count) {
        own[i] = shared_.units_up_to[shared_.candidates[first + i] & kIndexMask];
      }
    }
    uint64_t before = integers_.sum_before(own[0] + own[1], &total);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (before <= target && target < before + own[i]) {
        shared_.id = id_in(shared_.candidates[first + i] >> kIndexBits);
      }
      before += own[i];
    }
    __syncthreads();
    return shared_.id;
  }

  // ---- the border over the whole row, bit by bit

  // The highest order from which on the row has `wanted` values (kMass: units) or more, counting
  // from `lowest` on; 0 if it has fewer.
  template <bool kMass>
  __device__ uint64_t find_border(uint64_t wanted, uint64_t lowest, float inverse_temperature) {
    lowest = max(lowest, kLowestFinite);
    uint64_t border = 0;
    for (int bit = kOrderBits - 1; bit >= 0; --bit) {
      const uint64_t pivot = border | uint64_t{1} << bit;
      const uint64_t from = max(pivot, lowest);
      uint64_t own = 0;
      for_each([&](float value, int id) {
        if (order_of(value, id) < from) return;
        own += kMass ? units_of(exp_term(value, max_, inverse_temperature)) : 1;
      });
      if (sum_of_all(own) >= wanted) border = pivot;
    }
    return border;
  }

  __device__ uint64_t find_row_border(uint64_t row_units) {
    uint64_t border = 0;
    if (row_.top_k > 0) border = find_border<false>(row_.top_k, 0, 1);
    if (row_.top_p < 1) {
      const uint64_t total =
          row_.top_k > 0 ? sum_of_all(own_units(border, row_.inverse_temperature)) : row_units;
      border = find_border<true>(wanted_units(row_.top_p, total), border, row_.inverse_temperature);
    }
    return border;
  }

  // ---- choosing

  // Nothing below is kept. The largest logit always is.
  __device__ uint64_t min_p_border() const {
    if (!row_.has_min_p) return 0;
    const float border = __double2float_rn(__dadd_rn(max_, row_.min_p_depth));
    return static_cast<uint64_t>(key_of(comparable(fminf(border, max_)))) << kIdBits;
  }

  __device__ int choose() {
    const uint64_t best = best_order();
    if (!is_finite(best)) return -1;
    if (row_.inverse_temperature == 0) return id_in(best);
    max_ = logit_in(best);
    uint64_t border = 0;
    if (row_.top_k > 0 || row_.top_p < 1) {
      const uint64_t row_units = row_.top_p < 1 && row_.top_k == 0
                                     ? sum_of_all(own_units(0, row_.inverse_temperature))
                                     : 0;
      const Candidates gathered = gather(local_bound());
      const int id = rank_ == 0 ? choose_among(gathered, row_units) : -1;
      const int chosen = static_cast<int>(exchange(id, 0).words[0][0]);
      if (chosen >= 0) return chosen;
      border = find_row_border(row_units);
    }
    return draw_from_row(max(border, min_p_border()));
  }

  // Draws among the row's values from `lowest` on; the id in block 0.
  __device__ int draw_from_row(uint64_t lowest) {
    const uint32_t to = address_in_block(shared_address(chunk_units_), 0);
    for (int i = warp_; i * kBlocks + rank_ < num_chunks(); i += kWarps) {
      uint64_t sum = 0;
      for_chunk(i, [&](float value, int id) {
        if (order_of(value, id) >= lowest) {
          sum += units_of(exp_term(value, max_, row_.inverse_temperature));
        }
      });
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane_ == 0) {
        store_word_in_block(to + (i * kBlocks + rank_) * static_cast<uint32_t>(sizeof(uint64_t)),
                            sum);
      }
    }
    __syncwarp();
    meet();
    if (rank_ != 0) return -1;

    // The chunk: each thread adds up some neighbours.
    const int chunks = num_chunks(), each = (chunks + kThreads - 1) / kThreads;
    const int first = min(chunks, static_cast<int>(threadIdx.x) * each);
    const int end = min(chunks, first + each);
    uint64_t sum = 0, total = 0;
    for (int chunk = first; chunk < end; ++chunk) sum += chunk_units_[chunk];
    uint64_t before = integers_.sum_before(sum, &total);
    const uint64_t target = drawn_units(row_.uniform, total);
    if (before <= target && target < before + sum) {
      int chunk = first;
      while (before + chunk_units_[chunk] <= target) before += chunk_units_[chunk++];
      shared_.chunk = chunk;
      shared_.units_before = before;
    }
    __syncthreads();
    if (warp_ == 0) find_in_chunk(shared_.chunk, target, lowest);
    __syncthreads();
    return shared_.id;
  }

  // One warp: eight neighbouring values a lane, of the block that has the chunk.
  __device__ void find_in_chunk(int chunk, uint64_t target, uint64_t lowest) {
    const int first = lane_ * (kChunk / kWarp);
    const uint32_t from =
        address_in_block(shared_address(values_ + chunk / kBlocks * kChunk + first),
                         static_cast<uint32_t>(chunk % kBlocks));
    uint64_t units[kChunk / kWarp], sum = 0;
#pragma unroll
    for (int i = 0; i < kChunk / kWarp; ++i) {
      const float value = load_word_in_block(from + i * static_cast<uint32_t>(sizeof(float)));
      units[i] = order_of(value, chunk * kChunk + first + i) >= lowest
                     ? units_of(exp_term(value, max_, row_.inverse_temperature))
                     : 0;
      sum += units[i];
    }
    uint64_t before = shared_.units_before + integers_.warp_sum_up_to(sum, lane_) - sum;
#pragma unroll
    for (int i = 0; i < kChunk / kWarp; ++i) {
      if (before <= target && target < before + units[i]) shared_.id = chunk * kChunk + first + i;
      before += units[i];
    }
  }

  // ---- the result

  __device__ void write(int64_t out, int id) const {
    arguments_.ids[out] = id;
    if (row_.num_logprobs >= 0) {
      float logprob = 0;
      if (id >= 0) {
        const float logit = arguments_.logits[row_.row * arguments_.logits_stride + id];
        logprob = static_cast<float>(logit - log_sum_);
      }
      arguments_.logprobs[out] = logprob;
    }
    if (row_.counts_slot >= 0 && row_.given_id < 0 && id >= 0) {
      ++arguments_.counts[row_.counts_slot * arguments_.counts_stride + id];
    }
  }

  const Arguments& arguments_;
  const DeviceSampleRow& row_;
  Shared& shared_;
  float* const values_;
  uint64_t* const chunk_units_;
  const BlockIntegers<kThreads> integers_;
  const int rank_, warp_, lane_;

  int turn_ = 0;
  float best_ = -INFINITY;  // of this thread's values
  int best_id_ = -1;
  float max_ = 0;  // of the row, as it is being looked at
  bool raw_finite_ = true;
  double log_sum_ = 0;
};

extern __shared__ __align__(16) uint8_t dynamic_shared[];

__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(const __grid_constant__ Arguments arguments) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  let_next_launch_begin();
  // The others have begun before anything is sent to them.
  cluster_arrive();
  wait_for_earlier_launches();
  cluster_wait();
  const int64_t out = blockIdx.x / kBlocks;
  constexpr int kRowWords = sizeof(DeviceSampleRow) / sizeof(uint64_t);
  if (threadIdx.x < kRowWords) {
    reinterpret_cast<uint64_t*>(&shared.row)[threadIdx.x] =
        reinterpret_cast<const uint64_t*>(arguments.rows + out)[threadIdx.x];
  }
  __syncthreads();
  if (shared.row.row < 0) {
    if (blockIdx.x % kBlocks == 0 && threadIdx.x == 0) arguments.ids[out] = -1;
    return;
  }
  Sampler(arguments, shared, reinterpret_cast<float*>(dynamic_shared + sizeof(Shared))).run(out);
}

// ---- counts

__global__ void add_counts(uint32_t* slot, const int32_t* ids, int64_t count, bool prompt) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    if (prompt) {
      atomicOr(&slot[ids[i]], kInPrompt);
    } else {
      atomicAdd(&slot[ids[i]], 1);
    }
  }
}

void add_counts_of(uint32_t* slot, std::span<const int32_t> ids, bool prompt, cudaStream_t stream) {
  if (ids.empty()) return;
  const int64_t count = std::ssize(ids);
  add_counts<<<static_cast<unsigned>(std::min<int64_t>(132, ceil_div(count, 256))), 256, 0,
               stream>>>(slot, ids.data(), count, prompt);
  check(cudaGetLastError(), "counting tokens");
}

}  // namespace

void sample(const SampleArguments& arguments, cudaStream_t stream) {
  FATHOM_CHECK(arguments.vocab > 0 && arguments.vocab <= kMaxVocab &&
                   arguments.logits_stride >= arguments.vocab && arguments.logits_stride % 4 == 0,
               "{} logits, rows {} apart", arguments.vocab, arguments.logits_stride);
  if (arguments.num_rows == 0) return;
  const int64_t chunks = ceil_div(arguments.vocab, kChunk);
  const int64_t bytes =
      static_cast<int64_t>(sizeof(Shared)) + Sampler::own_chunks(chunks) * kChunk * 4 + chunks * 8;
  constexpr int kMostShared = 227 * 1024;
  static const bool prepared = (allow_shared_memory(sample_kernel, kMostShared), true);
  static_cast<void>(prepared);
  launch(sample_kernel,
         {.blocks = static_cast<unsigned>(arguments.num_rows * kBlocks),
          .threads = kThreads,
          .shared_bytes = static_cast<unsigned>(bytes),
          .cluster = kBlocks},
         stream, Arguments{arguments, token_counts_stride(arguments.vocab)});
}

void set_token_counts(uint32_t* slot, int64_t vocab, std::span<const int32_t> prompt,
                      std::span<const int32_t> output, cudaStream_t stream) {
  const auto bytes = static_cast<size_t>(token_counts_stride(vocab)) * sizeof(uint32_t);
  check(cudaMemsetAsync(slot, 0, bytes, stream), "clearing token counts");
  add_counts_of(slot, prompt, true, stream);
  add_counts_of(slot, output, false, stream);
}

}  // namespace fathom::cuda
