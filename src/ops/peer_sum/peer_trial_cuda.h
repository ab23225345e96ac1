// Ranks for tests and benchmarks of sums over ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/error.h"
#include "device/cuda/trial_devices.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {

struct PeerShape {
  int ranks;
  int64_t rows, n;

  std::string name() const {
    return std::to_string(ranks) + "Ranks" + std::to_string(rows) + "x" + std::to_string(n);
  }
};

// One rank's arrays, [rows, n] each, and its stream.
class PeerTrialRank {
 public:
  PeerTrialRank(int device, const PeerShape& shape, int64_t delta_stride)
      : device_(use_device(device)),
        residual(shape.rows * shape.n),
        delta(shape.rows * delta_stride),
        out(shape.rows * shape.n),
        values(shape.rows * shape.n),
        scales(ceil_div(shape.n, kScaleBlock) * round_up(shape.rows, int64_t{4})) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~PeerTrialRank() { cudaStreamDestroy(stream_); }
  PeerTrialRank(const PeerTrialRank&) = delete;
  PeerTrialRank& operator=(const PeerTrialRank&) = delete;

  // Its stream, with its device made current for what is enqueued there.
  cudaStream_t stream() const {
    use_device(device_);
    return stream_;
  }

  // Results that nothing has written yet, NaN in every type.
  void poison() const {
    use_device(device_);
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poisoning");
    check(cudaMemset(values.data(), 0xFF, values.bytes()), "poisoning");
    check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poisoning");
    check(cudaStreamSynchronize(nullptr), "poisoning");
  }

 private:
  const int device_;  // current before the arrays are made
  cudaStream_t stream_ = nullptr;

 public:
  DeviceArray<float> residual;
  DeviceArray<uint16_t> delta, out;
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;
};

}  // namespace fathom::cuda
