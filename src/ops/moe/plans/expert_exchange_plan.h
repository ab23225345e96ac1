// Plan of the exchange of experts' rows between the ranks of one process (exchange_cuda): where a
// rank's part of the workspace lies, and how rows are divided. Host code, a pure function of the
// sizes; the tokens' experts are known only on the device.
//
// The rows of all ranks are exchanged in rounds of about `capacity` rows, so that the workspace
// does not grow with the number of ranks, and no row is dropped wherever they go. Each rank divides
// its rows over all rounds: its links, and its combine, then have work in each of them.
#pragma once

#include <cstdint>

#include "ops/moe/plans/moe_many_rows_plan.h"

namespace fathom::cuda {

// Where an expert is: the rank, and its place among the rank's experts.
struct ExpertHost {
  int32_t rank = 0, slot = 0;
};

// The rows of its x that a rank offers to the experts' ranks.
struct OfferedRows {
  int32_t first = 0, count = 0;
  int64_t scales_stride = 0;  // of x's scales, see ScaledMoeArguments
};

// Rows [first, first + count) of a step.
struct RowShare {
  int64_t first = 0, count = 0;
};

// A rank's share of rows that `ranks` ranks have alike. Shares begin at multiples of 4, so that the
// scales of each are aligned as the GEMMs read them; the last ranks may have none.
RowShare share_of_rows(int64_t rows, int ranks, int rank);

// The rounds of `all_rows` rows, of all ranks together. Round i takes rows count * i / rounds to
// count * (i + 1) / rounds, both rounded down, of a rank's `count` rows.
struct ExchangeRounds {
  int64_t rounds = 0;
  int64_t most_rows = 0;  // in a round, at most room_of_exchange(capacity)
};
ExchangeRounds plan_exchange_rounds(int64_t all_rows, int64_t capacity, int ranks);

// Rows of a round's buffers: `capacity`, and what rounding adds.
int64_t room_of_exchange(int64_t capacity);

// Byte offsets into a rank's workspace, each a multiple of 1024. All but moe's part have places
// that depend on the capacity and the experts a token alone. The workspace must be zero at first.
struct ExpertExchangePlan {
  int64_t offered_at = 0, window_at = 0, slots_at = 0;
  int64_t moe_at = 0;   // where the workspace of moe begins
  MoeManyRowsPlan moe;  // of the rank's experts and a round's rows
  int64_t workspace_bytes = 0;
};

// sizes: num_experts is the most experts that the rank has in a layer, rows the room of a round.
ExpertExchangePlan plan_expert_exchange(const MoeManyRowsSizes& sizes);

// The same workspace with the tiles for a round of `rows` rows of all ranks, over which
// `num_experts` experts are spread.
MoeManyRowsPlan plan_exchange_round(const ExpertExchangePlan& plan, const MoeManyRowsSizes& sizes,
                                    int64_t rows, int64_t num_experts);

}  // namespace fathom::cuda
