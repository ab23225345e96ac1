// Activations as e4m3 GEMMs take them: scales 1x128 (one in fp32 for each 128 columns of a row),
// values e4m3.
//
//   scale = max(largest magnitude of the block, 1e-30) / 448      448: the largest e4m3
//   value = e4m3(x / scale), as x * (448 / magnitude) in fp32, rounded to nearest even
//
// With kPowerOfTwo the scale is the next power of two from there (checkpoints call it ue8m0): x /
// scale is exact then, and a scale fits 8 bits exactly.
//
// Source: DeepSeek-V3's technical report (arXiv 2412.19437), section 3.3.2, for the blocks; the
// inference code published with V3 and V3.1 for the scales.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/dtype.h"
#include "tensor/scale_form.h"

namespace fathom {

// Quantizes one block of up to 128 values; returns its scale. All devices' kernels are bitwise
// identical to it for finite x: all divisions are IEEE's.
float quantize_block(std::span<const bf16> x, ScaleForm form, std::span<e4m3> values);

// The same with a given scale (a checkpoint's, from calibration): e4m3(x * (1 / scale)), saturated
// at magnitude 448.
void quantize_block(std::span<const bf16> x, float scale, std::span<e4m3> values);

}  // namespace fathom
