#include "ops/linear/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "device/cpu/isa.h"
#include "ops/linear/linear_test_data.h"
#include "ops/linear/panel_product.h"

namespace fathom {
namespace {

using testing::Rows;
using testing::Scales;
using testing::Source;

struct Form {
  DType source;
  Scales scales;
  WeightFormat format;
};
const Form kForms[] = {
    {DType::kBF16, Scales::kNone, WeightFormat::kBF16},
    {DType::kF16, Scales::kNone, WeightFormat::kBF16},
    {DType::kF8E4M3, Scales::kBlock, WeightFormat::kF8E4M3},
    {DType::kF8E4M3, Scales::kRow, WeightFormat::kF8E4M3},
    {DType::kF8E4M3, Scales::kTensor, WeightFormat::kF8E4M3},
    {DType::kF8E4M3, Scales::kNone, WeightFormat::kF8E4M3},
    {DType::kF32, Scales::kNone, WeightFormat::kF32},
    {DType::kF8E4M3, Scales::kBlock, WeightFormat::kF32},
};

// fp32 rounding in a block of 128 products and over the blocks; far below the effect of one missing
// product.
double tolerance(const testing::Expected& expected) { return 4e-6 * expected.magnitude + 1e-30; }

template <typename T>
void check_products(CpuIsa isa, const Form& form, int64_t n, int64_t k) {
  const Source source(static_cast<uint64_t>(n * 1000 + k), n, k, form.source, form.scales);
  const PackedMatrix weight = pack(source, form.format);
  const int64_t pairs = ceil_div(n, kPairRows);
  for (const int64_t rows : {1, 2, 3, 4, 5, 7, 16, 17, 40, 96}) {
    const Rows<T> x(7, rows, k);
    std::vector<float> sums(static_cast<size_t>(pairs * rows * kPairRows), std::nanf(""));
    for (int64_t pair = 0; pair < pairs; pair += kMaxProductPairs) {
      multiply_pairs(linear_kernels(isa), {x.view}, rows, weight, pair,
                     std::min(kMaxProductPairs, pairs - pair),
                     sums.data() + pair * rows * kPairRows);
    }
    for (int64_t m = 0; m<rows; m += rows> 12 ? 11 : 1) {
      for (int64_t i = 0; i<n; i += n> 100 ? 7 : 1) {
        const float sum = sums[static_cast<size_t>(i / kPairRows * rows * kPairRows +
                                                   m * kPairRows + i % kPairRows)];
        const auto expected = testing::product<T>(x.view, m, source, form.format, i);
        ASSERT_NEAR(sum, expected.value, tolerance(expected))
            << name_of(isa) << " form " << &form - kForms << " [" << n << ", " << k << "] rows "
            << rows << " at " << m << ", " << i;
      }
    }
  }
}

bool same_bits(const float* a, const float* b, int64_t count) {
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  return std::equal(a, a + count, b, [&](float x, float y) { return bits(x) == bits(y); });
}

TEST(MultiplyPairs, EveryLevelEveryFormOddAndRealShapes) {
  const int64_t shapes[][2] = {{128, 256}, {96, 200}, {15, 72}, {3, 56},   {33, 129},
                               {65, 257},  {576, 96}, {1, 1},   {160, 128}};
  for (const CpuIsa isa : runnable_levels()) {
    for (const Form& form : kForms) {
      for (const auto& [n, k] : shapes) {
        check_products<float>(isa, form, n, k);
        check_products<bf16>(isa, form, n, k);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Any range of pairs gives the same bits as all of them: threads cut groups in the middle.
TEST(MultiplyPairs, ARangeMayBeginAndEndInsideAGroup) {
  for (const CpuIsa isa : runnable_levels()) {
    for (const Form& form : {kForms[0], kForms[2], kForms[6]}) {
      const Source source(5, 150, 200, form.source, form.scales);
      const PackedMatrix weight = pack(source, form.format);
      for (const int64_t rows : {2, 9, 18}) {
        const Rows<bf16> x(6, rows, 200);
        std::vector<float> whole(static_cast<size_t>(5 * rows * kPairRows));
        multiply_pairs(linear_kernels(isa), {x.view}, rows, weight, 0, 5, whole.data());
        for (int64_t begin = 0; begin < 5; ++begin) {
          for (int64_t end = begin + 1; end <= 5; ++end) {
            std::vector<float> part(static_cast<size_t>((end - begin) * rows * kPairRows), -1.0f);
            multiply_pairs(linear_kernels(isa), {x.view}, rows, weight, begin, end - begin,
                           part.data());
            EXPECT_TRUE(
                same_bits(part.data(), whole.data() + begin * rows * kPairRows, std::ssize(part)));
          }
        }
      }
    }
  }
}

TEST(MultiplyPairs, ARowsBitsDoNotDependOnTheRowsBesideIt) {
  for (const CpuIsa isa : runnable_levels()) {
    for (const Form& form : kForms) {
      const Source source(8, 64, 328, form.source, form.scales);
      const PackedMatrix weight = pack(source, form.format);
      constexpr int64_t kRows = 41;
      const auto check = [&](ConstTensorView x) {
        std::vector<float> together(size_t{2} * kRows * kPairRows), alone(size_t{2} * kPairRows);
        for (const int64_t rows : {2, 3, 4, 5, 12, 16, 17, 41}) {
          multiply_pairs(linear_kernels(isa), {x}, rows, weight, 0, 2, together.data());
          for (int64_t r = 0; r < rows; ++r) {
            multiply_pairs(linear_kernels(isa), {x, nullptr, r}, 1, weight, 0, 2, alone.data());
            for (int64_t pair = 0; pair < 2; ++pair) {
              ASSERT_TRUE(same_bits(alone.data() + pair * kPairRows,
                                    together.data() + (pair * rows + r) * kPairRows, kPairRows))
                  << name_of(isa) << " rows " << rows << " row " << r;
            }
          }
        }
      };
      check(Rows<bf16>(9, kRows, 328).view);
      check(Rows<float>(9, kRows, 328).view);
    }
  }
}

// Few rows may take other instructions than many, which may treat subnormals differently: x is so
// small that products and sums are subnormal.
TEST(MultiplyPairs, ARowsBitsDoNotDependOnTheRowsBesideItWhereSumsAreSubnormal) {
  for (const CpuIsa isa : runnable_levels()) {
    for (const Form& form : {kForms[0], kForms[2]}) {
      const Source source(31, 64, 328, form.source, form.scales);
      const PackedMatrix weight = pack(source, form.format);
      constexpr int64_t kRows = 17;
      Rows<bf16> x(32, kRows, 328);
      for (int64_t r = 0; r < kRows; ++r) {
        bf16* const row = x.view.row<bf16>(r);
        for (int64_t k = 0; k < 328; ++k) row[k] = to_bf16(to_float(row[k]) * 0x1p-125f);
      }
      std::vector<float> together(size_t{2} * kRows * kPairRows), alone(size_t{2} * kPairRows);
      multiply_pairs(linear_kernels(isa), {x.view}, kRows, weight, 0, 2, together.data());
      for (int64_t r = 0; r < kRows; ++r) {
        multiply_pairs(linear_kernels(isa), {x.view, nullptr, r}, 1, weight, 0, 2, alone.data());
        for (int64_t pair = 0; pair < 2; ++pair) {
          EXPECT_TRUE(same_bits(alone.data() + pair * kPairRows,
                                together.data() + (pair * kRows + r) * kPairRows, kPairRows))
              << name_of(isa) << " row " << r;
        }
      }
    }
  }
}

#if defined(__x86_64__)
// Whichever of the two this CPU prefers: the other one is right, too.
TEST(MultiplyPairs, FmasHaveTheBitsOfDotProducts) {
  if (cpu_isa() < CpuIsa::kAvx512) GTEST_SKIP() << "no AVX-512";
  for (const Form& form : {kForms[0], kForms[2]}) {
    for (const int64_t columns : {96, 129, 328}) {
      const Source source(51, 112, columns, form.source, form.scales);
      const PackedMatrix weight = pack(source, form.format);
      for (const float size : {1.0f, 0x1p-125f, 0x1p-131f}) {
        for (const int64_t rows : {1, 2, 3, 4, 6, 16, 17, 24, 29}) {
          Rows<bf16> x(52, rows, columns);
          for (int64_t r = 0; r < rows; ++r) {
            bf16* const row = x.view.row<bf16>(r);
            for (int64_t k = 0; k < columns; ++k) row[k] = to_bf16(to_float(row[k]) * size);
          }
          std::vector<float> dots(static_cast<size_t>(4 * rows * kPairRows)), fmas(dots.size());
          multiply_pairs(kLinearAvx512, {x.view}, rows, weight, 0, 4, dots.data());
          multiply_pairs(linear_avx512_fma(), {x.view}, rows, weight, 0, 4, fmas.data());
          EXPECT_TRUE(same_bits(dots.data(), fmas.data(), std::ssize(dots)))
              << rows << " rows of " << columns << " times " << size << ", source "
              << name_of(form.source);
        }
      }
    }
  }
}
#endif

// Steps whose codes are all normal may be dequantized in another way than those with a zero, a
// subnormal or a NaN among them. All codes are normal ones here but for one rare code at a time, in
// either panel, pair and column of a step; most trials' are small, so that the rare one's value
// matters in the sum.
TEST(MultiplyPairs, StepsOfNormalCodesAndStepsWithARareOne) {
  constexpr int64_t kRows = 128, kColumns = 264;
  constexpr uint8_t kRare[] = {0x00, 0x80, 0x01, 0x83, 0x07, 0x87, 0x7F, 0xFF};
  for (const CpuIsa isa : runnable_levels()) {
    for (uint64_t trial = 0; trial < 24; ++trial) {
      Source source(40 + trial, kRows, kColumns, DType::kF8E4M3, Scales::kBlock);
      const uint64_t normal_codes = trial < 16 ? 16 : 0x7F - 8;
      for (int64_t i = 0; i < kRows * kColumns; ++i) {
        const uint64_t bits = random_bits(41, trial, static_cast<uint64_t>(i));
        const auto magnitude = static_cast<uint8_t>(8 + bits % normal_codes);
        source.put(i, e4m3{static_cast<uint8_t>(magnitude | (bits >> 32 & 0x80))});
      }
      const auto row = static_cast<int64_t>(random_bits(42, trial, 0) % kRows);
      const auto column = static_cast<int64_t>(random_bits(42, trial, 1) % kColumns);
      const uint8_t code = kRare[trial % std::size(kRare)];
      source.put(row * kColumns + column, e4m3{code});
      const PackedMatrix weight = pack(source, WeightFormat::kF8E4M3);
      for (const int64_t rows : {1, 2, 3, 4, 17}) {
        const Rows<bf16> x(43, rows, kColumns);
        std::vector<float> sums(static_cast<size_t>(4 * rows * kPairRows));
        multiply_pairs(linear_kernels(isa), {x.view}, rows, weight, 0, 4, sums.data());
        for (int64_t i = 0; i < kRows; ++i) {
          const float sum =
              sums[static_cast<size_t>(i / kPairRows * rows * kPairRows + i % kPairRows)];
          const auto expected = testing::product<bf16>(x.view, 0, source, WeightFormat::kF8E4M3, i);
          if (i == row && (code & 0x7F) == 0x7F) {
            ASSERT_TRUE(std::isnan(sum)) << name_of(isa) << " rows " << rows;
          } else {
            ASSERT_NEAR(sum, expected.value, tolerance(expected))
                << name_of(isa) << " rows " << rows << " code " << int{code} << " at " << row
                << ", " << column << ", output " << i;
          }
        }
      }
    }
  }
}

TEST(MultiplyPairs, IndexedRows) {
  const Source source(11, 64, 96, DType::kBF16, Scales::kNone);
  const PackedMatrix weight = pack(source, WeightFormat::kBF16);
  const Rows<bf16> x(12, 10, 96);
  const int32_t index[] = {9, 0, 3, 3, 7, 1, 2};
  for (const int64_t rows : {2, 6}) {
    std::vector<float> sums(static_cast<size_t>(2 * rows * kPairRows));
    multiply_pairs(linear_kernels(cpu_isa()), {x.view, index, 1}, rows, weight, 0, 2, sums.data());
    for (int64_t r = 0; r < rows; ++r) {
      const auto expected =
          testing::product<bf16>(x.view, index[1 + r], source, WeightFormat::kBF16, 5);
      EXPECT_NEAR(sums[static_cast<size_t>(r * kPairRows + 5)], expected.value,
                  tolerance(expected));
    }
  }
}

TEST(RowBlocks, CoverAllRowsWithinTheLimit) {
  for (int64_t rows = 1; rows < 700; ++rows) {
    const RowBlocks blocks(rows);
    EXPECT_EQ(blocks.begin(0), 0);
    EXPECT_EQ(blocks.begin(blocks.count()), rows);
    for (int64_t b = 0; b < blocks.count(); ++b) {
      const int64_t height = blocks.begin(b + 1) - blocks.begin(b);
      EXPECT_TRUE(height > 0 && height <= kMaxProductRows) << rows;
    }
  }
}

TEST(CostPieces, EveryUnitFallsIntoOnePiece) {
  const int64_t counts[] = {5, 1, 0, 18, 300};
  const int64_t costs[] = {100, 7, 3, 40, 1};
  int64_t total = 0;
  for (int i = 0; i < 5; ++i) total += counts[i] * costs[i];
  for (const int threads : {1, 2, 3, 7, 64}) {
    for (const int64_t least_cost : {1, 20, 1000}) {
      const CostPieces pieces(total, threads, true, least_cost);
      // As run_pieces() hands them out: the threads' own first, then the small ones.
      std::vector<int> hits[5];
      for (int i = 0; i < 5; ++i) hits[i].resize(static_cast<size_t>(counts[i]));
      for (int piece = 0; piece < pieces.count(); ++piece) {
        CostSplit split = pieces.piece(piece);
        int64_t cost = 0;
        for (size_t i = 0; i < 5; ++i) {
          const auto range = split.next(counts[i], costs[i]);
          for (int64_t unit = range.begin; unit < range.end; ++unit) ++hits[i][unit];
          cost += (range.end - range.begin) * costs[i];
        }
        EXPECT_LE(cost, total / threads + 100);
      }
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(hits[i], std::vector<int>(static_cast<size_t>(counts[i]), 1)) << threads;
      }
    }
  }
}

TEST(CostPieces, SmallOnesAreAQuarterOfFewRows) {
  const CostPieces few(6400, 4, true, 100);
  EXPECT_EQ(few.count(), 4 + 8);
  const CostPieces narrow(6400, 4, true, 201);  // a small piece would be 200
  EXPECT_EQ(narrow.count(), 4);
  EXPECT_EQ(CostPieces(6400, 4, false, 100).count(), 4);
  EXPECT_EQ(CostPieces(6400, 1, true, 100).count(), 1);
}

// A router's rows: threads share the columns, and the bits are those of one thread.
TEST(Linear, ANarrowMatrixHasTheSameBitsOnAnyNumberOfThreads) {
  ThreadPool one(1);
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{64, 2048}, {40, 300}, {256, 1000}}) {
    const Form& form = kForms[6];
    ASSERT_EQ(form.format, WeightFormat::kF32);
    const Source source(24, n, k, form.source, form.scales);
    const PackedMatrix weight = pack(source, form.format);
    for (const int64_t rows : {1, 3, 16}) {
      const Rows<float> x(25, rows, k);
      for (const LinearMode mode : {LinearMode::kOverwrite, LinearMode::kAccumulate}) {
        const Rows<float> expected(26, rows, n);
        linear(Stream(one), x.view, weight, expected.view, mode);
        for (const int threads : {2, 9, 16}) {
          ThreadPool pool(threads);
          const Rows<float> out(26, rows, n);
          linear(Stream(pool), x.view, weight, out.view, mode);
          for (int64_t r = 0; r < rows; ++r) {
            ASSERT_TRUE(
                same_bits(out.view.template row<float>(r), expected.view.template row<float>(r), n))
                << threads << " threads, " << rows << " rows of [" << n << ", " << k << "]";
          }
        }
      }
    }
  }
}

template <typename T, typename Out>
void check_linear(ThreadPool& pool, int64_t rows, int64_t n, int64_t k, LinearMode mode) {
  const Form& form = kForms[2];
  const Source source(21, n, k, form.source, form.scales);
  const PackedMatrix weight = pack(source, form.format);
  const Rows<T> x(22, rows, k);
  Rows<Out> out(23, rows, n);  // poison between the rows
  const Rows<Out> before(23, rows, n);
  const Stream stream(pool);
  linear(stream, x.view, weight, out.view, mode);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < n; ++i) {
      auto expected = testing::product<T>(x.view, m, source, form.format, i);
      if (mode == LinearMode::kAccumulate) {
        const double old = to_float(before.view.template row<Out>(m)[i]);
        expected.value += old;
        expected.magnitude += std::abs(old);
      }
      const double rounding =
          std::is_same_v<Out, bf16> ? std::abs(expected.value) * 0x1.01p-8 : 0.0;
      ASSERT_NEAR(to_float(out.view.template row<Out>(m)[i]), expected.value,
                  tolerance(expected) + rounding);
    }
    for (int64_t i = n; i < out.stride && m + 1 < rows; ++i) {
      ASSERT_TRUE(std::isnan(to_float(out.view.template row<Out>(m)[i]))) << "wrote past the row";
    }
  }
}

TEST(Linear, MatchesDoubleForAnyThreadsRowsAndOutputs) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const int64_t rows : {1, 4, 17, 200}) {
      check_linear<bf16, float>(pool, rows, 150, 200, LinearMode::kOverwrite);
      check_linear<bf16, float>(pool, rows, 150, 200, LinearMode::kAccumulate);
      check_linear<bf16, bf16>(pool, rows, 150, 200, LinearMode::kOverwrite);
      check_linear<float, float>(pool, rows, 576, 72, LinearMode::kAccumulate);
      check_linear<float, bf16>(pool, rows, 3, 56, LinearMode::kOverwrite);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Linear, SameBitsForAnyThreadsAndBatch) {
  const Source source(31, 700, 512, DType::kF8E4M3, Scales::kBlock);
  const PackedMatrix weight = pack(source, WeightFormat::kF8E4M3);
  const Rows<bf16> x(32, 250, 512);
  std::vector<float> reference(size_t{250} * 700);
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    const Stream stream(pool);
    for (int repeat = 0; repeat < 2; ++repeat) {
      std::vector<float> out(size_t{250} * 700, std::nanf(""));
      linear(stream, x.view, weight, TensorView(out.data(), {250, 700}));
      if (threads == 1 && repeat == 0) reference = out;
      EXPECT_TRUE(same_bits(out.data(), reference.data(), std::ssize(out)));
    }
    for (const int64_t row : {0, 99, 249}) {
      std::vector<float> out(700, std::nanf(""));
      linear(stream, ConstTensorView(x.view).rows(row, 1), weight,
             TensorView(out.data(), {1, 700}));
      EXPECT_TRUE(same_bits(out.data(), reference.data() + row * 700, 700));
    }
  }
}

TEST(LinearGroup, EqualsTheProductsOneByOne) {
  const Source a(41, 128, 256, DType::kBF16, Scales::kNone);
  const Source b(42, 576, 256, DType::kF8E4M3, Scales::kBlock);
  const Source c(43, 15, 72, DType::kF32, Scales::kNone);
  const PackedMatrix weights[] = {pack(a, WeightFormat::kBF16), pack(b, WeightFormat::kF8E4M3),
                                  pack(c, WeightFormat::kF32)};
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const Stream stream(pool);
    for (const int64_t rows : {0, 1, 6, 150}) {
      const Rows<bf16> x(44, rows, 256), y(45, rows, 72);
      std::vector<std::vector<float>> together, alone;
      std::vector<LinearTask> tasks;
      for (const PackedMatrix& weight : weights) {
        together.emplace_back(static_cast<size_t>(rows * weight.rows() + 1), 0.5f);
        alone.push_back(together.back());
      }
      for (size_t i = 0; i < 3; ++i) {
        const ConstTensorView in = i == 2 ? y.view : x.view;
        tasks.push_back(
            {in, &weights[i], TensorView(together[i].data(), {rows, weights[i].rows()})});
        linear(stream, in, weights[i], TensorView(alone[i].data(), {rows, weights[i].rows()}),
               LinearMode::kAccumulate);
      }
      linear_group(stream, tasks, LinearMode::kAccumulate);
      EXPECT_EQ(together, alone) << threads << " threads, " << rows << " rows";
    }
  }
}

}  // namespace
}  // namespace fathom
