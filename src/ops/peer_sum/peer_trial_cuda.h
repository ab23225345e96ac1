// Ranks for tests and benchmarks: spread over the GPUs there are, in turns; with one GPU they share
// it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/error.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {

// Ranks that share a device wait for one another's launches: each stream needs a hardware queue of
// its own. Read when the device is first used.
[[maybe_unused]] inline const int kTrialQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

inline int num_gpus() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting GPUs");
  return count;
}

inline std::vector<int> trial_devices(int ranks) {
  std::vector<int> devices;
  for (int r = 0; r < ranks; ++r) devices.push_back(r % num_gpus());
  return devices;
}

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
      : device_(use(device)),
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
    use(device_);
    return stream_;
  }

  // Results that nothing has written yet, NaN in every type.
  void poison() const {
    use(device_);
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poisoning");
    check(cudaMemset(values.data(), 0xFF, values.bytes()), "poisoning");
    check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poisoning");
    check(cudaStreamSynchronize(nullptr), "poisoning");
  }

 private:
  static int use(int device) {
    check(cudaSetDevice(device), "choosing a device");
    return device;
  }

  const int device_;  // current before the arrays are made
  cudaStream_t stream_ = nullptr;

 public:
  DeviceArray<float> residual;
  DeviceArray<uint16_t> delta, out;
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;
};

}  // namespace fathom::cuda
