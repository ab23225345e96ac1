// Absorbed attention: the heads of a query are rows of multi-query attention over the latent rows,
// which stay in place in the cache when they already have the kernels' element type.
//
// A work item is a group of rows (queries x heads) of one sequence and one split of its keys
// (absorbed_plan.h). Items leave unnormalized sums; the thread that finishes the last split of a
// group combines them, in the order of the keys ("flash decoding", Dao et al. 2023).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "ops/attention/absorbed_plan.h"
#include "ops/attention/cpu/attention_cpu.h"
#include "ops/attention/workspace_arena.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kGroupRows = 64;   // rows (queries x heads) that share a pass over keys
constexpr int64_t kWaveItems = 256;  // items between two barriers of the threads
constexpr int64_t kWaveRows = 4096;  // rows x splits whose sums are kept between two barriers
// Multiply-adds below which a second thread costs more than it saves: 1.7 us of one.
constexpr int64_t kParallelWork = 200'000;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Rows [first_row, first_row + rows) of a sequence, counted as query * heads + head.
struct Group {
  int32_t sequence;
  int32_t splits;
  int64_t split_keys;
  int64_t first_row;
  int64_t rows;
  int64_t slot;       // its first row among the wave's sums; split j's rows follow split j - 1's
  int32_t remaining;  // splits not finished
};

struct Item {
  int32_t group;
  int32_t split;
};

// State that all threads share.
struct Wave {
  Group* groups;  // [kWaveItems]
  Item* items;    // [kWaveItems]
  float* sums;    // [slots, latent padded]
  float* max;     // [slots]
  float* sum;     // [slots]

  Wave(WorkspaceArena& arena, int64_t slots, int64_t latent_dim)
      : groups(arena.take<Group>(kWaveItems)),
        items(arena.take<Item>(kWaveItems)),
        sums(arena.take<float>(slots * round_up(latent_dim, kValuePadding))),
        max(arena.take<float>(slots)),
        sum(arena.take<float>(slots)) {}
};

// One thread's memory, sized for the wider (fp32) of the two element types.
struct Scratch {
  float* q;           // [group rows, dims]
  float* keys;        // [kTileKeys, dims]: decoded rows, where the cache is in another type
  const void** rows;  // [kTileKeys + kLookahead]
  float* scores;      // [group rows, kTileKeys]
  float* p;           // [group rows, kTileKeys]
  float* rescale;     // [group rows]
  int32_t* visible;   // [group rows]

  Scratch(WorkspaceArena& arena, int64_t group_rows, int64_t dims)
      : q(arena.take<float>(group_rows * dims)),
        keys(arena.take<float>(kTileKeys * dims)),
        rows(arena.take<const void*>(kTileKeys + kLookahead)),
        scores(arena.take<float>(group_rows * kTileKeys)),
        p(arena.take<float>(group_rows * kTileKeys)),
        rescale(arena.take<float>(group_rows)),
        visible(arena.take<int32_t>(group_rows)) {}
};

int64_t slots_for(int64_t rows) { return std::min(rows * kMaxSplits, kWaveRows); }

struct Absorbed {
  const AttentionKernels& kernels;
  ConstTensorView q_latent, q_rope;
  const PagedBatch& batch;
  const LatentPages& pages;
  float scale;  // times log2(e)
  TensorView out;
  int64_t row_bytes;  // of the cache

  int64_t heads() const { return q_latent.size(1); }
  int64_t latent() const { return pages.layout.latent_dim; }
  int64_t rope() const { return pages.layout.rope_dim; }
  int64_t dims() const { return latent() + rope(); }
  int64_t sums_stride() const { return round_up(latent(), kValuePadding); }
  int64_t element_bytes() const { return kernels.bf16_elements ? 2 : 4; }
  bool rows_in_place() const {
    return pages.layout.format == (kernels.bf16_elements ? CacheFormat::kBF16 : CacheFormat::kF32);
  }
};

void load_queries(const Absorbed& op, const Group& group, const Scratch& to) {
  const int64_t bytes = op.element_bytes();
  const int64_t row_bytes = op.dims() * bytes;
  auto* q = reinterpret_cast<std::byte*>(to.q);
  for (int64_t row = 0; row < group.rows; ++row) {
    const int64_t at = group.first_row + row;
    const int64_t query = op.batch.query_start[group.sequence] + at / op.heads();
    const int64_t head = at % op.heads();
    const auto copy = [&](ConstTensorView part, std::byte* out) {
      const auto* source = static_cast<const std::byte*>(part.raw());
      const int64_t element = query * part.stride(0) + head * part.stride(1);
      op.kernels.convert(source + element * size_of(part.dtype()), part.dtype() == DType::kBF16,
                         part.size(2), out);
    };
    copy(op.q_latent, q + row * row_bytes);
    copy(op.q_rope, q + row * row_bytes + op.latent() * bytes);
  }
}

// A split's keys, as far as any row of its group sees them; may be empty.
struct KeyRange {
  std::span<const int32_t> page_ids;
  int64_t begin = 0;
  int64_t end = 0;
};

KeyRange key_range(const Absorbed& op, const Group& group, int64_t split) {
  const int64_t last_query = (group.first_row + group.rows - 1) / op.heads();
  const int64_t seen = op.batch.context_lens[group.sequence] + last_query + 1;
  const int64_t end = std::min((split + 1) * group.split_keys, seen);
  const int64_t begin = std::max<int64_t>(split * group.split_keys, op.batch.first_key);
  return {op.batch.pages(group.sequence), std::min(begin, end), end};
}

// Points rows at the cache rows of up to `limit` keys from `begin` on, and returns how many.
int64_t point_at(const Absorbed& op, const KeyRange& keys, int64_t begin, const void** rows,
                 int64_t limit) {
  const int64_t count = std::clamp<int64_t>(keys.end - begin, 0, limit);
  for (int64_t i = 0; i < count;) {
    const int64_t slot = (begin + i) % kPageSize;
    const int64_t page = keys.page_ids[static_cast<size_t>((begin + i) / kPageSize)];
    const std::byte* row = op.pages.row(page, slot);
    for (const int64_t stop = std::min(count, i + kPageSize - slot); i < stop; ++i) {
      rows[i] = row;
      row += op.row_bytes;
    }
  }
  return count;
}

// Points scratch.rows at the tile that begins at key `first`, repeating the last row up to a
// multiple of 4 (the kernels need that many; repeats are masked), and then at the kLookahead keys
// that this thread reads next, in this split or at the beginning of `following`. Returns the tile's
// number of keys.
int64_t find_keys(const Absorbed& op, const KeyRange& keys, int64_t first,
                  const KeyRange& following, const Scratch& scratch) {
  const void** rows = scratch.rows;
  const int64_t count = point_at(op, keys, first, rows, kTileKeys);
  const int64_t padded = round_up(count, 4);
  std::fill(rows + count, rows + padded, rows[count - 1]);
  const void** ahead = rows + padded;
  int64_t known = point_at(op, keys, first + count, ahead, kLookahead);
  known += point_at(op, following, following.begin, ahead + known, kLookahead - known);
  std::fill(ahead + known, ahead + kLookahead, rows[count - 1]);
  if (op.rows_in_place()) return count;
  const int64_t bytes = op.dims() * op.element_bytes();
  auto* copy = reinterpret_cast<std::byte*>(scratch.keys);
  for (int64_t i = 0; i < padded; ++i, copy += bytes) {
    decode_key(op.kernels, op.pages.layout, static_cast<const std::byte*>(rows[i]), copy);
    rows[i] = copy;
  }
  return count;
}

void attend_item(const Absorbed& op, const Group& group, int64_t split, const KeyRange& following,
                 const Wave& wave, const Scratch& scratch) {
  const int64_t slot = group.slot + split * group.rows;
  float* sums = wave.sums + slot * op.sums_stride();
  std::fill_n(wave.max + slot, group.rows, kLowest);
  std::fill_n(wave.sum + slot, group.rows, 0.0f);
  const int64_t context = op.batch.context_lens[group.sequence];
  const KeyRange keys = key_range(op, group, split);
  if (keys.begin == keys.end) {  // beyond what any row of the group sees
    std::fill_n(sums, group.rows * op.sums_stride(), 0.0f);
    return;
  }
  load_queries(op, group, scratch);
  for (int64_t first = keys.begin; first < keys.end; first += kTileKeys) {
    const int64_t count = find_keys(op, keys, first, following, scratch);
    for (int64_t row = 0; row < group.rows; ++row) {
      const int64_t seen = context + (group.first_row + row) / op.heads() + 1;
      scratch.visible[row] = static_cast<int32_t>(std::clamp<int64_t>(seen - first, 0, count));
    }
    const int64_t padded = round_up(count, 4);
    op.kernels.direct_scores(scratch.q, op.dims(), group.rows, scratch.rows, padded, op.dims(),
                             scratch.scores);
    op.kernels.softmax(scratch.scores, group.rows, scratch.visible, op.scale, wave.max + slot,
                       wave.sum + slot, scratch.rescale, scratch.p);
    op.kernels.direct_values(scratch.p, group.rows, scratch.rows, padded, op.latent(),
                             scratch.rescale, sums, op.sums_stride());
  }
}

// out = sum over splits of 2^(max_j - max) sums_j / sum over splits of 2^(max_j - max) sum_j
void merge_parts(const Absorbed& op, const Group& group, const Wave& wave) {
  for (int64_t row = 0; row < group.rows; ++row) {
    const int64_t at = group.first_row + row;
    float max = kLowest;
    for (int64_t part = 0; part < group.splits; ++part) {
      max = std::max(max, wave.max[group.slot + part * group.rows + row]);
    }
    float weights[kMaxSplits] = {};
    float total = 0;
    for (int64_t part = 0; part < group.splits; ++part) {
      const int64_t slot = group.slot + part * group.rows + row;
      weights[part] = wave.max[slot] == kLowest ? 0.0f : std::exp2(wave.max[slot] - max);
      total += weights[part] * wave.sum[slot];
    }
    for (int64_t part = 0; part < group.splits; ++part) weights[part] /= total;
    const int64_t query = op.batch.query_start[group.sequence] + at / op.heads();
    const int64_t element = query * op.out.stride(0) + at % op.heads() * op.out.stride(1);
    op.kernels.merge(wave.sums + (group.slot + row) * op.sums_stride(),
                     group.rows * op.sums_stride(), group.splits, weights, op.latent(),
                     op.out.dtype() == DType::kBF16,
                     static_cast<std::byte*>(op.out.raw()) + element * size_of(op.out.dtype()));
  }
}

// The split of a row's keys: by what the row itself sees, so that it has the same bits alone and
// among the rows of a chunk or a draft window.
KeySplit split_of(const Absorbed& op, int32_t sequence, int64_t row) {
  return split_keys(op.batch.context_lens[sequence] + row / op.heads() + 1);
}

// How many rows from `first` on are split in this way, at most a group's.
int64_t rows_alike(const Absorbed& op, int32_t sequence, int64_t first, KeySplit split) {
  const int64_t sequence_rows = op.batch.num_queries(sequence) * op.heads();
  const int64_t last = std::min(first + kGroupRows, sequence_rows);
  int64_t end = first;
  while (end < last && split_of(op, sequence, end) == split) {
    end = std::min(last, (end / op.heads() + 1) * op.heads());
  }
  return end - first;
}

// Collects items of the sequences in turn, as many as fit the wave's memory.
class WaveBuilder {
 public:
  WaveBuilder(const Absorbed& op, const Wave& wave, int64_t slots)
      : op_(op), wave_(wave), slots_(slots) {}

  // Returns false when the group does not fit any more: run the wave and add it again.
  bool add(int32_t sequence, KeySplit split, int64_t first_row, int64_t rows) {
    if (num_items_ + split.splits > kWaveItems || used_ + split.splits * rows > slots_) {
      return false;
    }
    const auto group = static_cast<int32_t>(num_groups_++);
    const auto splits = static_cast<int32_t>(split.splits);
    wave_.groups[group] = {sequence, splits, split.keys, first_row, rows, used_, splits};
    for (int32_t part = 0; part < splits; ++part) wave_.items[num_items_++] = {group, part};
    used_ += split.splits * rows;
    work_ += rows * op_.batch.total_len(sequence) * (op_.dims() + op_.latent());
    return true;
  }

  int64_t num_items() const { return num_items_; }
  int64_t work() const { return work_; }
  void clear() { num_items_ = num_groups_ = used_ = work_ = 0; }

 private:
  const Absorbed& op_;
  const Wave& wave_;
  const int64_t slots_;
  int64_t num_items_ = 0;
  int64_t num_groups_ = 0;
  int64_t used_ = 0;
  int64_t work_ = 0;  // multiply-adds
};

}  // namespace

int64_t absorbed_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                           int num_threads, int64_t rope_dim) {
  WorkspaceArena arena;
  Wave(arena, slots_for(rows * num_heads), latent_dim);
  const int64_t group_rows = std::min(rows * num_heads, kGroupRows);
  for (int thread = 0; thread < num_threads; ++thread) {
    Scratch(arena, group_rows, latent_dim + rope_dim);
  }
  return arena.bytes();
}

void absorbed_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_latent,
                        ConstTensorView q_rope, const PagedBatch& batch,
                        std::span<const int32_t> sequences, const LatentPages& pages,
                        float softmax_scale, TensorView out, std::span<std::byte> workspace) {
  const bool fp32 = q_latent.dtype() == DType::kF32 && pages.layout.format == CacheFormat::kF32;
  const Absorbed op{
      attention_kernels(isa, !fp32), q_latent, q_rope, batch, pages, softmax_scale * kLog2E, out,
      pages.layout.row_bytes()};
  const int64_t rows = q_latent.size(0) * op.heads();
  const int64_t group_rows = std::min(rows, kGroupRows);
  const int64_t slots = slots_for(rows);
  WorkspaceArena shared(workspace);
  const Wave wave(shared, slots, op.latent());
  WaveBuilder builder(op, wave, slots);

  const auto run_wave = [&] {
    std::atomic<int64_t> next = 0;
    const auto work = [&](int thread) {
      WorkspaceArena arena = shared;
      for (int before = 0; before < thread; ++before) Scratch(arena, group_rows, op.dims());
      const Scratch scratch(arena, group_rows, op.dims());
      for (int64_t i = next++; i < builder.num_items();) {
        Group& group = wave.groups[wave.items[i].group];
        // With items to spare a thread takes its next one early, to prefetch its keys.
        const bool spare = builder.num_items() >= int64_t{4} * pool.num_threads();
        const int64_t following = spare ? next++ : builder.num_items();
        const KeyRange keys = following < builder.num_items()
                                  ? key_range(op, wave.groups[wave.items[following].group],
                                              wave.items[following].split)
                                  : KeyRange{};
        attend_item(op, group, wave.items[i].split, keys, wave, scratch);
        if (std::atomic_ref(group.remaining).fetch_sub(1, std::memory_order_acq_rel) == 1) {
          merge_parts(op, group, wave);
        }
        i = spare ? following : next++;
      }
    };
    if (builder.num_items() == 1 || builder.work() < kParallelWork) {
      work(0);
    } else {
      pool.run(work);
    }
    builder.clear();
  };

  for (const int32_t sequence : sequences) {
    const int64_t sequence_rows = batch.num_queries(sequence) * op.heads();
    for (int64_t first = 0; first < sequence_rows;) {
      const KeySplit split = split_of(op, sequence, first);
      const int64_t count = rows_alike(op, sequence, first, split);
      if (!builder.add(sequence, split, first, count)) {
        run_wave();
        FATHOM_CHECK(builder.add(sequence, split, first, count), "{} rows in {} slots", count,
                     slots);
      }
      first += count;
    }
  }
  if (builder.num_items() > 0) run_wave();
}

}  // namespace fathom::cpu
