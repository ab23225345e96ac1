#include "ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace fathom {
namespace {

TEST(Embedding, CopiesTheRowsOfEveryType) {
  constexpr int64_t kVocab = 37;
  for (const int64_t n : {int64_t{1}, int64_t{77}, int64_t{256}}) {
    std::vector<float> table(static_cast<size_t>(kVocab * n));
    std::vector<bf16> narrow(table.size());
    for (size_t i = 0; i < table.size(); ++i) {
      narrow[i] = to_bf16(static_cast<float>(i) * 0.37f - 5);
      table[i] = to_float(narrow[i]);
    }
    for (const size_t count : {size_t{1}, size_t{5}, size_t{700}}) {
      std::vector<int32_t> ids(count);
      for (size_t i = 0; i < count; ++i) ids[i] = static_cast<int32_t>(i * 11 % kVocab);
      ThreadPool pool(3);
      for (const bool wide : {true, false}) {
        std::vector<float> out(count * static_cast<size_t>(n) + 1, std::nanf(""));
        const ConstTensorView view = wide ? ConstTensorView(table.data(), {kVocab, n})
                                          : ConstTensorView(narrow.data(), {kVocab, n});
        embedding(Stream(pool), ids, view,
                  TensorView(out.data(), {static_cast<int64_t>(count), n}));
        EXPECT_TRUE(std::isnan(out.back()));
        for (size_t row = 0; row < count; ++row) {
          for (int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(out[row * n + i], table[ids[row] * n + i]) << row << " " << i;
          }
        }
      }
    }
  }
}

TEST(EmbeddingDeathTest, AnIdOutsideTheVocabularyIsABug) {
  ThreadPool pool(1);
  const std::vector<float> table(8, 0.0f);
  std::vector<float> out(4);
  const int32_t ids[1] = {2};
  EXPECT_DEATH(embedding(Stream(pool), ids, ConstTensorView(table.data(), {2, 4}),
                         TensorView(out.data(), {1, 4})),
               "id 2 of 2");
}

}  // namespace
}  // namespace fathom
