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

// A sum takes one meeting, in which every rank reads and adds all arrays, or two, in which each
// adds its slice and then reads the others' sums. Two are faster in a process as soon as arrays are
// not tiny: 14,336 bytes take 4.0 us against 5.4 with 2 ranks, 4.7 against 15.6 with 4, 6.3 against
// 24.5 with 8; 4,096 bytes 2.0 against 2.2, 3.1 against 5.4, 4.3 against 10.4 (medians of
// comm_bench on 16 CPUs of an H200's host). Between processes the second one is a round trip more,
// which is worth some of the bytes that it saves.
constexpr size_t kOnePhaseBytes = 2 << 10;
constexpr size_t kOnePhaseSentBytes = 64 << 10;  // by one rank to all others
// Up to here what a rank gives is copied, so that it can be changed at once; beyond, the rank waits
// in a barrier until everyone has read it. A barrier between processes is a round trip.
constexpr size_t kCopiedBytes = 16 << 10;
constexpr size_t kCopiedBytesBetweenProcesses = 256 << 10;
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

// Decides alike on all ranks: by sizes that all know.
bool is_copied(const Group& group, size_t bytes) {
  return bytes <= (group.spans_processes() ? kCopiedBytesBetweenProcesses : kCopiedBytes);
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

// out[i] = (or +=) the sum of the ranks' arrays at i, ranks in order.
void sum_in_order(std::span<const ConstBytes> of_ranks, Then then, std::span<float> out,
                  ThreadPool* pool) {
  spread(pool, static_cast<int64_t>(out.size()), [&](int64_t begin, int64_t end) {
    std::array<float, kBlock> sum;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      const float* summed = floats(of_ranks[0]).data() + at;
      if (of_ranks.size() > 1) {
        const float* x = floats(of_ranks[1]).data() + at;
        for (int64_t i = 0; i < count; ++i) sum[i] = summed[i] + x[i];
        summed = sum.data();
      }
      for (size_t rank = 2; rank < of_ranks.size(); ++rank) {
        const float* x = floats(of_ranks[rank]).data() + at;
        for (int64_t i = 0; i < count; ++i) sum[i] += x[i];
      }
      float* to = out.data() + at;
      if (then == Then::kAdd) {
        for (int64_t i = 0; i < count; ++i) to[i] += summed[i];
      } else if (to != summed) {
        std::memcpy(to, summed, count * sizeof(float));
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
  if (group.size() == 1 || sums_in_one_meeting(group, bytes.size())) {
    // A single rank's own memory need not outlast the call: nobody else reads it.
    const ConstBytes given = group.size() == 1 ? bytes : staged(group, bytes);
    sum_in_order(group.meet(Collective::kAllReduce, given), then, out, pool);
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
  sum_in_order(parts, Then::kStore, slice, pool);

  const std::span<const ConstBytes> sums =
      group.meet(Collective::kAllReduceGather, std::as_bytes(slice));
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t begin = begin_of(rank);
    const int64_t length = begin_of(rank + 1) - begin;
    if (sums[rank].size() != length * sizeof(float)) {
      group.fail_bytes(rank, sums[rank].size(), length * sizeof(float));
    }
    sum_in_order(sums.subspan(rank, 1), then, out.subspan(begin, length), pool);
  }
}

int64_t total_of(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Gives each rank its part of `given`, and sums the parts that this rank gets.
void scatter(Group& group, ConstBytes given, std::span<const int64_t> counts, Then then,
             std::span<float> out, ThreadPool* pool) {
  std::vector<ConstBytes> parts(group.size());
  size_t begin = 0;
  for (int to = 0; to < group.size(); ++to) {
    parts[to] = given.subspan(begin, counts[to] * sizeof(float));
    begin += parts[to].size();
  }
  sum_in_order(group.meet(Collective::kReduceScatter, parts), then, out, pool);
}

void check_parts(const Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                 std::span<float> out) {
  FATHOM_CHECK(static_cast<int>(counts.size()) == group.size() &&
                   static_cast<int64_t>(mine.size()) == total_of(counts) &&
                   static_cast<int64_t>(out.size()) == counts[group.rank()],
               "{} counts for {} floats, {} to be summed", counts.size(), mine.size(), out.size());
}

struct Copy {
  const std::byte* from;
  std::byte* to;
  size_t bytes;
};
constexpr size_t kMostCopied = 64 << 10;  // by one Copy, so that threads get equal shares

void add_copies(const std::byte* from, std::byte* to, size_t bytes, std::vector<Copy>& copies) {
  for (size_t done = 0; done < bytes; done += kMostCopied) {
    copies.push_back({from + done, to + done, std::min(kMostCopied, bytes - done)});
  }
}

void copy_all(std::vector<Copy>& copies, size_t bytes, ThreadPool* pool) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
  };
  const auto count = static_cast<int64_t>(copies.size());
  if (pool == nullptr || bytes <= kMostCopied) {
    run(0, count);
  } else {
    pool->parallel_for(count, 1, run);
  }
  copies.clear();
}

size_t bytes_of(std::span<const Piece> pieces) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.size();
  return bytes;
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

bool sums_in_one_meeting(const Group& group, size_t bytes) {
  if (!group.spans_processes()) return bytes <= kOnePhaseBytes;
  return bytes * (group.size() - 1) <= kOnePhaseSentBytes;
}

void reduce_scatter(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                    std::span<float> out, ThreadPool* pool) {
  check_parts(group, mine, counts, out);
  const bool copied = is_copied(group, mine.size_bytes());
  const ConstBytes bytes = std::as_bytes(mine);
  scatter(group, copied ? staged(group, bytes) : bytes, counts, Then::kStore, out, pool);
  if (!copied) barrier(group);
}

void reduce_scatter_add(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                        std::span<float> out, ThreadPool* pool) {
  check_parts(group, mine, counts, out);
  scatter(group, std::as_bytes(mine), counts, Then::kAdd, out, pool);
}

void all_gather(Group& group, ConstBytes mine, std::span<const int64_t> counts,
                std::span<std::byte> out) {
  FATHOM_CHECK(static_cast<int>(counts.size()) == group.size() &&
                   static_cast<int64_t>(mine.size()) == counts[group.rank()] &&
                   static_cast<int64_t>(out.size()) == total_of(counts),
               "{} counts for {} bytes, {} to be gathered", counts.size(), mine.size(), out.size());
  // By the largest part, which all ranks know.
  const bool copied = is_copied(group, *std::max_element(counts.begin(), counts.end()));
  const std::span<const ConstBytes> parts =
      group.meet(Collective::kAllGather, copied ? staged(group, mine) : mine);
  std::byte* to = out.data();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto expected = static_cast<size_t>(counts[rank]);
    if (parts[rank].size() != expected) group.fail_bytes(rank, parts[rank].size(), expected);
    copy(parts[rank], to);
    to += expected;
  }
  if (!copied) barrier(group);
}

void all_gather(Group& group, std::span<const float> mine, std::span<const int64_t> counts,
                std::span<float> out) {
  std::vector<int64_t> bytes(counts.begin(), counts.end());
  for (int64_t& count : bytes) count *= sizeof(float);
  all_gather(group, std::as_bytes(mine), bytes, std::as_writable_bytes(out));
}

void all_gather_pieces(Group& group, std::span<const std::vector<Piece>> pieces, ThreadPool* pool) {
  FATHOM_CHECK(static_cast<int>(pieces.size()) == group.size(), "the pieces of {} ranks of {}",
               pieces.size(), group.size());
  std::vector<Copy> copies;
  const size_t own_bytes = bytes_of(pieces[group.rank()]);
  const std::span<std::byte> given = group.staging(own_bytes);
  size_t at = 0;
  for (const Piece& piece : pieces[group.rank()]) {
    add_copies(piece.data(), given.data() + at, piece.size(), copies);
    at += piece.size();
  }
  copy_all(copies, own_bytes, pool);
  const std::span<const ConstBytes> of_ranks = group.meet(Collective::kAllGather, given);
  size_t got = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) continue;
    const size_t expected = bytes_of(pieces[rank]);
    if (of_ranks[rank].size() != expected) group.fail_bytes(rank, of_ranks[rank].size(), expected);
    const std::byte* from = of_ranks[rank].data();
    for (const Piece& piece : pieces[rank]) {
      add_copies(from, piece.data(), piece.size(), copies);
      from += piece.size();
    }
    got += expected;
  }
  copy_all(copies, got, pool);
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
