// The exact choice by radix: a histogram of the orders' upper 11 bits finds the bin that holds the
// k-th score, and two more of 11 and 10 bits over that bin's orders alone find the score itself,
// however many share its leading bits. A last pass emits positions in ascending order: every score
// above the k-th, and as many equal to it as are wanted, lowest positions first.
//
// Bytes: two passes over a row's scores (4 B a key), and two over the bin's orders.
#include <algorithm>
#include <atomic>
#include <numeric>

#include "ops/attention/workspace_arena.h"
#include "ops/indexer/indexer_cpu.h"
#include "ops/indexer/score_order.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kBins = 2048;
// Neighbouring scores go to different copies: equal bins one after the other would wait for one
// another.
constexpr int64_t kCopies = 4;
constexpr int64_t kBlock = 256;  // scores whose orders are computed at a time

// One thread's memory.
struct ChooserScratch {
  uint32_t* counts;  // [kCopies, kBins]
  uint32_t* orders;  // [max length]: of the bin that holds the k-th score

  ChooserScratch(WorkspaceArena& arena, int64_t max_length)
      : counts(arena.take<uint32_t>(kCopies * kBins)), orders(arena.take<uint32_t>(max_length)) {}
};

[[gnu::always_inline]] inline void orders_of(const float* scores, int64_t count, uint32_t* orders) {
  for (int64_t i = 0; i < count; ++i) orders[i] = order_of(scores[i]);
}

void orders_portable(const float* scores, int64_t count, uint32_t* orders) {
  orders_of(scores, count, orders);
}

FATHOM_FOR_AVX512 void orders_avx512(const float* scores, int64_t count, uint32_t* orders) {
  orders_of(scores, count, orders);
}

// The score at the k-th place, and how many of those equal to it belong to the k.
struct Limit {
  uint32_t order;
  int64_t wanted;
};

// Where the counts, from the highest bin down, reach `wanted`: the bin, and how many of it are
// wanted.
Limit find_bin(const uint32_t* counts, int64_t wanted) {
  for (int64_t bin = kBins - 1;; --bin) {
    int64_t count = 0;
    for (int64_t copy = 0; copy < kCopies; ++copy) count += counts[copy * kBins + bin];
    if (count >= wanted) return {static_cast<uint32_t>(bin), wanted};
    wanted -= count;
  }
}

// Narrows `orders`, `count` of them, to those whose bits from `shift` on, 11 at most, are at the
// wanted place; returns those bits.
Limit narrow(uint32_t* orders, int64_t& count, int shift, int64_t wanted, uint32_t* counts) {
  std::fill_n(counts, kCopies * kBins, 0);
  for (int64_t i = 0; i < count; ++i) {
    ++counts[i % kCopies * kBins + (orders[i] >> shift) % kBins];
  }
  const Limit bin = find_bin(counts, wanted);
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t order = orders[i];
    orders[kept] = order;
    kept += (order >> shift) % kBins == bin.order ? 1 : 0;
  }
  count = kept;
  return bin;
}

class Chooser {
 public:
  Chooser(CpuIsa isa, const ChooserScratch& scratch)
      : orders_of_(isa >= CpuIsa::kAvx512 ? orders_avx512 : orders_portable), scratch_(scratch) {}

  // scores [count], more than k -> list [k], positions from `first_key` on.
  void choose(const float* scores, int64_t count, int64_t k, int32_t first_key,
              int32_t* list) const {
    const Limit limit = find_limit(scores, count, k);
    int64_t emitted = 0;
    int64_t equals = limit.wanted;
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t size = std::min(kBlock, count - first);
      uint32_t block[kBlock];
      orders_of_(scores + first, size, block);
      for (int64_t i = 0; i < size && emitted < k; ++i) {
        const bool equal = block[i] == limit.order && equals > 0;
        list[emitted] = first_key + static_cast<int32_t>(first + i);
        emitted += block[i] > limit.order || equal ? 1 : 0;
        equals -= equal ? 1 : 0;
      }
    }
  }

 private:
  Limit find_limit(const float* scores, int64_t count, int64_t k) const {
    std::fill_n(scratch_.counts, kCopies * kBins, 0);
    for_blocks(scores, count, [&](const uint32_t* block, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        ++scratch_.counts[i % kCopies * kBins + (block[i] >> 21)];
      }
    });
    const Limit upper = find_bin(scratch_.counts, k);
    int64_t kept = 0;
    for_blocks(scores, count, [&](const uint32_t* block, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        scratch_.orders[kept] = block[i];
        kept += block[i] >> 21 == upper.order ? 1 : 0;
      }
    });
    const Limit middle = narrow(scratch_.orders, kept, 10, upper.wanted, scratch_.counts);
    // The last 11-bit round reuses bit 10, already equal in all remaining scores.
    const Limit lower = narrow(scratch_.orders, kept, 0, middle.wanted, scratch_.counts);
    return {scratch_.orders[0], lower.wanted};
  }

  template <typename Body>
  void for_blocks(const float* scores, int64_t count, const Body& body) const {
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t size = std::min(kBlock, count - first);
      uint32_t block[kBlock];
      orders_of_(scores + first, size, block);
      body(block, size);
    }
  }

  void (*orders_of_)(const float*, int64_t, uint32_t*);
  const ChooserScratch& scratch_;
};

}  // namespace

int64_t top_keys_workspace_bytes(int64_t max_length, int num_threads) {
  WorkspaceArena arena;
  for (int thread = 0; thread < num_threads; ++thread) ChooserScratch(arena, max_length);
  return arena.bytes();
}

void select_top_keys(ThreadPool& pool, CpuIsa isa, ConstTensorView scores,
                     std::span<const SparseRow> rows, int32_t first_key, TensorView keys,
                     std::span<std::byte> workspace) {
  const int64_t k = keys.size(1);
  int64_t longest = 0;
  for (const SparseRow& row : rows) longest = std::max<int64_t>(longest, row.length);
  const WorkspaceArena shared(workspace);
  // Shares are contiguous: which thread has which does not matter to what comes out.
  std::atomic<int> next_thread = 0;
  pool.parallel_for(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
    WorkspaceArena arena = shared;
    const int thread = next_thread++;
    for (int before = 0; before < thread; ++before) ChooserScratch(arena, longest - first_key);
    const ChooserScratch scratch(arena, longest - first_key);
    const Chooser chooser(isa, scratch);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t visible = int64_t{rows[static_cast<size_t>(i)].length} - first_key;
      int32_t* list = keys.row<int32_t>(i);
      if (visible <= k) {
        std::iota(list, list + visible, first_key);
        std::fill(list + visible, list + k, -1);
      } else {
        chooser.choose(scores.row<float>(i) + first_key, visible, k, first_key, list);
      }
    }
  });
}

}  // namespace fathom::cpu
