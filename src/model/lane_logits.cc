#include "model/lane_logits.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "comm/collectives.h"
#include "device/cpu/thread_pool.h"
#include "ops/sampling/sample.h"
#include "placement/split.h"

namespace fathom {
namespace {

// Logits that are worth a thread: some microseconds to read.
constexpr int64_t kGrainLogits = 64 << 10;

void find_tokens(Group& lane, ConstTensorView part, std::span<const int32_t> rows, int64_t first_id,
                 std::span<int32_t> tokens, ThreadPool& pool) {
  std::vector<Candidate> candidates(rows.size());
  const int64_t columns = part.size(1);
  const int64_t grain = std::max<int64_t>(1, kGrainLogits / std::max<int64_t>(1, columns));
  pool.parallel_for(std::ssize(rows), grain, [&](int64_t begin, int64_t end) {
    SampleScratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const LargestLogit largest =
          largest_logit({part.row<float>(rows[i]), static_cast<size_t>(columns)}, scratch);
      if (largest.id < 0) continue;
      candidates[i] = {largest.value, static_cast<int32_t>(first_id + largest.id)};
    }
  });
  argmax(lane, candidates, candidates);
  if (lane.rank() != 0) return;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool has_token = candidates[i].id >= 0 && std::isfinite(candidates[i].value);
    tokens[rows[i]] = has_token ? candidates[i].id : -1;
  }
}

// Rows of `part` from the ranks to the first one.
void gather_rows(Group& lane, ConstTensorView part, std::span<const int32_t> left_out,
                 int64_t vocab_size, TensorView out) {
  const auto bytes = static_cast<size_t>(part.num_elements()) * sizeof(float);
  const auto parts = lane.meet(Collective::kAllGather,
                               ConstBytes(static_cast<const std::byte*>(part.raw()), bytes));
  if (lane.rank() != 0) return;
  for (int rank = 0; rank < lane.size(); ++rank) {
    const Slice columns = split_vocabulary(vocab_size, lane.size(), rank);
    const auto* from = reinterpret_cast<const float*>(parts[static_cast<size_t>(rank)].data());
    auto skipped = left_out.begin();
    for (int64_t row = 0; row < part.size(0); ++row, from += columns.count) {
      if (skipped != left_out.end() && *skipped == row) {
        ++skipped;
      } else {
        std::copy_n(from, columns.count, out.row<float>(row) + columns.first);
      }
    }
  }
}

}  // namespace

void collect_logits(Group& lane, ConstTensorView part, std::span<const int32_t> largest_only,
                    int64_t vocab_size, TensorView out, std::span<int32_t> tokens,
                    ThreadPool& pool) {
  if (!largest_only.empty()) {
    const int64_t first_id = split_vocabulary(vocab_size, lane.size(), lane.rank()).first;
    find_tokens(lane, part, largest_only, first_id, tokens, pool);
  }
  if (std::ssize(largest_only) < part.size(0)) {
    gather_rows(lane, part, largest_only, vocab_size, out);
  }
}

}  // namespace fathom
