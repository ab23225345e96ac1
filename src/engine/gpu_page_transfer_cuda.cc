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

GpuPageTransfer::GpuPageTransfer(std::span<const PagesOfRank> pools, int64_t page_bytes)
    : page_bytes_(page_bytes) {
  for (const PagesOfRank& of_rank : pools) {
    of_rank.device.make_current();
    pools_.push_back({of_rank, nullptr, {}, false});
    cuda::check(cudaStreamCreateWithFlags(&pools_.back().stream, cudaStreamNonBlocking),
                "creating a stream");
  }
}

GpuPageTransfer::~GpuPageTransfer() {
  for (const Pool& pool : pools_) {
    cudaStreamSynchronize(pool.stream);
    cudaStreamDestroy(pool.stream);
  }
}

void GpuPageTransfer::note_step() {
  for (Pool& pool : pools_) pool.is_behind_steps = false;
}

Result<std::unique_ptr<HostMemory>> GpuPageTransfer::allocate_slots(int64_t slots) {
  copies_.resize(static_cast<size_t>(slots));
  for (Copy& copy : copies_) copy.done.resize(pools_.size());
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
  Copy& copy = next_copy(id, 1);
  Pool& pool = pools_.front();
  enqueue(pool, copy, copy.done.front(), [&] {
    return cudaMemcpyAsync(host, pool.of_rank.pages + page * page_bytes_,
                           static_cast<size_t>(page_bytes_), cudaMemcpyDeviceToHost, pool.stream);
  });
}

void GpuPageTransfer::load(const std::byte* host, int32_t page, int32_t id) {
  Copy& copy = next_copy(id, pools_.size());
  for (size_t i = 0; i < pools_.size() && copy.begun == cudaSuccess; ++i) {
    Pool& pool = pools_[i];
    enqueue(pool, copy, copy.done[i], [&] {
      return cudaMemcpyAsync(pool.of_rank.pages + page * page_bytes_, host,
                             static_cast<size_t>(page_bytes_), cudaMemcpyHostToDevice, pool.stream);
    });
  }
}

GpuPageTransfer::Copy& GpuPageTransfer::next_copy(int32_t id, size_t pools) {
  FATHOM_CHECK(in_flight_ < copies_.size(), "{} copies in flight", in_flight_);
  Copy& next = copies_[(first_ + in_flight_++) % copies_.size()];
  next.id = id;
  next.begun = cudaSuccess;
  next.pools = pools;
  return next;
}

// Enqueues a page from or to a pool, after the steps begun so far.
template <typename Enqueue>
void GpuPageTransfer::enqueue(Pool& pool, Copy& copy, cuda::Event& done, const Enqueue& enqueue) {
  pool.of_rank.device.make_current();
  try {
    if (!pool.is_behind_steps) {
      pool.steps_begun.record(pool.of_rank.steps);
      cuda::check(cudaStreamWaitEvent(pool.stream, pool.steps_begun.get()), "waiting for steps");
      pool.is_behind_steps = true;
    }
    cuda::check(enqueue(), "copying a page");
    done.record(pool.stream);
  } catch (const cuda::DeviceError& failure) {
    // Copies may have been issued: their page must not be reused before the devices have finished.
    for (const Pool& each : pools_) cudaStreamSynchronize(each.stream);
    cudaGetLastError();
    copy.begun = failure.code();
  }
}

void GpuPageTransfer::take_ended(std::vector<EndedCopy>& ended, bool wait) {
  ended.clear();
  for (; in_flight_ > 0; --in_flight_, first_ = (first_ + 1) % copies_.size()) {
    const Copy& oldest = copies_[first_];
    cudaError_t status = oldest.begun;
    for (size_t i = 0; i < oldest.pools && status == cudaSuccess; ++i) {
      const cudaEvent_t done = oldest.done[i].get();
      status = wait && ended.empty() ? cudaEventSynchronize(done) : cudaEventQuery(done);
    }
    if (status == cudaErrorNotReady) return;
    ended.push_back({oldest.id, status == cudaSuccess});
  }
}

}  // namespace fathom
