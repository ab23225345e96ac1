// Latent decode attention on the GPU against the CPU's absorbed attention in fp32.
#include "ops/attention/latent_decode_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/attention/attention.h"
#include "ops/attention/latent_decode_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)
constexpr uint16_t kNan = 0x7FC0;

int num_multiprocessors() {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "attribute");
  return count;
}

struct Inputs {
  std::vector<uint16_t> q_latent, q_rope, pages;
};

// Rows of pages that hold no token are NaN.
Inputs random_inputs(const LatentDecodeProblem& problem, int64_t num_pages, uint32_t seed) {
  std::mt19937 random(seed);
  Inputs inputs{random_bf16(problem.rows() * kLatent, 0.6f, random),
                random_bf16(problem.rows() * kRope, 0.6f, random),
                std::vector<uint16_t>(static_cast<size_t>(num_pages * kPageSize * kColumns), kNan)};
  const PagedBatch batch = problem.batch();
  for (const int32_t s : problem.sequences) {
    for (int32_t key = 0; key < batch.total_len(s); ++key) {
      const auto row = random_bf16(kColumns, 0.6f, random);
      const int64_t at = batch.pages(s)[static_cast<size_t>(key / 64)] * kPageSize + key % 64;
      std::memcpy(inputs.pages.data() + at * kColumns, row.data(), kColumns * 2);
    }
  }
  return inputs;
}

std::vector<float> on_cpu(const LatentDecodeProblem& problem, const Inputs& inputs) {
  ThreadPool pool(0);
  const Stream stream(pool);
  const int64_t rows = problem.query_start.back(), heads = problem.heads;
  std::vector<float> q_latent = widen(inputs.q_latent), q_rope = widen(inputs.q_rope),
                     pages = widen(inputs.pages), out(static_cast<size_t>(rows * heads * kLatent));
  const LatentPages latent{{.format = CacheFormat::kF32},
                           reinterpret_cast<std::byte*>(pages.data()),
                           std::ssize(pages) / (kPageSize * kColumns)};
  std::vector<std::byte> workspace(static_cast<size_t>(
      absorbed_attention_workspace_bytes(rows, heads, kLatent, pool.num_threads(), kRope)));
  absorbed_attention(stream, ConstTensorView(q_latent.data(), {rows, heads, kLatent}),
                     ConstTensorView(q_rope.data(), {rows, heads, kRope}), problem.batch(),
                     problem.sequences, latent, kScale,
                     TensorView(out.data(), {rows, heads, kLatent}), workspace);
  return out;
}

// Launches `launches` times over one scratch memory; the outputs of the first, which all equal.
std::vector<float> on_gpu(const LatentDecodeProblem& problem, const Inputs& inputs, int launches) {
  const PagedBatch batch = problem.batch();
  const auto plan =
      plan_latent_decode(batch, problem.sequences, problem.heads, num_multiprocessors());
  const DeviceArray<uint16_t> q_latent(inputs.q_latent), q_rope(inputs.q_rope), pages(inputs.pages);
  const DeviceArray<int32_t> tables(problem.block_tables);
  const DeviceArray<LatentDecodePart> parts(plan.parts);
  const DeviceArray<int32_t> first_part(plan.first_part);
  const int processors = num_multiprocessors();
  const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
  const DeviceArray<uint16_t> out(problem.rows() * kLatent);
  prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
  const LatentDecodeArguments arguments = {.rows = problem.query_start.back(),
                                           .q_latent = q_latent.data(),
                                           .q_rope = q_rope.data(),
                                           .pages = pages.data(),
                                           .num_pages = pages.size() / (kPageSize * kColumns),
                                           .block_tables = tables.data(),
                                           .out = out.data(),
                                           .heads = problem.heads,
                                           .softmax_scale = kScale,
                                           .parts = parts.data(),
                                           .first_part = first_part.data(),
                                           .scratch = scratch.data()};
  std::vector<uint16_t> first;
  for (int i = 0; i < launches; ++i) {
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    latent_decode(plan.tile_rows, processors, arguments, nullptr);
    check(cudaDeviceSynchronize(), "synchronize");
    const auto values = out.to_host();
    if (i == 0) first = values;
    EXPECT_EQ(values, first) << "launch " << i;
  }
  // As it was found.
  for (const float word : scratch.to_host()) {
    EXPECT_TRUE(word == 0 && std::signbit(word));
    if (word != 0 || !std::signbit(word)) break;
  }
  return widen(first);
}

void compare(int heads, const std::vector<int32_t>& lens, const std::vector<int32_t>& queries,
             int launches = 3) {
  int64_t num_pages = 1;
  for (const int32_t len : lens) num_pages += (len + 63) / 64;
  const auto seed = static_cast<uint32_t>(heads * 1000 + std::ssize(lens) * 10 + queries[0]);
  const LatentDecodeProblem problem(heads, lens, queries, num_pages, seed);
  const Inputs inputs = random_inputs(problem, num_pages, seed);
  const auto expected = on_cpu(problem, inputs);
  const auto actual = on_gpu(problem, inputs, launches);
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(std::isfinite(actual[i])) << "element " << i;
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  // bf16 probabilities and a bf16 result: each rounds by 2^-9 at most.
  EXPECT_LE(std::sqrt(error / norm), 4e-3) << heads << " heads, " << lens.size() << " sequences";
}

class LatentDecode : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(LatentDecode, EqualsTheCpu) {
  const auto [heads, queries] = GetParam();
  compare(heads, {64}, {queries});
  compare(heads, {queries, 63, 64, 65, 300, 4000}, {queries, 1, queries, queries, 1, queries});
  compare(heads, {1000, 1000, 1000}, {queries, queries, queries});
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatentDecode,
                         testing::Combine(testing::Values(4, 16, 24, 64, 128),
                                          testing::Values(1, 2, 3, 4, 5, 8)));

TEST(LatentDecodeBatch, MoreSequencesThanMultiprocessors) {
  std::mt19937 random(5);
  std::vector<int32_t> lens(300), queries(300, 1);
  for (int32_t& len : lens) len = 1 + static_cast<int32_t>(random() % 700);
  lens[7] = 9000;
  compare(16, lens, queries);
}

TEST(LatentDecodeBatch, MoreRowTilesThanBlocks) {
  std::mt19937 random(6);
  for (const int heads : {64, 128}) {
    std::vector<int32_t> lens(150), queries(150);
    for (int32_t& count : queries) count = 1 + static_cast<int32_t>(random() % 2);
    for (int32_t& len : lens) len = 2 + static_cast<int32_t>(random() % 700);
    lens[7] = 9000;  // more than a block's share: cut
    compare(heads, lens, queries);
  }
}

TEST(LatentDecodeBatch, ManyHeadsOverAllMultiprocessorsFiftyTimes) {
  compare(64, {20000}, {1}, 50);
  compare(128, {20000}, {1}, 50);
}

TEST(LatentDecodeBatch, OneSequenceOverAllMultiprocessorsFiftyTimes) {
  compare(16, {20000}, {1}, 50);
}

}  // namespace
}  // namespace fathom::cuda
