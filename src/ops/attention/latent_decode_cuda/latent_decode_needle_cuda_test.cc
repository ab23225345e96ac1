// One matching key among 131,072: latent decode attention on the GPU finds it in every cache
// format, at any position, as attention in double precision does.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/attention/latent_decode_cuda/latent_decode_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int32_t kKeys = 131072;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)
constexpr float kDeviation = 0.6f;

// The other keys repeat these rows, so that attention in double precision computes each one once.
// Their scores have a standard deviation of about 0.8: together they weigh as much as one key of
// score log(131072) + 0.8^2 / 2 = 12.1.
constexpr int64_t kOthers = 1021;

struct Case {
  CacheFormat format;
  int heads;
};

class Needle : public testing::TestWithParam<Case> {
 protected:
  Needle() {
    const auto needle = random_f32(kColumns, kDeviation, random_);
    for (int64_t i = 0; i < kOthers; ++i) add_row(random_f32(kColumns, kDeviation, random_));
    add_row(needle);
  }

  void add_row(const std::vector<float>& row) {
    const LatentLayout layout{.format = GetParam().format};
    const auto at = encoded_.size();
    encoded_.resize(at + static_cast<size_t>(layout.row_bytes()));
    encode_row(layout, row.data(), row.data() + kLatent, encoded_.data() + at);
    std::vector<float> decoded(kColumns);
    decode_row(layout, encoded_.data() + at, decoded.data(), decoded.data() + kLatent);
    rows_.push_back(std::move(decoded));
  }

  // Queries are random rows plus the multiple of the needle that gives it this score.
  void make_queries(double score) {
    const int heads = GetParam().heads;
    q_latent_.clear();
    q_rope_.clear();
    const std::vector<float>& needle = rows_.back();
    double length = 0;
    for (const float x : needle) length += x * x;
    for (int head = 0; head < heads; ++head) {
      auto q = random_f32(kColumns, kDeviation, random_);
      double product = 0;
      for (size_t i = 0; i < q.size(); ++i) product += q[i] * needle[i];
      const double more = (score / kScale - product) / length;
      for (size_t i = 0; i < q.size(); ++i) {
        const uint16_t bits = bf16_bits(q[i] + static_cast<float>(more) * needle[i]);
        (static_cast<int64_t>(i) < kLatent ? q_latent_ : q_rope_).push_back(bits);
      }
    }
  }

  // A head's result in double precision.
  std::vector<double> in_double(int head) const {
    const auto of = [&](const std::vector<uint16_t>& q, int64_t columns, const float* row) {
      double sum = 0;
      for (int64_t i = 0; i < columns; ++i) {
        sum += static_cast<double>(from_bf16(q[static_cast<size_t>(head * columns + i)])) * row[i];
      }
      return sum;
    };
    std::vector<double> scores;
    for (const auto& row : rows_) {
      scores.push_back(kScale *
                       (of(q_latent_, kLatent, row.data()) + of(q_rope_, kRope, &row[kLatent])));
    }
    const double most = std::ranges::max(scores);
    std::vector<double> out(kLatent);
    double sum = 0;
    for (size_t i = 0; i < rows_.size(); ++i) {
      const double weight = std::exp(scores[i] - most) * static_cast<double>(counts_[i]);
      sum += weight;
      for (size_t c = 0; c < kLatent; ++c) out[c] += weight * rows_[i][c];
    }
    for (double& x : out) x /= sum;
    return out;
  }

  std::vector<float> on_gpu(int32_t position) {
    const auto [format, heads] = GetParam();
    const LatentLayout layout{.format = format};
    const int64_t row_bytes = layout.row_bytes();
    const LatentDecodeProblem problem(heads, {kKeys}, {1}, kKeys / kPageSize, 3);
    const PagedBatch batch = problem.batch();
    std::vector<std::byte> pages(static_cast<size_t>(kKeys * row_bytes));
    counts_.assign(rows_.size(), 0);
    for (int32_t key = 0; key < kKeys; ++key) {
      const int64_t row = key == position ? kOthers : key % kOthers;
      const int64_t page = batch.pages(0)[static_cast<size_t>(key / kPageSize)];
      std::copy_n(encoded_.begin() + row * row_bytes, row_bytes,
                  pages.begin() + (page * kPageSize + key % kPageSize) * row_bytes);
      ++counts_[static_cast<size_t>(row)];
    }
    const int processors = DeviceContext::current().num_multiprocessors();
    const auto plan = plan_latent_decode(batch, problem.sequences, heads, processors);
    const DeviceArray<uint16_t> q_latent(q_latent_), q_rope(q_rope_), out(problem.rows() * kLatent);
    const DeviceArray<std::byte> its_pages(pages);
    const DeviceArray<int32_t> tables(problem.block_tables), first_part(plan.first_part);
    const DeviceArray<LatentDecodePart> parts(plan.parts);
    const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
    prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    latent_decode(plan.tile_rows, processors,
                  {.rows = 1,
                   .q_latent = q_latent.data(),
                   .q_rope = q_rope.data(),
                   .pages = its_pages.data(),
                   .num_pages = kKeys / kPageSize,
                   .block_tables = tables.data(),
                   .out = out.data(),
                   .heads = heads,
                   .softmax_scale = kScale,
                   .parts = parts.data(),
                   .first_part = first_part.data(),
                   .scratch = scratch.data(),
                   .format = format},
                  nullptr);
    check(cudaDeviceSynchronize(), "synchronize");
    return widen(out.to_host());
  }

  // The needle's share of a result.
  template <typename T>
  double needle_in(const T* out) const {
    double product = 0, length = 0;
    for (size_t c = 0; c < kLatent; ++c) {
      product += out[c] * rows_.back()[c];
      length += rows_.back()[c] * rows_.back()[c];
    }
    return product / length;
  }

  std::mt19937 random_{17};
  std::vector<std::byte> encoded_;        // rows, the needle last
  std::vector<std::vector<float>> rows_;  // dequantized cache rows
  std::vector<int64_t> counts_;           // multiplicity of keys
  std::vector<uint16_t> q_latent_, q_rope_;
};

TEST_P(Needle, IsFoundAsInDoublePrecision) {
  double worst_error = 0, worst_share = 0, least = 1, most = 0;
  for (const double score : {12.0, 20.0}) {
    make_queries(score);
    for (const int32_t position : {0, 70001, kKeys - 1}) {
      const auto actual = on_gpu(position);
      for (int head = 0; head < GetParam().heads; ++head) {
        const auto expected = in_double(head);
        const float* its = actual.data() + head * kLatent;
        double error = 0, norm = 0;
        for (size_t c = 0; c < kLatent; ++c) {
          error += (its[c] - expected[c]) * (its[c] - expected[c]);
          norm += expected[c] * expected[c];
        }
        const double share = needle_in(expected.data());
        worst_error = std::max(worst_error, std::sqrt(error / norm));
        worst_share = std::max(worst_share, std::abs(needle_in(its) - share));
        least = std::min(least, share);
        most = std::max(most, share);
      }
    }
  }
  EXPECT_LT(least, 0.6);
  EXPECT_GT(most, 0.99);
  EXPECT_LE(worst_error, 4e-3);
  EXPECT_LE(worst_share, GetParam().format == CacheFormat::kBF16 ? 4e-3 : 1e-3);
  RecordProperty("worst_error", std::to_string(worst_error));
  RecordProperty("worst_share", std::to_string(worst_share));
  RecordProperty("shares", std::to_string(least) + " to " + std::to_string(most));
}

INSTANTIATE_TEST_SUITE_P(
    Formats, Needle,
    testing::Values(Case{CacheFormat::kBF16, 16}, Case{CacheFormat::kFp8Scaled, 16},
                    Case{CacheFormat::kE4M3, 16}, Case{CacheFormat::kE5M2, 16},
                    Case{CacheFormat::kBF16, 128}, Case{CacheFormat::kFp8Scaled, 128},
                    Case{CacheFormat::kE4M3, 128}, Case{CacheFormat::kE5M2, 128}),
    [](const testing::TestParamInfo<Case>& test) {
      return std::string(name_of(test.param.format)) + "_" + std::to_string(test.param.heads);
    });

}  // namespace
}  // namespace fathom::cuda
