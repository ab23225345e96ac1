// A step's rows, as the ranks of a lane divide what they would otherwise all compute alike: norms,
// latent projections, cache rows and the router.
//
// With many rows each rank computes its own of them and gives the results to the others, and sums
// over the lane end on the rank whose rows they are. With few rows, which take as long as reading
// the weights, all ranks compute all of them. No bit of a row depends on who computes it.
//
// Belongs to one step of one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/collectives.h"
#include "tensor/slice.h"
#include "tensor/tensor_view.h"

namespace fathom {

class LaneRows {
 public:
  // `lane` outlives this; null: a rank alone. `row_floats`: of the sums that ranks owe one another,
  // a row.
  LaneRows(Group* lane, int64_t rows, int64_t row_floats);

  // True if each rank computes only its own rows.
  bool are_divided() const { return are_divided_; }
  // What this rank computes: its own rows, or all.
  Slice own() const { return are_divided_ ? of_this_rank() : Slice{0, rows_}; }
  // A rank's rows where they are divided.
  Slice of(int rank) const;
  Slice of_this_rank() const { return of(rank_); }

  // list(rank, pieces) appends where in this rank's memory the pieces of `rank` are, as
  // all_gather_pieces() wants them. On return those of all ranks are there.
  using List = std::function<void(int rank, std::vector<Piece>& pieces)>;
  void gather(const List& list, ThreadPool& pool) const;
  // Appends a dense array's rows.
  static void add_piece(TensorView array, Slice rows, std::vector<Piece>& pieces);

  // residual += the sum of the ranks' `partial`, both [rows, row_floats] f32, in own() rows.
  // `partial` has to stay as it is until the rank's next collective of the lane returns.
  void add_sum(TensorView partial, TensorView residual, ThreadPool& pool) const;

 private:
  Group* lane_;
  int rank_, size_;
  int64_t rows_;
  bool are_divided_ = false;
};

}  // namespace fathom
