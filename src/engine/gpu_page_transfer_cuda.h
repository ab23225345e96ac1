// Copies pages between a GPU's page pool and pinned host memory, on a stream of its own.
//
// A copy waits on the device for the steps that were begun before it. No step waits for a copy: the
// engine begins a step that needs one only after it has ended. A page is contiguous in the pool,
// with all layers. Used by the engine's thread only.
#pragma once

#include <vector>

#include "cache/page_transfer.h"
#include "device/cuda/event.h"

namespace fathom {

class GpuPageTransfer : public PageTransfer {
 public:
  // pages: [num_pages, page_bytes] on the current device; steps: the stream that steps run on. Both
  // must outlive this object. Throws cuda::DeviceError.
  GpuPageTransfer(std::byte* pages, int64_t page_bytes, cudaStream_t steps);
  ~GpuPageTransfer() override;

  int64_t page_bytes() const override { return page_bytes_; }
  Result<std::unique_ptr<HostMemory>> allocate_slots(int64_t slots) override;
  void save(int32_t page, std::byte* host, int32_t id) override;
  void load(const std::byte* host, int32_t page, int32_t id) override;
  void take_ended(std::vector<EndedCopy>& ended, bool wait) override;

  // Tells the transfer that a step has begun: later copies are ordered after it.
  void note_step() { is_behind_steps_ = false; }

 private:
  struct Copy {
    int32_t id = 0;
    cudaError_t begun = cudaSuccess;
    cuda::Event done;
  };
  void copy(void* to, const void* from, int32_t id, cudaMemcpyKind kind);

  std::byte* const pages_;
  const int64_t page_bytes_;
  const cudaStream_t steps_;
  cudaStream_t stream_ = nullptr;
  cuda::Event steps_begun_;
  bool is_behind_steps_ = false;  // whether stream_ already waits for the newest step
  std::vector<Copy> copies_;      // a ring buffer: copies in flight end in order
  size_t first_ = 0, in_flight_ = 0;
};

}  // namespace fathom
