// The inner loop of a head in 8-bit integers, one function a CPU level.
//
// Plain types and no inline functions: the vector files are compiled with flags of their own, and
// nothing that they instantiate may be shared with code for an older CPU.
//
// A panel is 64 weight rows. A step is 4 columns of it, 256 bytes: byte 4 * r + c is column c of
// row r. Rows and columns are padded with zeros to whole panels and steps.
#pragma once

#include <cstdint>

#include "device/cpu/isa.h"

namespace fathom {

constexpr int64_t kPanelRows = 64;
constexpr int64_t kStepColumns = 4;
constexpr int kMostRows = 4;
// Largest magnitude of a weight's code: two products with a byte of x, 255 at most, are added in 16
// bits with sign (AVX2).
constexpr int kMaxCode = 63;
// x is stored as code + kZero, codes -127 … 127.
constexpr int kZero = 128;

// sums [rows][kPanelRows] = x [rows][4 * steps] times one panel, kZero included. rows <= kMostRows.
using PanelSums = void (*)(const uint8_t* x, int rows, const int8_t* panel, int64_t steps,
                           int32_t* sums);

// The function of a level that this CPU has.
PanelSums panel_sums(CpuIsa isa);

void panel_sums_scalar(const uint8_t* x, int rows, const int8_t* panel, int64_t steps,
                       int32_t* sums);
#if defined(__x86_64__)
void panel_sums_avx2(const uint8_t* x, int rows, const int8_t* panel, int64_t steps, int32_t* sums);
void panel_sums_avx512(const uint8_t* x, int rows, const int8_t* panel, int64_t steps,
                       int32_t* sums);
#endif

}  // namespace fathom
