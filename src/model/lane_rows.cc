#include "model/lane_rows.h"

#include "base/check.h"
#include "placement/split.h"

namespace fathom {
namespace {

// With fewer rows a rank, giving them to the others takes longer than computing them.
constexpr int64_t kRowsOfARank = 8;

std::span<float> floats_of(TensorView array) {
  return {array.data<float>(), static_cast<size_t>(array.num_elements())};
}

}  // namespace

LaneRows::LaneRows(Group* lane, int64_t rows, int64_t row_floats)
    : lane_(lane),
      rank_(lane == nullptr ? 0 : lane->rank()),
      size_(lane == nullptr ? 1 : lane->size()),
      rows_(rows) {
  if (lane == nullptr || rows == 0) return;
  const auto bytes = static_cast<size_t>(rows * row_floats) * sizeof(float);
  are_divided_ = rows >= kRowsOfARank * size_ && !sums_in_one_meeting(*lane, bytes);
}

Slice LaneRows::of(int rank) const { return split_units(rows_, 1, size_, rank); }

void LaneRows::gather(const List& list, ThreadPool& pool) const {
  std::vector<std::vector<Piece>> pieces(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) list(rank, pieces[static_cast<size_t>(rank)]);
  all_gather_pieces(*lane_, pieces, &pool);
}

void LaneRows::add_piece(TensorView array, Slice rows, std::vector<Piece>& pieces) {
  const TensorView part = array.rows(rows.first, rows.count);
  FATHOM_CHECK(part.is_dense(), "rows of {} are apart", part.shape_string());
  pieces.emplace_back(static_cast<std::byte*>(part.raw()),
                      static_cast<size_t>(part.num_elements() * size_of(part.dtype())));
}

void LaneRows::add_sum(TensorView partial, TensorView residual, ThreadPool& pool) const {
  if (!are_divided_) {
    return all_reduce_add(*lane_, floats_of(partial), floats_of(residual), &pool);
  }
  std::vector<int64_t> counts;
  counts.reserve(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) counts.push_back(of(rank).count * partial.size(1));
  const TensorView sums = residual.rows(own().first, own().count);
  reduce_scatter_add(*lane_, floats_of(partial), counts, floats_of(sums), &pool);
}

}  // namespace fathom
