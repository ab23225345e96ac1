// Tokens and experts in e4m3 for the tests and benchmarks of the mixture of experts on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/device_array.h"
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"

namespace fathom::cuda {

// One or several matrices with block-wise 128 x 128 scales.
struct ScaledMatrices {
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;
};

// Weights repeat some 8 MB of random numbers; outputs and workspace are not initialised, progress
// is zero.
struct ScaledMoeProblem {
  ScaledMoeProblem(const MoeShape& shape, int32_t rows, const std::vector<int32_t>& ids,
                   uint32_t seed);

  ScaledMoeArguments arguments(DType out_type) const;
  double flop() const;  // of the GEMMs of tokens with their experts

  MoeShape shape;
  int32_t rows;
  std::vector<int32_t> expert_ids;
  DeviceArray<uint8_t> x;
  int64_t x_scales_stride;
  DeviceArray<float> x_scales;
  DeviceArray<int32_t> ids;
  DeviceArray<float> weights;
  ScaledMatrices gate_up, down, shared_gate_up, shared_down;
  DeviceArray<float> out;
  DeviceArray<uint8_t> workspace;
  DeviceArray<uint64_t> progress;
};

// Reference of scaled_moe() in double precision from the same e4m3 and scales. Activations between
// the GEMMs are quantized as there, but from doubles: an occasional value rounds to the other side.
class ScaledMoeReference {
 public:
  explicit ScaledMoeReference(const ScaledMoeProblem& problem, ScaleForm form = ScaleForm::kF32);
  std::vector<double> row(int32_t row) const;

 private:
  struct Matrices {
    std::vector<uint8_t> values;
    std::vector<float> scales;
    int64_t n, k;  // of one matrix

    // Adds rows [first, first + count) of matrix e times x, times weight, to out.
    void multiply(int64_t e, int64_t first, int64_t count, const std::vector<double>& x,
                  double weight, double* out) const;
  };

  void add_mlp(const Matrices& gate_up, const Matrices& down, int64_t expert,
               const std::vector<double>& x, double weight, std::vector<double>& out) const;

  MoeShape shape_;
  ScaleForm form_;
  std::vector<int32_t> ids_;
  std::vector<uint8_t> x_;
  std::vector<float> x_scales_, weights_;
  int64_t x_scales_stride_;
  Matrices gate_up_, down_, shared_gate_up_, shared_down_;
};

}  // namespace fathom::cuda
