#include "ops/sampling/logit_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "ops/sampling/logits_test_data.h"

namespace fathom {
namespace {

TEST(LogitRow, MaximaOfEverySizeAndNanIsNothing) {
  for (const int64_t size : {1, 63, 64, 65, 127, 128, 1000, 8192}) {
    std::mt19937 random(3);
    std::vector<float> row = random_row(random, size, 5);
    if (size > 4) row[2] = std::nanf("");
    if (size > 4) row[4] = -kInf;
    std::vector<float> maxima(static_cast<size_t>(num_logit_blocks(size)), -7777);
    block_maxima(row, maxima);
    for (int64_t b = 0; b < std::ssize(maxima); ++b) {
      float best = -kInf;
      for (int64_t i = b * 64; i < std::min(size, (b + 1) * 64); ++i) {
        if (row[i] > best) best = row[i];
      }
      EXPECT_EQ(maxima[b], best) << size << " block " << b;
    }
  }
}

TEST(LogitRow, ExpTermAgainstDouble) {
  for (float x = 0; x > -87; x -= 0.00137f) {
    const double expected = std::exp(static_cast<double>(x));
    EXPECT_NEAR(exp_term(x, 0, 1), expected, 2e-7 * expected) << x;
  }
  EXPECT_EQ(exp_term(0, 0, 1), 1);
  EXPECT_EQ(exp_term(-87.1f, 0, 1), 0);
  EXPECT_EQ(exp_term(-kInf, 0, 1), 0);
  EXPECT_EQ(exp_term(std::nanf(""), 0, 1), 0);
}

TEST(LogitRow, SumsAreThoseOfTheTerms) {
  for (const int64_t size : {1, 64, 100, 129'280}) {
    for (const float inverse_temperature : {1.0f, 0.5f, 3.0f}) {
      std::mt19937 random(5);
      std::vector<float> row = random_row(random, size, 4);
      if (size > 64) row[65] = -kInf;
      const float max = *std::max_element(row.begin(), row.end());
      std::vector<uint64_t> sums(static_cast<size_t>(num_logit_blocks(size)), 7777);
      const uint64_t total = block_exp_sums(row, max, inverse_temperature, sums);
      uint64_t expected_total = 0;
      double exact = 0;
      for (int64_t b = 0; b < std::ssize(sums); ++b) {
        uint64_t expected = 0;
        for (int64_t i = b * 64; i < std::min(size, (b + 1) * 64); ++i) {
          expected += units_of(exp_term(row[i], max, inverse_temperature));
          exact += std::exp((static_cast<double>(row[i]) - max) * inverse_temperature);
        }
        EXPECT_EQ(sums[b], expected);
        expected_total += expected;
      }
      EXPECT_EQ(total, expected_total);
      EXPECT_NEAR(static_cast<double>(total) / kTermUnits, exact, 1e-6 * exact);
    }
  }
}

}  // namespace
}  // namespace fathom
