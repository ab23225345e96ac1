#include "model/kv_b_split.h"

#include <gtest/gtest.h>

#include <random>

#include "base/math.h"

namespace fathom {
namespace {

struct Case {
  int64_t rows, cols, scale_rows, scale_cols;
};

class KvBSplit : public testing::TestWithParam<Case> {};

TEST_P(KvBSplit, KeepsEveryValue) {
  const Case c = GetParam();
  std::mt19937 random(3);
  std::vector<uint8_t> values(static_cast<size_t>(c.rows * c.cols));
  for (uint8_t& value : values) value = static_cast<uint8_t>(random() % 0x7F);
  const int64_t blocks_r = ceil_div(c.rows, c.scale_rows);
  const int64_t blocks_c = ceil_div(c.cols, c.scale_cols);
  std::vector<float> scales(static_cast<size_t>(blocks_r * blocks_c));
  for (float& scale : scales) scale = 0.5f + static_cast<float>(random() % 1000) / 1000;
  ScaledMatrix matrix;
  matrix.values = ConstTensorView(values.data(), DType::kF8E4M3, {c.rows, c.cols});
  matrix.scales = ConstTensorView(scales.data(), {blocks_r, blocks_c});
  matrix.scale_rows = c.scale_rows;
  matrix.scale_cols = c.scale_cols;

  const int64_t step = c.rows / 4;
  for (int64_t first = 0; first + step <= c.rows; first += step) {
    const OwnedMatrix slice = slice_rows(matrix, first, step);
    const OwnedMatrix transpose = transpose_rows(matrix, first, step);
    ASSERT_EQ(slice.view.rows(), step);
    ASSERT_EQ(transpose.view.cols(), step);
    for (int64_t r = 0; r < step; ++r) {
      for (int64_t col = 0; col < c.cols; ++col) {
        ASSERT_EQ(slice.view.at(r, col), matrix.at(first + r, col));
        ASSERT_EQ(transpose.view.at(col, r), matrix.at(first + r, col));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ScaleForms, KvBSplit,
                         testing::Values(Case{512, 512, 128, 128},  // published: whole blocks
                                         Case{96, 200, 128,
                                              128},  // slices inside one block, ragged columns
                                         Case{1024, 384, 128, 128},  // slices of two by three
                                         Case{448, 96, 128, 128},    // slices that straddle blocks
                                         Case{64, 48, 1, 48},        // per-row scales
                                         Case{64, 48, 64, 48}));     // a per-tensor scale

}  // namespace
}  // namespace fathom
