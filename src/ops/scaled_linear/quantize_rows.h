// Activations as products of e4m3 take them: each row's columns by blocks of 128, values e4m3, a
// scale in fp32 for each block.
//
//   scale = max(largest magnitude of the block, 1e-30) / 448      448: the largest e4m3
//   value = e4m3(x / scale), as x * (448 / magnitude) in fp32, rounded to nearest even
//
// With kPowerOfTwo the scale is the next power of two from there (what checkpoints call ue8m0): x /
// scale is exact then, and so is a scale kept in 8 bits.
//
// Source: DeepSeek-V3's technical report (arXiv 2412.19437), section 3.3.2, for the blocks; the
// inference code published with V3 and V3.1 for the scales.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/dtype.h"
#include "tensor/scale_form.h"

namespace fathom {

// One block of up to 128 values; returns its scale. What any device's kernel gives, to the bit, for
// finite x: all divisions are IEEE's.
float quantize_block(std::span<const bf16> x, ScaleForm form, std::span<e4m3> values);

// With the scale given (a checkpoint's, from calibration): e4m3(x * (1 / scale)), where magnitudes
// beyond 448 become 448.
void quantize_block(std::span<const bf16> x, float scale, std::span<e4m3> values);

}  // namespace fathom
