#include "ops/attention/cpu/absorbed_wave.h"

#include <algorithm>
#include <cmath>

#include "base/math_constants.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kWaveItems = 256;  // items between two barriers of the threads
constexpr int64_t kWaveRows = 4096;  // rows x splits whose sums are kept between two barriers
// Multiply-adds below which a second thread costs more than it saves: 1.7 us of one.
constexpr int64_t kParallelWork = 200'000;

constexpr float kLn2 = 0.693147180559945f;

int64_t slots_for(int64_t rows) { return std::min(rows * kMaxSplits, kWaveRows); }

}  // namespace

// One thread's memory, sized for the wider (fp32) of the two element types.
struct AbsorbedWave::Scratch {
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

// A split's entries, as far as any row of its group sees them; may be empty.
struct AbsorbedWave::KeyRange {
  KeyList list;
  int64_t begin = 0;
  int64_t end = 0;

  // Points rows at the cache rows of up to `limit` entries from `first` on, and returns how many.
  int64_t point_at(const Absorbed& op, int64_t first, const void** rows, int64_t limit) const {
    const int64_t count = std::clamp<int64_t>(end - first, 0, limit);
    if (list.positions != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = list.positions[first + i - list.hidden];
        rows[i] = op.pages.row(list.page_ids[static_cast<size_t>(position / kPageSize)],
                               position % kPageSize);
      }
      return count;
    }
    for (int64_t i = 0; i < count;) {
      const int64_t slot = (first + i) % kPageSize;
      const int64_t page = list.page_ids[static_cast<size_t>((first + i) / kPageSize)];
      const std::byte* row = op.pages.row(page, slot);
      for (const int64_t stop = std::min(count, i + kPageSize - slot); i < stop; ++i) {
        rows[i] = row;
        row += op.row_bytes;
      }
    }
    return count;
  }
};

AbsorbedWave::Memory::Memory(WorkspaceArena& arena, int64_t slots, int64_t latent_dim)
    : groups(arena.take<Group>(kWaveItems)),
      items(arena.take<Item>(kWaveItems)),
      sums(arena.take<float>(slots * round_up(latent_dim, kValuePadding))),
      max(arena.take<float>(slots)),
      sum(arena.take<float>(slots)) {}

AbsorbedWave::AbsorbedWave(ThreadPool& pool, const Absorbed& op, int64_t rows,
                           std::span<std::byte> workspace)
    : pool_(pool),
      op_(op),
      group_rows_(std::min(rows, kGroupRows)),
      slots_(slots_for(rows)),
      arena_(workspace),
      memory_(arena_, slots_, op.latent()) {}

int64_t AbsorbedWave::bytes(int64_t rows, int64_t latent_dim, int64_t rope_dim, int num_threads) {
  WorkspaceArena arena;
  Memory(arena, slots_for(rows), latent_dim);
  for (int thread = 0; thread < num_threads; ++thread) {
    Scratch(arena, std::min(rows, kGroupRows), latent_dim + rope_dim);
  }
  return arena.bytes();
}

void AbsorbedWave::load_queries(const RowGroup& rows, const Scratch& scratch) const {
  const int64_t bytes = op_.element_bytes();
  const int64_t row_bytes = op_.dims() * bytes;
  auto* q = reinterpret_cast<std::byte*>(scratch.q);
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t at = rows.first_row + row;
    const int64_t query = rows.query + at / op_.heads();
    const int64_t head = at % op_.heads();
    const auto copy = [&](ConstTensorView part, std::byte* out) {
      const auto* source = static_cast<const std::byte*>(part.raw());
      const int64_t element = query * part.stride(0) + head * part.stride(1);
      op_.kernels.convert(source + element * size_of(part.dtype()), part.dtype() == DType::kBF16,
                          part.size(2), out);
    };
    copy(op_.q_latent, q + row * row_bytes);
    copy(op_.q_rope, q + row * row_bytes + op_.latent() * bytes);
  }
}

AbsorbedWave::KeyRange AbsorbedWave::key_range(const Item& item) const {
  const Group& group = memory_.groups[item.group];
  const RowGroup& rows = group.rows;
  const int64_t last_query = (rows.first_row + rows.rows - 1) / op_.heads();
  const int64_t end = std::min((item.split + 1) * group.split_keys, rows.seen + last_query);
  const int64_t begin = std::max<int64_t>(item.split * group.split_keys, rows.keys.hidden);
  return {rows.keys, std::min(begin, end), end};
}

// Points scratch.rows at the tile that begins at entry `first`, repeating the last row up to a
// multiple of 4 (the kernels need that many; repeats are masked), and then at the kLookahead keys
// that this thread reads next, in this split or at the beginning of `following`. Returns the tile's
// number of keys.
int64_t AbsorbedWave::find_keys(const KeyRange& keys, int64_t first, const KeyRange& following,
                                const Scratch& scratch) const {
  const void** rows = scratch.rows;
  const int64_t count = keys.point_at(op_, first, rows, kTileKeys);
  const int64_t padded = round_up(count, 4);
  std::fill(rows + count, rows + padded, rows[count - 1]);
  const void** ahead = rows + padded;
  int64_t known = keys.point_at(op_, first + count, ahead, kLookahead);
  known += following.point_at(op_, following.begin, ahead + known, kLookahead - known);
  std::fill(ahead + known, ahead + kLookahead, rows[count - 1]);
  if (op_.rows_in_place()) return count;
  const int64_t bytes = op_.dims() * op_.element_bytes();
  auto* copy = reinterpret_cast<std::byte*>(scratch.keys);
  for (int64_t i = 0; i < padded; ++i, copy += bytes) {
    decode_key(op_.kernels, op_.pages.layout, static_cast<const std::byte*>(rows[i]), copy);
    rows[i] = copy;
  }
  return count;
}

void AbsorbedWave::attend(const Item& item, const KeyRange& following,
                          const Scratch& scratch) const {
  const Group& group = memory_.groups[item.group];
  const RowGroup& rows = group.rows;
  const int64_t slot = group.slot + item.split * rows.rows;
  float* sums = memory_.sums + slot * op_.sums_stride();
  std::fill_n(memory_.max + slot, rows.rows, kNegativeInfinity);
  std::fill_n(memory_.sum + slot, rows.rows, 0.0f);
  const KeyRange keys = key_range(item);
  if (keys.begin == keys.end) {  // beyond what any row of the group sees
    std::fill_n(sums, rows.rows * op_.sums_stride(), 0.0f);
    return;
  }
  load_queries(rows, scratch);
  for (int64_t first = keys.begin; first < keys.end; first += kTileKeys) {
    const int64_t count = find_keys(keys, first, following, scratch);
    for (int64_t row = 0; row < rows.rows; ++row) {
      const int64_t seen = rows.seen + (rows.first_row + row) / op_.heads();
      scratch.visible[row] = static_cast<int32_t>(std::clamp<int64_t>(seen - first, 0, count));
    }
    const int64_t padded = round_up(count, 4);
    op_.kernels.direct_scores(scratch.q, op_.dims(), rows.rows, scratch.rows, padded, op_.dims(),
                              scratch.scores);
    op_.kernels.softmax(scratch.scores, rows.rows, scratch.visible, op_.scale, memory_.max + slot,
                        memory_.sum + slot, scratch.rescale, scratch.p);
    op_.kernels.direct_values(scratch.p, rows.rows, scratch.rows, padded, op_.latent(),
                              scratch.rescale, sums, op_.sums_stride());
  }
}

// out = sum over splits of 2^(max_j - max) sums_j / sum over splits of 2^(max_j - max) sum_j
void AbsorbedWave::merge(const Group& group) const {
  for (int64_t row = 0; row < group.rows.rows; ++row) {
    const int64_t at = group.rows.first_row + row;
    float max = kNegativeInfinity;
    for (int64_t part = 0; part < group.splits; ++part) {
      max = std::max(max, memory_.max[group.slot + part * group.rows.rows + row]);
    }
    float weights[kMaxSplits] = {};
    float total = 0;
    for (int64_t part = 0; part < group.splits; ++part) {
      const int64_t slot = group.slot + part * group.rows.rows + row;
      weights[part] =
          memory_.max[slot] == kNegativeInfinity ? 0.0f : std::exp2(memory_.max[slot] - max);
      total += weights[part] * memory_.sum[slot];
    }
    for (int64_t part = 0; part < group.splits; ++part) weights[part] /= total;
    const int64_t query = group.rows.query + at / op_.heads();
    const int64_t head = at % op_.heads();
    if (!op_.lse.empty()) op_.lse.row<float>(query)[head] = (max + std::log2(total)) * kLn2;
    const int64_t element = query * op_.out.stride(0) + head * op_.out.stride(1);
    op_.kernels.merge(memory_.sums + (group.slot + row) * op_.sums_stride(),
                      group.rows.rows * op_.sums_stride(), group.splits, weights, op_.latent(),
                      op_.out.dtype() == DType::kBF16,
                      static_cast<std::byte*>(op_.out.raw()) + element * size_of(op_.out.dtype()));
  }
}

bool AbsorbedWave::fits(const RowGroup& rows, KeySplit split) const {
  return num_items_ + split.splits <= kWaveItems && used_ + split.splits * rows.rows <= slots_;
}

void AbsorbedWave::add(const RowGroup& rows, KeySplit split) {
  if (!fits(rows, split)) run();
  FATHOM_CHECK(fits(rows, split), "{} rows in {} slots", rows.rows, slots_);
  const auto group = static_cast<int32_t>(num_groups_++);
  const auto splits = static_cast<int32_t>(split.splits);
  memory_.groups[group] = {rows, splits, split.keys, used_, splits};
  for (int32_t part = 0; part < splits; ++part) memory_.items[num_items_++] = {group, part};
  used_ += split.splits * rows.rows;
  work_ += rows.rows * rows.seen * (op_.dims() + op_.latent());
}

void AbsorbedWave::work(int thread, std::atomic<int64_t>& next) {
  WorkspaceArena arena = arena_;
  for (int before = 0; before < thread; ++before) Scratch(arena, group_rows_, op_.dims());
  const Scratch scratch(arena, group_rows_, op_.dims());
  for (int64_t i = next++; i < num_items_;) {
    const Item item = memory_.items[i];
    // With items to spare a thread takes its next one early, to prefetch its keys.
    const bool spare = num_items_ >= int64_t{4} * pool_.num_threads();
    const int64_t following = spare ? next++ : num_items_;
    attend(item, following < num_items_ ? key_range(memory_.items[following]) : KeyRange{},
           scratch);
    Group& group = memory_.groups[item.group];
    if (std::atomic_ref(group.remaining).fetch_sub(1, std::memory_order_acq_rel) == 1) {
      merge(group);
    }
    i = spare ? following : next++;
  }
}

void AbsorbedWave::run() {
  std::atomic<int64_t> next = 0;
  if (num_items_ == 1 || work_ < kParallelWork) {
    work(0, next);
  } else {
    pool_.run([&](int thread) { work(thread, next); });
  }
  num_items_ = num_groups_ = used_ = work_ = 0;
}

Absorbed make_absorbed(CpuIsa isa, ConstTensorView q_latent, ConstTensorView q_rope,
                       const LatentPages& pages, float softmax_scale, TensorView out,
                       TensorView lse) {
  const bool fp32 = q_latent.dtype() == DType::kF32 && pages.layout.format == CacheFormat::kF32;
  return {attention_kernels(isa, !fp32), q_latent, q_rope, pages,
          softmax_scale * kLog2E,        out,      lse,    pages.layout.row_bytes()};
}

}  // namespace fathom::cpu
