#include "ops/linear/linear.h"

#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "device/cpu/isa.h"
#include "ops/linear/panel_product.h"

namespace fathom {
namespace {

void check(const LinearTask& task, LinearMode mode) {
  FATHOM_CHECK(task.weight != nullptr && task.x.rank() == 2 && task.out.rank() == 2 &&
                   task.x.size(1) == task.weight->cols() &&
                   task.out.size(1) == task.weight->rows() && task.x.size(0) == task.out.size(0),
               "{} times [{}, {}] to {}", task.x.shape_string(),
               task.weight == nullptr ? 0 : task.weight->rows(),
               task.weight == nullptr ? 0 : task.weight->cols(), task.out.shape_string());
  FATHOM_CHECK(task.x.dtype() == DType::kBF16 || task.x.dtype() == DType::kF32, "x is {}",
               name_of(task.x.dtype()));
  FATHOM_CHECK(task.out.dtype() == DType::kF32 ||
                   (task.out.dtype() == DType::kBF16 && mode == LinearMode::kOverwrite),
               "out is {}", name_of(task.out.dtype()));
}

// The work units of a task. A unit is a pair of panels with all rows of x, so that a thread reads
// its weights once; with few rows, and pairs enough, a group of two, whose bytes alternate in
// memory; with few pairs and many rows (a narrow matrix in prefill) one pair with one block of
// rows.
struct Cut {
  Cut(const LinearTask& task, int threads)
      : pairs(ceil_div(task.weight->rows(), kPairRows)), blocks(task.x.size(0)) {
    by_rows = blocks.count() > 1 && pairs < int64_t{8} * threads;
    unit_pairs = task.x.size(0) <= kFewRows && pairs >= int64_t{2} * threads ? 2 : 1;
    units = by_rows ? pairs * blocks.count() : ceil_div(pairs, unit_pairs);
    const int64_t rows = by_rows ? blocks.begin(1) : task.x.size(0);
    // A unit's cost is its multiply-adds plus reading its weights, which takes the time of about
    // six rows.
    cost = (rows + 6) * task.weight->cols() * unit_pairs;
  }
  int64_t pairs;
  RowBlocks blocks;
  bool by_rows = false;
  int64_t unit_pairs = 1;
  int64_t units = 0;
  int64_t cost = 0;
};

void store(const LinearKernels& kernels, const LinearTask& task, LinearMode mode, int64_t first_row,
           int64_t rows, int64_t first_pair, int64_t num_pairs, const float* sums) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t column = (first_pair + pair) * kPairRows;
    const int64_t count = std::min<int64_t>(kPairRows, task.out.size(1) - column);
    for (int64_t r = 0; r < rows; ++r, sums += kPairRows) {
      if (task.out.dtype() == DType::kBF16) {
        auto* const out = task.out.row<bf16>(first_row + r) + column;
        kernels.store_bf16(sums, count, reinterpret_cast<uint16_t*>(out));
      } else if (mode == LinearMode::kAccumulate) {
        kernels.add_scaled(sums, 1.0f, count, task.out.row<float>(first_row + r) + column);
      } else if (count == kPairRows) {  // a size known in advance: four vector moves, no call
        std::memcpy(task.out.row<float>(first_row + r) + column, sums, kPairRows * sizeof(float));
      } else {
        std::memcpy(task.out.row<float>(first_row + r) + column, sums,
                    static_cast<size_t>(count) * sizeof(float));
      }
    }
  }
}

// Multiplies pairs [begin, end) with the rows of blocks [first_block, last_block).
void compute(const LinearKernels& kernels, const LinearTask& task, LinearMode mode,
             const RowBlocks& blocks, int64_t first_block, int64_t last_block, int64_t begin,
             int64_t end) {
  alignas(64) float sums[kMaxProductPairs * kMaxProductRows * kPairRows];
  for (int64_t pair = begin; pair < end; pair += kMaxProductPairs) {
    const int64_t pairs = std::min(kMaxProductPairs, end - pair);
    for (int64_t block = first_block; block < last_block; ++block) {
      const int64_t row = blocks.begin(block);
      const int64_t rows = blocks.begin(block + 1) - row;
      multiply_pairs(kernels, {task.x, nullptr, row}, rows, *task.weight, pair, pairs, sums);
      store(kernels, task, mode, row, rows, pair, pairs, sums);
    }
  }
}

void compute_share(const LinearKernels& kernels, std::span<const LinearTask> tasks, LinearMode mode,
                   int threads, CostSplit split) {
  for (const LinearTask& task : tasks) {
    if (task.x.size(0) == 0) continue;
    const Cut cut(task, threads);
    auto [begin, end] = split.next(cut.units, cut.cost);
    if (!cut.by_rows) {
      compute(kernels, task, mode, cut.blocks, 0, cut.blocks.count(), begin * cut.unit_pairs,
              std::min(end * cut.unit_pairs, cut.pairs));
      continue;
    }
    while (begin < end) {
      const int64_t block = begin / cut.pairs;
      const int64_t stop = std::min(end, (block + 1) * cut.pairs);
      compute(kernels, task, mode, cut.blocks, block, block + 1, begin - block * cut.pairs,
              stop - block * cut.pairs);
      begin = stop;
    }
  }
}

// ---- narrow matrices ----

constexpr int64_t kNarrowFloats = 16 << 10;  // sums of a narrow matrix' blocks

// Whether the matrix has fewer pairs than there are threads, but blocks of columns for all: a
// router and few rows. Others of so few rows are small, or in a group.
bool is_narrow(const LinearTask& task, int threads) {
  if (task.weight->format() != WeightFormat::kF32 || task.x.dtype() != DType::kF32) return false;
  const int64_t rows = task.x.size(0);
  const int64_t pairs = ceil_div(task.weight->rows(), kPairRows);
  const int64_t blocks = ceil_div(task.weight->cols(), kBlockColumns);
  return rows <= kFewRows && pairs < threads && blocks > 1 &&
         pairs * blocks * rows * kPairRows <= kNarrowFloats;
}

// Threads share the matrix' blocks. The caller adds a row's sums over blocks in their order, which
// is what a thread does with all of them.
void multiply_narrow(ThreadPool& pool, const LinearKernels& kernels, const LinearTask& task,
                     LinearMode mode) {
  alignas(64) float sums[kNarrowFloats];
  const int64_t rows = task.x.size(0), count = rows * kPairRows;
  const int64_t pairs = ceil_div(task.weight->rows(), kPairRows);
  const int64_t blocks = ceil_div(task.weight->cols(), kBlockColumns);
  pool.parallel_for(pairs * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      multiply_block(kernels, {task.x, nullptr, 0}, rows, *task.weight, i / blocks, i % blocks,
                     sums + i * count);
    }
  });
  for (int64_t pair = 0; pair < pairs; ++pair) {
    float* const total = sums + pair * blocks * count;
    for (int64_t block = 1; block < blocks; ++block) {
      kernels.add_scaled(total + block * count, 1.0f, count, total);
    }
    store(kernels, task, mode, 0, rows, pair, 1, total);
  }
}

}  // namespace

void linear_group(const Stream& stream, std::span<const LinearTask> tasks, LinearMode mode) {
  // Below about 32 KiB of weights, waking the threads costs more than they save.
  constexpr int64_t kWorthThreads = 4096;
  const LinearKernels& kernels = linear_kernels(cpu_isa());
  const int threads = stream.pool().num_threads();
  int64_t cost = 0, unit_cost = 0;
  bool few_rows = true;
  for (const LinearTask& task : tasks) {
    check(task, mode);
    if (task.x.size(0) == 0) continue;
    const Cut cut(task, threads);
    cost += cut.units * cut.cost;
    unit_cost = std::max(unit_cost, cut.cost);
    few_rows = few_rows && task.x.size(0) <= kFewRows;
  }
  if (threads == 1 || cost < kWorthThreads) {
    compute_share(kernels, tasks, mode, threads, CostSplit(0, cost));
    return;
  }
  if (tasks.size() == 1 && is_narrow(tasks.front(), threads)) {
    return multiply_narrow(stream.pool(), kernels, tasks.front(), mode);
  }
  const CostPieces pieces(cost, threads, few_rows, unit_cost);
  stream.pool().run_pieces(pieces.count(), [&](int piece) {
    compute_share(kernels, tasks, mode, threads, pieces.piece(piece));
  });
}

void linear(const Stream& stream, ConstTensorView x, const PackedMatrix& weight, TensorView out,
            LinearMode mode) {
  const LinearTask task = {x, &weight, out};
  linear_group(stream, {&task, 1}, mode);
}

}  // namespace fathom
