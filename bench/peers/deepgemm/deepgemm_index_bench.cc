// index_scores() of prompts beside DeepGEMM's kernel, in one program and in turns.
//
//   deepgemm_index_bench [--rounds 9]
//
// 64 heads of 128; rows that see all keys, and rows that are the last of the sequence. DeepGEMM's
// keys are contiguous, ours lie in pages of 64 in random order. Graphs of launches over different
// keys and queries, medians; --rounds times in a random order each. Scores that differ end the
// program. JSON: {"device": …, "results": [{"rows", "keys", "seen", "us", "deepgemm_us"}, …]}.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "deepgemm_index_scores.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/indexer/index_scores_cuda.h"
#include "tensor/dtype.h"

namespace fathom::peers {
namespace {

using cuda::DeviceArray;
constexpr int64_t kHeads = 64, kDim = cuda::kIndexDim, kCopies = 3, kAlign = 256;
constexpr int kSms = 132;

class Problem {
 public:
  Problem(int64_t rows, int64_t keys, bool sees_all)
      : rows_(rows),
        keys_(keys),
        columns_(keys + kAlign),
        pages_(keys / kPageSize),
        random_(1),
        queries_(codes(kCopies * rows * kHeads * kDim)),
        flat_(codes(kCopies * keys * kDim)),
        scales_(random_scales(kCopies * keys)),
        weights_(cuda::random_f32(kCopies * rows * kHeads, 0.1f, random_)),
        begin_(rows),
        end_(lengths(sees_all)),
        starts_(rows),
        table_(shuffled()),
        paged_(kCopies * pages_ * cuda::kIndexPageBytes),
        scores_(rows * columns_) {
    cuda::check(cudaMemset(begin_.data(), 0, begin_.bytes()), "begins");
    cuda::check(cudaMemset(starts_.data(), 0, starts_.bytes()), "starts");
    const std::vector<uint8_t> flat = flat_.to_host();
    const std::vector<float> scales = scales_.to_host();
    const std::vector<int32_t> table = table_.to_host();
    std::vector<std::byte> paged(static_cast<size_t>(paged_.size()));
    for (int64_t copy = 0; copy < kCopies; ++copy) {
      for (int64_t page = 0; page < pages_; ++page) {
        std::byte* const to = paged.data() + (copy * pages_ + table[page]) * cuda::kIndexPageBytes;
        const int64_t key = copy * keys_ + page * kPageSize;
        std::memcpy(to, flat.data() + key * kDim, cuda::kIndexValueBytes);
        std::memcpy(to + cuda::kIndexValueBytes, scales.data() + key, kPageSize * sizeof(float));
      }
    }
    paged_.copy_from(paged);
  }

  double seen() const {
    const auto ends = end_.to_host();
    return std::accumulate(ends.begin(), ends.end(), 0.0);
  }

  void ours(int copy, cudaStream_t stream) const {
    cuda::index_scores(
        {.values = queries_.data() + copy * rows_ * kHeads * kDim,
         .weights = weights_.data() + copy * rows_ * kHeads,
         .lengths = end_.data(),
         .table_starts = starts_.data(),
         .block_tables = table_.data(),
         .pages = {paged_.data() + copy * pages_ * cuda::kIndexPageBytes, cuda::kIndexPageBytes},
         .scores = scores_.data(),
         .columns = columns_,
         .rows = static_cast<int32_t>(rows_),
         .heads = kHeads},
        kSms, stream);
  }
  void theirs(int copy, cudaStream_t stream) const {
    deepgemm_index_scores({.queries = queries_.data() + copy * rows_ * kHeads * kDim,
                           .keys = flat_.data() + copy * keys_ * kDim,
                           .scales = scales_.data() + copy * keys_,
                           .weights = weights_.data() + copy * rows_ * kHeads,
                           .begin = begin_.data(),
                           .end = end_.data(),
                           .scores = scores_.data(),
                           .rows = static_cast<int32_t>(rows_),
                           .num_keys = static_cast<int32_t>(keys_),
                           .columns = static_cast<int32_t>(columns_)},
                          stream);
  }

  // The largest difference of two sides' scores of seen keys, as a share of their largest.
  double difference() const {
    const auto made = [&](auto launch) {
      cuda::check(cudaMemset(scores_.data(), 0xFF, scores_.bytes()), "poison");
      launch();
      cuda::check(cudaDeviceSynchronize(), "scores");
      return scores_.to_host();
    };
    const auto a = made([&] { ours(1, nullptr); }), b = made([&] { theirs(1, nullptr); });
    const auto ends = end_.to_host();
    double worst = 0, largest = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t at = row * columns_; at < row * columns_ + ends[row]; ++at) {
        const double off = std::abs(double{a[at]} - b[at]);
        if (!(off <= worst)) worst = off;  // NaN too
        largest = std::max(largest, std::abs(double{b[at]}));
      }
    }
    return worst / largest;
  }

 private:
  // About normal.
  std::vector<uint8_t> codes(int64_t count) {
    const std::vector<float> some = cuda::random_f32(int64_t{1} << 20, 2, random_);
    std::vector<uint8_t> out(static_cast<size_t>(count));
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = to_e4m3(some[(i + i / some.size() * 7919) % some.size()]).bits;
    }
    return out;
  }
  std::vector<float> random_scales(int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& scale : out) scale = std::ldexp(1.0f, static_cast<int>(random_() % 5) - 8);
    return out;
  }
  std::vector<int32_t> lengths(bool sees_all) const {
    std::vector<int32_t> out(static_cast<size_t>(rows_));
    for (int64_t row = 0; row < rows_; ++row) {
      out[row] = static_cast<int32_t>(sees_all ? keys_ : keys_ - rows_ + row + 1);
    }
    return out;
  }
  std::vector<int32_t> shuffled() {
    std::vector<int32_t> out(static_cast<size_t>(pages_));
    std::iota(out.begin(), out.end(), 0);
    std::shuffle(out.begin(), out.end(), random_);
    return out;
  }

  const int64_t rows_, keys_, columns_, pages_;
  std::mt19937 random_;
  const DeviceArray<uint8_t> queries_, flat_;
  const DeviceArray<float> scales_, weights_;
  const DeviceArray<int32_t> begin_, end_, starts_, table_;
  DeviceArray<std::byte> paged_;
  const DeviceArray<float> scores_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(int rounds) {
  std::printf("{\"device\": \"%s\", \"results\": [", cuda::device_line().c_str());
  const char* separator = "";
  std::mt19937 random(2);
  struct Size {
    int64_t rows, keys;
  };
  for (const Size size : {Size{512, 4096}, Size{1024, 4096}, Size{2048, 8192}, Size{4096, 32768}}) {
    for (const bool sees_all : {true, false}) {
      const Problem problem(size.rows, size.keys, sees_all);
      const double difference = problem.difference();
      if (!(difference < 1e-3)) {
        std::fprintf(stderr, "scores differ by %.5f of the largest\n", difference);
        return 1;
      }
      std::vector<double> times[2];
      for (int round = 0; round < 2 * rounds; ++round) {
        const bool first_is_ours = random() % 2 == 0;
        const bool is_ours = round % 2 == 0 ? first_is_ours : times[0].size() < times[1].size();
        times[is_ours ? 0 : 1].push_back(
            cuda::time_in_graph(kCopies, [&](int copy, cudaStream_t stream) {
              is_ours ? problem.ours(copy, stream) : problem.theirs(copy, stream);
            }));
      }
      const double us = median(times[0]), other = median(times[1]);
      std::printf(
          "%s\n  {\"rows\": %ld, \"keys\": %ld, \"seen\": %.0f, \"us\": %.2f, "
          "\"deepgemm_us\": %.2f, \"ratio\": %.3f, \"tflops\": %.0f, \"difference\": %.1e}",
          separator, size.rows, size.keys, problem.seen() / static_cast<double>(size.rows), us,
          other, us / other, problem.seen() * 2 * kHeads * kDim / us * 1e-6, difference);
      std::fflush(stdout);
      separator = ",";
    }
  }
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::peers

int main(int argc, char** argv) {
  int rounds = 9;
  if (argc == 3 && std::strcmp(argv[1], "--rounds") == 0) rounds = std::max(1, std::atoi(argv[2]));
  if (argc != 1 && argc != 3) {
    std::fprintf(stderr, "usage: %s [--rounds 9]\n", argv[0]);
    return 2;
  }
  return fathom::peers::run(rounds);
}
