// wgmma.mma_async: 64 rows with 8 to 256 columns, fp32 (+)= 16 x 16 bits, a step of 16 of k, or 8 x
// 8 bits, one of 32. PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate".
//
// A thread's element j of D is row 16 * warp + lane / 4 (+ 8 if j & 2) and column 8 * (j / 4) + 2 *
// (lane % 4) + (j & 1): as many elements as half the columns. add = 0: d is written, not added to.
#pragma once

#include <cstdint>

#include "device/cuda/fp8.cuh"
#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// ---- matrix descriptors

// Matrix descriptor of shared memory with the 128-byte swizzle whose rows are k: 64 columns are a
// box of groups of 8 rows (1,024 bytes), boxes are `box_stride` bytes apart. "Matrix-descriptor
// format" under wgmma, "MN-major". For K-major: swizzled_matrix() of ptx.cuh.
__device__ inline uint64_t swizzled_boxes(uint32_t address, int box_stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kGroupStride = 1024 >> 4;
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(box_stride >> 4) << 16 |
         kGroupStride << 32 | kSwizzle128;
}

// The descriptor advanced by `bytes`. Only the lower word changes: half the arithmetic.
__device__ inline uint64_t moved(uint64_t matrix, int bytes) {
  const auto low = static_cast<uint32_t>(matrix) + static_cast<uint32_t>(bytes >> 4);
  return (matrix >> 32 << 32) | low;
}

// The same descriptor, declared warp-uniform: it stays in a uniform register, and moved() costs one
// instruction instead of a chain of ten between two wgmmas.
__device__ inline uint64_t uniform_matrix(uint64_t matrix) {
  return (matrix >> 32 << 32) | __shfl_sync(~0u, static_cast<uint32_t>(matrix), 0);
}

// Compiler barrier for these registers: their uses do not move across it while a wgmma in flight
// reads or writes them.
template <int kCount>
__device__ inline void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// ---- operand syntax of the instruction: D's registers, and their names

#define FATHOM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FATHOM_D8(i) FATHOM_D4(i), FATHOM_D4(i + 4)
#define FATHOM_D16(i) FATHOM_D8(i), FATHOM_D8(i + 8)
#define FATHOM_D24(i) FATHOM_D16(i), FATHOM_D8(i + 16)
#define FATHOM_D32(i) FATHOM_D16(i), FATHOM_D16(i + 16)
#define FATHOM_D40(i) FATHOM_D32(i), FATHOM_D8(i + 32)
#define FATHOM_D48(i) FATHOM_D32(i), FATHOM_D16(i + 32)
#define FATHOM_D56(i) FATHOM_D48(i), FATHOM_D8(i + 48)
#define FATHOM_D64(i) FATHOM_D32(i), FATHOM_D32(i + 32)
#define FATHOM_D72(i) FATHOM_D64(i), FATHOM_D8(i + 64)
#define FATHOM_D80(i) FATHOM_D64(i), FATHOM_D16(i + 64)
#define FATHOM_D96(i) FATHOM_D64(i), FATHOM_D32(i + 64)
#define FATHOM_D112(i) FATHOM_D96(i), FATHOM_D16(i + 96)
#define FATHOM_D128(i) FATHOM_D64(i), FATHOM_D64(i + 64)
#define FATHOM_N4 "%0,%1,%2,%3"
#define FATHOM_N8 FATHOM_N4 ",%4,%5,%6,%7"
#define FATHOM_N16 FATHOM_N8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FATHOM_N24 FATHOM_N16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FATHOM_N32 \
  FATHOM_N16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FATHOM_N40 FATHOM_N32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FATHOM_N48 \
  FATHOM_N32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FATHOM_N56 FATHOM_N48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FATHOM_N64                                                                           \
  FATHOM_N32                                                                                 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
  ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FATHOM_N72 FATHOM_N64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FATHOM_N80 \
  FATHOM_N64       \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define FATHOM_N96                                                                           \
  FATHOM_N64                                                                                 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85" \
  ",%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FATHOM_N112 \
  FATHOM_N96        \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define FATHOM_N128                                                                        \
  FATHOM_N96                                                                               \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113" \
  ",%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// A and B from shared memory; A, B, P, TA and TB are the numbers of the operands that follow D's.
#define FATHOM_MMA(COLUMNS, NAMES, REGISTERS, A, B, P, TA, TB)                                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P                                    \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES \
               "}, %" #A ", %" #B ", add, 1, 1, %" #TA ", %" #TB ";\n}"                       \
               : REGISTERS                                                                    \
               : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB)))

// The same for e4m3, K-major in both.
#define FATHOM_MMA_E4M3(COLUMNS, NAMES, REGISTERS, A, B, P)                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P                                    \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {" NAMES \
               "}, %" #A ", %" #B ", add, 1, 1;\n}"                                           \
               : REGISTERS                                                                    \
               : "l"(a), "l"(b), "r"(add))

// A from registers.
#define FATHOM_MMA_REGISTERS(COLUMNS, TYPE, NAMES, REGISTERS, A0, A1, A2, A3, B, P, TB)         \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P                                      \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE      \
               " {" NAMES "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", add, 1, 1, %" #TB \
               ";\n}"                                                                           \
               : REGISTERS                                                                      \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(static_cast<int>(kB)))

#define FATHOM_MMA_FP8_REGISTERS(COLUMNS, TYPE, NAMES, REGISTERS, A0, A1, A2, A3, B, P)           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P                                        \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32." TYPE ".e4m3 {" NAMES \
               "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", add, 1, 1;\n}"                 \
               : REGISTERS                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

// ---- A and B from shared memory, bf16

// The axis along which a matrix's k runs in shared memory.
enum class KAlong { kColumns, kRows };

// A [64, 16], B [columns, 16].
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[4], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(8, FATHOM_N4, FATHOM_D4(0), 4, 5, 6, 7, 8);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[8], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(16, FATHOM_N8, FATHOM_D8(0), 8, 9, 10, 11, 12);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[16], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(32, FATHOM_N16, FATHOM_D16(0), 16, 17, 18, 19, 20);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[32], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(64, FATHOM_N32, FATHOM_D32(0), 32, 33, 34, 35, 36);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[48], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(96, FATHOM_N48, FATHOM_D48(0), 48, 49, 50, 51, 52);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[64], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(128, FATHOM_N64, FATHOM_D64(0), 64, 65, 66, 67, 68);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[80], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(160, FATHOM_N80, FATHOM_D80(0), 80, 81, 82, 83, 84);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[96], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(192, FATHOM_N96, FATHOM_D96(0), 96, 97, 98, 99, 100);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[112], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(224, FATHOM_N112, FATHOM_D112(0), 112, 113, 114, 115, 116);
}
template <KAlong kA = KAlong::kColumns, KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[128], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA(256, FATHOM_N128, FATHOM_D128(0), 128, 129, 130, 131, 132);
}

// ---- the same, e4m3: A [64, 32], B [columns, 32]; the 32 are 32 bytes of a swizzled row

__device__ inline void mma_64_e4m3(float (&d)[4], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(8, FATHOM_N4, FATHOM_D4(0), 4, 5, 6);
}
__device__ inline void mma_64_e4m3(float (&d)[8], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(16, FATHOM_N8, FATHOM_D8(0), 8, 9, 10);
}
__device__ inline void mma_64_e4m3(float (&d)[16], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(32, FATHOM_N16, FATHOM_D16(0), 16, 17, 18);
}
__device__ inline void mma_64_e4m3(float (&d)[24], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(48, FATHOM_N24, FATHOM_D24(0), 24, 25, 26);
}
__device__ inline void mma_64_e4m3(float (&d)[32], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(64, FATHOM_N32, FATHOM_D32(0), 32, 33, 34);
}
__device__ inline void mma_64_e4m3(float (&d)[40], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(80, FATHOM_N40, FATHOM_D40(0), 40, 41, 42);
}
__device__ inline void mma_64_e4m3(float (&d)[48], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(96, FATHOM_N48, FATHOM_D48(0), 48, 49, 50);
}
__device__ inline void mma_64_e4m3(float (&d)[56], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(112, FATHOM_N56, FATHOM_D56(0), 56, 57, 58);
}
__device__ inline void mma_64_e4m3(float (&d)[64], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(128, FATHOM_N64, FATHOM_D64(0), 64, 65, 66);
}
__device__ inline void mma_64_e4m3(float (&d)[72], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(144, FATHOM_N72, FATHOM_D72(0), 72, 73, 74);
}
__device__ inline void mma_64_e4m3(float (&d)[96], uint64_t a, uint64_t b, int add) {
  FATHOM_MMA_E4M3(192, FATHOM_N96, FATHOM_D96(0), 96, 97, 98);
}

// ---- A from registers

// A thread's values of A [64, 16], two a register: row 16 * warp + lane / 4, columns 2 (lane % 4)
// and the next in a0, the same 8 columns further in a2; 8 rows further in a1 and a3. So D's values,
// packed in pairs, are A: elements 8 t to 8 t + 7 are a0 to a3 of step t.
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[8], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(16, "bf16", FATHOM_N8, FATHOM_D8(0), 8, 9, 10, 11, 12, 13, 14);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(32, "bf16", FATHOM_N16, FATHOM_D16(0), 16, 17, 18, 19, 20, 21, 22);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(64, "bf16", FATHOM_N32, FATHOM_D32(0), 32, 33, 34, 35, 36, 37, 38);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[48], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(96, "bf16", FATHOM_N48, FATHOM_D48(0), 48, 49, 50, 51, 52, 53, 54);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(128, "bf16", FATHOM_N64, FATHOM_D64(0), 64, 65, 66, 67, 68, 69, 70);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[80], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(160, "bf16", FATHOM_N80, FATHOM_D80(0), 80, 81, 82, 83, 84, 85, 86);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[96], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(192, "bf16", FATHOM_N96, FATHOM_D96(0), 96, 97, 98, 99, 100, 101, 102);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[112], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(224, "bf16", FATHOM_N112, FATHOM_D112(0), 112, 113, 114, 115, 116, 117, 118);
}
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(256, "bf16", FATHOM_N128, FATHOM_D128(0), 128, 129, 130, 131, 132, 133, 134);
}

// The same for f16.
template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64_f16(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2,
                                  uint32_t a3, uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(64, "f16", FATHOM_N32, FATHOM_D32(0), 32, 33, 34, 35, 36, 37, 38);
}

// e4m3 or e5m2 times e4m3, A [64, 32]: row 16 * warp + lane / 4, columns 4 (lane % 4) to 3 further
// in a0, the same 16 columns further in a2; 8 rows further in a1 and a3.
template <Fp8 kA>
__device__ inline void mma_64_fp8(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kA == Fp8::kE4M3) {
    FATHOM_MMA_FP8_REGISTERS(16, "e4m3", FATHOM_N8, FATHOM_D8(0), 8, 9, 10, 11, 12, 13);
  } else {
    FATHOM_MMA_FP8_REGISTERS(16, "e5m2", FATHOM_N8, FATHOM_D8(0), 8, 9, 10, 11, 12, 13);
  }
}
template <Fp8 kA>
__device__ inline void mma_64_fp8(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kA == Fp8::kE4M3) {
    FATHOM_MMA_FP8_REGISTERS(32, "e4m3", FATHOM_N16, FATHOM_D16(0), 16, 17, 18, 19, 20, 21);
  } else {
    FATHOM_MMA_FP8_REGISTERS(32, "e5m2", FATHOM_N16, FATHOM_D16(0), 16, 17, 18, 19, 20, 21);
  }
}
template <Fp8 kA>
__device__ inline void mma_64_fp8(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kA == Fp8::kE4M3) {
    FATHOM_MMA_FP8_REGISTERS(64, "e4m3", FATHOM_N32, FATHOM_D32(0), 32, 33, 34, 35, 36, 37);
  } else {
    FATHOM_MMA_FP8_REGISTERS(64, "e5m2", FATHOM_N32, FATHOM_D32(0), 32, 33, 34, 35, 36, 37);
  }
}

#undef FATHOM_D4
#undef FATHOM_D8
#undef FATHOM_D16
#undef FATHOM_D24
#undef FATHOM_D32
#undef FATHOM_D40
#undef FATHOM_D48
#undef FATHOM_D56
#undef FATHOM_D64
#undef FATHOM_D72
#undef FATHOM_D80
#undef FATHOM_D96
#undef FATHOM_D112
#undef FATHOM_D128
#undef FATHOM_N4
#undef FATHOM_N8
#undef FATHOM_N16
#undef FATHOM_N24
#undef FATHOM_N32
#undef FATHOM_N40
#undef FATHOM_N48
#undef FATHOM_N56
#undef FATHOM_N64
#undef FATHOM_N72
#undef FATHOM_N80
#undef FATHOM_N96
#undef FATHOM_N112
#undef FATHOM_N128
#undef FATHOM_MMA
#undef FATHOM_MMA_E4M3
#undef FATHOM_MMA_FP8_REGISTERS
#undef FATHOM_MMA_REGISTERS

}  // namespace fathom::cuda
