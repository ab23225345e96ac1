// Launches whose CTAs wait for one another: what does not fit is refused, shared-memory limits are
// never lowered, and two engines of a process take turns.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "device/cuda/co_resident.h"
#include "device/cuda/co_resident_trial_cuda.h"
#include "device/cuda/device_array.h"
#include "device/cuda/device_turn.h"
#include "device/cuda/event.h"
#include "device/cuda/graph.h"

namespace fathom::cuda {
namespace {

class CoResident : public testing::Test {
 protected:
  CoResident() : arrived_(std::vector<uint64_t>{0}) {}
  DeviceArray<uint64_t> arrived_;
};

TEST_F(CoResident, TheDevicesBudgetCanBeLaunched) {
  const SmBudget budget = DeviceContext::current().budget();
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "asking for SMs");
  EXPECT_EQ(budget.sms, sms);
  EXPECT_EQ(budget.clusters.of_1, budget.sms);
  EXPECT_LE(budget.clusters.of_2 * 2, budget.sms);
  EXPECT_LE(budget.clusters.of_8 * 8, budget.clusters.of_4 * 4);
  launch_barriers(budget.sms, budget.sms, arrived_.data(), 100, nullptr);
  check(cudaDeviceSynchronize(), "running barriers");
  EXPECT_EQ(arrived_.to_host()[0], 100 * static_cast<uint64_t>(budget.sms));
}

TEST_F(CoResident, MoreThanCanBeResidentIsRefusedByName) {
  const int sms = DeviceContext::current().num_multiprocessors();
  const auto refused = [&](int blocks, int budget) -> std::string {
    try {
      launch_barriers(blocks, budget, arrived_.data(), 1, nullptr);
    } catch (const DeviceError& failure) {
      EXPECT_EQ(failure.code(), cudaErrorCooperativeLaunchTooLarge);
      return failure.what();
    }
    return "";
  };
  EXPECT_NE(refused(sms + 1, 1000).find("barriers"), std::string::npos);
  EXPECT_NE(refused(sms / 2 + 1, sms / 2).find("barriers"), std::string::npos);
  EXPECT_EQ(refused(sms / 2, sms / 2), "");
  check(cudaDeviceSynchronize(), "running barriers");
}

TEST_F(CoResident, LogsNamesOnce) {
  const CoResidentLog log;
  EXPECT_EQ(log.text(), "none");
  for (int i = 0; i < 3; ++i) launch_barriers(2, 2, arrived_.data(), 1, nullptr);
  {
    const CoResidentLog inner;
    launch_nothing(nullptr);
    EXPECT_EQ(inner.text(), "nothing");
  }
  EXPECT_EQ(log.text(), "barriers, nothing");
  check(cudaDeviceSynchronize(), "running barriers");
}

TEST(DeviceContext, IsOneADevice) {
  check(cudaSetDevice(0), "choosing the device");
  DeviceContext& device = DeviceContext::of(0);
  EXPECT_EQ(&DeviceContext::current(), &device);
  EXPECT_EQ(&GpuStream(nullptr).device(), &device);
  std::thread other([&] { EXPECT_EQ(&DeviceContext::of(0), &device); });
  other.join();
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting devices");
  EXPECT_THROW(DeviceContext::of(count), DeviceError);
  int current = -1;
  check(cudaGetDevice(&current), "asking for the device");
  EXPECT_EQ(current, 0);
}

TEST(DeviceContext, NeverLowersASharedMemoryLimit) {
  EXPECT_EQ(allow_nothing(100 * 1024), 100 * 1024);
  EXPECT_EQ(allow_nothing(227 * 1024), 227 * 1024);
  EXPECT_EQ(allow_nothing(64 * 1024), 227 * 1024);
}

// Two streams that each keep the whole device busy with kernels whose CTAs wait for one another, by
// graphs and by single launches.
TEST_F(CoResident, TwoEnginesOfAProcessTakeTurns) {
  constexpr int kSteps = 3000, kKernels = 4, kBarriers = 3;
  const int sms = DeviceContext::current().num_multiprocessors();
  std::atomic<int> ended = 0;
  const auto engine = [&](bool by_graph) {
    check(cudaSetDevice(0), "choosing the device");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    const DeviceArray<uint64_t> arrived(std::vector<uint64_t>{0});
    const auto kernels = [&] {
      for (int i = 0; i < kKernels; ++i) {
        launch_barriers(sms, sms, arrived.data(), kBarriers, stream);
      }
    };
    {
      const Graph graph(stream, kernels);
      Event done[2];
      DeviceTurn turn(DeviceContext::of(0).turns());
      for (int step = 0; step < kSteps; ++step) {
        Event& event = done[step % 2];
        event.wait();
        cudaEvent_t recorded = nullptr;
        turn.take({&stream, 1}, [&] {
          if (by_graph) {
            graph.launch(stream);
          } else {
            kernels();
          }
          event.record(stream);
          recorded = event.get();
          return std::span<const cudaEvent_t>(&recorded, 1);
        });
      }
      check(cudaStreamSynchronize(stream), "running steps");
    }
    EXPECT_EQ(arrived.to_host()[0],
              uint64_t{kSteps} * kKernels * kBarriers * static_cast<uint64_t>(sms));
    cudaStreamDestroy(stream);
    ++ended;
  };
  std::thread first([&] { engine(true); }), second([&] { engine(false); });
  first.join();
  second.join();
  EXPECT_EQ(ended, 2);
}

}  // namespace
}  // namespace fathom::cuda
