#include "comm/collectives.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "device/cpu/thread_pool.h"

namespace fathom {
namespace {

// Up to here a rank copies what it gives into the group's staging buffer and meets once; beyond,
// it gives its own memory and meets twice. Both forms cost the same at about this size
// (comm_bench).
constexpr size_t kOnePhaseBytes = 64 << 10;
// Floats that are summed at a time: they stay in the first-level cache.
constexpr int64_t kBlock = 1024;
// Floats that are worth a thread of the pool.
constexpr int64_t kGrain = 16 << 10;

std::span<const float> floats(ConstBytes bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

std::span<float> floats(std::span<std::byte> bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

void copy(ConstBytes from, std::byte* to) {
  if (!from.empty() && from.data() != to) std::memcpy(to, from.data(), from.size());
}

// A copy of `mine` that may be given in the next meeting.
ConstBytes staged(Group& group, ConstBytes mine) {
  const std::span<std::byte> copied = group.staging(mine.size());
  copy(mine, copied.data());
  return copied;
}

// Meets once with bytes that may be changed on return of the collective: what is large is given
// as it is, and finish() waits until everyone has read it.
std::span<const ConstBytes> give(Group& group, Collective kind, ConstBytes mine) {
  return group.meet(kind, mine.size() <= kOnePhaseBytes ? staged(group, mine) : mine);
}
void finish(Group& group, size_t bytes) {
  if (bytes > kOnePhaseBytes) barrier(group);
}

template <typename Body>
void spread(ThreadPool* pool, int64_t count, const Body& body) {
  if (pool != nullptr) {
    pool->parallel_for(count, kGrain, body);
  } else if (count > 0) {
    body(int64_t{0}, count);
  }
}

enum class Then { kStore, kAdd };

// out[i] = (or +=) the sum of the ranks' arrays at `offset` + i, ranks in order.
void sum_in_order(std::span<const ConstBytes> of_ranks, int64_t offset, Then then,
                  std::span<float> out, ThreadPool* pool) {
  spread(pool, static_cast<int64_t>(out.size()), [&](int64_t begin, int64_t end) {
    std::array<float, kBlock> sum;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      std::memcpy(sum.data(), floats(of_ranks[0]).data() + offset + at, count * sizeof(float));
      for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
        const float* x = floats(of_ranks[rank]).data() + offset + at;
        for (int64_t i = 0; i < count; ++i) sum[i] += x[i];
      }
      float* to = out.data() + at;
      if (then == Then::kStore) {
        std::memcpy(to, sum.data(), count * sizeof(float));
      } else {
        for (int64_t i = 0; i < count; ++i) to[i] += sum[i];
      }
    }
  });
}

// Where rank r's slice of `count` floats begins; whole cache lines, so that no two ranks read one.
int64_t slice_begin(int64_t count, int rank, int size) {
  constexpr int64_t kLine = 16;
  const int64_t lines = (count + kLine - 1) / kLine;
  return std::min(count, lines * rank / size * kLine);
}

void reduce(Group& group, std::span<const float> mine, Then then, std::span<float> out,
            ThreadPool* pool) {
  FATHOM_CHECK(mine.size() == out.size(), "a sum of {} floats into {}", mine.size(), out.size());
  const ConstBytes bytes = std::as_bytes(mine);
  if (bytes.size() <= kOnePhaseBytes || group.size() == 1) {
    // A single rank's own memory need not outlast the call: nobody else reads it.
    const ConstBytes given = group.size() == 1 ? bytes : staged(group, bytes);
    sum_in_order(group.meet(Collective::kAllReduce, given), 0, then, out, pool);
    return;
  }
  // Each rank sums one slice; then slices are met, which also proves that `mine` has been read.
  const auto count = static_cast<int64_t>(mine.size());
  std::vector<ConstBytes> slices(group.size());
  const auto begin_of = [&](int rank) { return slice_begin(count, rank, group.size()); };
  for (int rank = 0; rank < group.size(); ++rank) {
    slices[rank] = std::as_bytes(mine.subspan(begin_of(rank), begin_of(rank + 1) - begin_of(rank)));
  }
  const std::span<const ConstBytes> parts = group.meet(Collective::kAllReduce, slices);
  const std::span<float> slice = floats(group.staging(slices[group.rank()].size()));
  sum_in_order(parts, 0, Then::kStore, slice, pool);

  const std::span<const ConstBytes> sums =
      group.meet(Collective::kAllReduceGather, std::as_bytes(slice));
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t begin = begin_of(rank);
    const int64_t length = begin_of(rank + 1) - begin;
    if (sums[rank].size() != length * sizeof(float)) {
      group.fail_bytes(rank, sums[rank].size(), length * sizeof(float));
    }
    sum_in_order(sums.subspan(rank, 1), 0, then, out.subspan(begin, length), pool);
  }
}

int64_t total_of(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Whether a is a better choice than b.
bool beats(const Candidate& a, const Candidate& b) {
  if ((a.id < 0) != (b.id < 0)) return b.id < 0;
  if (a.id < 0) return false;
  if (std::isnan(a.value) != std::isnan(b.value)) return std::isnan(a.value);
  if (a.value == b.value || std::isnan(a.value)) return a.id < b.id;
  return a.value > b.value;
}

}  // namespace

void barrier(Group& group) { group.meet(Collective::kBarrier, ConstBytes{}); }

void all_reduce(Group& group, std::span<const float> mine, std::span<float> sum, ThreadPool* pool) {
  reduce(group, mine, Then::kStore, sum, pool);
}

void all_reduce_add(Group& group, std::span<const float> mine, std::span<float> out,
                    ThreadPool* pool) {
  reduce(group, mine, Then::kAdd, out, pool);
}

void reduce_scatter(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                    std::span<float> out, ThreadPool* pool) {
  const int rank = group.rank();
  FATHOM_CHECK(static_cast<int>(counts.size()) == group.size() &&
                   static_cast<int64_t>(mine.size()) == total_of(counts) &&
                   static_cast<int64_t>(out.size()) == counts[rank],
               "{} counts for {} floats, {} to be summed", counts.size(), mine.size(), out.size());
  const ConstBytes given = mine.size_bytes() <= kOnePhaseBytes ? staged(group, std::as_bytes(mine))
                                                               : std::as_bytes(mine);
  std::vector<ConstBytes> parts(group.size());
  size_t begin = 0;
  for (int to = 0; to < group.size(); ++to) {
    parts[to] = given.subspan(begin, counts[to] * sizeof(float));
    begin += parts[to].size();
  }
  sum_in_order(group.meet(Collective::kReduceScatter, parts), 0, Then::kStore, out, pool);
  finish(group, mine.size_bytes());
}

void all_gather(Group& group, ConstBytes mine, std::span<const int64_t> counts,
                std::span<std::byte> out) {
  FATHOM_CHECK(static_cast<int>(counts.size()) == group.size() &&
                   static_cast<int64_t>(mine.size()) == counts[group.rank()] &&
                   static_cast<int64_t>(out.size()) == total_of(counts),
               "{} counts for {} bytes, {} to be gathered", counts.size(), mine.size(), out.size());
  const std::span<const ConstBytes> parts = give(group, Collective::kAllGather, mine);
  std::byte* to = out.data();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto expected = static_cast<size_t>(counts[rank]);
    if (parts[rank].size() != expected) group.fail_bytes(rank, parts[rank].size(), expected);
    copy(parts[rank], to);
    to += expected;
  }
  // By the largest part, which all ranks know: they decide alike.
  finish(group, *std::max_element(counts.begin(), counts.end()));
}

void all_gather(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                std::span<float> out) {
  std::vector<int64_t> bytes(counts.begin(), counts.end());
  for (int64_t& count : bytes) count *= sizeof(float);
  all_gather(group, std::as_bytes(mine), bytes, std::as_writable_bytes(out));
}

void argmax(Group& group, std::span<const Candidate> mine, std::span<Candidate> best) {
  FATHOM_CHECK(mine.size() == best.size(), "{} rows into {}", mine.size(), best.size());
  const std::span<const ConstBytes> of_ranks =
      group.meet(Collective::kArgmax, staged(group, std::as_bytes(mine)));
  const auto candidate_of = [&](int rank, size_t row) {
    Candidate candidate;
    std::memcpy(&candidate, of_ranks[rank].data() + row * sizeof(Candidate), sizeof(Candidate));
    return candidate;
  };
  for (size_t row = 0; row < best.size(); ++row) {
    Candidate winner = candidate_of(0, row);
    for (int rank = 1; rank < group.size(); ++rank) {
      const Candidate candidate = candidate_of(rank, row);
      if (beats(candidate, winner)) winner = candidate;
    }
    best[row] = winner;
  }
}

}  // namespace fathom
