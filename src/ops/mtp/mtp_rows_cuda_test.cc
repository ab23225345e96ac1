// The rows around the MTP layer on the GPU: norms against double precision, copies to the bit.
#include "ops/mtp/mtp_rows_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kStatesAPage = 4, kPages = 5, kVocab = 300, kStates = 9;
constexpr double kEps = 1e-6;

// A page: something else, then its states.
int64_t page_bytes(int64_t n) { return 48 + kStatesAPage * n * 2; }

std::vector<double> norm(const float* x, const std::vector<float>& weight) {
  const size_t n = weight.size();
  double squares = 0;
  for (size_t i = 0; x != nullptr && i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + kEps);
  std::vector<double> y(n);
  for (size_t i = 0; x != nullptr && i < n; ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

class MtpRows : public testing::TestWithParam<int64_t> {
 protected:
  const int64_t n_ = GetParam();
  std::mt19937 random_{static_cast<uint32_t>(n_)};
};

TEST_P(MtpRows, InputIsTheTwoNorms) {
  const auto table = random_bf16(kVocab * n_, 1, random_);
  const auto states = random_bf16(kStates * n_, 3, random_);
  const auto pages = random_bf16(kPages * page_bytes(n_) / 2, 2, random_);
  const auto embedding_norm = random_f32(n_, 1, random_), state_norm = random_f32(n_, 1, random_);
  const auto wide_table = widen(table), wide_states = widen(states), wide_pages = widen(pages);
  const std::vector<int32_t> sampled = {7, -1, 299};
  const DeviceArray<uint16_t> device_table(table), device_states(states), device_pages(pages);
  const DeviceArray<float> device_embedding_norm(embedding_norm), device_state_norm(state_norm);
  const DeviceArray<int32_t> device_sampled(sampled);
  for (const int64_t rows : {1, 3, 130}) {
    std::vector<int32_t> ids;
    std::vector<int64_t> previous;
    std::vector<const float*> embeddings, before;
    for (int64_t i = 0; i < rows; ++i) {
      int32_t id = static_cast<int32_t>(random_() % kVocab);
      if (i % 3 == 1) id = -1 - static_cast<int32_t>(random_() % sampled.size());
      ids.push_back(id);
      if (id < 0) id = sampled[static_cast<size_t>(-1 - id)];
      embeddings.push_back(id < 0 ? nullptr : wide_table.data() + id * n_);
      const auto state = static_cast<int64_t>(random_() % kStates);
      const auto page = static_cast<int64_t>(random_() % kPages),
                 slot = static_cast<int64_t>(random_() % kStatesAPage);
      if (i % 4 == 3) {
        previous.push_back(kNoState);
        before.push_back(nullptr);
      } else if (i % 2 == 0) {
        previous.push_back(-1 - (page * kStatesAPage + slot));
        before.push_back(wide_pages.data() + (page * page_bytes(n_) + 48) / 2 + slot * n_);
      } else {
        previous.push_back(state);
        before.push_back(wide_states.data() + state * n_);
      }
    }
    const DeviceArray<int32_t> device_ids(ids);
    const DeviceArray<int64_t> device_previous(previous);
    const DeviceArray<uint16_t> out(rows * 2 * n_);
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poisoning");
    MtpInputArguments arguments;
    arguments.ids = device_ids.data();
    arguments.sampled = device_sampled.data();
    arguments.shards[0] = {device_table.data(), 120};
    arguments.shards[1] = {device_table.data() + 120 * n_, kVocab - 120};
    arguments.num_shards = 2;
    arguments.previous = device_previous.data();
    arguments.states = device_states.data();
    arguments.kept = {reinterpret_cast<std::byte*>(device_pages.data()) + 48, page_bytes(n_),
                      kStatesAPage};
    arguments.embedding_norm = device_embedding_norm.data();
    arguments.state_norm = device_state_norm.data();
    arguments.out = out.data();
    arguments.rows = rows;
    arguments.n = n_;
    mtp_input(arguments, nullptr);
    check(cudaDeviceSynchronize(), "mtp_input");
    const std::vector<float> actual = widen(out.to_host());
    for (int64_t i = 0; i < rows; ++i) {
      for (const bool is_state : {false, true}) {
        const auto at = static_cast<size_t>(i);
        const auto expected =
            is_state ? norm(before[at], state_norm) : norm(embeddings[at], embedding_norm);
        for (int64_t c = 0; c < n_; ++c) {
          const double right = expected[static_cast<size_t>(c)];
          // One rounding to bf16.
          ASSERT_NEAR(actual[static_cast<size_t>((2 * i + (is_state ? 1 : 0)) * n_ + c)], right,
                      std::abs(right) / 250 + 1e-7)
              << "row " << i << " of " << rows << (is_state ? ", state " : ", embedding ") << c;
        }
      }
    }
  }
}

TEST_P(MtpRows, StatesGoToTheirSlotsAndNowhereElse) {
  const int64_t rows = 11;
  const auto states = random_bf16(rows * n_, 1, random_);
  std::vector<uint16_t> pages(static_cast<size_t>(kPages * page_bytes(n_) / 2), 0xFFFF);
  const std::vector<int64_t> slots = {-1, 3, 19, 0, -1, 8, 7, 4, -1, 12, 1};
  const DeviceArray<uint16_t> device_states(states), device_pages(pages);
  const DeviceArray<int64_t> device_slots(slots);
  keep_states({.states = device_states.data(),
               .slots = device_slots.data(),
               .kept = {reinterpret_cast<std::byte*>(device_pages.data()) + 48, page_bytes(n_),
                        kStatesAPage},
               .rows = rows,
               .n = n_},
              nullptr);
  check(cudaDeviceSynchronize(), "keep_states");
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = slots[static_cast<size_t>(i)];
    if (slot < 0) continue;
    const int64_t at = (slot / kStatesAPage * page_bytes(n_) + 48) / 2 + slot % kStatesAPage * n_;
    std::copy_n(states.begin() + i * n_, n_, pages.begin() + at);
  }
  EXPECT_EQ(device_pages.to_host(), pages);
}

INSTANTIATE_TEST_SUITE_P(Widths, MtpRows, testing::Values(8, 256, 2048, 2056, 7168, 8208, 16384));

}  // namespace
}  // namespace fathom::cuda
