// Copies pages between the page pools of a lane's ranks on GPUs, which have equal contents, and
// pinned host memory: a page is saved from the first pool and loaded into each, on a stream a pool.
//
// A copy waits on the device for the steps that were begun before it. No step waits for a copy: the
// engine begins a step that needs one only after it has ended. A page is contiguous in the pool,
// with all layers. Used by the engine's thread only.
#pragma once

#include <span>
#include <vector>

#include "cache/page_transfer.h"
#include "device/cuda/device_context.h"
#include "device/cuda/event.h"

namespace fathom {

class GpuPageTransfer : public PageTransfer {
 public:
  // A rank's pool, [num_pages, page_bytes] on its device, and the stream that its steps run on.
  // Both must outlive the transfer.
  struct PagesOfRank {
    cuda::DeviceContext& device;
    std::byte* pages;
    cudaStream_t steps;
  };
  // Throws cuda::DeviceError.
  GpuPageTransfer(std::span<const PagesOfRank> pools, int64_t page_bytes);
  ~GpuPageTransfer() override;

  int64_t page_bytes() const override { return page_bytes_; }
  Result<std::unique_ptr<HostMemory>> allocate_slots(int64_t slots) override;
  void save(int32_t page, std::byte* host, int32_t id) override;
  void load(const std::byte* host, int32_t page, int32_t id) override;
  void take_ended(std::vector<EndedCopy>& ended, bool wait) override;

  // Tells the transfer that a step has begun: later copies are ordered after it.
  void note_step();

 private:
  struct Pool {
    PagesOfRank of_rank;
    cudaStream_t stream = nullptr;
    cuda::Event steps_begun;
    bool is_behind_steps = false;  // whether `stream` already waits for the newest step
  };
  struct Copy {
    int32_t id = 0;
    cudaError_t begun = cudaSuccess;
    size_t pools = 1;               // that it is from or to: the first ones
    std::vector<cuda::Event> done;  // [pools_]
  };
  Copy& next_copy(int32_t id, size_t pools);
  template <typename Enqueue>
  void enqueue(Pool& pool, Copy& copy, cuda::Event& done, const Enqueue& enqueue);

  std::vector<Pool> pools_;
  const int64_t page_bytes_;
  std::vector<Copy> copies_;  // a ring buffer: copies in flight end in order
  size_t first_ = 0, in_flight_ = 0;
};

}  // namespace fathom
