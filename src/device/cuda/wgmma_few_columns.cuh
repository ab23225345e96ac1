// wgmma.mma_async.m64n{16,32}k16 with A from registers: what is converted on the way to the tensor
// cores. D's elements are as in wgmma.cuh.
#pragma once

#include <cstdint>

namespace fathom::cuda {

enum class Half { kF16, kBF16 };  // of A and B

// A thread's values of A [64, 16], two a register: of row 16 * warp + lane / 4 columns 2 (lane % 4)
// and the next in a[0], the same 8 columns further in a[2]; of 8 rows further in a[1] and a[3]. B
// [columns, 16] from shared memory, k contiguous. add = 0: d is written, not added to.
template <Half kType>
__device__ inline void mma_64_converted(float (&d)[8], const uint32_t (&a)[4], uint64_t b,
                                        int add) {
#define FATHOM_MMA(TYPE)                                                                    \
  asm volatile(                                                                             \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"                                      \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, add, 1, 1, 0;\n}"                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
        "+f"(d[7])                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
  if constexpr (kType == Half::kF16) {
    FATHOM_MMA("f16");
  } else {
    FATHOM_MMA("bf16");
  }
#undef FATHOM_MMA
}

template <Half kType>
__device__ inline void mma_64_converted(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                        int add) {
#define FATHOM_MMA(TYPE)                                                                        \
  asm volatile(                                                                                 \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                               \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "                              \
      "{%16,%17,%18,%19}, %20, add, 1, 1, 0;\n}"                                                \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
  if constexpr (kType == Half::kF16) {
    FATHOM_MMA("f16");
  } else {
    FATHOM_MMA("bf16");
  }
#undef FATHOM_MMA
}

}  // namespace fathom::cuda
