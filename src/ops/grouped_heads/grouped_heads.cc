#include "ops/grouped_heads/grouped_heads.h"

#include <algorithm>
#include <cstring>

namespace fathom {
namespace {

// Below this many bytes a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelBytes = 64 * 1024;

std::byte* at(TensorView view, int64_t row, int64_t head, int64_t element) {
  const int64_t index = row * view.stride(0) + head * view.stride(1) + element;
  return static_cast<std::byte*>(view.raw()) + index * size_of(view.dtype());
}

const std::byte* at(ConstTensorView view, int64_t row, int64_t head, int64_t element) {
  const int64_t index = row * view.stride(0) + head * view.stride(1) + element;
  return static_cast<const std::byte*>(view.raw()) + index * size_of(view.dtype());
}

const std::byte* at(ConstTensorView view, int64_t row, int64_t element) {
  return static_cast<const std::byte*>(view.raw()) +
         (row * view.stride(0) + element) * size_of(view.dtype());
}

// Calls work(row, head) for all of them, rows divided over the pool.
template <typename Work>
void for_each_head(const Stream& stream, TensorView out, const Work& work) {
  const int64_t row_bytes = out.size(1) * out.size(2) * size_of(out.dtype());
  const int64_t grain = std::max<int64_t>(1, kParallelBytes / std::max<int64_t>(1, row_bytes));
  stream.pool().parallel_for(out.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < out.size(1); ++head) work(row, head);
    }
  });
}

// Whether `wide` values hold the KV heads of d values that these query heads see.
bool holds_heads(int64_t wide, int64_t d, const GroupedHeads& heads, int64_t num_heads) {
  return d > 0 && wide % d == 0 && heads.queries_per_kv > 0 && heads.first_head >= 0 &&
         num_heads > 0 && heads.kv_head(num_heads - 1) < wide / d;
}

}  // namespace

void spread_queries(const Stream& stream, const GroupedHeads& heads, ConstTensorView q,
                    TensorView wide) {
  FATHOM_CHECK(q.rank() == 3 && wide.rank() == 3 && q.size(0) == wide.size(0) &&
                   q.size(1) == wide.size(1) && q.dtype() == wide.dtype() &&
                   holds_heads(wide.size(2), q.size(2), heads, q.size(1)),
               "q {}, wide {}", q.shape_string(), wide.shape_string());
  const int64_t d = q.size(2), element = size_of(q.dtype());
  for_each_head(stream, wide, [&](int64_t row, int64_t head) {
    std::memset(at(wide, row, head, 0), 0, static_cast<size_t>(wide.size(2) * element));
    std::memcpy(at(wide, row, head, heads.kv_head(head) * d), at(q, row, head, 0),
                static_cast<size_t>(d * element));
  });
}

void select_values(const Stream& stream, const GroupedHeads& heads, ConstTensorView wide,
                   TensorView out) {
  FATHOM_CHECK(out.rank() == 3 && wide.rank() == 3 && out.size(0) == wide.size(0) &&
                   out.size(1) == wide.size(1) && out.dtype() == wide.dtype() &&
                   holds_heads(wide.size(2), out.size(2), heads, out.size(1)),
               "wide {}, out {}", wide.shape_string(), out.shape_string());
  const int64_t d = out.size(2), element = size_of(out.dtype());
  for_each_head(stream, out, [&](int64_t row, int64_t head) {
    std::memcpy(at(out, row, head, 0), at(wide, row, head, heads.kv_head(head) * d),
                static_cast<size_t>(d * element));
  });
}

void expand_grouped(const Stream& stream, const GroupedHeads& heads, ConstTensorView values,
                    ConstTensorView keys_rotated, TensorView kv) {
  FATHOM_CHECK(values.rank() == 2 && keys_rotated.rank() == 2 && kv.rank() == 3 &&
                   values.size(0) == kv.size(0) && keys_rotated.size(0) == kv.size(0) &&
                   values.size(1) == keys_rotated.size(1) && kv.size(2) % 2 == 0 &&
                   values.dtype() == kv.dtype() && keys_rotated.dtype() == kv.dtype() &&
                   holds_heads(values.size(1), kv.size(2) / 2, heads, kv.size(1)),
               "values {}, keys {}, kv {}", values.shape_string(), keys_rotated.shape_string(),
               kv.shape_string());
  const int64_t d = kv.size(2) / 2;
  const auto bytes = static_cast<size_t>(d * size_of(kv.dtype()));
  for_each_head(stream, kv, [&](int64_t row, int64_t head) {
    const int64_t first = heads.kv_head(head) * d;
    std::memcpy(at(kv, row, head, 0), at(keys_rotated, row, first), bytes);
    std::memcpy(at(kv, row, head, d), at(values, row, first), bytes);
  });
}

}  // namespace fathom
