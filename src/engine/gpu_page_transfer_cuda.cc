#include "engine/gpu_page_transfer_cuda.h"

#include <utility>

#include "base/check.h"
#include "device/cuda/pinned_array.h"

namespace fathom {
namespace {

class PinnedMemory : public HostMemory {
 public:
  explicit PinnedMemory(int64_t bytes) : array_(bytes) {}
  std::byte* data() const override { return array_.data(); }

 private:
  cuda::PinnedArray<std::byte> array_;
};

}  // namespace

GpuPageTransfer::GpuPageTransfer(std::byte* pages, int64_t page_bytes, cudaStream_t steps)
    : pages_(pages), page_bytes_(page_bytes), steps_(steps) {
  cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

GpuPageTransfer::~GpuPageTransfer() {
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

Result<std::unique_ptr<HostMemory>> GpuPageTransfer::allocate_slots(int64_t slots) {
  copies_.resize(static_cast<size_t>(slots));
  try {
    return std::make_unique<PinnedMemory>(slots * page_bytes_);
  } catch (const cuda::DeviceError& failure) {
    cudaGetLastError();  // clears the error, which is reported here only
    return error(Code::kResourceExhausted,
                 "{} pages of {} bytes of pinned host memory for kv_offload_bytes: {}", slots,
                 page_bytes_, failure.what());
  }
}

void GpuPageTransfer::save(int32_t page, std::byte* host, int32_t id) {
  copy(host, pages_ + page * page_bytes_, id, cudaMemcpyDeviceToHost);
}

void GpuPageTransfer::load(const std::byte* host, int32_t page, int32_t id) {
  copy(pages_ + page * page_bytes_, host, id, cudaMemcpyHostToDevice);
}

void GpuPageTransfer::copy(void* to, const void* from, int32_t id, cudaMemcpyKind kind) {
  FATHOM_CHECK(in_flight_ < copies_.size(), "{} copies in flight", in_flight_);
  Copy& next = copies_[(first_ + in_flight_++) % copies_.size()];
  next.id = id;
  next.begun = cudaSuccess;
  try {
    if (!is_behind_steps_) {
      steps_begun_.record(steps_);
      cuda::check(cudaStreamWaitEvent(stream_, steps_begun_.get()), "waiting for steps");
      is_behind_steps_ = true;
    }
    cuda::check(cudaMemcpyAsync(to, from, static_cast<size_t>(page_bytes_), kind, stream_),
                "copying a page");
    next.done.record(stream_);
  } catch (const cuda::DeviceError& failure) {
    // The copy may have been issued: its page must not be reused before the device has finished.
    cudaStreamSynchronize(stream_);
    cudaGetLastError();
    next.begun = failure.code();
  }
}

void GpuPageTransfer::take_ended(std::vector<EndedCopy>& ended, bool wait) {
  ended.clear();
  for (; in_flight_ > 0; --in_flight_, first_ = (first_ + 1) % copies_.size()) {
    const Copy& oldest = copies_[first_];
    cudaError_t status = oldest.begun;
    if (status == cudaSuccess) {
      status = wait && ended.empty() ? cudaEventSynchronize(oldest.done.get())
                                     : cudaEventQuery(oldest.done.get());
    }
    if (status == cudaErrorNotReady) return;
    ended.push_back({oldest.id, status == cudaSuccess});
  }
}

}  // namespace fathom
