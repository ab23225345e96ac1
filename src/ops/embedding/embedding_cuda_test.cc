// embedding on the GPU: rows of the table, bitwise identical.
#include "ops/embedding/embedding_cuda.h"

#include <gtest/gtest.h>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"

namespace fathom::cuda {
namespace {

void compare(int64_t rows, int64_t n, bool wide, bool sampled, int shards) {
  constexpr int64_t kVocab = 1000;
  std::mt19937 random(static_cast<uint32_t>(rows + n));
  const auto narrow_table = random_bf16(kVocab * n, 1, random);
  const auto table = wide ? random_f32(kVocab * n, 1, random) : widen(narrow_table);
  std::vector<int32_t> ids, samples;
  for (int64_t i = 0; i < 20; ++i) samples.push_back(static_cast<int32_t>(random() % kVocab));
  samples[3] = -1;
  std::vector<float> expected;
  for (int64_t i = 0; i < rows; ++i) {
    const auto from = static_cast<int32_t>(random() % samples.size());
    int32_t id = i % 5 == 4 ? 123456789 : static_cast<int32_t>(random() % kVocab);
    ids.push_back(sampled && i % 2 == 0 ? -1 - from : id);
    if (ids.back() < 0) id = samples[static_cast<size_t>(from)];
    for (int64_t c = 0; c < n; ++c) {
      expected.push_back(id < 0 || id >= kVocab ? 0 : table[id * n + c]);
    }
  }
  const DeviceArray<float> device_table(table), out(rows * n);
  const DeviceArray<uint16_t> device_narrow(narrow_table);
  const DeviceArray<int32_t> device_ids(ids), device_samples(samples);
  EmbeddingArguments arguments;
  arguments.ids = device_ids.data();
  if (sampled) arguments.sampled = device_samples.data();
  // In shards of unequal sizes, one of them empty.
  int64_t first = 0;
  arguments.num_shards = shards;
  for (int s = 0; s < shards; ++s) {
    const int64_t count = s + 1 == shards ? kVocab - first : s == 1 ? 0 : 130 * (s + 1);
    const void* const rows_of_shard = wide ? static_cast<void*>(device_table.data() + first * n)
                                           : static_cast<void*>(device_narrow.data() + first * n);
    arguments.shards[s] = {rows_of_shard, count};
    first += count;
  }
  arguments.table_type = wide ? DType::kF32 : DType::kBF16;
  arguments.out = out.data();
  arguments.rows = rows;
  arguments.n = n;
  check(cudaMemset(out.data(), 0xFF, out.bytes()), "poisoning");
  embedding(arguments, nullptr);
  check(cudaDeviceSynchronize(), "embedding");
  EXPECT_EQ(out.to_host(), expected) << rows << " x " << n;
}

TEST(EmbeddingCuda, EqualsTheTable) {
  for (const int64_t n : {8, 256, 2048, 2056, 7168}) {
    for (const int64_t rows : {1, 3, 200}) {
      compare(rows, n, false, true, 1);
      compare(rows, n, true, false, 1);
      compare(rows, n, false, true, 4);
      compare(rows, n, true, true, 3);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
