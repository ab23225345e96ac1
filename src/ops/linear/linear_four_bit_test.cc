// Four-bit weights: packing, products and dequantization on every instruction set, against plain
// code over the codes.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <thread>

#include "device/cpu/isa.h"
#include "ops/linear/linear_test_data.h"
#include "ops/linear/panel_layout.h"
#include "ops/linear/panel_product.h"

namespace fathom {
namespace {

using testing::Rows;
using testing::same_bytes;

PackedForm form_of(FourBitCode code, int64_t group, DType scales, bool zeros) {
  PackedForm form = WeightFormat::kFourBit;
  form.code = code;
  form.group_cols = group;
  form.scales = scales;
  form.zeros = zeros;
  return form;
}

const PackedForm kPackedForms[] = {
    form_of(FourBitCode::kInteger, 32, DType::kBF16, false),
    form_of(FourBitCode::kInteger, 128, DType::kBF16, false),
    form_of(FourBitCode::kInteger, 0, DType::kBF16, false),
    form_of(FourBitCode::kInteger, 128, DType::kF32, true),
    form_of(FourBitCode::kInteger, 32, DType::kBF16, true),
    form_of(FourBitCode::kInteger, 64, DType::kF32, true),
    form_of(FourBitCode::kE2m1, 32, DType::kBF16, false),
    form_of(FourBitCode::kE2m1, 16, DType::kF32, false),
    form_of(FourBitCode::kInteger, 256, DType::kF32, false),
};

// Random codes with scales and zero points. The values that it stands for are computed here from
// their definition, not by ScaledMatrix.
struct Codes {
  Codes(uint64_t seed, int64_t num_rows, int64_t num_cols, const PackedForm& packed)
      : rows(num_rows), cols(num_cols), form(packed) {
    group = form.group_cols > 0 ? form.group_cols : cols;
    groups = ceil_div(cols, group);
    for (int64_t i = 0; i < rows * cols; ++i) {
      codes.push_back(static_cast<uint8_t>(random_bits(seed, 1, static_cast<uint64_t>(i)) & 15));
    }
    for (int64_t i = 0; i < rows * groups; ++i) {
      const float scale = 0.01f * (1.5f + testing::random_value(seed, 2, i));
      scales.push_back(form.scales == DType::kBF16 ? to_float(to_bf16(scale)) : scale);
      zeros.push_back(static_cast<uint8_t>(random_bits(seed, 3, static_cast<uint64_t>(i)) & 15));
    }
    matrix.values = ConstTensorView(codes.data(), {rows, cols});
    matrix.scales = ConstTensorView(scales.data(), {rows, groups});
    matrix.scale_rows = 1;
    matrix.scale_cols = group;
    matrix.code = form.code;
    if (form.zeros) matrix.zeros = ConstTensorView(zeros.data(), {rows, groups});
  }
  Codes(const Codes&) = delete;
  Codes& operator=(const Codes&) = delete;

  double weight(int64_t row, int64_t col) const {
    const int code = codes[static_cast<size_t>(row * cols + col)];
    const auto at = static_cast<size_t>(row * groups + col / group);
    if (form.code == FourBitCode::kE2m1) {
      const int exponent = code >> 1 & 3, mantissa = code & 1;
      const double size = exponent == 0 ? mantissa * 0.5 : std::ldexp(2 + mantissa, exponent - 2);
      return (code & 8 ? -size : size) * scales[at];
    }
    return (code - (form.zeros ? zeros[at] : 8)) * static_cast<double>(scales[at]);
  }

  PackedMatrix packed() const {
    PackedMatrix out = *PackedMatrix::allocate(rows, cols, form, "test");
    std::memset(const_cast<std::byte*>(out.data()), 0xFF, static_cast<size_t>(out.bytes()));
    out.pack(0, matrix);
    return out;
  }

  int64_t rows, cols;
  PackedForm form;
  int64_t group, groups;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales;
  ScaledMatrix matrix;
};

std::vector<float> multiply(CpuIsa isa, ConstTensorView x, int64_t first, int64_t rows,
                            const PackedMatrix& weight) {
  const int64_t pairs = ceil_div(weight.rows(), kPairRows);
  std::vector<float> sums(static_cast<size_t>(pairs * rows * kPairRows), std::nanf(""));
  for (int64_t pair = 0; pair < pairs; pair += kMaxProductPairs) {
    multiply_pairs(linear_kernels(isa), {x, nullptr, first}, rows, weight, pair,
                   std::min(kMaxProductPairs, pairs - pair), sums.data() + pair * rows * kPairRows);
  }
  return sums;
}

template <typename T>
void check_products(CpuIsa isa, const PackedForm& form, int64_t n, int64_t k) {
  const Codes source(static_cast<uint64_t>(n * 1000 + k), n, k, form);
  const PackedMatrix weight = source.packed();
  for (const int64_t rows : {1, 2, 3, 4, 5, 16, 17, 40}) {
    const Rows<T> x(7, rows, k);
    const std::vector<float> sums = multiply(isa, x.view, 0, rows, weight);
    for (int64_t m = 0; m<rows; m += rows> 12 ? 11 : 1) {
      for (int64_t i = 0; i < n; ++i) {
        double expected = 0, magnitude = 0;
        for (int64_t c = 0; c < k; ++c) {
          const double term = to_float(x.view.template row<T>(m)[c]) * source.weight(i, c);
          expected += term;
          magnitude += std::abs(term);
        }
        const float sum =
            sums[static_cast<size_t>((i / kPairRows * rows + m) * kPairRows + i % kPairRows)];
        ASSERT_NEAR(sum, expected, 4e-6 * magnitude + 1e-30)
            << name_of(isa) << " form " << &form - kPackedForms << " [" << n << ", " << k
            << "] rows " << rows << " at " << m << ", " << i;
      }
    }
  }
}

TEST(FourBit, ProductsOfEveryLevelAndForm) {
  for (const CpuIsa isa : runnable_levels()) {
    for (const PackedForm& form : kPackedForms) {
      for (const auto& [n, groups] : {std::pair<int64_t, int64_t>{64, 2}, {33, 1}, {100, 3}}) {
        const int64_t k = form.group_cols > 0 ? form.group_cols * groups : 61 * groups;
        check_products<float>(isa, form, n, k);
        check_products<bf16>(isa, form, n, k);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// As act-order leaves them: packed column c multiplies columns[c] of x.
template <typename T>
void check_reordered(CpuIsa isa, PackedForm form) {
  form.reordered = true;
  const Codes source(12, 40, 2 * form.group_cols, form);
  PackedMatrix weight = source.packed();
  std::vector<int32_t> columns(static_cast<size_t>(source.cols));
  std::iota(columns.begin(), columns.end(), 0);
  std::shuffle(columns.begin(), columns.end(), std::mt19937(5));
  weight.set_columns(columns);
  const PackedMatrix shared = weight.share();
  for (const int64_t rows : {1, 3, 17}) {
    const Rows<T> x(7, rows, source.cols);
    const std::vector<float> sums = multiply(isa, x.view, 0, rows, shared);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = 0; i < source.rows; ++i) {
        double expected = 0, magnitude = 0;
        for (int64_t c = 0; c < source.cols; ++c) {
          const auto of_x = columns[static_cast<size_t>(c)];
          const double term = to_float(x.view.template row<T>(m)[of_x]) * source.weight(i, c);
          expected += term;
          magnitude += std::abs(term);
        }
        const auto at = (i / kPairRows * rows + m) * kPairRows + i % kPairRows;
        ASSERT_NEAR(sums[static_cast<size_t>(at)], expected, 4e-6 * magnitude)
            << name_of(isa) << " rows " << rows << " at " << m << ", " << i;
      }
    }
  }
}

TEST(FourBit, ReorderedColumnsTakeTheirOwnOfX) {
  for (const CpuIsa isa : runnable_levels()) {
    for (const PackedForm& form : {kPackedForms[1], kPackedForms[3], kPackedForms[4]}) {
      check_reordered<float>(isa, form);
      check_reordered<bf16>(isa, form);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(FourBit, ARowsBitsDoNotDependOnTheRowsBesideIt) {
  for (const CpuIsa isa : runnable_levels()) {
    for (const PackedForm& form : kPackedForms) {
      const Codes source(8, 64, form.group_cols > 0 ? 512 : 331, form);
      const PackedMatrix weight = source.packed();
      const auto check = [&](ConstTensorView x) {
        for (const int64_t rows : {2, 4, 5, 16, 17, 33}) {
          const std::vector<float> together = multiply(isa, x, 0, rows, weight);
          for (int64_t r = 0; r < rows; ++r) {
            const std::vector<float> alone = multiply(isa, x, r, 1, weight);
            for (int64_t pair = 0; pair < 2; ++pair) {
              ASSERT_EQ(std::memcmp(alone.data() + pair * kPairRows,
                                    together.data() + (pair * rows + r) * kPairRows,
                                    kPairRows * sizeof(float)),
                        0)
                  << name_of(isa) << " form " << &form - kPackedForms << " rows " << rows;
            }
          }
        }
      };
      check(Rows<bf16>(9, 33, source.cols).view);
      check(Rows<float>(9, 33, source.cols).view);
    }
  }
}

// A rank's columns are whole groups of a larger matrix.
TEST(FourBit, ASliceOfColumnsIsAMatrixOfItsOwn) {
  for (const PackedForm& form : {kPackedForms[0], kPackedForms[4], kPackedForms[7]}) {
    const Codes source(11, 40, 4 * form.group_cols, form);
    const int64_t first = form.group_cols, count = 2 * form.group_cols;
    PackedMatrix part = *PackedMatrix::allocate(20, count, form, "test");
    part.pack(0, source.matrix.slice({10, 20}, {first, count}));
    const Rows<float> x(3, 1, count);
    const std::vector<float> sums = multiply(CpuIsa::kScalar, x.view, 0, 1, part);
    for (int64_t i = 0; i < 20; ++i) {
      double expected = 0;
      for (int64_t c = 0; c < count; ++c) {
        expected += x.view.row<float>(0)[c] * source.weight(10 + i, first + c);
      }
      EXPECT_NEAR(sums[static_cast<size_t>(i)], expected, 1e-5) << i;
    }
  }
}

TEST(FourBit, RowRangesOfAnyAlignmentFromSeveralThreads) {
  for (const PackedForm& form : {kPackedForms[0], kPackedForms[3], kPackedForms[4]}) {
    const Codes source(1, 205, 384, form);
    const PackedMatrix whole = source.packed();
    PackedMatrix parts = *PackedMatrix::allocate(205, 384, form, "test");
    std::memset(const_cast<std::byte*>(parts.data()), 0xAA, static_cast<size_t>(parts.bytes()));
    const int64_t cuts[] = {0, 1, 17, 18, 95, 131, 204, 205};
    std::vector<std::thread> threads;
    for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
      threads.emplace_back([&, i] {
        parts.pack(cuts[i], source.matrix.slice({cuts[i], cuts[i + 1] - cuts[i]}, {0, 384}));
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(same_bytes(whole, parts));
  }
}

TEST(FourBit, BytesAreFourBitsAndTheScales) {
  const auto bytes = [](const PackedForm& form) {
    return PackedMatrix::allocate(2816, 2048, form, "test")->bytes();
  };
  EXPECT_EQ(bytes(kPackedForms[0]), 2816 * 2048 / 2 + 2816 * 64 * 2);  // 4.5 bits a weight
  EXPECT_EQ(bytes(kPackedForms[1]), 2816 * 2048 / 2 + 2816 * 16 * 2);  // 4.125
  EXPECT_EQ(bytes(kPackedForms[3]), 2816 * 2048 / 2 + 2816 * 16 * 5);  // 4.31
  EXPECT_EQ(bytes(kPackedForms[6]), 2816 * 2048 / 2 + 2816 * 64 * 2);  // 4.5
}

// All codes with all zero points: the packed order of one pair's steps is written out here.
TEST(FourBit, ExpandsEveryCodeExactly) {
  const Buffer buffer = *Buffer::allocate(int64_t{4} * 64, "test");
  std::vector<int> codes(size_t{32} * 16);  // [row][column]
  std::memset(buffer.data(), 0, 256);
  std::vector<uint8_t> shifts;
  for (int row = 0; row < 32; ++row) {
    shifts.push_back(static_cast<uint8_t>(16 - row % 16));
    for (int column = 0; column < 16; ++column) {
      const int code = (row * 7 + column) % 16;
      codes[static_cast<size_t>(row) * 16 + static_cast<size_t>(column)] = code;
      const int at = column / 4 * 64 + row % 16 * 4 + column % 2 * 2 + row / 16;
      buffer.data()[at] |= static_cast<std::byte>(code << (column % 4 / 2 * 4));
    }
  }
  for (const CpuIsa isa : runnable_levels()) {
    const LinearKernels& kernels = linear_kernels(isa);
    for (const auto& [form, zeros] : {std::pair(FourBitCode::kInteger, false),
                                      {FourBitCode::kInteger, true},
                                      {FourBitCode::kE2m1, false}}) {
      const FourBitTable& table = four_bit_table(form, zeros);
      const uint8_t* const shift = zeros ? shifts.data() : nullptr;
      const auto expected = [&, form = form, zeros = zeros](int row, int column) {
        return four_bit_value(form,
                              codes[static_cast<size_t>(row) * 16 + static_cast<size_t>(column)],
                              zeros ? row % 16 : 8);
      };
      std::vector<float> wide(size_t{16} * 32);
      kernels.expand_four_bit_to_f32(buffer.data(), 64, 4, table, shift, wide.data());
      for (int i = 0; i < 16 * 32; ++i) {
        EXPECT_EQ(wide[static_cast<size_t>(i)], expected(i % 32, i / 32)) << name_of(isa) << i;
      }
      if (kernels.expand_four_bit_to_bf16 == nullptr) continue;
      std::vector<bf16> pairs(size_t{16} * 32);
      kernels.expand_four_bit_to_bf16(buffer.data(), 64, 4, table, shift,
                                      reinterpret_cast<std::byte*>(pairs.data()));
      for (int i = 0; i < 16 * 32; ++i) {
        const int row = i / 16, column = i % 16;
        EXPECT_EQ(to_float(pairs[static_cast<size_t>(column / 2 * 64 + row * 2 + column % 2)]),
                  expected(row, column))
            << name_of(isa) << " " << row << ", " << column;
      }
    }
  }
}

}  // namespace
}  // namespace fathom
