#include "comm/collectives.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <vector>

#include "base/random.h"
#include "comm/collectives_test_data.h"
#include "comm/rank_threads.h"
#include "device/cpu/thread_pool.h"

namespace fathom {
namespace {

const int kSizes[] = {1, 2, 3, 4, 8};
// Below, at and above what is summed in one phase (512 floats), odd counts, none at all.
const int64_t kCounts[] = {0, 1, 3, 17, 255, 512, 513, 3584, 16385, 70003};

float serial_sum(int ranks, uint64_t seed, int64_t i) {
  float sum = value_of(0, seed, i);
  for (int rank = 1; rank < ranks; ++rank) sum += value_of(rank, seed, i);
  return sum;
}

std::vector<float> poison(int64_t count) {
  return std::vector<float>(count, std::numeric_limits<float>::quiet_NaN());
}

void expect_all_returned(const std::vector<RankEnd>& ends) {
  for (const RankEnd& end : ends) EXPECT_TRUE(end.returned) << end.what;
}

// Random parts with some empty ones.
std::vector<int64_t> parts_of(int ranks, uint64_t seed, int64_t most) {
  std::vector<int64_t> counts(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const uint64_t bits = random_bits(seed, 77, rank);
    counts[rank] = bits % 4 == 0 ? 0 : static_cast<int64_t>((bits >> 8) % (most + 1));
  }
  return counts;
}

TEST(AllReduce, EqualsTheOrderedSumOnAllRanks) {
  for (const int ranks : kSizes) {
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      ThreadPool pool(2);
      uint64_t seed = 1;
      for (const int64_t count : kCounts) {
        for (ThreadPool* used : {static_cast<ThreadPool*>(nullptr), &pool}) {
          ++seed;
          std::vector<float> expected(count);
          for (int64_t i = 0; i < count; ++i) expected[i] = serial_sum(ranks, seed, i);
          std::vector<float> mine = values_of(group.rank(), seed, count);
          std::vector<float> sum = poison(count);
          all_reduce(group, mine, sum, used);
          EXPECT_TRUE(equal_bits(sum, expected)) << ranks << " ranks, " << count << " floats";

          // In place, and `mine` is the caller's at once.
          all_reduce(group, mine, mine, used);
          EXPECT_TRUE(equal_bits(mine, expected)) << ranks << " ranks, " << count << " floats";
        }
      }
    }));
  }
}

TEST(AllReduce, AddsTheWholeSumOnce) {
  for (const int ranks : kSizes) {
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      uint64_t seed = 1000;
      for (const int64_t count : kCounts) {
        ++seed;
        std::vector<float> expected(count), residual(count);
        for (int64_t i = 0; i < count; ++i) {
          residual[i] = value_of(99, seed, i);
          const float sum = serial_sum(ranks, seed, i);
          expected[i] = residual[i] + sum;
        }
        all_reduce_add(group, values_of(group.rank(), seed, count), residual);
        EXPECT_TRUE(equal_bits(residual, expected)) << ranks << " ranks, " << count << " floats";
      }
    }));
  }
}

TEST(AllReduce, InputsMayChangeOnReturn) {
  // The other ranks may still be summing when this one returns.
  for (const int64_t count : {int64_t{64}, int64_t{3584}, int64_t{50000}}) {
    expect_all_returned(run_ranks(4, [&](Group& group) {
      std::vector<float> mine(count), sum(count);
      for (int round = 0; round < 200; ++round) {
        std::fill(mine.begin(), mine.end(), static_cast<float>(round + group.rank()));
        all_reduce(group, mine, sum);
        std::fill(mine.begin(), mine.end(), -1e6f);
        const float expected = static_cast<float>(4 * round + 6);
        for (const float value : sum) ASSERT_EQ(value, expected);
        std::fill(sum.begin(), sum.end(), -1e6f);
      }
    }));
  }
}

TEST(ReduceScatter, EqualsTheOrderedSum) {
  for (const int ranks : kSizes) {
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      for (uint64_t seed = 1; seed <= 20; ++seed) {
        const auto counts = parts_of(ranks, seed, seed % 5 == 0 ? 30000 : 500);
        int64_t total = 0, begin = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank < group.rank()) begin += counts[rank];
          total += counts[rank];
        }
        const int64_t count = counts[group.rank()];
        std::vector<float> expected(count), out = poison(count);
        for (int64_t i = 0; i < count; ++i) expected[i] = serial_sum(ranks, seed, begin + i);
        std::vector<float> mine = values_of(group.rank(), seed, total);
        reduce_scatter(group, mine, counts, out);
        std::fill(mine.begin(), mine.end(), 0.0f);
        EXPECT_TRUE(equal_bits(out, expected)) << ranks << " ranks, seed " << seed;

        // Into its own place.
        mine = values_of(group.rank(), seed, total);
        const std::span<float> own = std::span(mine).subspan(begin, count);
        reduce_scatter(group, mine, counts, own);
        EXPECT_TRUE(equal_bits(own, expected)) << ranks << " ranks, seed " << seed;
      }
    }));
  }
}

TEST(ReduceScatter, AddsTheWholeSumOnce) {
  for (const int ranks : kSizes) {
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      for (uint64_t seed = 1; seed <= 20; ++seed) {
        const auto counts = parts_of(ranks, seed, seed % 5 == 0 ? 30000 : 500);
        int64_t total = 0, begin = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank < group.rank()) begin += counts[rank];
          total += counts[rank];
        }
        const int64_t count = counts[group.rank()];
        std::vector<float> expected(count), residual(count);
        for (int64_t i = 0; i < count; ++i) {
          residual[i] = value_of(99, seed, i);
          const float sum = serial_sum(ranks, seed, begin + i);
          expected[i] = residual[i] + sum;
        }
        std::vector<float> mine = values_of(group.rank(), seed, total);
        reduce_scatter_add(group, mine, counts, residual);
        EXPECT_TRUE(equal_bits(residual, expected)) << ranks << " ranks, seed " << seed;
        barrier(group);
        std::fill(mine.begin(), mine.end(), 0.0f);
      }
    }));
  }
}

TEST(AllGatherPieces, FillsEveryonesPlaces) {
  for (const int ranks : kSizes) {
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      ThreadPool pool(2);
      for (uint64_t seed = 1; seed <= 20; ++seed) {
        // A piece of each of three arrays, and none of a fourth; one of some is large.
        std::vector<std::vector<float>> arrays, expected;
        std::vector<std::vector<Piece>> pieces(ranks);
        for (uint64_t array = 0; array < 3; ++array) {
          const auto counts = parts_of(ranks, 3 * seed + array, seed % 5 == 0 ? 60000 : 500);
          auto& whole = expected.emplace_back();
          for (int rank = 0; rank < ranks; ++rank) {
            const auto part = values_of(rank, 3 * seed + array, counts[rank]);
            whole.insert(whole.end(), part.begin(), part.end());
          }
          auto& own = arrays.emplace_back(poison(static_cast<int64_t>(whole.size())));
          size_t begin = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            const auto count = static_cast<size_t>(counts[rank]);
            if (rank == group.rank()) {
              std::copy_n(whole.data() + begin, count, own.data() + begin);
            }
            pieces[rank].push_back(std::as_writable_bytes(std::span(own).subspan(begin, count)));
            begin += count;
          }
        }
        all_gather_pieces(group, pieces, seed % 2 == 0 ? &pool : nullptr);
        // The rank's own may change at once.
        const std::vector<std::vector<float>> got = arrays;
        for (auto& array : arrays) std::fill(array.begin(), array.end(), 0.0f);
        for (size_t array = 0; array < got.size(); ++array) {
          EXPECT_TRUE(equal_bits(got[array], expected[array]))
              << ranks << " ranks, seed " << seed << ", array " << array;
        }
      }
    }));
  }
}

TEST(AllGatherPieces, RefusesPiecesOfAnotherSize) {
  const auto ends = run_ranks(2, [](Group& group) {
    // Rank 1 believes that it gives 3 bytes, rank 0 expects 2.
    std::vector<std::byte> memory(4);
    const size_t theirs = group.rank() == 0 ? 2 : 3;
    const std::vector<std::vector<Piece>> pieces = {{Piece(memory).first(1)},
                                                    {Piece(memory).subspan(1, theirs)}};
    all_gather_pieces(group, pieces);
    barrier(group);
  });
  EXPECT_TRUE(ends[0].comm_error);
  EXPECT_NE(ends[0].what.find("rank 1 gave 3 bytes in all_gather #1 (1 bytes) where this rank 0 "
                              "expected 2"),
            std::string::npos)
      << ends[0].what;
  EXPECT_FALSE(ends[1].returned);
}

TEST(AllGather, PutsThePartsInOrder) {
  for (const int ranks : kSizes) {
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      for (uint64_t seed = 1; seed <= 20; ++seed) {
        const auto counts = parts_of(ranks, seed, seed % 5 == 0 ? 30000 : 500);
        std::vector<float> expected;
        int64_t begin = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank < group.rank()) begin += counts[rank];
          const auto part = values_of(rank, seed, counts[rank]);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        std::vector<float> mine = values_of(group.rank(), seed, counts[group.rank()]);
        std::vector<float> out = poison(static_cast<int64_t>(expected.size()));
        all_gather(group, mine, counts, out);
        std::fill(mine.begin(), mine.end(), 0.0f);
        EXPECT_TRUE(equal_bits(out, expected)) << ranks << " ranks, seed " << seed;

        // From its own place.
        out = poison(static_cast<int64_t>(expected.size()));
        const std::span<float> own = std::span(out).subspan(begin, counts[group.rank()]);
        const auto again = values_of(group.rank(), seed, counts[group.rank()]);
        std::copy(again.begin(), again.end(), own.begin());
        all_gather(group, own, counts, out);
        EXPECT_TRUE(equal_bits(out, expected)) << ranks << " ranks, seed " << seed;
      }
    }));
  }
}

TEST(Argmax, LargestValueThenLowestId) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  struct Row {
    std::vector<Candidate> of_ranks;
    int32_t winner;
  };
  const std::vector<Row> rows = {
      {{{1, 5}, {2, 105}, {1.5f, 205}}, 105},
      {{{3, 9}, {3, 107}, {3, 200}}, 9},                               // equal: the lowest id
      {{{3, 300}, {3, 107}, {2, 200}}, 107},                           // and not the lowest rank
      {{{0.0f, 50}, {-0.0f, 40}, {-1, 1}}, 40},                        // zeros are equal
      {{{-kInfinity, -1}, {-kInfinity, 100}, {-kInfinity, -1}}, 100},  // a shard without a token
      {{{9, -1}, {1, 100}, {0, 200}}, 100},
      {{{1, 5}, {kNan, 150}, {kInfinity, 205}}, 150},  // a NaN reaches the caller
      {{{kNan, 205}, {kNan, 150}, {kInfinity, 5}}, 150},
      {{{9, -1}, {kNan, -1}, {0, 200}}, 200},
      {{{7, -1}, {8, -1}, {9, -1}}, -1},
  };
  expect_all_returned(run_ranks(3, [&](Group& group) {
    std::vector<Candidate> mine, best(rows.size(), Candidate{kNan, 777});
    for (const Row& row : rows) mine.push_back(row.of_ranks[group.rank()]);
    argmax(group, mine, best);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(best[i].id, rows[i].winner) << "row " << i;
      for (const Candidate& candidate : rows[i].of_ranks) {
        if (candidate.id != rows[i].winner || candidate.id < 0) continue;
        EXPECT_EQ(std::bit_cast<uint32_t>(best[i].value), std::bit_cast<uint32_t>(candidate.value));
      }
    }
    argmax(group, {}, {});
  }));
}

TEST(AllGather, RefusesAPartOfAnotherSize) {
  const auto ends = run_ranks(2, [](Group& group) {
    // Rank 1 believes that it gives 3 floats, rank 0 expects 2.
    const std::vector<int64_t> counts = {1, group.rank() == 0 ? 2 : 3};
    std::vector<float> mine(counts[group.rank()]), out(1 + counts[1]);
    all_gather(group, mine, counts, out);
    barrier(group);
  });
  EXPECT_TRUE(ends[0].comm_error);
  EXPECT_NE(ends[0].what.find("rank 1 gave 12 bytes in all_gather #1 (4 bytes) where this rank 0 "
                              "expected 8"),
            std::string::npos)
      << ends[0].what;
  EXPECT_FALSE(ends[1].returned);
}

}  // namespace
}  // namespace fathom
