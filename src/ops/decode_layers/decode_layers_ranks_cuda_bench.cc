// A layer of DeepSeek-V3's TP8 slice for one to four tokens in decode_layers() with its sums over
// ranks, whose other ranks are a stand-in on the same device: what the sums cost where links cost
// nothing. Several tokens are of a sequence each, or neighbours of one. Time of a launch of 30
// layers less that of one of 6, over 24; medians of 21, three times in turns.
//
//   decode_layers_ranks_cuda_bench [--json]
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "ops/decode_layers/decode_layers_trial_cuda.h"
#include "ops/decode_layers/other_ranks_trial_cuda.h"
#include "ops/rope/rope.h"

namespace fathom::cuda {
namespace {

using namespace decode_layers_trial;

constexpr int kReplays = 21, kWarm = 3, kFew = 6, kMany = 30;
constexpr int32_t kPosition = 1024;
constexpr int64_t kPages = (kPosition + 1) / 64 + 1, kHidden = 7168,
                  kMostTokens = decode_layers_kernel::kMostRows;
// Bytes of a layer's weights, docs/kernels/decode_layers.md, and of what another token's experts
// add if it shares none.
constexpr double kLayerBytes = 90e6, kMoreBytes = 44e6;

struct Tokens {
  int rows;
  bool are_neighbours;
};

[[maybe_unused]] const int kLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 1);

class Bench {
 public:
  Bench() {
    for (cudaStream_t* stream : {&own_, &others_}) {
      check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "a stream");
    }
    check(cudaMemset(cache_.data(), 0, cache_.bytes()), "clearing the cache");
    std::mt19937 random(5);
    residual_.copy_from(random_f32(residual_.size(), 1, random));
    parts_.copy_from(random_bf16(parts_.size(), 0.3f, random));
    // More layers than there are weights for: in turns, together larger than the L2.
    std::vector<DecodeLayer> layers(kMany), some(kLayers);
    check(cudaMemcpy(some.data(), weights_.layers(), kLayers * sizeof(DecodeLayer),
                     cudaMemcpyDeviceToHost),
          "reading layers");
    for (size_t l = 0; l < layers.size(); ++l) layers[l] = some[l % some.size()];
    layers_ = DeviceArray<DecodeLayer>(layers);
  }
  ~Bench() {
    cudaStreamDestroy(own_);
    cudaStreamDestroy(others_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // us a layer.
  double measure(const Tokens& tokens, int ranks) {
    const int rows = tokens.rows;
    PeerGroup group(std::vector<int>(static_cast<size_t>(ranks), 0), rows, kHidden,
                    std::chrono::seconds(5));
    std::vector<int32_t> positions, starts;
    std::vector<int64_t> slots;
    for (int32_t r = 0; r < kMostTokens; ++r) {
      const int64_t page = tokens.are_neighbours ? 0 : r * kPages;
      positions.push_back(kPosition + (tokens.are_neighbours ? r : 0));
      starts.push_back(static_cast<int32_t>(page));
      slots.push_back(page * kPageSize + positions.back());
    }
    position_.copy_from(positions);
    slot_.copy_from(slots);
    starts_.copy_from(starts);
    const double us = (median(group, rows, kMany) - median(group, rows, kFew)) / (kMany - kFew);
    if (group.stopped()) throw std::runtime_error("a rank did not come");
    return us;
  }

 private:
  double median(const PeerGroup& group, int rows, int layers) {
    std::vector<double> times;
    for (int replay = -kWarm; replay < kReplays; ++replay) {
      if (group.size() > 1) {
        enqueue_other_ranks({.peers = group.rank(0),
                             .parts = parts_.data(),
                             .exchanges = 2 * layers - 1,
                             .rows = rows,
                             .n = kHidden},
                            others_);
      }
      const auto begin = std::chrono::steady_clock::now();
      decode_layers(arguments(group, rows, layers), own_);
      check(cudaStreamSynchronize(own_), "the layers");
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      check(cudaDeviceSynchronize(), "the other ranks");
      if (replay >= 0) times.push_back(took.count());
    }
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2];
  }

  DecodeLayersArguments arguments(const PeerGroup& group, int rows, int layers) const {
    return {.kind = kForm.kind,
            .layers = layers_.data(),
            .num_layers = layers,
            .rows = rows,
            .residual = residual_.data(),
            .delta_out = delta_.data(),
            .eps = static_cast<float>(Shape::kEps),
            .inner_eps = static_cast<float>(Shape::kEps),
            .cos_sin = cos_sin_.data(),
            .positions = position_.data(),
            .slots = slot_.data(),
            .block_tables = table_.data(),
            .table_starts = starts_.data(),
            .pages = cache_.data(),
            .layer_bytes = kMostTokens * kPages * kPageSize * kLayout.row_bytes(),
            .format = kForm.format,
            .softmax_scale = static_cast<float>(kSoftmaxScale),
            .gate = kForm.gate(),
            .exchange = exchange_.data(),
            .peers = group.size() > 1 ? group.rank(0) : PeerRank{}};
  }

  static std::vector<int32_t> first_pages() {
    std::vector<int32_t> pages;
    for (int32_t page = 0; page < kMostTokens * kPages; ++page) pages.push_back(page);
    return pages;
  }

  static constexpr Form kForm = {"", DecodeLayersKind::kV3Tp8, CacheFormat::kFp8Scaled};
  static constexpr LatentLayout kLayout = {kForm.format, Shape::kLatent, Shape::kRope};
  const Weights weights_{kForm};
  DeviceArray<DecodeLayer> layers_;
  const DeviceArray<std::byte> exchange_{
      std::vector<std::byte>(static_cast<size_t>(decode_layers_exchange_bytes(kForm.kind)))};
  const DeviceArray<std::byte> cache_{kMany * kMostTokens * kPages * kPageSize *
                                      kLayout.row_bytes()};
  DeviceArray<float> residual_{kMostTokens * kHidden};
  DeviceArray<uint16_t> delta_{kMostTokens * kHidden},
      parts_{int64_t{kMostPeers} * kMostTokens * 2 * kMany * kHidden};
  const DeviceArray<float> cos_sin_{
      tabulate(make_rope_table(Shape::kRope, 10000, std::nullopt), kPages* kPageSize)};
  DeviceArray<int32_t> position_{kMostTokens}, starts_{kMostTokens};
  const DeviceArray<int32_t> table_{first_pages()};
  DeviceArray<int64_t> slot_{kMostTokens};
  cudaStream_t own_ = nullptr, others_ = nullptr;
};

int run(int argc, char** argv) {
  BenchTable table(argc, argv);
  Bench bench;
  const struct {
    Tokens tokens;
    const char* name;
  } kinds[] = {{{1, false}, "decode_layers"},
               {{2, false}, "decode_layers, two tokens"},
               {{2, true}, "decode_layers, neighbours"},
               {{3, false}, "decode_layers, three tokens"},
               {{3, true}, "decode_layers, three neighbours"},
               {{4, false}, "decode_layers, four tokens"},
               {{4, true}, "decode_layers, four neighbours"}};
  for (const auto& [tokens, name] : kinds) {
    const double bytes = kLayerBytes + (tokens.rows - 1) * kMoreBytes;
    const std::vector<int> ranks = {1, 2, 4, 8};
    std::vector<std::vector<double>> times(ranks.size());
    for (int turn = 0; turn < 3; ++turn) {
      for (size_t i = 0; i < ranks.size(); ++i) {
        times[i].push_back(bench.measure(tokens, ranks[i]));
      }
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      std::sort(times[i].begin(), times[i].end());
      table.add(std::string(name) + ", " + std::to_string(ranks[i]) + (i == 0 ? " rank" : " ranks"),
                "1 x " + std::to_string(kPosition) + " keys", times[i][1], bytes);
    }
  }
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) { return fathom::cuda::run(argc, argv); }
