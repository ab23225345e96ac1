#include "ops/linear/library_plan.h"

#include <gtest/gtest.h>

#include <set>

namespace fathom::cuda {
namespace {

TEST(LibraryPlan, TakesManyRowsOfOneMatrix) {
  EXPECT_TRUE(library_pays({.rows = 65, .n = 2048, .k = 2048}));
  EXPECT_TRUE(library_pays({.rows = 8192, .n = 2048, .k = 2048}));
  EXPECT_FALSE(library_pays({.rows = 64, .n = 2048, .k = 2048}));
  EXPECT_FALSE(library_pays({.rows = 256, .n = 512, .k = 128, .batches = 16}));
}

TEST(LibraryPlan, FewNumbersOfRowsStandForAll) {
  std::set<int64_t> numbers;
  for (int64_t rows = 65; rows <= 16384; ++rows) {
    const int64_t alike = rows_alike(rows);
    EXPECT_GE(alike, rows);
    EXPECT_LE(alike, rows + std::max<int64_t>(63, rows / 8));
    EXPECT_EQ(rows_alike(alike), alike);
    numbers.insert(alike);
  }
  EXPECT_LE(numbers.size(), 50);
}

}  // namespace
}  // namespace fathom::cuda
