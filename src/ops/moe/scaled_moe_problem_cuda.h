// Tokens and experts in e4m3 for the tests and benchmarks of the mixture of experts on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/device_array.h"
#include "ops/moe/scaled_moe_many_rows_cuda.h"

namespace fathom::cuda {

// A matrix, or several, with scales for blocks of 128 x 128.
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
  double flop() const;  // of the products of tokens with their experts

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

// What scaled_moe() is to give, in double precision from the same e4m3 and scales. What is between
// the products is quantised as there, from doubles: now and then a value falls to the other side.
class ScaledMoeReference {
 public:
  explicit ScaledMoeReference(const ScaledMoeProblem& problem, ScaleForm form = ScaleForm::kF32);
  std::vector<double> row(int32_t row) const;

 private:
  struct Matrices {
    std::vector<uint8_t> values;
    std::vector<float> scales;
    int64_t n, k;  // of one

    // Of matrix e, rows [first, first + count) times x, added to out times weight.
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
