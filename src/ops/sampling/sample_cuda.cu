// What: a row of logits to a token, by the rules and with the arithmetic of sample().
//
// Inputs/outputs: sample_cuda.h.
//
// Layout: a cluster of 8 CTAs has a row. Chunks of 256 ids are distributed round-robin over the
// CTAs, so that each has a share of the frequent tokens; a CTA keeps its chunks in shared memory, a
// warp reads a chunk at a time, eight values a lane. CTA 0 decides.
//
// Algorithm:
//   1. load, NaN as -infinity; of rows with log-probabilities the sum of exponentials
//   2. bias, penalties, masks, in shared memory; the largest logit of the row
//   3. top-k, top-p: each block sorts and sends the candidates above a bound of its own, which some
//      50 of its threads' largest reach (found bit by bit: a barrier can count). Above the highest
//      of the bounds block 0 has all that there are: it merges them, finds the border and draws.
//      Where that is not enough (a flat row, hundreds of equals, a large k) the border is looked
//      for in the whole row, adding up what lies above a pivot until so few are left that they can
//      be sent.
//   4. the draw (gumbel_noise.h): among candidates each thread of CTA 0 has one and computes its
//      score. Otherwise all threads estimate the scores of their values; those that come close to
//      the largest estimate of the row are computed again, to the CPU's bits.
// Sums are integers (logit_row.h) and the draw is a maximum, so that none of it depends on an
// order.
//
// Determinism: the token is a function of the row alone; the same as the CPU's.
//
// Limits: 400,000 tokens, as what 8 SMs' shared memory holds.
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
#include "ops/sampling/race_cuda.cuh"
#include "ops/sampling/sample_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kBlocks = 8, kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kChunk = 256;
constexpr int kLoadsAhead = 4;  // chunks of a warp in flight together
constexpr int kGuess = 46;      // candidates that a CTA aims for,
constexpr int kEnough = 54;     // accepts
constexpr int kRoom = 64;       // and has room for
constexpr int kFewLeft = 256;   // in all CTAs: rarely more than 64 in one of them
constexpr int kCandidates = kBlocks * kRoom;
static_assert(kCandidates == kThreads, "a thread each");
static_assert(kGuess >= kDeviceTopLogprobs);
constexpr uint64_t kLowestFinite = uint64_t{kLowestFiniteKey} << kIdBits;
constexpr double kUnits = 0x1p40;  // units_of(1)

struct alignas(16) Shared {
  DeviceSampleRow row;
  uint64_t own[kRoom];                // this CTA's candidates, in order of discovery
  uint64_t lists[kBlocks][kRoom];     // CTA 0's: every CTA's, sorted, then zeros
  uint64_t sorted[kCandidates];       // CTA 0's: all of them, then zeros
  uint64_t exchanged[2][kBlocks][2];  // double-buffered, two words of each CTA
  uint64_t parts[kWarps];
  uint64_t border;
  uint32_t count;
};

struct Exchanged {
  uint64_t words[kBlocks][2];
};

// Shared, and the CTA's values.
extern __shared__ __align__(16) uint8_t dynamic_shared[];

class Sampler {
 public:
  __device__ explicit Sampler(const SampleArguments& arguments)
      : arguments_(arguments),
        integers_(shared().parts),
        rank_(static_cast<int>(cluster_rank())),
        warp_(threadIdx.x / kWarp),
        lane_(threadIdx.x % kWarp) {}

  __device__ static Shared& shared() { return *reinterpret_cast<Shared*>(dynamic_shared); }

  // Chunks of one CTA, and words of its shared memory, for so many chunks of the row.
  __host__ __device__ static constexpr int64_t own_chunks(int64_t chunks) {
    return (chunks + kBlocks - 1) / kBlocks;
  }

  // Selects the token and writes it, in CTA 0.
  __device__ void run(int64_t out) {
    const bool wants_logprob = row().num_logprobs >= 0;
    load();
    if (wants_logprob) find_logprobs(out);
    int id = row().given_id;
    if (id < 0) {
      change();
      id = choose();
    }
    if (wants_logprob && !raw_finite_) id = -1;
    if (rank_ == 0 && threadIdx.x == 0) write(out, id);
  }

 private:
  __device__ static const DeviceSampleRow& row() { return shared().row; }
  __device__ static float* values() {
    return reinterpret_cast<float*>(dynamic_shared + sizeof(Shared));
  }
  __device__ int num_chunks() const {
    return static_cast<int>((arguments_.vocab + kChunk - 1) / kChunk);
  }
  __device__ bool changes() const {
    return row().num_biases > 0 || row().num_seen > 0 || row().num_masked > 0 ||
           row().allowed_row >= 0;
  }
  // Whether values are read again after the load.
  __device__ bool keeps() const {
    return row().num_logprobs >= 0 || row().inverse_temperature != 0 || changes();
  }

  // ---- this thread's values: chunk i * kBlocks + rank is the CTA's i-th, and warp i % kWarps has
  // it

  __device__ float4* at(int own_chunk, int half) const {
    return reinterpret_cast<float4*>(values() + own_chunk * kChunk + half * (kChunk / 2) +
                                     lane_ * 4);
  }
  __device__ int first_id(int own_chunk, int half) const {
    return (own_chunk * kBlocks + rank_) * kChunk + half * (kChunk / 2) + lane_ * 4;
  }

  // Calls of(four values, id of the first) for each of them, ids ascending.
  template <typename Of>
  __device__ void for_each_four(Of of) const {
    for (int i = warp_; i * kBlocks + rank_ < num_chunks(); i += kWarps) {
#pragma unroll
      for (int half = 0; half < 2; ++half) of(*at(i, half), first_id(i, half));
    }
  }
  // Calls of(value, id).
  template <typename Of>
  __device__ void for_each(Of of) const {
    for_each_four([&](float4& four, int id) {
      of(four.x, id);
      of(four.y, id + 1);
      of(four.z, id + 2);
      of(four.w, id + 3);
    });
  }
  // Calls of(value, id, upper half of its noise's n).
  template <typename Of>
  __device__ void for_each_noisy(Of of) const {
    static_assert(kNoiseGroup == 4);
    const NoiseKey key = row().noise;
    for_each_four([&](const float4& four, int id) {
      const PhiloxWords noise = noise_words(key, static_cast<uint32_t>(id) / kNoiseGroup);
      of(four.x, id, noise.words[0]);
      of(four.y, id + 1, noise.words[1]);
      of(four.z, id + 2, noise.words[2]);
      of(four.w, id + 3, noise.words[3]);
    });
  }

  __device__ void see(float value, int id) {
    if (value > best_) {
      best_ = value;
      best_id_ = id;
    }
  }

  // ---- 1. loading

  __device__ void load() {
    const float* const logits = arguments_.logits + row().row * arguments_.logits_stride;
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
            loaded[ahead][half] = *reinterpret_cast<const float4*>(logits + id);
          }
        }
      }
#pragma unroll
      for (int ahead = 0; ahead < kLoadsAhead; ++ahead) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first + ahead * kWarps, id = first_id(i, half);
          float4& x = loaded[ahead][half];
          x = make_float4(comparable(x.x), comparable(x.y), comparable(x.z), comparable(x.w));
          if (id + 3 >= arguments_.vocab) {
            if (id + 1 >= arguments_.vocab) x.y = -INFINITY;
            if (id + 2 >= arguments_.vocab) x.z = -INFINITY;
            x.w = -INFINITY;
          }
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

  // ---- exchange within the cluster: two words of each CTA, broadcast to all

  __device__ Exchanged exchange(uint64_t a, uint64_t b) {
    uint64_t(*const words)[2] = shared().exchanged[turn_];
    if (threadIdx.x < kBlocks) {
      const uint32_t there = address_in_block(shared_address(words[rank_]), threadIdx.x);
      store_word_in_block(there, a);
      store_word_in_block(there + sizeof(uint64_t), b);
    }
    __syncwarp();
    meet();
    // The other buffer's words are written next: all CTAs have read them by then.
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

  // Sum over the row.
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

  // The largest logit that see() has seen, above -infinity; 0 if there is none.
  __device__ uint64_t best_order() {
    return largest_of_all(best_id_ < 0 ? 0 : order_of(best_, best_id_));
  }
  __device__ static bool is_finite(uint64_t order) {
    return order != 0 && logit_in(order) != INFINITY;
  }

  // Units of this thread's values from `lowest` on.
  __device__ uint64_t own_units(uint64_t lowest, float inverse_temperature) const {
    UnitSum sum(max_, inverse_temperature);
    if (lowest == 0) {
      for_each([&](float value, int) { sum.add(value); });
    } else {
      const Border border(lowest);
      for_each([&](float value, int id) { sum.add(value, border.keeps(value, id)); });
    }
    return sum.units();
  }

  // ---- log-probabilities, of the raw row

  __device__ void find_logprobs(int64_t out) {
    const uint64_t best = best_order();
    raw_finite_ = is_finite(best);
    if (!raw_finite_) return;
    max_ = logit_in(best);
    log_sum_ = max_ + log(__ull2double_rn(sum_of_all(own_units(0, 1))) / kUnits);
    const int count = min(row().num_logprobs, static_cast<int>(arguments_.vocab));
    if (count == 0) return;
    const Candidates gathered = gather(uint64_t{local_bound()} << kIdBits);
    if (!gathered.holds(count)) {
      const uint64_t border = find_border<false>(count, 0, 1, gathered.lowest);
      gather(max(border, kLowestFinite));
    }
    if (rank_ != 0) return;
    merge();
    if (threadIdx.x < kDeviceTopLogprobs) {
      const uint64_t order =
          static_cast<int>(threadIdx.x) < count ? shared().sorted[threadIdx.x] : 0;
      const int64_t to = out * kDeviceTopLogprobs + threadIdx.x;
      arguments_.top_ids[to] = order == 0 ? -1 : id_in(order);
      arguments_.top_logprobs[to] = order == 0 ? 0 : static_cast<float>(logit_in(order) - log_sum_);
    }
  }

  // ---- 2. bias, penalties, masks

  __device__ void change() {
    if (!changes()) return;
    for (int i = threadIdx.x; i < row().num_biases; i += kThreads) {
      float* const value = own_value(arguments_.bias_ids[row().first_bias + i]);
      if (value != nullptr) {
        *value = comparable(__fadd_rn(*value, arguments_.bias_values[row().first_bias + i]));
      }
    }
    __syncthreads();
    if (row().num_seen > 0) penalise();
    for (int i = threadIdx.x; i < row().num_masked; i += kThreads) {
      float* const value = own_value(arguments_.masked_ids[row().first_masked + i]);
      if (value != nullptr) *value = -INFINITY;
    }
    __syncthreads();
    best_ = -INFINITY;
    best_id_ = -1;
    const uint32_t* const allowed =
        row().allowed_row < 0
            ? nullptr
            : arguments_.allowed + row().allowed_row * ((arguments_.vocab + 31) / 32);
    for_each([&](float& value, int id) {
      if (allowed != nullptr && id < arguments_.vocab && !(allowed[id / 32] >> id % 32 & 1)) {
        value = -INFINITY;
      }
      see(value, id);
    });
    __syncthreads();
  }

  // Address of this id's value in this CTA; null if another CTA has it.
  __device__ float* own_value(int id) const {
    const int chunk = id / kChunk;
    if (chunk % kBlocks != rank_) return nullptr;
    return values() + chunk / kBlocks * kChunk + id % kChunk;
  }

  __device__ void penalise() {
    for (int i = threadIdx.x; i < row().num_seen; i += kThreads) {
      const SeenToken seen = arguments_.seen[row().first_seen + i];
      float* const value = own_value(seen.id);
      if (value == nullptr || *value == -INFINITY) continue;
      double logit = *value;
      logit = logit > 0 ? __ddiv_rn(logit, row().repetition_penalty)
                        : __dmul_rn(logit, row().repetition_penalty);
      logit = __dsub_rn(logit, __dmul_rn(row().frequency_penalty, seen.output_count));
      if (seen.output_count > 0) logit = __dsub_rn(logit, row().presence_penalty);
      *value = comparable(__double2float_rn(logit));
    }
    __syncthreads();
  }

  // ---- 3. the largest few of the row

  struct Candidates {
    uint64_t lowest;  // CTA 0 has all of the row from this order on
    bool overflowed;  // a CTA had more than kRoom
    bool all;         // these are all of the row's values

    // Whether the row's `wanted` largest are among the candidates.
    __device__ bool holds(int wanted) const { return !overflowed && (all || wanted <= kGuess); }
  };

  // A key that about kGuess of the threads' maxima reach.
  __device__ uint32_t local_bound() const {
    const uint32_t key = best_id_ < 0 ? 0 : key_of(best_);
    uint32_t bound = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t pivot = bound | 1u << bit;
      const int count = __syncthreads_count(key >= pivot);
      if (count >= kGuess) bound = pivot;
      if (count >= kGuess && count <= kEnough) break;
    }
    return max(bound, kLowestFiniteKey);
  }

  // Sends this CTA's values from `lowest` on and before `end` to CTA 0, in descending order.
  __device__ Candidates gather(uint64_t lowest, uint64_t end = ~uint64_t{0}) {
    if (threadIdx.x == 0) shared().count = 0;
    if (threadIdx.x < kRoom) shared().own[threadIdx.x] = 0;
    __syncthreads();
    const Border border(lowest), above(end);
    if (best_id_ >= 0 && border.keeps(best_, best_id_)) {
      for_each([&](float value, int id) {
        if (!border.keeps(value, id) || above.keeps(value, id)) return;
        const uint32_t place = atomicAdd(&shared().count, 1);
        if (place < kRoom) shared().own[place] = order_of(value, id);
      });
    }
    __syncthreads();
    if (threadIdx.x < kRoom) {
      const int own = static_cast<int>(threadIdx.x);
      const uint64_t order = shared().own[own];
      int place = 0;
#pragma unroll 16
      for (int i = 0; i < kRoom; ++i) place += shared().own[i] > order;
      if (order == 0) place = own;  // all others come before
      store_word_in_block(address_in_block(shared_address(&shared().lists[rank_][place]), 0),
                          order);
    }
    const Exchanged all = exchange(lowest, shared().count);
    Candidates gathered = {0, false, true};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      gathered.lowest = max(gathered.lowest, all.words[block][0]);
      gathered.overflowed |= all.words[block][1] > kRoom;
      gathered.all &= key_in(all.words[block][0]) == kLowestFiniteKey;
    }
    return gathered;
  }

  // Merges the lists of all CTAs. CTA 0 only.
  __device__ void merge() const {
    const int list = static_cast<int>(threadIdx.x) / kRoom, at = threadIdx.x % kRoom;
    const uint64_t order = shared().lists[list][at];
    int place = at;
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {
      // The number of the other list's entries that come before.
      int before = 0;
#pragma unroll
      for (int step = kRoom / 2; step > 0; step /= 2) {
        if (shared().lists[other][before + step - 1] > order) before += step;
      }
      before += shared().lists[other][before] > order;
      place += other == list ? 0 : before;
    }
    shared().sorted[threadIdx.x] = 0;
    __syncthreads();
    if (order != 0) shared().sorted[place] = order;
    __syncthreads();
  }

  // The token, if top-k and top-p can be decided among the candidates; -1 if not. CTA 0 only.
  // `row_units` are those of the whole row, known where top-p cuts it.
  __device__ int choose_among(const Candidates& gathered, uint64_t row_units) {
    if (gathered.overflowed) return -1;
    merge();
    const int own = static_cast<int>(threadIdx.x);
    const uint64_t order = shared().sorted[own];
    int limit = __syncthreads_count(order >= gathered.lowest);
    if (row().top_k > 0) {
      if (row().top_k > limit && !gathered.all) return -1;
      limit = min(limit, row().top_k);
    }
    const uint64_t units =
        own < limit ? units_at(logit_in(order), max_, row().inverse_temperature) : 0;
    uint64_t total = 0;
    const uint64_t before = integers_.sum_before(units, &total);
    if (row().top_p < 1) {
      const uint64_t wanted = wanted_units(row().top_p, row().top_k > 0 ? total : row_units);
      if (total < wanted) return -1;
      limit = __syncthreads_count(own < limit && before < wanted);
    }
    limit = __syncthreads_count(own < limit && order >= min_p_border());
    return draw_among(limit);
  }

  // The winner among the first `count` candidates. CTA 0 only.
  __device__ int draw_among(int count) {
    uint64_t score = 0;
    int id = 0;
    if (static_cast<int>(threadIdx.x) < count) {
      const uint64_t order = shared().sorted[threadIdx.x];
      id = id_in(order);
      score = exact_score(logit_in(order), row().inverse_temperature, row().noise, id,
                          upper_word(row().noise, id));
    }
    return id_of_place(winner_of_block(score, id).place);
  }

  // A score and, among equal scores, an id: larger for the lower one. 0: none.
  struct Winner {
    uint64_t score, place;
  };
  __device__ static uint64_t place_of(int id) { return kIdMask - static_cast<uint64_t>(id); }
  __device__ static int id_of_place(uint64_t place) { return static_cast<int>(kIdMask - place); }

  __device__ Winner winner_of_block(uint64_t score, int id) const {
    const uint64_t best = integers_.largest(score);
    return {best, integers_.largest(score != 0 && score == best ? place_of(id) : 0)};
  }

  // ---- the cutoff over the whole row

  // The highest order from which on the row has `wanted` values (kMass: units) or more, counting
  // from `lowest` on; 0 if it has fewer. `pivot`: where to begin.
  template <bool kMass>
  __device__ uint64_t find_border(uint64_t wanted, uint64_t lowest, float inverse_temperature,
                                  uint64_t pivot) {
    constexpr uint64_t kUnknown = ~uint64_t{0};
    constexpr int kLeaps = 8;
    uint64_t low = max(lowest, kLowestFinite), high = order_of(max_, 0) + 1;
    uint64_t above = 0, count_above = 0, count_from_low = kUnknown;
    float leap = 0.5f / inverse_temperature;
    int leaps = 0;
    if (!kMass && weigh<kMass>(low, inverse_temperature).weight < wanted) return 0;
    while (high - low > 1) {
      if (pivot <= low || pivot >= high) pivot = low + (high - low) / 2;
      const Weighed weighed = weigh<kMass>(pivot, inverse_temperature, low);
      if (weighed.weight >= wanted) {
        low = pivot;
        count_from_low = weighed.count;
      } else {
        high = pivot;
        above = weighed.weight;
        count_above = weighed.count;
      }
      if (count_from_low != kUnknown && count_from_low - count_above <= kFewLeft &&
          !gather(low, high).overflowed) {
        return border_among<kMass>(wanted - above, inverse_temperature);
      }
      // From the first pivot downwards, by a guess from probabilities; then by bisection.
      pivot = 0;
      if (count_from_low == kUnknown && leaps++ < kLeaps) {
        pivot = static_cast<uint64_t>(key_of(logit_in(high) - leap)) << kIdBits;
        leap *= 2;
      }
    }
    return low;
  }

  struct Weighed {
    uint64_t weight, count;
  };

  // The row's values from max(pivot, lowest) on.
  template <bool kMass>
  __device__ Weighed weigh(uint64_t pivot, float inverse_temperature, uint64_t lowest = 0) {
    const Border border(max(pivot, lowest));
    UnitSum sum(max_, inverse_temperature);
    uint64_t count = 0;
    for_each([&](float value, int id) {
      const bool keeps = border.keeps(value, id);
      count += keeps;
      if constexpr (kMass) sum.add(value, keeps);
    });
    count = integers_.sum(count);
    const Exchanged all = exchange(kMass ? integers_.sum(sum.units()) : count, count);
    Weighed weighed = {0, 0};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      weighed.weight += all.words[block][0];
      weighed.count += all.words[block][1];
    }
    return weighed;
  }

  // The cutoff, known to be one of the candidates that have been sent.
  template <bool kMass>
  __device__ uint64_t border_among(uint64_t wanted, float inverse_temperature) {
    if (rank_ == 0) {
      merge();
      const uint64_t order = shared().sorted[threadIdx.x];
      uint64_t weight = order != 0, total = 0;
      if (kMass && order != 0) weight = units_at(logit_in(order), max_, inverse_temperature);
      const uint64_t before = integers_.sum_before(weight, &total);
      if (before < wanted && wanted <= before + weight) shared().border = order;
      __syncthreads();
    }
    return exchange(shared().border, 0).words[0][0];
  }

  // `pivot`: first guess.
  __device__ uint64_t find_row_border(uint64_t row_units, uint64_t pivot) {
    const float inverse_temperature = row().inverse_temperature;
    uint64_t border = 0;
    if (row().top_k > 0) border = find_border<false>(row().top_k, 0, 1, pivot);
    if (row().top_p < 1) {
      const uint64_t total =
          row().top_k > 0 ? sum_of_all(own_units(border, inverse_temperature)) : row_units;
      border =
          find_border<true>(wanted_units(row().top_p, total), border, inverse_temperature, pivot);
    }
    return border;
  }

  // ---- selection

  // Nothing below is kept. The largest logit always is.
  __device__ uint64_t min_p_border() const {
    if (!row().has_min_p) return 0;
    const float border = __double2float_rn(__dadd_rn(max_, row().min_p_depth));
    return static_cast<uint64_t>(key_of(comparable(fminf(border, max_)))) << kIdBits;
  }

  __device__ int choose() {
    const uint64_t best = best_order();
    if (!is_finite(best)) return -1;
    if (row().inverse_temperature == 0) return id_in(best);
    max_ = logit_in(best);
    uint64_t border = 0;
    if (row().top_k > 0 || row().top_p < 1) {
      const uint64_t row_units = row().top_p < 1 && row().top_k == 0
                                     ? sum_of_all(own_units(0, row().inverse_temperature))
                                     : 0;
      const Candidates gathered = gather(uint64_t{local_bound()} << kIdBits);
      const int id = rank_ == 0 ? choose_among(gathered, row_units) : -1;
      const int chosen = static_cast<int>(exchange(id, 0).words[0][0]);
      if (chosen >= 0) return chosen;
      border = find_row_border(row_units, gathered.lowest);
    }
    return draw_from_row(max(border, min_p_border()));
  }

  // The winner among the row's values from `lowest` on.
  __device__ int draw_from_row(uint64_t lowest) {
    const Border border(lowest);
    const float inverse_temperature = row().inverse_temperature;
    const auto estimate = [&](float value, uint32_t upper) {
      return estimated_score(value, max_, inverse_temperature, upper);
    };
    float low = -INFINITY, high = -INFINITY;
    for_each_noisy([&](float value, int id, uint32_t upper) {
      if (!border.keeps(value, id)) return;
      const Estimate own = estimate(value, upper);
      low = fmaxf(low, own.low);
      high = fmaxf(high, own.high);
    });
    low = logit_of_key(static_cast<uint32_t>(largest_of_all(key_of(low))));
    const float least = least_estimate(low, max_, inverse_temperature);
    uint64_t score = 0;
    int winner = 0;
    if (high >= least) {
      for_each_noisy([&](float value, int id, uint32_t upper) {
        if (!border.keeps(value, id) || !(estimate(value, upper).high >= least)) return;
        const uint64_t own = exact_score(value, inverse_temperature, row().noise, id, upper);
        if (own > score) {
          score = own;
          winner = id;
        }
      });
    }
    const Winner of_block = winner_of_block(score, winner);
    const Exchanged all = exchange(of_block.score, of_block.place);
    Winner of_row = {0, 0};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Winner other = {all.words[block][0], all.words[block][1]};
      if (other.score > of_row.score ||
          (other.score == of_row.score && other.place > of_row.place)) {
        of_row = other;
      }
    }
    return id_of_place(of_row.place);
  }

  // ---- the result

  __device__ void write(int64_t out, int id) const {
    arguments_.ids[out] = id;
    if (row().num_logprobs >= 0) {
      float logprob = 0;
      if (id >= 0) {
        const float logit = arguments_.logits[row().row * arguments_.logits_stride + id];
        logprob = static_cast<float>(logit - log_sum_);
      }
      arguments_.logprobs[out] = logprob;
    }
  }

  const SampleArguments& arguments_;
  const BlockIntegers<kThreads> integers_;
  const int rank_, warp_, lane_;

  int turn_ = 0;
  float best_ = -INFINITY;  // of this thread's values
  int best_id_ = -1;
  float max_ = 0;  // of the row in its current state
  bool raw_finite_ = true;
  double log_sum_ = 0;
};

__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(const __grid_constant__ SampleArguments arguments) {
  let_next_launch_begin();
  // The other CTAs have begun before anything is sent to them.
  cluster_arrive();
  wait_for_earlier_launches();
  cluster_wait();
  const int64_t out = blockIdx.x / kBlocks;
  constexpr int kRowWords = sizeof(DeviceSampleRow) / sizeof(uint64_t);
  if (threadIdx.x < kRowWords) {
    reinterpret_cast<uint64_t*>(&Sampler::shared().row)[threadIdx.x] =
        reinterpret_cast<const uint64_t*>(arguments.rows + out)[threadIdx.x];
  }
  __syncthreads();
  if (Sampler::shared().row.row < 0) {
    if (blockIdx.x % kBlocks == 0 && threadIdx.x == 0) arguments.ids[out] = -1;
    return;
  }
  Sampler(arguments).run(out);
}

}  // namespace

void sample(const SampleArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(arguments.vocab > 0 && arguments.vocab <= kMostDeviceVocab &&
                   arguments.logits_stride >= arguments.vocab && arguments.logits_stride % 4 == 0,
               "{} logits, rows {} apart", arguments.vocab, arguments.logits_stride);
  if (arguments.num_rows == 0) return;
  const int64_t chunks = ceil_div(arguments.vocab, kChunk);
  const int64_t bytes =
      static_cast<int64_t>(sizeof(Shared)) + Sampler::own_chunks(chunks) * kChunk * 4;
  constexpr int kMostShared = 227 * 1024;
  stream.device().allow_shared_memory(sample_kernel, kMostShared);
  launch(sample_kernel,
         {.blocks = static_cast<unsigned>(arguments.num_rows * kBlocks),
          .threads = kThreads,
          .shared_bytes = static_cast<unsigned>(bytes),
          .cluster = kBlocks},
         stream, arguments);
}

}  // namespace fathom::cuda
