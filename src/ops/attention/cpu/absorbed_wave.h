// The driver of absorbed attention: the heads of a query are rows of multi-query attention over
// latent rows, which stay in place in the cache when they already have the kernels' element type.
// Dense (absorbed_attention_cpu.cc) and sparse attention (sparse_attention_cpu.cc) say which keys a
// row sees; the order of arithmetic is this file's, the same for both.
//
// A work item is a group of rows (queries x heads) that share a list of keys, and one split of that
// list (absorbed_plan.h). Items leave unnormalized sums; the thread that finishes the last split of
// a group combines them, in the order of the keys ("flash decoding", Dao et al. 2023).
#pragma once

#include <atomic>
#include <span>

#include "ops/attention/absorbed_plan.h"
#include "ops/attention/cpu/attention_cpu.h"
#include "ops/attention/workspace_arena.h"

namespace fathom::cpu {

inline constexpr int64_t kGroupRows = 64;  // rows (queries x heads) that share a pass over keys

// What all rows of a call share.
struct Absorbed {
  const AttentionKernels& kernels;
  ConstTensorView q_latent, q_rope;
  const LatentPages& pages;
  float scale;  // times log2(e)
  TensorView out;
  TensorView lse;     // empty: not wanted
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

Absorbed make_absorbed(CpuIsa isa, ConstTensorView q_latent, ConstTensorView q_rope,
                       const LatentPages& pages, float softmax_scale, TensorView out,
                       TensorView lse);

// A list of keys, entries [hidden, …): entry e is the position positions[e - hidden] or, without
// positions, e itself.
struct KeyList {
  std::span<const int32_t> page_ids;  // of the sequence
  const int32_t* positions = nullptr;
  int64_t hidden = 0;  // entries before the first: they count in the split, nobody sees them
};

// Rows [first_row, first_row + rows), counted as query * heads + head from `query` on. The first
// query sees the entries before `seen`, each later one an entry more.
struct RowGroup {
  KeyList keys;
  int64_t query = 0;
  int64_t seen = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

// Collects groups, as many as fit the wave's memory, and runs them on the pool's threads. Owned and
// called by the thread that owns the pool; its memory is the caller's workspace.
class AbsorbedWave {
 public:
  // rows: of the call, queries x heads.
  AbsorbedWave(ThreadPool& pool, const Absorbed& op, int64_t rows, std::span<std::byte> workspace);
  ~AbsorbedWave() = default;
  AbsorbedWave(const AbsorbedWave&) = delete;
  AbsorbedWave& operator=(const AbsorbedWave&) = delete;

  // Adds a group of at most kGroupRows rows whose list is cut like this; runs what was added before
  // when memory is full.
  void add(const RowGroup& rows, KeySplit split);
  // Runs what was added and has not run.
  void run();

  // Bytes of workspace.
  static int64_t bytes(int64_t rows, int64_t latent_dim, int64_t rope_dim, int num_threads);

 private:
  struct Scratch;
  struct Group {
    RowGroup rows;
    int32_t splits;
    int64_t split_keys;
    int64_t slot;       // its first row among the sums; split j's rows follow split j - 1's
    int32_t remaining;  // splits not finished
  };
  struct Item {
    int32_t group;
    int32_t split;
  };
  struct KeyRange;
  struct Memory {
    Group* groups;  // [kWaveItems]
    Item* items;    // [kWaveItems]
    float* sums;    // [slots, latent padded]
    float* max;     // [slots]
    float* sum;     // [slots]

    Memory(WorkspaceArena& arena, int64_t slots, int64_t latent_dim);
  };

  bool fits(const RowGroup& rows, KeySplit split) const;
  void work(int thread, std::atomic<int64_t>& next);
  KeyRange key_range(const Item& item) const;
  void attend(const Item& item, const KeyRange& following, const Scratch& scratch) const;
  int64_t find_keys(const KeyRange& keys, int64_t first, const KeyRange& following,
                    const Scratch& scratch) const;
  void load_queries(const RowGroup& rows, const Scratch& scratch) const;
  void merge(const Group& group) const;

  ThreadPool& pool_;
  const Absorbed& op_;
  const int64_t group_rows_;
  const int64_t slots_;
  WorkspaceArena arena_;  // what is left of the workspace behind memory_: the threads' scratch
  Memory memory_;
  int64_t num_items_ = 0;
  int64_t num_groups_ = 0;
  int64_t used_ = 0;  // slots
  int64_t work_ = 0;  // multiply-adds
};

}  // namespace fathom::cpu
