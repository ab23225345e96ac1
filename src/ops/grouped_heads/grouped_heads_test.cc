#include "ops/grouped_heads/grouped_heads.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/random.h"

namespace fathom {
namespace {

constexpr float kPoison = 1e30f;

std::vector<float> random_values(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(random_uniform(seed, 0, i) - 0.5);
  }
  return values;
}

struct Shape {
  int64_t rows, heads, kv_heads, d;
  GroupedHeads grouped;
};
// All heads of a model; the second half of one's, whose first head is in the middle of a group; one
// KV head for all.
const Shape kShapes[] = {{3, 8, 4, 6, {0, 2}}, {700, 3, 3, 5, {3, 2}}, {1, 5, 1, 64, {0, 5}}};

TEST(SpreadQueries, EachHeadsValuesAtItsKvHeadsPlace) {
  ThreadPool pool(3);
  for (const Shape& shape : kShapes) {
    const int64_t width = shape.kv_heads * shape.d, stride = width + 3;
    const std::vector<float> q = random_values(shape.rows * shape.heads * shape.d, 1);
    std::vector<float> wide(static_cast<size_t>(shape.rows * shape.heads * stride), kPoison);
    spread_queries(Stream(pool), shape.grouped,
                   ConstTensorView(q.data(), {shape.rows, shape.heads, shape.d}),
                   TensorView(wide.data(), {shape.rows, shape.heads, stride}).columns(0, width));
    for (int64_t i = 0; i < shape.rows * shape.heads; ++i) {
      const int64_t kv =
          (shape.grouped.first_head + i % shape.heads) / shape.grouped.queries_per_kv;
      for (int64_t c = 0; c < stride; ++c) {
        const bool own = c / shape.d == kv && c < width;
        const float expected = c >= width ? kPoison
                               : own      ? q[static_cast<size_t>(i * shape.d + c % shape.d)]
                                          : 0.0f;
        ASSERT_EQ(wide[static_cast<size_t>(i * stride + c)], expected) << i << ", " << c;
      }
    }
  }
}

TEST(SelectValues, TakesEachHeadsPart) {
  ThreadPool pool(3);
  for (const Shape& shape : kShapes) {
    const int64_t width = shape.kv_heads * shape.d;
    const std::vector<float> wide = random_values(shape.rows * shape.heads * width, 2);
    std::vector<float> out(static_cast<size_t>(shape.rows * shape.heads * shape.d + 1), kPoison);
    select_values(Stream(pool), shape.grouped,
                  ConstTensorView(wide.data(), {shape.rows, shape.heads, width}),
                  TensorView(out.data(), {shape.rows, shape.heads, shape.d}));
    EXPECT_EQ(out.back(), kPoison);
    for (int64_t i = 0; i < shape.rows * shape.heads; ++i) {
      const int64_t kv =
          (shape.grouped.first_head + i % shape.heads) / shape.grouped.queries_per_kv;
      for (int64_t c = 0; c < shape.d; ++c) {
        ASSERT_EQ(out[static_cast<size_t>(i * shape.d + c)],
                  wide[static_cast<size_t>(i * width + kv * shape.d + c)]);
      }
    }
  }
}

TEST(ExpandGrouped, KeyThenValueOfEachHead) {
  ThreadPool pool(3);
  for (const Shape& shape : kShapes) {
    const int64_t width = shape.kv_heads * shape.d;
    const std::vector<float> values = random_values(shape.rows * width, 3);
    const std::vector<float> keys = random_values(shape.rows * width, 4);
    std::vector<float> kv(static_cast<size_t>(shape.rows * shape.heads * 2 * shape.d + 1), kPoison);
    expand_grouped(Stream(pool), shape.grouped, ConstTensorView(values.data(), {shape.rows, width}),
                   ConstTensorView(keys.data(), {shape.rows, width}),
                   TensorView(kv.data(), {shape.rows, shape.heads, 2 * shape.d}));
    EXPECT_EQ(kv.back(), kPoison);
    for (int64_t i = 0; i < shape.rows * shape.heads; ++i) {
      const int64_t row = i / shape.heads;
      const int64_t kv_head =
          (shape.grouped.first_head + i % shape.heads) / shape.grouped.queries_per_kv;
      for (int64_t c = 0; c < 2 * shape.d; ++c) {
        const auto& source = c < shape.d ? keys : values;
        ASSERT_EQ(kv[static_cast<size_t>(i * 2 * shape.d + c)],
                  source[static_cast<size_t>(row * width + kv_head * shape.d + c % shape.d)]);
      }
    }
  }
}

}  // namespace
}  // namespace fathom
