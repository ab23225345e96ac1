// Latent decode attention over caches of 8 bits on the GPU, against the CPU's absorbed attention in
// fp32 over the same rows, decoded.
#include "ops/attention/latent_decode_8_bit_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/attention/attention.h"
#include "ops/attention/latent_decode_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)

struct Inputs {
  std::vector<uint16_t> q_latent, q_rope;
  std::vector<std::byte> pages;
  std::vector<float> decoded;  // the pages in fp32
};

// Rows of pages that hold no token are NaN in every format. Keys are of different sizes, and so are
// each one's blocks of 128 columns.
Inputs random_inputs(const LatentDecodeProblem& problem, const LatentLayout& layout,
                     int64_t num_pages, uint32_t seed) {
  std::mt19937 random(seed);
  Inputs inputs{
      random_bf16(problem.rows() * kLatent, 0.6f, random),
      random_bf16(problem.rows() * kRope, 0.6f, random),
      std::vector<std::byte>(static_cast<size_t>(num_pages * layout.page_bytes()), std::byte{0xFF}),
      std::vector<float>(static_cast<size_t>(num_pages * kPageSize * kColumns), std::nanf(""))};
  const PagedBatch batch = problem.batch();
  for (const int32_t s : problem.sequences) {
    for (int32_t key = 0; key < batch.total_len(s); ++key) {
      auto row = random_f32(kColumns, 0.6f, random);
      for (int64_t i = 0; i < kLatent; ++i) {
        row[static_cast<size_t>(i)] *= 0.25f + 0.25f * static_cast<float>((key + i / 128) % 5);
      }
      const int64_t at = batch.pages(s)[static_cast<size_t>(key / 64)] * kPageSize + key % 64;
      std::byte* const bytes = inputs.pages.data() + at * layout.row_bytes();
      encode_row(layout, row.data(), row.data() + kLatent, bytes);
      float* const decoded = inputs.decoded.data() + at * kColumns;
      decode_row(layout, bytes, decoded, decoded + kLatent);
    }
  }
  return inputs;
}

std::vector<float> on_cpu(const LatentDecodeProblem& problem, Inputs& inputs) {
  ThreadPool pool(0);
  const Stream stream(pool);
  const int64_t rows = problem.query_start.back(), heads = problem.heads;
  std::vector<float> q_latent = widen(inputs.q_latent), q_rope = widen(inputs.q_rope),
                     out(static_cast<size_t>(rows * heads * kLatent));
  const LatentPages pages{{.format = CacheFormat::kF32},
                          reinterpret_cast<std::byte*>(inputs.decoded.data()),
                          std::ssize(inputs.decoded) / (kPageSize * kColumns)};
  std::vector<std::byte> workspace(static_cast<size_t>(
      absorbed_attention_workspace_bytes(rows, heads, kLatent, pool.num_threads(), kRope)));
  absorbed_attention(stream, ConstTensorView(q_latent.data(), {rows, heads, kLatent}),
                     ConstTensorView(q_rope.data(), {rows, heads, kRope}), problem.batch(),
                     problem.sequences, pages, kScale,
                     TensorView(out.data(), {rows, heads, kLatent}), workspace);
  return out;
}

// Launches `launches` times over one scratch memory; the outputs of the first, which all equal.
std::vector<float> on_gpu(const LatentDecodeProblem& problem, const Inputs& inputs,
                          CacheFormat format, int launches) {
  const int processors = num_multiprocessors();
  const auto plan =
      plan_latent_decode(problem.batch(), problem.sequences, problem.heads, processors, format);
  const DeviceArray<uint16_t> q_latent(inputs.q_latent), q_rope(inputs.q_rope);
  const DeviceArray<std::byte> pages(inputs.pages);
  const DeviceArray<int32_t> tables(problem.block_tables);
  const DeviceArray<LatentDecodePart> parts(plan.parts);
  const DeviceArray<int32_t> first_part(plan.first_part);
  const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
  const DeviceArray<uint16_t> out(problem.rows() * kLatent);
  prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
  const LatentDecodeArguments arguments = {
      .q_latent = q_latent.data(),
      .q_rope = q_rope.data(),
      .pages = pages.data(),
      .num_pages = std::ssize(inputs.decoded) / (kPageSize * kColumns),
      .block_tables = tables.data(),
      .out = out.data(),
      .heads = problem.heads,
      .softmax_scale = kScale,
      .parts = parts.data(),
      .first_part = first_part.data(),
      .scratch = scratch.data(),
      .format = format};
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

void compare(CacheFormat format, int heads, const std::vector<int32_t>& lens,
             const std::vector<int32_t>& queries, int launches = 3) {
  int64_t num_pages = 1;
  for (const int32_t len : lens) num_pages += (len + 63) / 64;
  const auto seed = static_cast<uint32_t>(heads * 1000 + std::ssize(lens) * 10 + queries[0]);
  const LatentDecodeProblem problem(heads, lens, queries, num_pages, seed);
  Inputs inputs = random_inputs(problem, {.format = format}, num_pages, seed);
  const auto expected = on_cpu(problem, inputs);
  const auto actual = on_gpu(problem, inputs, format, launches);
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(std::isfinite(actual[i])) << "element " << i;
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  // A bf16 result rounds by 2^-9 at most, by 0.0017 on average; f16 probabilities by an eighth of
  // it.
  EXPECT_LE(std::sqrt(error / norm), 2e-3)
      << name_of(format) << ", " << heads << " heads, " << lens.size() << " sequences";
}

constexpr auto kFormats = {CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2};

class LatentDecode8Bit : public testing::TestWithParam<std::tuple<CacheFormat, int, int>> {};

TEST_P(LatentDecode8Bit, EqualsTheCpu) {
  const auto [format, heads, queries] = GetParam();
  compare(format, heads, {64}, {queries});
  compare(format, heads, {queries, 63, 64, 65, 300, 2500},
          {queries, 1, queries, queries, 1, queries});
  compare(format, heads, {1000, 1000, 1000}, {queries, queries, queries});
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatentDecode8Bit,
                         testing::Combine(testing::ValuesIn(kFormats),
                                          testing::Values(4, 16, 24, 128),
                                          testing::Values(1, 2, 5, 8)));

TEST(LatentDecode8BitBatch, MoreSequencesThanMultiprocessors) {
  std::mt19937 random(5);
  std::vector<int32_t> lens(300), queries(300, 1);
  for (int32_t& len : lens) len = 1 + static_cast<int32_t>(random() % 700);
  lens[7] = 9000;
  for (const CacheFormat format : kFormats) compare(format, 16, lens, queries);
}

TEST(LatentDecode8BitBatch, OneSequenceOverAllMultiprocessorsFiftyTimes) {
  for (const CacheFormat format : kFormats) compare(format, 16, {20000}, {1}, 50);
}

// Queries that f16 does not hold, nor their products with keys; and none at all.
TEST(LatentDecode8BitBatch, QueriesOfAnySize) {
  for (const float size : {1e-30f, 1e6f, 0.0f}) {
    const LatentDecodeProblem problem(16, {200}, {1}, 5, 3);
    Inputs inputs = random_inputs(problem, {.format = CacheFormat::kFp8Scaled}, 5, 3);
    for (auto* q : {&inputs.q_latent, &inputs.q_rope}) {
      for (uint16_t& value : *q) value = bf16_bits(from_bf16(value) * size);
    }
    const auto expected = on_cpu(problem, inputs);
    const auto actual = on_gpu(problem, inputs, CacheFormat::kFp8Scaled, 1);
    double error = 0, norm = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    EXPECT_LE(std::sqrt(error / norm), 2e-3) << size;
  }
}

}  // namespace
}  // namespace fathom::cuda
