#include "device/cuda/peer_group.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "base/check.h"
#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kSignalWords = int64_t{2} * kMostPeers, kBarrierWords = 2;

// Makes a device current for the object's life.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "asking for the device");
    check(cudaSetDevice(device), "choosing a device");
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// Lets kernels of the current device reach the memory of another.
void reach(int from, int to) {
  if (from == to) return;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, from, to), "asking for peer access");
  if (can == 0) {
    const std::string what = "reaching the memory of GPU " + std::to_string(to) + " from GPU " +
                             std::to_string(from) + ": no peer access";
    throw DeviceError(cudaErrorPeerAccessUnsupported, what.c_str());
  }
  const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // not an error, and not to be left for the next check
    return;
  }
  check(status, "enabling peer access");
}

}  // namespace

int64_t PeerGroup::bytes_of_rank(int ranks, int64_t rows, int64_t columns) {
  if (ranks == 1) return 0;
  return int64_t{2} * ranks * rows * ceil_div(columns, int64_t{kPacketValues}) *
             static_cast<int64_t>(sizeof(Packet)) +
         (rows + kSignalWords + kBarrierWords) * static_cast<int64_t>(sizeof(uint32_t));
}

PeerGroup::PeerGroup(std::vector<int> devices, int64_t rows, int64_t columns,
                     std::chrono::nanoseconds limit)
    : devices_(std::move(devices)),
      rows_(rows),
      row_packets_(ceil_div(columns, int64_t{kPacketValues})),
      limit_(limit),
      faults_(1) {
  FATHOM_CHECK(size() >= 1 && size() <= kMostPeers && rows >= 1 && columns >= 1,
               "{} ranks, {} rows of {}", size(), rows, columns);
  faults_[0] = {};
  for (const int device : devices_) {
    const CurrentDevice current(device);
    for (const int other : devices_) reach(device, other);
    inboxes_.emplace_back(int64_t{2} * size() * rows_ * row_packets_);
    check(cudaMemset(inboxes_.back().data(), 0, inboxes_.back().bytes()), "clearing an inbox");
    epochs_.emplace_back(rows_);
    check(cudaMemset(epochs_.back().data(), 0, epochs_.back().bytes()), "clearing epochs");
    signals_.emplace_back(kSignalWords + kBarrierWords);
    check(cudaMemset(signals_.back().data(), 0, signals_.back().bytes()), "clearing signals");
    check(cudaStreamSynchronize(nullptr), "preparing inboxes");
  }
}

PeerRank PeerGroup::rank(int rank) const {
  PeerRank view;
  view.rank = rank;
  view.ranks = size();
  for (int r = 0; r < size(); ++r) {
    view.inboxes[r] = inboxes_[static_cast<size_t>(r)].data();
    view.signals[r] = signals_[static_cast<size_t>(r)].data();
  }
  view.epochs = epochs_[static_cast<size_t>(rank)].data();
  view.barrier = view.signals[rank] + kSignalWords;
  view.faults = faults_.data();
  view.limit_ns = static_cast<uint64_t>(limit_.count());
  view.rows = rows_;
  view.row_packets = row_packets_;
  view.shares_device =
      std::count(devices_.begin(), devices_.end(), devices_[static_cast<size_t>(rank)]) > 1;
  return view;
}

void PeerGroup::stop() { std::atomic_ref(faults_[0].stop).store(1); }

bool PeerGroup::stopped() const { return std::atomic_ref(faults_[0].stop).load() != 0; }

std::optional<PeerGroup::Late> PeerGroup::late() const {
  for (int r = 0; r < size(); ++r) {
    const uint32_t missing = std::atomic_ref(faults_[0].late[r]).load();
    if (missing != 0) return Late{r, static_cast<int>(missing) - 1};
  }
  return std::nullopt;
}

}  // namespace fathom::cuda
