#include "ops/linear/packed_matrix.h"

#include <gtest/gtest.h>

#include <thread>

#include "ops/linear/linear_test_data.h"

namespace fathom {
namespace {

using testing::same_bytes;
using testing::Scales;
using testing::Source;

ScaledMatrix rows_of(const ScaledMatrix& matrix, int64_t first, int64_t count) {
  // Only for scales that do not begin inside a block: none, per-row or per-tensor.
  ScaledMatrix part = matrix;
  part.values = matrix.values.rows(first, count);
  if (!matrix.scales.empty() && matrix.scale_rows == 1) {
    part.scales = matrix.scales.rows(first, count);
  }
  return part;
}

TEST(PackedMatrix, RowRangesOfAnyAlignmentFromSeveralThreads) {
  struct StoredForm {
    DType dtype;
    Scales scales;
    WeightFormat format;
  };
  for (const StoredForm& form : {StoredForm{DType::kBF16, Scales::kNone, WeightFormat::kBF16},
                                 StoredForm{DType::kF8E4M3, Scales::kRow, WeightFormat::kF8E4M3},
                                 StoredForm{DType::kF32, Scales::kNone, WeightFormat::kF32}}) {
    const Source source(1, 205, 333, form.dtype, form.scales);
    const PackedMatrix whole = pack(source, form.format);
    PackedMatrix parts = *PackedMatrix::allocate(205, 333, form.format, "test");
    std::memset(const_cast<std::byte*>(parts.data()), 0xFF, static_cast<size_t>(parts.bytes()));
    const int64_t cuts[] = {0, 1, 17, 18, 95, 131, 204, 205};
    std::vector<std::thread> threads;
    for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
      threads.emplace_back(
          [&, i] { parts.pack(cuts[i], rows_of(source.matrix, cuts[i], cuts[i + 1] - cuts[i])); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(same_bytes(whole, parts));
  }
}

TEST(PackedMatrix, EveryByteIsWritten) {
  for (const WeightFormat format :
       {WeightFormat::kBF16, WeightFormat::kF8E4M3, WeightFormat::kF32}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{15, 72}, {65, 129}, {64, 128}}) {
      const Source source(2, rows, cols,
                          format == WeightFormat::kF8E4M3 ? DType::kF8E4M3 : DType::kBF16,
                          format == WeightFormat::kF8E4M3 ? Scales::kBlock : Scales::kNone);
      PackedMatrix matrices[2];
      for (int i = 0; i < 2; ++i) {
        matrices[i] = *PackedMatrix::allocate(rows, cols, format, "test");
        std::memset(const_cast<std::byte*>(matrices[i].data()), i == 0 ? 0xFF : 0x11,
                    static_cast<size_t>(matrices[i].bytes()));
        matrices[i].pack(0, source.matrix);
      }
      EXPECT_TRUE(same_bytes(matrices[0], matrices[1])) << rows << " x " << cols;
    }
  }
}

TEST(PackedMatrix, BytesAreTheWeightsAndLittleMore) {
  const auto bytes = [](int64_t rows, int64_t cols, WeightFormat format) {
    return PackedMatrix::allocate(rows, cols, format, "test")->bytes();
  };
  EXPECT_EQ(bytes(3072, 2048, WeightFormat::kBF16), 3072 * 2048 * 2);
  EXPECT_EQ(bytes(576, 2048, WeightFormat::kF32), 576 * 2048 * 4);
  EXPECT_EQ(bytes(3072, 2048, WeightFormat::kF8E4M3), 3072 * 2048 * 33 / 32);
}

}  // namespace
}  // namespace fathom
