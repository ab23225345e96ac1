// Attention of one head over runs of up to 16 keys by tensor cores, for decode_layers().
//
// A group of four warps takes a run; each warp has a part of the columns, 128 latent and 16 rotary
// ones. The first product has keys as rows and the launch's tokens as columns: parts of the scores,
// which the group's warps exchange. The second one has latent columns as rows, keys as columns, and
// multiplies them with the softmax's weights.
//
// Lane l has two keys of the first product's rows, l / 4 and l / 4 + 8, and 32 columns of the
// warp's part: those of eight steps, four neighbours each. It gets the scores of tokens 2 (l % 4)
// and the next.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"
#include "ops/scaled_linear/row_products_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// The first of a lane's four columns of a step, for lanes with l % 4 = quarter. A lane reads 16
// bytes at a time; which ones, avoids bank conflicts between rows of this length.
template <typename Row>
__host__ __device__ constexpr int key_column(int quarter, int step) {
  if (Row::kIsBf16) return step / 2 * 32 + quarter * 8 + step % 2 * 4;
  if (Row::kIsScaled) return quarter * 32 + step * 4;
  return step / 4 * 64 + quarter * 16 + step % 4 * 4;
}

// Stores columns 4 l to 4 l + 3 of the part of a token's query. By a whole warp.
template <typename Row, int kRows>
__device__ inline void store_query(const float (&values)[4], int part, int token, int lane,
                                   KeyQueries<kRows>& queries) {
  int quarter, step;  // key_column(quarter, step) = 4 l
  if constexpr (Row::kIsBf16) {
    quarter = lane % 8 / 2;
    step = lane / 8 * 2 + lane % 2;
  } else if constexpr (Row::kIsScaled) {
    quarter = lane / 8;
    step = lane % 8;
  } else {
    quarter = lane % 16 / 4;
    step = lane / 16 * 4 + lane % 4;
  }
  uint2 words;
  if constexpr (Row::kIsBf16) {
    words = make_uint2(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]));
    if (lane == 0) queries.scales[part][token] = 1;
  } else {
    const float largest =
        fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
    const F16Scale f16 =
        f16_scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest))));
    words = make_uint2(pack_f16(values[0] * f16.inverse, values[1] * f16.inverse),
                       pack_f16(values[2] * f16.inverse, values[3] * f16.inverse));
    if (lane == 0) queries.scales[part][token] = f16.scale;
  }
  *reinterpret_cast<uint2*>(&queries.latent[part][token][quarter][2 * step]) = words;
}

// ---- a run's keys in shared memory

constexpr int kLaneKeys = 2;

// Which key of eight is row r of the first product; the order avoids bank conflicts.
template <typename Row>
__device__ constexpr int key_of_row(int r) {
  return Row::kIsScaled || Row::kIsBf16 ? r : r / 2 + r % 2 * 4;
}

__device__ inline void load_words(const std::byte* from, uint32_t (&words)[4]) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  words[0] = x.x;
  words[1] = x.y;
  words[2] = x.z;
  words[3] = x.w;
}

// Rotary columns `column` to `column` + 3 of a key as bf16.
template <typename Row>
__device__ inline uint2 load_rope(const std::byte* key, int column) {
  const std::byte* const from = key + Row::kRopeAt;
  if constexpr (Row::kRopeIsBf16) {
    return *reinterpret_cast<const uint2*>(from + column * 2);
  } else {
    const auto four = *reinterpret_cast<const uint32_t*>(from + column);
    const float2 low = widen_f16(fp8_to_f16<Row::kType>(four)),
                 high = widen_f16(upper_fp8_to_f16<Row::kType>(four));
    return make_uint2(pack_bf16(low.x, low.y), pack_bf16(high.x, high.y));
  }
}

template <typename Row>
__device__ inline void multiply_keys(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
  if constexpr (Row::kIsBf16) {
    warp_mma_16x8x16(d, a, b);
  } else {
    warp_mma_16x8x16_f16(d, a, b);
  }
}
template <typename Row>
__device__ inline void multiply_first_keys(float (&d)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) {
  if constexpr (Row::kIsBf16) {
    warp_first_mma_16x8x16(d, a, b);
  } else {
    warp_first_mma_16x8x16_f16(d, a, b);
  }
}

// Where the two halves of a run begin, eight keys each.
template <typename Row>
struct KeyHalves {
  const std::byte* begin[2];

  __device__ const std::byte* key(int half, int place) const {
    return begin[half] + place * Row::kBytes;
  }
};

// Parts of the scores of a run, of the lane's keys and tokens: [2 i + t] of key i and token t.
// place: of the lane's key in each half; scales: of these keys in the warp's part.
template <typename Row, int kRows>
__device__ inline void multiply_query(const KeyHalves<Row>& keys, int place,
                                      const float (&scales)[kLaneKeys],
                                      const KeyQueries<kRows>& queries, int part, int lane,
                                      float softmax_factor, float (&scores)[2 * kLaneKeys]) {
  constexpr int kSize = Row::kIsBf16 ? 2 : 1, kFourSteps = 4 / kSize;  // steps of 16 bytes
  // Column l / 4 of the product is a token; those beyond the last one repeat others, unread.
  const int token = lane / 4 % kRows, quarter = lane % 4;
  const std::byte* const key[2] = {keys.key(0, place), keys.key(1, place)};
  const uint32_t* const query = queries.latent[part][token][quarter];
  float d[2][4], rotary[4];
#pragma unroll
  for (int four = 0; four < kKeySteps / kFourSteps; ++four) {
    const int at = (part * kKeyColumns + key_column<Row>(quarter, four * kFourSteps)) * kSize;
    uint32_t words[kLaneKeys][4];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) load_words(key[i] + at, words[i]);
#pragma unroll
    for (int s = 0; s < kFourSteps; ++s) {
      const int step = four * kFourSteps + s;
      const uint2 x = *reinterpret_cast<const uint2*>(query + 2 * step);
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        if constexpr (Row::kIsBf16) {
          pairs[i] = words[i][2 * s];
          pairs[2 + i] = words[i][2 * s + 1];
        } else {
          pairs[i] = fp8_to_f16<Row::kType>(words[i][s]);
          pairs[2 + i] = upper_fp8_to_f16<Row::kType>(words[i][s]);
        }
      }
      if (step < 2) {
        multiply_first_keys<Row>(d[step], pairs, {x.x, x.y});
      } else {
        multiply_keys<Row>(d[step % 2], pairs, {x.x, x.y});
      }
    }
  }
  const int rope_at = part * kKeyRope + quarter * 4;
  const uint2 rope = *reinterpret_cast<const uint2*>(&queries.rope[token][rope_at / 2]),
              first = load_rope<Row>(key[0], rope_at), second = load_rope<Row>(key[1], rope_at);
  warp_first_mma_16x8x16(rotary, {first.x, second.x, first.y, second.y}, {rope.x, rope.y});
#pragma unroll
  for (int j = 0; j < 2 * kLaneKeys; ++j) {
    const float factor = scales[j / 2] * queries.scales[part][(2 * quarter + j % 2) % kRows];
    scores[j] = ((d[0][j] + d[1][j]) * factor + rotary[j]) * softmax_factor;
  }
}

// ---- the running softmax of a group

// Over the lanes that have the same tokens.
template <typename Op>
__device__ inline float over_keys(float x, const Op& op) {
#pragma unroll
  for (int distance = 4; distance < kWarp; distance *= 2) {
    x = op(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

// The running softmax of the lane's tokens in the warp's part of the columns. kTokens: 1 in
// launches of one token, else 2.
template <typename Row, int kTokens>
struct KeySums {
  float most[kTokens], total[kTokens] = {};  // total: of the lane's keys
  float out[kKeySteps][4] = {};              // [step][2 j + t]: column j of the lane's two, token t
  int exponent[kTokens] = {};                // the unit of `out` is 2^(exponent - 127)

  __device__ KeySums() {
#pragma unroll
    for (float& value : most) value = -INFINITY;
  }

  // scores: of the whole group; -infinity: a key that the token does not attend to. is_of: whether
  // the run is of the token's sequence: otherwise its sums stay, whatever the keys are.
  __device__ void add(const KeyHalves<Row>& keys, const float (&scales)[kLaneKeys],
                      const float (&scores)[2 * kLaneKeys], const bool (&is_of)[kTokens], int part,
                      int lane) {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float before[kTokens], probabilities[2 * kLaneKeys] = {};
    int least = 0;  // the largest scale's exponent
    if constexpr (Row::kIsScaled) {
      constexpr int kMost = 253;
      const float largest = over_keys(fmaxf(scales[0], scales[1]), larger);
      least = min(static_cast<int>(__float_as_uint(largest) >> 23), kMost);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float largest = fmaxf(most[t], over_keys(fmaxf(scores[t], scores[2 + t]), larger));
      before[t] = most[t] == largest ? 1 : exp2_fast(most[t] - largest);
      most[t] = largest;
      total[t] *= before[t];
      float unit = 1;
      if constexpr (Row::kIsScaled) {
        constexpr int kBias = 127;
        const int power = is_of[t] ? max(exponent[t], least) : exponent[t];
        unit = __uint_as_float(static_cast<uint32_t>(2 * kBias - power) << 23);
        before[t] *=
            __uint_as_float(static_cast<uint32_t>(max(kBias + exponent[t] - power, 0)) << 23);
        exponent[t] = power;
      }
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const float score = scores[2 * i + t];
        const float probability = score == -INFINITY ? 0 : exp2_fast(score - largest);
        total[t] += probability;
        probabilities[2 * i + t] = Row::kIsScaled ? probability * (scales[i] * unit) : probability;
      }
    }
    uint32_t weights[kLaneKeys];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const float low = probabilities[2 * i], high = probabilities[2 * i + 1];
      weights[i] = transposed(Row::kIsBf16 ? pack_bf16(low, high) : pack_f16(low, high));
    }
    const auto add_step = [&](int step, const uint32_t(&columns)[4]) {
      float d[4];
      multiply_first_keys<Row>(d, columns, weights);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (!is_of[t]) continue;
        out[step][t] = fmaf(out[step][t], before[t], d[t]);
        out[step][2 + t] = fmaf(out[step][2 + t], before[t], d[2 + t]);
      }
    };
    if constexpr (Row::kIsBf16) {
      // The first product's values, transposed.
      const int place = key_of_row<Row>(lane / 4);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        const int at = (part * kKeyColumns + key_column<Row>(lane % 4, step)) * 2;
        const uint2 first = *reinterpret_cast<const uint2*>(keys.key(0, place) + at),
                    second = *reinterpret_cast<const uint2*>(keys.key(1, place) + at);
        add_step(step, {transposed(first.x), transposed(first.y), transposed(second.x),
                        transposed(second.y)});
      }
    } else {
      // Sixteen columns of four keys: bytes of two keys become pairs.
      const int at = part * kKeyColumns + lane / 4 * 16;
      uint32_t words[2][2][4];  // [half][key of a pair]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = key_of_row<Row>(lane % 4 * 2 + i % 2);
        load_words(keys.key(i / 2, place) + at, words[i / 2][i % 2]);
      }
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        uint32_t columns[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pairs = __byte_perm(words[half][0][step / 2], words[half][1][step / 2],
                                             step % 2 == 0 ? 0x5140 : 0x7362);
          columns[2 * half] = fp8_to_f16<Row::kType>(pairs);
          columns[2 * half + 1] = upper_fp8_to_f16<Row::kType>(pairs);
        }
        add_step(step, columns);
      }
    }
  }

  // Ends the sums: totals of all keys, `out` in units of 1.
  __device__ void end() {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      total[t] = over_keys(total[t], [](float a, float b) { return a + b; });
      if constexpr (!Row::kIsScaled) continue;
      const float unit = __uint_as_float(static_cast<uint32_t>(exponent[t]) << 23);
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        out[s][t] *= unit;
        out[s][2 + t] *= unit;
      }
    }
  }

  // Stores the warp's 128 columns of the lane's token t, in the order of column_of_place().
  __device__ void store(float* to, int t, int lane) const {
    if constexpr (Row::kIsBf16) {
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        float* const four = to + s * 16 + lane / 8 * 4 + lane / 4 % 2;
        four[0] = out[s][t];
        four[2] = out[s][2 + t];
      }
    } else {
#pragma unroll
      for (int s = 0; s < kKeySteps; s += 2) {
        reinterpret_cast<float4*>(to)[s / 2 * 8 + lane / 4] =
            make_float4(out[s][t], out[s][2 + t], out[s + 1][t], out[s + 1][2 + t]);
      }
    }
  }
  // Four neighbours are four neighbouring columns.
  __device__ static int column_of_place(int place) {
    if constexpr (Row::kIsBf16) return key_column<Row>(place / 4 % 4, place / 16) + place % 4;
    return place / 4 % 8 * 16 + place / 32 * 4 + place % 4;
  }
};

}  // namespace fathom::cuda::decode_layers_kernel
