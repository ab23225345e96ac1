// From each rank's columns of the logits to what the lane's first rank samples from: whole rows, or
// only the token of the largest logit where that is all that is needed.
#pragma once

#include <cstdint>
#include <span>

#include "comm/group.h"
#include "tensor/tensor_view.h"

namespace fathom {

class ThreadPool;

// part [rows, columns of split_vocabulary()] f32: this rank's. Rows that are in `largest_only`
// (ascending, alike on all ranks): on the first rank tokens[row] becomes the lowest id with the
// largest logit, or -1 if that is not finite, as sample() chooses; NaN counts as -infinity. All
// other rows: whole to out [rows, vocab] f32 of the first rank. The other ranks' `out` and `tokens`
// may be empty. `part` has to stay as it is until this rank's next collective of the lane returns.
// Throws CommError.
void collect_logits(Group& lane, ConstTensorView part, std::span<const int32_t> largest_only,
                    int64_t vocab_size, TensorView out, std::span<int32_t> tokens,
                    ThreadPool& pool);

}  // namespace fathom
