// Index scores on the CPU. Rows are taken in waves of kWaveRows: the threads pack their queries,
// then score work units, a block of rows of one sequence and a chunk of its keys. A unit decodes a
// tile of keys once for all of its rows.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "ops/attention/workspace_arena.h"
#include "ops/indexer/index_kernels.h"
#include "ops/indexer/indexer_cpu.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kWaveRows = 64;    // whose packed queries are kept: 1 MB with 64 heads of 128
constexpr int64_t kBlockRows = 16;   // that share a decoded key: 256 KB of queries stay in an L2
constexpr int64_t kChunkTiles = 16;  // 768 keys: 50 us of one core with 64 heads
constexpr int64_t kChunkKeys = kChunkTiles * kIndexTileKeys;
// Multiply-adds below which a second thread costs more than it saves: 1.7 us of one.
constexpr int64_t kParallelWork = 200'000;

IndexKernels kernels_for(CpuIsa isa, [[maybe_unused]] const IndexKeyLayout& layout) {
#if defined(__x86_64__)
  if (isa >= CpuIsa::kAmx && layout.format != IndexKeyFormat::kF32 && layout.dim % 32 == 0) {
    return amx_index_kernels();
  }
  if (isa >= CpuIsa::kAvx512) {
    return layout.format == IndexKeyFormat::kF32 ? kAvx512Index : kAvx512Bf16Index;
  }
  if (isa == CpuIsa::kAvx2) return kAvx2Index;
#endif
  return kScalarIndex;
}

// Consecutive rows of one sequence, [first, first + count) of the call's.
struct Block {
  int64_t first;
  int64_t count;
  int64_t length;      // that the longest sees
  int64_t first_unit;  // of the wave's units
};

// Sized for the wider (fp32) of the two element types.
struct Shared {
  float* packed;   // [kWaveRows, heads padded * dim]
  float* weights;  // [kWaveRows, heads padded]

  Shared(WorkspaceArena& arena, int64_t rows, int64_t lanes, int64_t dim)
      : packed(arena.take<float>(std::min(rows, kWaveRows) * lanes * dim)),
        weights(arena.take<float>(std::min(rows, kWaveRows) * lanes)) {}
};

struct Scratch {
  float* keys;    // [kIndexTileKeys, dim]
  float* scales;  // [kIndexTileKeys]
  float* scores;  // [kIndexTileKeys]

  Scratch(WorkspaceArena& arena, int64_t dim)
      : keys(arena.take<float>(kIndexTileKeys * dim)),
        scales(arena.take<float>(kIndexTileKeys)),
        scores(arena.take<float>(kIndexTileKeys)) {}
};

struct Scores {
  IndexKernels kernels;
  ConstTensorView values, weights;
  const PagedBatch& batch;
  std::span<const SparseRow> rows;
  const IndexKeyPages& pages;
  TensorView out;

  int64_t heads() const { return values.size(1); }
  int64_t lanes() const { return round_up(heads(), kHeadLanes); }
  int64_t dim() const { return pages.layout.dim; }
};

// Row `i` of the call to the wave's place `slot`.
void pack_row(const Scores& op, int64_t i, int64_t slot, const Shared& shared) {
  const int64_t row = op.rows[static_cast<size_t>(i)].row;
  const auto* values = static_cast<const std::byte*>(op.values.raw()) +
                       row * op.values.stride(0) * size_of(op.values.dtype());
  op.kernels.pack(values, op.pages.layout.format, op.values.stride(1), op.heads(), op.dim(),
                  shared.packed + slot * op.lanes() * op.dim());
  float* weights = shared.weights + slot * op.lanes();
  std::copy_n(op.weights.row<float>(row), op.heads(), weights);
  std::fill(weights + op.heads(), weights + op.lanes(), 0.0f);
}

// Calls body(rows, i, run) for the runs of the keys [first, first + count) of a sequence that lie
// one behind the other: the keys [first + i, first + i + run).
template <typename Body>
void for_runs(const Scores& op, std::span<const int32_t> page_ids, int64_t first, int64_t count,
              const Body& body) {
  for (int64_t i = 0; i < count;) {
    const int64_t slot = (first + i) % kPageSize;
    const int64_t page = page_ids[static_cast<size_t>((first + i) / kPageSize)];
    const int64_t run = std::min(count - i, kPageSize - slot);
    body(op.pages.row(page, slot), i, run);
    i += run;
  }
}

// Decodes the keys [first, first + count) of a sequence; the tile's other keys become 0.
void decode_tile(const Scores& op, std::span<const int32_t> page_ids, int64_t first, int64_t count,
                 const Scratch& scratch) {
  const int64_t bytes = op.dim() * (op.kernels.bf16_elements ? 2 : 4);
  auto* keys = reinterpret_cast<std::byte*>(scratch.keys);
  for_runs(op, page_ids, first, count, [&](const std::byte* rows, int64_t i, int64_t run) {
    op.kernels.decode(rows, run, op.pages.layout.format, op.dim(), keys + i * bytes,
                      scratch.scales + i);
  });
  std::memset(keys + count * bytes, 0, static_cast<size_t>((kIndexTileKeys - count) * bytes));
  std::fill(scratch.scales + count, scratch.scales + kIndexTileKeys, 0.0f);
}

// Has the memory begin to read those keys. It changes nothing where arithmetic is the limit; AMX
// leaves the memory idle without it.
void prefetch_tile(const Scores& op, std::span<const int32_t> page_ids, int64_t first,
                   int64_t count) {
  for_runs(op, page_ids, first, count, [&](const std::byte* line, int64_t, int64_t run) {
    const std::byte* const end = line + run * op.pages.layout.row_bytes();
    for (; line < end; line += 64) __builtin_prefetch(line);
  });
}

void score_unit(const Scores& op, const Block& block, int64_t chunk, int64_t wave_first,
                const Shared& shared, const Scratch& scratch) {
  const int64_t begin = op.batch.first_key + chunk * kChunkKeys;
  const int64_t end = std::min(begin + kChunkKeys, block.length);
  const std::span<const int32_t> page_ids =
      op.batch.pages(op.rows[static_cast<size_t>(block.first)].sequence);
  for (int64_t first = begin; first < end; first += kIndexTileKeys) {
    decode_tile(op, page_ids, first, std::min(kIndexTileKeys, end - first), scratch);
    const int64_t next = first + kIndexTileKeys;
    prefetch_tile(op, page_ids, next, std::min(kIndexTileKeys, end - next));
    for (int64_t i = block.first; i < block.first + block.count; ++i) {
      const int64_t seen = std::min<int64_t>(op.rows[static_cast<size_t>(i)].length, end) - first;
      const int64_t count = std::min(seen, kIndexTileKeys);
      if (count <= 0) continue;
      const int64_t slot = i - wave_first;
      op.kernels.score(shared.packed + slot * op.lanes() * op.dim(),
                       shared.weights + slot * op.lanes(), op.heads(), scratch.keys, scratch.scales,
                       count, op.dim(), scratch.scores);
      std::copy_n(scratch.scores, count, op.out.row<float>(i) + first);
    }
  }
}

// The blocks of rows [first, first + count); returns how many.
int64_t find_blocks(const Scores& op, int64_t first, int64_t count, Block* blocks) {
  int64_t num_blocks = 0, units = 0;
  for (int64_t i = first; i < first + count;) {
    const int32_t sequence = op.rows[static_cast<size_t>(i)].sequence;
    Block& block = blocks[num_blocks++] = {i, 0, 0, units};
    for (; i < first + count && block.count < kBlockRows &&
           op.rows[static_cast<size_t>(i)].sequence == sequence;
         ++i, ++block.count) {
      block.length = std::max<int64_t>(block.length, op.rows[static_cast<size_t>(i)].length);
    }
    units += ceil_div(block.length - op.batch.first_key, kChunkKeys);
  }
  blocks[num_blocks] = {0, 0, 0, units};
  return num_blocks;
}

void run_wave(ThreadPool& pool, const Scores& op, int64_t first, int64_t count,
              const Shared& shared, const WorkspaceArena& rest) {
  Block blocks[kWaveRows + 1];
  const int64_t num_blocks = find_blocks(op, first, count, blocks);
  const int64_t units = blocks[num_blocks].first_unit;
  int64_t keys = 0;
  for (int64_t b = 0; b < num_blocks; ++b) keys += blocks[b].count * blocks[b].length;
  const bool alone = keys * op.lanes() * op.dim() < kParallelWork;

  std::atomic<int64_t> next_row = 0, next_unit = 0;
  const auto pack = [&](int) {
    for (int64_t i = next_row++; i < count; i = next_row++) pack_row(op, first + i, i, shared);
  };
  const auto score = [&](int thread) {
    WorkspaceArena arena = rest;
    for (int before = 0; before < thread; ++before) Scratch(arena, op.dim());
    const Scratch scratch(arena, op.dim());
    const Block* block = blocks;  // units are taken in ascending order
    if (op.kernels.begin != nullptr) op.kernels.begin();
    for (int64_t unit = next_unit++; unit < units; unit = next_unit++) {
      while (unit >= block[1].first_unit) ++block;
      score_unit(op, *block, unit - block->first_unit, first, shared, scratch);
    }
    if (op.kernels.end != nullptr) op.kernels.end();
  };
  if (alone || count == 1) {
    pack(0);
  } else {
    pool.run(pack);
  }
  if (alone || units == 1) {
    score(0);
  } else {
    pool.run(score);
  }
}

}  // namespace

int64_t index_scores_workspace_bytes(int64_t rows, int64_t num_heads, int64_t dim,
                                     int num_threads) {
  WorkspaceArena arena;
  Shared(arena, rows, round_up(num_heads, kHeadLanes), dim);
  for (int thread = 0; thread < num_threads; ++thread) Scratch(arena, dim);
  return arena.bytes();
}

void index_scores(ThreadPool& pool, CpuIsa isa, ConstTensorView values, ConstTensorView weights,
                  const PagedBatch& batch, std::span<const SparseRow> rows,
                  const IndexKeyPages& pages, TensorView scores, std::span<std::byte> workspace) {
  const Scores op{kernels_for(isa, pages.layout), values, weights, batch, rows, pages, scores};
  WorkspaceArena arena(workspace);
  const auto count = static_cast<int64_t>(rows.size());
  const Shared shared(arena, count, op.lanes(), op.dim());
  for (int64_t first = 0; first < count; first += kWaveRows) {
    run_wave(pool, op, first, std::min(kWaveRows, count - first), shared, arena);
  }
}

}  // namespace fathom::cpu
