#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "ops/sampling/noise_trial_cuda.h"
#include "ops/sampling/race_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void noise_kernel(NoiseKey key, const uint64_t* numbers, int64_t count, double* noise,
                             double* gumbels) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int id = static_cast<int>(i);
  noise[i] = token_noise(key, id, upper_word(key, id));
  gumbels[i] = gumbel(numbers[i]);
}

}  // namespace

void compute_noise(NoiseKey key, const uint64_t* numbers, int64_t count, double* noise,
                   double* gumbels, GpuStream stream) {
  launch(noise_kernel,
         {.blocks = static_cast<unsigned>(ceil_div(count, int64_t{kThreads})), .threads = kThreads},
         stream, key, numbers, count, noise, gumbels);
}

}  // namespace fathom::cuda
