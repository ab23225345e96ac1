#include "device/cuda/launch.h"
#include "e2e/gpu_spin_cuda.h"

namespace fathom {
namespace {

constexpr int kBytes = 227 * 1024;

__global__ void spin_kernel(uint64_t nanoseconds) {
  const auto now = [] {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  };
  // Every turn reads the clock: a loop without side effects may be left out.
  const uint64_t begin = now();
  while (now() - begin < nanoseconds || nanoseconds == 0) {
  }
}

}  // namespace

void occupy_gpu(std::chrono::nanoseconds duration) {
  cuda::DeviceContext& device = cuda::DeviceContext::current();
  device.allow_shared_memory(spin_kernel, kBytes);
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  cuda::launch(spin_kernel,
               {.blocks = static_cast<unsigned>(device.num_multiprocessors()),
                .threads = 128,
                .shared_bytes = kBytes},
               {device, stream}, static_cast<uint64_t>(duration.count()));
}

}  // namespace fathom
