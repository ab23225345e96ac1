// Four-bit codes to bf16 in registers, exactly: two values an instruction. Each of a word's halves
// has four codes; pair i is the codes at bits 4 i of both.
#pragma once

#include <cstdint>

#include "tensor/scaled_matrix.h"

namespace fathom::cuda {

__device__ inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
__device__ inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// (a & mask) | bits: one instruction, which the compiler makes two of for two constants.
__device__ inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

template <FourBitCode kCode>
__device__ inline uint32_t four_bit_pair(uint32_t word, int i) {
  if constexpr (kCode == FourBitCode::kInteger) {
    // The last bit of bf16's 128 is 1: with a code in its low bits it is 128 + code. Codes are
    // offset by 8.
    return subtract_bf16x2(and_or(word >> 4 * i, 0x000F000F, 0x43004300), 0x43084308);
  } else {
    // Exponent and mantissa of E2M1, at the place of bf16's last two exponent bits and first of the
    // mantissa, are 2^-126 of the value, subnormal numbers included.
    const uint32_t value = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
    return multiply_bf16x2(and_or(value, 0x01C001C0, word << (12 - 4 * i) & 0x80008000),
                           0x7E807E80);
  }
}

// The left operand of a tensor core instruction of 16 rows and 16 columns, from a lane's word.
template <FourBitCode kCode>
__device__ inline void four_bit_fragment(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = four_bit_pair<kCode>(word, i);
}

}  // namespace fathom::cuda
