// The router on the GPU: logits in double precision, and the CPU's gate() on them.
#include "ops/gate/gate_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/gate/gate.h"

namespace fathom::cuda {
namespace {

constexpr uint16_t kNan = 0x7FC0;

struct Router {
  int64_t experts, hidden;
  GateOptions options;
  bool wide = false;
};

const GateOptions kV3 = {GateScoring::kSigmoidBias, 8, 4, 8, true, 2.5f};
const GateOptions kLite = {GateScoring::kSoftmaxGreedy, 1, 1, 6, false, 1};

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> weights;

  // Bitwise comparison: a NaN equals itself.
  bool operator==(const Choice& other) const {
    return ids == other.ids && weights.size() == other.weights.size() &&
           std::memcmp(weights.data(), other.weights.data(), weights.size() * sizeof(float)) == 0;
  }
};

struct Inputs {
  std::vector<uint16_t> x, narrow;
  std::vector<float> weight, bias;
};

Inputs random_inputs(const Router& router, int64_t rows) {
  std::mt19937 random(static_cast<uint32_t>(router.experts * 7 + router.hidden + rows));
  Inputs inputs;
  inputs.x = random_bf16(rows * router.hidden, 1, random);
  const float deviation = 2 / std::sqrt(static_cast<float>(router.hidden));
  inputs.narrow = random_bf16(router.experts * router.hidden, deviation, random);
  inputs.weight = router.wide ? random_f32(router.experts * router.hidden, deviation, random)
                              : widen(inputs.narrow);
  inputs.bias = random_f32(router.experts, 0.5f, random);
  return inputs;
}

Choice on_cpu(const Router& router, const Inputs& inputs) {
  const int64_t rows = std::ssize(inputs.x) / router.hidden, k = router.options.experts_per_token;
  std::vector<float> logits;
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* x = inputs.x.data() + row * router.hidden;
    for (int64_t expert = 0; expert < router.experts; ++expert) {
      const float* weight = inputs.weight.data() + expert * router.hidden;
      double sum = 0;
      for (int64_t i = 0; i < router.hidden; ++i) sum += double{from_bf16(x[i])} * weight[i];
      logits.push_back(static_cast<float>(sum));
    }
  }
  Choice choice{std::vector<int32_t>(static_cast<size_t>(rows * k)),
                std::vector<float>(static_cast<size_t>(rows * k))};
  ThreadPool pool(0);
  const bool biased = router.options.scoring == GateScoring::kSigmoidBias;
  fathom::gate(Stream(pool), ConstTensorView(logits.data(), {rows, router.experts}),
               biased ? ConstTensorView(inputs.bias.data(), {router.experts}) : ConstTensorView(),
               router.options, TensorView(choice.ids.data(), {rows, k}),
               TensorView(choice.weights.data(), {rows, k}));
  return choice;
}

Choice on_gpu(const Router& router, const Inputs& inputs, int64_t valid = -1,
              bool batch_invariant = false) {
  const int64_t rows = std::ssize(inputs.x) / router.hidden, k = router.options.experts_per_token;
  const DeviceArray<uint16_t> x(inputs.x), narrow(inputs.narrow);
  const DeviceArray<float> weight(inputs.weight), bias(inputs.bias), weights(rows * k);
  const DeviceArray<int32_t> ids(rows * k);
  const DeviceArray<int32_t> num_valid(std::vector<int32_t>{static_cast<int32_t>(valid)});
  const DeviceArray<float> scratch(gate_scratch_words(rows, router.hidden, router.experts));
  check(cudaMemset(scratch.data(), 0xFF, scratch.bytes()), "preparing");
  GateArguments arguments;
  arguments.scratch = scratch.data();
  arguments.batch_invariant = batch_invariant;
  arguments.x = x.data();
  arguments.weight = narrow.data();
  if (router.wide) arguments.weight = weight.data();
  arguments.weight_type = router.wide ? DType::kF32 : DType::kBF16;
  if (router.options.scoring == GateScoring::kSigmoidBias) arguments.bias = bias.data();
  arguments.options = router.options;
  if (valid >= 0) arguments.num_valid_rows = num_valid.data();
  arguments.expert_ids = ids.data();
  arguments.expert_weights = weights.data();
  arguments.rows = rows;
  arguments.hidden = router.hidden;
  arguments.experts = router.experts;
  Choice first;
  for (int launch = 0; launch < 3; ++launch) {
    check(cudaMemset(ids.data(), 0xFF, ids.bytes()), "poisoning");
    check(cudaMemset(weights.data(), 0xFF, weights.bytes()), "poisoning");
    gate(arguments, nullptr);
    check(cudaDeviceSynchronize(), "gate");
    const Choice choice{ids.to_host(), weights.to_host()};
    if (launch == 0) first = choice;
    EXPECT_TRUE(choice == first) << "launch " << launch;
  }
  return first;
}

// Another order of summation selects other experts only where two are nearly equal; then the
// weights are, too.
void compare(const Router& router, int64_t rows) {
  SCOPED_TRACE(testing::Message() << router.experts << " experts, " << router.hidden << ", " << rows
                                  << " rows, wide " << router.wide);
  const Inputs inputs = random_inputs(router, rows);
  const Choice expected = on_cpu(router, inputs), actual = on_gpu(router, inputs);
  const int64_t k = router.options.experts_per_token;
  int64_t others = 0;
  for (int64_t i = 0; i < rows * k; ++i) {
    others += actual.ids[i] != expected.ids[i];
    ASSERT_NEAR(actual.weights[i], expected.weights[i],
                actual.ids[i] == expected.ids[i] ? 1e-5 * router.options.scaling : 0.05)
        << "row " << i / k;
  }
  EXPECT_LE(others, 2 + rows * k / 500);
}

const std::vector<Router> kRouters = {
    {64, 2048, kLite},                                                     // V2-Lite
    {256, 7168, kV3},                                                      // V3
    {16, 256, {GateScoring::kSigmoidBias, 4, 2, 4, true, 2.5f}},           // the bundled model
    {160, 5120, {GateScoring::kSoftmaxGroupLimited, 8, 3, 6, false, 16}},  // V2
    {384, 7168, {GateScoring::kSigmoidBias, 1, 1, 8, true, 2.827f}},       // Kimi K2
    {15, 32, {GateScoring::kSigmoidBias, 3, 2, 4, true, 1.5f}},
    {64, 2048, {GateScoring::kSoftmaxGreedy, 1, 1, 6, true, 16}, true},
    {256, 7168, kV3, true},
    {15, 32, {GateScoring::kSigmoidBias, 3, 2, 4, true, 1.5f}, true},
    {128, 4096, {GateScoring::kSoftmaxGroupLimited, 8, 3, 6, false, 16}, true},
    {512, 1056, {GateScoring::kSoftmaxGroupLimited, 32, 5, 32, true, 1}, true},
};

TEST(GateCuda, EqualsTheCpu) {
  for (const Router& router : kRouters) {
    for (const int64_t rows : {1, 2, 8, 9, 33}) compare(router, rows);
  }
}

TEST(GateCuda, ManyRowsEqualTheCpu) {
  compare(kRouters[0], 1025);
  for (const int64_t rows : {17, 64, 65, 127, 131, 255}) compare(kRouters[1], rows);
  compare(kRouters[2], 3000);
  compare(kRouters[5], 1537);
  compare(kRouters[6], 200);
}

TEST(GateCuda, ARowsBitsDoNotDependOnTheirNumber) {
  for (const Router& router : kRouters) {
    constexpr int64_t kRows = 1600;
    const Inputs inputs = random_inputs(router, kRows);
    const Choice all = on_gpu(router, inputs, -1, true);
    const int64_t k = router.options.experts_per_token;
    for (const auto& [first, count] : {std::pair(0, 1), std::pair(700, 1), std::pair(1300, 70)}) {
      Inputs some = inputs;
      some.x.assign(inputs.x.begin() + first * router.hidden,
                    inputs.x.begin() + (first + count) * router.hidden);
      const Choice few = on_gpu(router, some, -1, true);
      for (int64_t i = 0; i < count * k; ++i) {
        ASSERT_EQ(few.ids[i], all.ids[first * k + i]);
        ASSERT_EQ(few.weights[i], all.weights[first * k + i]);
      }
    }
  }
}

TEST(GateCuda, ARowsBitsDoNotDependOnTheOthers) {
  for (const Router& router : kRouters) {
    for (const int64_t rows : {5, 70, 200}) {
      Inputs inputs = random_inputs(router, rows);
      const Choice before = on_gpu(router, inputs);
      std::fill_n(inputs.x.begin() + 3 * router.hidden, router.hidden, kNan);
      const Choice after = on_gpu(router, inputs);
      const int64_t k = router.options.experts_per_token;
      for (int64_t i = 0; i < rows * k; ++i) {
        if (i / k == 3) continue;
        ASSERT_EQ(after.ids[i], before.ids[i]);
        ASSERT_EQ(after.weights[i], before.weights[i]);
      }
    }
  }
}

// Experts with the same weights have bitwise identical logits.
TEST(GateCuda, TiesGoToTheLowerIndex) {
  for (Router router : kRouters) {
    for (const int64_t rows : {1, 20}) {
      Inputs inputs = random_inputs(router, rows);
      for (int64_t i = 0; i < std::ssize(inputs.weight); ++i) {
        inputs.weight[i] = inputs.weight[i % router.hidden];
        inputs.narrow[i] = inputs.narrow[i % router.hidden];
      }
      std::ranges::fill(inputs.bias, 0.25f);
      EXPECT_EQ(on_gpu(router, inputs).ids, on_cpu(router, inputs).ids) << router.experts;
    }
  }
}

TEST(GateCuda, PaddingRowsHaveNoExpertsAndHarmNobody) {
  for (const int64_t rows : {13, 300, 1700}) {
    for (const Router& router : {kRouters[0], kRouters[1], kRouters[2]}) {
      Inputs inputs = random_inputs(router, rows);
      const Choice expected = on_gpu(router, inputs);
      const int64_t valid = rows - 6, k = router.options.experts_per_token;
      std::fill(inputs.x.begin() + valid * router.hidden, inputs.x.end(), kNan);
      const Choice actual = on_gpu(router, inputs, valid);
      for (int64_t i = 0; i < rows * k; ++i) {
        ASSERT_EQ(actual.ids[i], i < valid * k ? expected.ids[i] : -1);
        ASSERT_EQ(actual.weights[i], i < valid * k ? expected.weights[i] : 0);
      }
    }
  }
}

TEST(GateCuda, ARowOfPaddingAloneHasNoExperts) {
  for (const Router& router : kRouters) {
    Inputs inputs = random_inputs(router, 1);
    std::ranges::fill(inputs.x, kNan);
    const Choice choice = on_gpu(router, inputs, 0);
    EXPECT_EQ(std::ranges::count(choice.ids, -1), std::ssize(choice.ids));
    EXPECT_EQ(std::ranges::count(choice.weights, 0.0f), std::ssize(choice.weights));
  }
}

TEST(GateCuda, NotANumberStillChoosesDistinctExperts) {
  for (const Router& router : kRouters) {
    Inputs inputs = random_inputs(router, 3);
    std::fill(inputs.x.begin() + router.hidden, inputs.x.begin() + 2 * router.hidden, kNan);
    const Choice choice = on_gpu(router, inputs);
    const int64_t k = router.options.experts_per_token;
    for (int64_t row = 0; row < 3; ++row) {
      std::vector<int32_t> ids(choice.ids.begin() + row * k, choice.ids.begin() + (row + 1) * k);
      std::ranges::sort(ids);
      EXPECT_EQ(std::ranges::adjacent_find(ids), ids.end());
      EXPECT_GE(ids.front(), 0);
      EXPECT_LT(ids.back(), router.experts);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
