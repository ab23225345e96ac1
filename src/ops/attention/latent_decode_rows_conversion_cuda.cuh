// Pages of a cache of 8 bits, brought into shared memory as the bf16 that a block of
// latent_decode_rows_cuda.cu multiplies, and queries: the work of one warpgroup of a block.
//
// A page's rows come through registers. A thread has four pieces of 16 bytes of each slab of 128
// columns: two rows, 8 apart, two pieces, half a slab apart; the eight lanes that store together
// have eight rows, whose pieces the swizzle puts into different banks. Half a page is asked for
// before it is needed, and all of it is asked to come to the L2 some pages before that.
//
// Numbers: e4m3 and e5m2 are exact in bf16. With a scale the product is rounded to bf16, as the
// value would have been in a cache of bf16. NaN is taken for the number that its bits would be.
// Limit: scales up to kMostScale; larger ones are taken for that.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/tile_load.cuh"
#include "ops/attention/latent_decode_rows_copies_cuda.cuh"

namespace fathom::cuda::latent_rows {

constexpr float kMostScale = 126;

// Factors of two neighbours, each as the sum of two in bf16: fp32's scale has more bits than one.
struct PairFactor {
  uint32_t leading, rest;
};

__device__ inline uint32_t times_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ inline uint32_t times_plus_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The bits of a byte's number, put where bf16 has them, are that number times 2^-120 (e4m3) or
// 2^-112 (e5m2): the difference of the exponents' biases. Subnormal ones, too.
template <Fp8 kType>
struct Fp8InBf16 {
  static constexpr int kShift = kType == Fp8::kE4M3 ? 4 : 3;
  static constexpr uint32_t kMagnitude = kType == Fp8::kE4M3 ? 0x07F007F0 : 0x0FE00FE0;
  static constexpr float kUp = kType == Fp8::kE4M3 ? 0x1p120f : 0x1p112f;
  static constexpr uint32_t kUpPair = kType == Fp8::kE4M3 ? 0x7B807B80 : 0x77807780;

  // Bytes 2 * kHalf and the next of four.
  template <int kHalf>
  __device__ static uint32_t pair(uint32_t bytes) {
    const uint32_t high = __byte_perm(bytes, 0, kHalf == 0 ? 0x1404 : 0x3424);
    return (high >> kShift & kMagnitude) | (high & 0x80008000);
  }

  __device__ static PairFactor factor(float scale) {
    const float up = fminf(scale, kMostScale) * kUp;
    const uint32_t leading = pack_bf16(up, up);
    const float rest = up - __uint_as_float(leading << 16);
    return {leading, pack_bf16(rest, rest)};
  }
};

template <typename Row>
class Conversion {
 public:
  // The rotated box comes as it is where it is bf16, by the copy engine.
  __device__ static constexpr int arrivals(int arrival) {
    return arrival == 0 && Row::kRopeIsBf16 ? 1 : kGroupThreads / 32;
  }
  static constexpr bool kArrivedIsOrdinary = true;  // written, not copied

  __device__ Conversion(SharedMemory& shared, const Maps& maps, const Arguments& arguments,
                        int rank)
      : shared_(shared),
        maps_(maps),
        arguments_(arguments),
        rank_(rank),
        thread_(threadIdx.x % kGroupThreads) {
    const int lane = threadIdx.x % 32, row = thread_ / 32 * 16 + lane % 8, piece = lane / 8;
    row_ = row * Row::kBytes;
    from_ = row_ + piece * 16;
    to_ = row * 128 + (2 * piece ^ row % 8) * 16;
  }

  __device__ void run(const LatentDecodePart& part) {
    // Read once: what follows writes memory, of which the compiler cannot know that it is not this.
    const int tiles = part.num_tiles, old_tiles = part.old_tiles;
    if (tiles == 0) return;
    const int32_t* table = arguments_.block_tables + part.first_page;
    static_assert(LatentDecodePart::kPagesWithin == 4);
    int page = part.pages[0], next = part.pages[1], second = part.pages[2], third = part.pages[3];
    if (old_tiles == 0) wait_once();
    load_slab<0>(page, 0);
    load_slab<1>(page, 0);
    if constexpr (!Row::kRopeIsBf16) load_rope(page);
    if (tiles > 1) prefetch(next);
    if (tiles > 2) prefetch(second);
    for (int t = 0; t < tiles; ++t) {
      const int fourth = t + 4 < tiles ? table[t + 4] : 0;
      if (t + 3 < tiles) prefetch(third);
      const int stage = t % kStages;
      const int use = stage == 0 ? even_pages_++ : odd_pages_++;
      const bool more = t + 1 < tiles;
      if (use > 0) barrier_wait(&shared_.read[stage][0], (use - 1) & 1);
      convert_rope(stage, page);
      convert_slab<0>(stage);
      load_slab<2>(page, stage);
      publish(stage, 1);
      convert_slab<1>(stage);
      load_slab<3>(page, stage);
      publish(stage, 2);
      if (more && t + 1 >= old_tiles) wait_once();
      if (use > 0) barrier_wait(&shared_.read[stage][1], (use - 1) & 1);
      convert_slab<2>(stage);
      if (more) load_slab<0>(next, stage ^ 1);
      publish(stage, 3);
      convert_slab<3>(stage);
      if (more) {
        load_slab<1>(next, stage ^ 1);
        if constexpr (!Row::kRopeIsBf16) load_rope(next);
      }
      publish(stage, 4);
      if (t == 0) {
        wait_once();
        if (thread_ == 0) copy_queries(shared_, maps_, part, rank_, parts_);
      }
      page = next, next = second, second = third, third = fourth;
    }
    ++parts_;
  }

 private:
  using Bits = Fp8InBf16<Row::kType>;
  static constexpr int kSlabBytes = 128, kPieces = 4;

  __device__ void wait_once() {
    if (!waited_) wait_for_earlier_launches();
    waited_ = true;
  }

  __device__ const std::byte* page_at(int page) const {
    return arguments_.pages + int64_t{page} * (kKeys * Row::kBytes);
  }

  // Two blocks of the same rows share the work.
  __device__ void prefetch(int page) const {
    if (thread_ != 0) return;
    const int bytes = kKeys * Row::kBytes >> (arguments_.tile_blocks - 1);
    prefetch_bytes(page_at(page) + rank_ * bytes, bytes);
  }

  __device__ static uint4 load(const std::byte* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }
  __device__ static float load_scale(const std::byte* from) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
  }

  // The slab of a page that comes as its boxes' arrival kTurn + 1.
  __device__ static int slab_of(int turn, int stage) { return (turn + 2 * stage) % 4; }

  template <int kTurn>
  __device__ void load_slab(int page, int stage) {
    const int slab = slab_of(kTurn, stage);
    const std::byte* from = page_at(page) + from_ + slab * kSlabBytes;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      bytes_[kTurn % 2][i] = load(from + i / 2 * (8 * Row::kBytes) + i % 2 * (kSlabBytes / 2));
    }
    if constexpr (Row::kIsScaled) {
      const std::byte* scale = page_at(page) + row_ + Row::kScalesAt + slab * 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) scales_[kTurn % 2][r] = load_scale(scale + r * (8 * Row::kBytes));
    }
  }

  template <int kTurn>
  __device__ void convert_slab(int stage) {
    uint8_t* const to =
        shared_.pages[stage] + box_of(stage, kTurn + 1, 0) * kBoxBytes;  // two boxes, side by side
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      PairFactor factor = {Bits::kUpPair, 0};
      if constexpr (Row::kIsScaled) factor = Bits::factor(scales_[kTurn % 2][r]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store(to + half * kBoxBytes + r * 1024, bytes_[kTurn % 2][2 * r + half], factor);
      }
    }
  }

  __device__ void load_rope(int page) {
    const std::byte* from = page_at(page) + from_ + Row::kRopeAt;
#pragma unroll
    for (int r = 0; r < 2; ++r) rope_[r] = load(from + r * (8 * Row::kBytes));
  }

  __device__ void convert_rope(int stage, int page) {
    if constexpr (Row::kRopeIsBf16) {
      if (thread_ != 0) return;
      barrier_expect(&shared_.arrived[stage][0], kBoxBytes);
      copy_box(shared_.pages[stage] + kRopeBox * kBoxBytes, &maps_.pages,
               &shared_.arrived[stage][0], Row::kRopeAt / 2, page * kKeys);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store(shared_.pages[stage] + kRopeBox * kBoxBytes + r * 1024, rope_[r], {Bits::kUpPair, 0});
      }
      publish(stage, 0);
    }
  }

  // 16 values, to a thread's place in a box.
  __device__ void store(uint8_t* box, uint4 bytes, PairFactor factor) const {
    *reinterpret_cast<uint4*>(box + to_) = widen(bytes.x, bytes.y, factor);
    *reinterpret_cast<uint4*>(box + (to_ ^ 16)) = widen(bytes.z, bytes.w, factor);
  }
  __device__ static uint4 widen(uint32_t low, uint32_t high, PairFactor factor) {
    return {
        scaled(Bits::template pair<0>(low), factor), scaled(Bits::template pair<1>(low), factor),
        scaled(Bits::template pair<0>(high), factor), scaled(Bits::template pair<1>(high), factor)};
  }
  __device__ static uint32_t scaled(uint32_t pair, PairFactor factor) {
    if constexpr (Row::kIsScaled) {
      return times_plus_bf16(pair, factor.leading, times_bf16(pair, factor.rest));
    } else {
      return times_bf16(pair, factor.leading);
    }
  }

  // An arrival of each warp. Who multiplies what arrived fences it: a fence here would wait for the
  // bytes asked for, too.
  __device__ void publish(int stage, int arrival) {
    __syncwarp();
    if (thread_ % 32 == 0) barrier_arrive(&shared_.arrived[stage][arrival]);
  }

  SharedMemory& shared_;
  const Maps& maps_;
  const Arguments& arguments_;
  const int rank_, thread_;
  int row_, from_, to_;                 // a thread's row in a page, its piece, the place in a box
  int even_pages_ = 0, odd_pages_ = 0;  // converted to each stage
  int parts_ = 0;
  bool waited_ = false;
  uint4 bytes_[2][kPieces];
  float scales_[2][2];
  uint4 rope_[2];
};

}  // namespace fathom::cuda::latent_rows
