// wgmma.mma_async of bf16 with A from registers, of the numbers of columns that wgmma.cuh's
// functions do not have: mma_64() of 96, 160, 192 and 224 columns, for GEMMs whose B is any
// multiple of 32 wide.
#pragma once

#include <cstdint>

#include "device/cuda/wgmma.cuh"

namespace fathom::cuda {

// Operand syntax as in wgmma.cuh.

#define FATHOM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FATHOM_D8(i) FATHOM_D4(i), FATHOM_D4(i + 4)
#define FATHOM_D16(i) FATHOM_D8(i), FATHOM_D8(i + 8)
#define FATHOM_D32(i) FATHOM_D16(i), FATHOM_D16(i + 16)
#define FATHOM_D48(i) FATHOM_D32(i), FATHOM_D16(i + 32)
#define FATHOM_D64(i) FATHOM_D32(i), FATHOM_D32(i + 32)
#define FATHOM_D80(i) FATHOM_D64(i), FATHOM_D16(i + 64)
#define FATHOM_D96(i) FATHOM_D64(i), FATHOM_D32(i + 64)
#define FATHOM_D112(i) FATHOM_D96(i), FATHOM_D16(i + 96)
#define FATHOM_N4 "%0,%1,%2,%3"
#define FATHOM_N8 FATHOM_N4 ",%4,%5,%6,%7"
#define FATHOM_N16 FATHOM_N8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FATHOM_N32 \
  FATHOM_N16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FATHOM_N48 \
  FATHOM_N32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FATHOM_N64                                                                           \
  FATHOM_N32                                                                                 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
  ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
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

#define FATHOM_MMA_REGISTERS(COLUMNS, TYPE, NAMES, REGISTERS, A0, A1, A2, A3, B, P, TB)         \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P                                      \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE      \
               " {" NAMES "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", add, 1, 1, %" #TB \
               ";\n}"                                                                           \
               : REGISTERS                                                                      \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(static_cast<int>(kB)))

template <KAlong kB = KAlong::kColumns>
__device__ inline void mma_64(float (&d)[48], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint64_t b, int add) {
  FATHOM_MMA_REGISTERS(96, "bf16", FATHOM_N48, FATHOM_D48(0), 48, 49, 50, 51, 52, 53, 54);
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

#undef FATHOM_D4
#undef FATHOM_D8
#undef FATHOM_D16
#undef FATHOM_D32
#undef FATHOM_D48
#undef FATHOM_D64
#undef FATHOM_D80
#undef FATHOM_D96
#undef FATHOM_D112
#undef FATHOM_N4
#undef FATHOM_N8
#undef FATHOM_N16
#undef FATHOM_N32
#undef FATHOM_N48
#undef FATHOM_N64
#undef FATHOM_N80
#undef FATHOM_N96
#undef FATHOM_N112
#undef FATHOM_MMA_REGISTERS

}  // namespace fathom::cuda
