// Latent decode attention by plan_batch_invariant_latent_decode: a token's result is bitwise
// identical alone, among others, and as the last of several new tokens of its sequence.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int32_t kNumPages = 1024, kMaxPages = 200;

struct Member {
  int32_t queries, total;  // new tokens, all tokens
};

struct Way {
  int heads;
  CacheFormat format;
};

class BatchInvariantDecode : public testing::TestWithParam<Way> {
 protected:
  BatchInvariantDecode() {
    const LatentLayout layout{.format = GetParam().format};
    std::vector<std::byte> pages(static_cast<size_t>(kNumPages * layout.page_bytes()));
    // A repeated pattern of distinct rows.
    const int64_t row_bytes = layout.row_bytes(), others = 997 * row_bytes;
    for (int64_t at = 0; at < std::ssize(pages); at += row_bytes) {
      if (at >= others) {
        std::copy_n(pages.begin() + (at - others), row_bytes, pages.begin() + at);
      } else {
        const auto values = random_f32(kColumns, 0.6f, random_);
        encode_row(layout, values.data(), values.data() + kLatent, pages.data() + at);
      }
    }
    pages_ = DeviceArray<std::byte>(pages);
    scratch_ = DeviceArray<float>(latent_decode_scratch(processors_).words());
    prepare_latent_decode_scratch(scratch_.data(), processors_, nullptr);
    table_.resize(kNumPages);
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random_);
    const auto heads = int64_t{GetParam().heads};
    q_latent_ = random_bf16(heads * kLatent, 0.6f, random_);
    q_rope_ = random_bf16(heads * kRope, 0.6f, random_);
  }

  // The result of the last token of members[at], whose queries and pages are always the same.
  std::vector<uint16_t> result(const std::vector<Member>& members, size_t at) {
    const auto [heads, format] = GetParam();
    std::vector<int32_t> query_start = {0}, context_lens, tables, sequences;
    for (size_t s = 0; s < members.size(); ++s) {
      sequences.push_back(static_cast<int32_t>(s));
      query_start.push_back(query_start.back() + members[s].queries);
      context_lens.push_back(members[s].total - members[s].queries);
      for (int32_t page = 0; page < kMaxPages; ++page) {
        tables.push_back(s == at ? table_[static_cast<size_t>(page)]
                                 : static_cast<int32_t>(random_() % kNumPages));
      }
    }
    const PagedBatch batch{query_start, context_lens, tables, kMaxPages};
    const int64_t rows = int64_t{query_start.back()} * heads;
    auto q_latent = random_bf16(rows * kLatent, 0.6f, random_),
         q_rope = random_bf16(rows * kRope, 0.6f, random_);
    const int64_t row = (query_start[at + 1] - 1) * int64_t{heads};
    std::ranges::copy(q_latent_, q_latent.begin() + row * kLatent);
    std::ranges::copy(q_rope_, q_rope.begin() + row * kRope);
    const DeviceArray<uint16_t> its_latent(q_latent), its_rope(q_rope), out(rows * kLatent);
    const DeviceArray<int32_t> its_tables(tables);
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    for (const LatentDecodePlan& plan :
         plan_batch_invariant_latent_decode(batch, sequences, heads, processors_)) {
      const DeviceArray<LatentDecodePart> parts(plan.parts);
      const DeviceArray<int32_t> first_part(plan.first_part);
      latent_decode(plan.tile_rows, processors_,
                    {.rows = query_start.back(),
                     .q_latent = its_latent.data(),
                     .q_rope = its_rope.data(),
                     .pages = pages_.data(),
                     .num_pages = kNumPages,
                     .block_tables = its_tables.data(),
                     .out = out.data(),
                     .heads = heads,
                     .softmax_scale = 0.0721688f,
                     .parts = parts.data(),
                     .first_part = first_part.data(),
                     .scratch = scratch_.data(),
                     .format = format},
                    nullptr);
      check(cudaDeviceSynchronize(), "synchronize");
    }
    const auto values = out.to_host();
    return {values.begin() + row * kLatent, values.begin() + (row + heads) * kLatent};
  }

  std::mt19937 random_{11};
  const int processors_ = DeviceContext::current().num_multiprocessors();
  std::vector<int32_t> table_;
  std::vector<uint16_t> q_latent_, q_rope_;
  DeviceArray<std::byte> pages_;
  DeviceArray<float> scratch_;
};

TEST_P(BatchInvariantDecode, ATokensBitsDoNotDependOnTheBatch) {
  for (const int32_t total : {1, 64, 65, 700, 5000, 12800}) {
    SCOPED_TRACE(testing::Message() << total << " tokens");
    const auto alone = result({{1, total}}, 0);
    EXPECT_EQ(std::ranges::count(alone, 0xFFFF), 0);
    for (const size_t others : {1, 7, 127}) {
      std::vector<Member> members;
      for (size_t i = 0; i < others; ++i) {
        const auto queries = static_cast<int32_t>(i % 5 == 0 ? 1 + random_() % 6 : 1);
        members.push_back({queries, queries + static_cast<int32_t>(random_() % 3000)});
      }
      const size_t at = random_() % (others + 1);
      const int32_t queries = others == 7 ? std::min(total, 5) : 1;
      members.insert(members.begin() + static_cast<std::ptrdiff_t>(at), {queries, total});
      EXPECT_EQ(result(members, at), alone) << others << " others, " << queries << " new tokens";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, BatchInvariantDecode,
                         testing::Values(Way{16, CacheFormat::kBF16}, Way{64, CacheFormat::kBF16},
                                         Way{128, CacheFormat::kBF16},
                                         Way{16, CacheFormat::kFp8Scaled},
                                         Way{64, CacheFormat::kFp8Scaled},
                                         Way{128, CacheFormat::kFp8Scaled},
                                         Way{128, CacheFormat::kE4M3}));

}  // namespace
}  // namespace fathom::cuda
