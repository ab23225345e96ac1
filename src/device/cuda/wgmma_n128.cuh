// wgmma.mma_async.m64n128k16 with A from registers: what attention over many queries adds. A
// thread's 64 registers of D: element j is row 16 * warp + lane / 4 (+ 8 if j & 2), column 8 * (j /
// 4) + 2 * (lane % 4) + (j & 1).
#pragma once

#include "device/cuda/wgmma.cuh"

namespace fathom::cuda {

// The compiler does not move uses of these registers across this place: an unfinished product reads
// or writes them on one of its sides.
template <int kCount>
__device__ inline void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// A matrix in shared memory with the 128-byte swizzle whose rows are k: 64 columns are a box of
// groups of 8 rows (1,024 bytes), boxes are `box_stride` bytes apart. "Matrix-descriptor format"
// under wgmma, "MN-major".
__device__ inline uint64_t swizzled_boxes(uint32_t address, int box_stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kGroupStride = 1024 >> 4;
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(box_stride >> 4) << 16 |
         kGroupStride << 32 | kSwizzle128;
}

// The matrix that begins `bytes` further on. Only the lower word changes: half the arithmetic.
__device__ inline uint64_t moved(uint64_t matrix, int bytes) {
  const auto low = static_cast<uint32_t>(matrix) + static_cast<uint32_t>(bytes >> 4);
  return (matrix >> 32 << 32) | low;
}

// A from registers (as D's, packed in pairs: elements 8 t to 8 t + 7 of a thread are a[4 t] to
// a[4 t + 3]), B as swizzled_boxes() describes it. add: 0 writes d.
__device__ inline void mma_64x128x16_rows(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, add, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

}  // namespace fathom::cuda
