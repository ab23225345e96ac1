// Sums and gathers over the ranks of a group, on the CPU.
//
// All ranks call with the same sizes. On return all arguments are the caller's again, but for
// reduce_scatter_add()'s: nobody reads them any more. A sum may go to where `mine` is; a part may
// lie at its place in the whole. Every sum is fp32 over ranks 0 … size - 1 in this order, one
// addition after the other, so that its bits are equal on all ranks, in every run and for every
// size (a NaN stays a NaN, its payload is not specified). All of them throw CommError
// (comm/group.h). A pool takes shares of large arrays; it belongs to the rank's thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/group.h"

namespace fathom {

class ThreadPool;

// Returns when all ranks have come.
void barrier(Group& group);

// sum[i] = mine_0[i] + mine_1[i] + … for mine and sum of the same size.
void all_reduce(Group& group, std::span<const float> mine, std::span<float> sum,
                ThreadPool* pool = nullptr);
// The sum is formed first, in order; then out[i] += sum[i], one addition.
void all_reduce_add(Group& group, std::span<const float> mine, std::span<float> out,
                    ThreadPool* pool = nullptr);

// This rank's part of the sum: parts lie one after the other, counts[r] floats for rank r. `mine`
// has all parts, `out` counts[rank()].
void reduce_scatter(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                    std::span<float> out, ThreadPool* pool = nullptr);

// out[i] += this rank's part of the sum at i. `mine` has to stay as it is until this rank's next
// collective of the group returns: that proves that everyone has read it.
void reduce_scatter_add(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                        std::span<float> out, ThreadPool* pool = nullptr);

// Whether a sum of `bytes` bytes that all ranks get takes one meeting, in which each rank adds all
// arrays; two otherwise: a reduce_scatter and a gather. Alike on all ranks.
bool sums_in_one_meeting(const Group& group, size_t bytes);

// out = mine_0, mine_1, … one after the other. counts[r]: how many elements rank r gives, known to
// all; `out` has room for all.
void all_gather(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                std::span<float> out);
void all_gather(Group& group, ConstBytes mine, std::span<const int64_t> counts,
                std::span<std::byte> out);

// A part of a rank's memory.
using Piece = std::span<std::byte>;
// pieces[r]: where in this rank's memory the pieces are that rank r has; they have the same sizes
// in the same order on all ranks. This rank gives its own, and gets the others' to their places.
void all_gather_pieces(Group& group, std::span<const std::vector<Piece>> pieces,
                       ThreadPool* pool = nullptr);

// A row's best token of a shard of the vocabulary. id < 0: the shard has none.
struct Candidate {
  float value = 0;
  int32_t id = -1;
};

// best[row]: of all ranks' candidates of this row the one with the largest value; at equal values
// (-0 equals 0) the lowest id. A NaN is larger than every number, so that it reaches the caller;
// of several NaNs the one with the lowest id. Candidates with id < 0 lose to all others; where all
// are so, best[row] is rank 0's.
void argmax(Group& group, std::span<const Candidate> mine, std::span<Candidate> best);

}  // namespace fathom
