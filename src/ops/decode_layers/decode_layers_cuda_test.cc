// Three layers of decode_layers() against float64, for every shape and cache format, at lengths
// around those at which a CTA, a warp or a page gains a key. Each comparison stands for itself: no
// mean and no best of several. Keys make each head attend to one of them almost alone and no router
// choice is close, so the remaining error is rounding: bf16 between CTAs, 0.1 % a step.
#include "ops/decode_layers/decode_layers_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/decode_layers/decode_layers_oracle.h"
#include "ops/decode_layers/decode_layers_trial_cuda.h"
#include "ops/decode_layers/other_ranks_trial_cuda.h"
#include "ops/rope/rope.h"

namespace fathom::cuda {
namespace {

using namespace decode_layers_trial;

// Relative to the root mean square: RMS error over all values, and largest error of one value.
constexpr double kMostError = 0.02, kMostErrorOfOne = 0.12;

struct Error {
  double all = 0, most = 0;  // shares of the expected values' root mean square
};

template <typename T>
Error error_of(const std::vector<T>& actual, const std::vector<double>& expected) {
  double squares = 0, errors = 0, most = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = static_cast<double>(actual[i]) - expected[i];
    squares += expected[i] * expected[i];
    errors += error * error;
    // NaN counts as the largest error.
    most = std::isfinite(error) ? std::max(most, std::abs(error)) : INFINITY;
    if (most == INFINITY) break;
  }
  const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
  return {std::isfinite(most) ? std::sqrt(errors / squares) : INFINITY, most / rms};
}

// Keys that heads attend to: the newest ones, the first ones, those around the boundaries of warps'
// runs and of pages, each once.
OracleNeedles needles_for(int32_t position) {
  OracleNeedles needles;
  for (const int32_t key :
       {position - 1, position - 2, position - 16, 0, 1, 15, 16, 63, 64, 127, 128, position / 2,
        position / 3, (position - 1) / 64 * 64, (position - 1) / 128 * 128 + 17}) {
    const bool is_new =
        std::find(needles.keys.begin(), needles.keys.end(), key) == needles.keys.end();
    needles.keys.push_back(is_new && key >= 0 && key < position ? key : -1);
  }
  needles.keys.push_back(-1);  // the last head
  needles.far_background = position > 20;
  return needles;
}

// Launches of ranks wait for one another: nothing may load a kernel meanwhile. Read when the device
// is first used.
[[maybe_unused]] const int kLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 1);

// The other ranks of a group, in which rank `own` runs the layers: what they add to each sum.
struct OtherRanks {
  static constexpr int64_t kExchanges = 2 * kLayers - 1;

  OtherRanks(int ranks, int own_rank, int64_t hidden)
      : own(own_rank),
        n(hidden),
        group(std::vector<int>(static_cast<size_t>(ranks), 0), 1, hidden, std::chrono::seconds(5)),
        parts(ranks * kExchanges * hidden),
        received(parts.size()) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  }
  ~OtherRanks() { cudaStreamDestroy(stream); }
  OtherRanks(const OtherRanks&) = delete;
  OtherRanks& operator=(const OtherRanks&) = delete;

  // Draws parts; returns their sums, [exchange][n].
  std::vector<std::vector<double>> draw(std::mt19937& random) {
    const std::vector<uint16_t> bits = random_bf16(parts.size(), 0.3f, random);
    parts.copy_from(bits);
    std::vector<std::vector<double>> sums(kExchanges, std::vector<double>(static_cast<size_t>(n)));
    for (int64_t i = 0; i < std::ssize(bits); ++i) {
      if (i / n / kExchanges == own) continue;
      sums[static_cast<size_t>(i / n % kExchanges)][static_cast<size_t>(i % n)] +=
          from_bf16(bits[static_cast<size_t>(i)]);
    }
    return sums;
  }
  void enqueue() const {
    check(cudaMemset(received.data(), 0xFF, received.bytes()), "poisoning");
    check(cudaDeviceSynchronize(), "poisoning");
    enqueue_other_ranks({.peers = group.rank(own),
                         .parts = parts.data(),
                         .received = received.data(),
                         .exchanges = static_cast<int32_t>(kExchanges),
                         .n = static_cast<int32_t>(n)},
                        stream);
  }
  // What rank r has received of one exchange.
  std::vector<float> received_by(int r, int64_t exchange) const {
    const std::vector<float> all = widen(received.to_host());
    const auto begin = all.begin() + (r * kExchanges + exchange) * n;
    return {begin, begin + n};
  }

  const int own;
  const int64_t n;
  PeerGroup group;
  DeviceArray<uint16_t> parts, received;  // [ranks, exchanges, n]
  cudaStream_t stream = nullptr;
};

// What a launch has left.
struct Found {
  std::vector<float> residual;
  std::vector<float> delta;
  std::vector<std::byte> cache;
  std::vector<std::vector<std::byte>> rows;  // the token's, of each layer
};

class DecodeLayersCuda : public testing::TestWithParam<Form> {
 protected:
  static void SetUpTestSuite() {
    cos_sin_ = tabulate(make_rope_table(Shape::kRope, 10000, std::nullopt), 160 * kPageSize);
    device_cos_sin_ = DeviceArray<float>(cos_sin_);
  }
  // Tests of a shape follow one another: the weights of one at a time.
  void SetUp() override {
    if (weights_ != nullptr && weights_of_ == GetParam().kind) return;
    weights_.reset();
    weights_ = std::make_unique<Weights>(GetParam());
    weights_of_ = GetParam().kind;
    const auto bytes = static_cast<size_t>(decode_layers_exchange_bytes(weights_of_));
    exchange_ = DeviceArray<std::byte>(std::vector<std::byte>(bytes));
  }
  static void TearDownTestSuite() {
    weights_.reset();
    exchange_ = {};
    device_cos_sin_ = {};
  }

  OracleSequence sequence_at(int32_t position) const {
    OracleSequence sequence;
    sequence.layout = {GetParam().format, Shape::kLatent, Shape::kRope};
    const auto pages = static_cast<int32_t>(GetParam().pages());
    sequence.layer_bytes = (pages + 1) * sequence.layout.page_bytes();
    // 27 has no factor in common with the number of pages: all but the first are used once.
    for (int32_t page = 0; page < pages; ++page) {
      sequence.block_table.push_back(page * 27 % pages + 1);
    }
    sequence.position = position;
    return sequence;
  }

  // The cache before a test plants its keys: generated once for each format.
  static const std::vector<std::byte>& random_rows(const OracleSequence& sequence) {
    static std::map<std::pair<CacheFormat, int64_t>, std::vector<std::byte>> made;
    const LatentLayout& layout = sequence.layout;
    std::vector<std::byte>& cache = made[{layout.format, sequence.layer_bytes}];
    if (!cache.empty()) return cache;
    std::mt19937 random(3);
    const int64_t rows = kLayers * sequence.layer_bytes / layout.row_bytes();
    const std::vector<float> latent = random_f32(1 << 20, 1, random),
                             rope = random_f32(1 << 20, 1, random);
    cache.resize(static_cast<size_t>(rows * layout.row_bytes()));
    for (int64_t row = 0; row < rows; ++row) {
      encode_row(layout, latent.data() + random() % ((1 << 20) - Shape::kLatent),
                 rope.data() + random() % ((1 << 20) - Shape::kRope),
                 cache.data() + row * layout.row_bytes());
    }
    return cache;
  }

  Found launch(const OracleSequence& sequence, const std::vector<float>& residual,
               const std::vector<uint16_t>& delta_in, const std::vector<std::byte>& cache,
               const OtherRanks* others) const;
  void compare(int32_t position, OtherRanks* others = nullptr);

  static std::unique_ptr<Weights> weights_;
  static DecodeLayersKind weights_of_;
  static DeviceArray<std::byte> exchange_;
  static std::vector<float> cos_sin_;
  static DeviceArray<float> device_cos_sin_;
};

std::unique_ptr<Weights> DecodeLayersCuda::weights_;
DecodeLayersKind DecodeLayersCuda::weights_of_ = DecodeLayersKind::kNone;
DeviceArray<std::byte> DecodeLayersCuda::exchange_;
std::vector<float> DecodeLayersCuda::cos_sin_;
DeviceArray<float> DecodeLayersCuda::device_cos_sin_;

Found DecodeLayersCuda::launch(const OracleSequence& sequence, const std::vector<float>& residual,
                               const std::vector<uint16_t>& delta_in,
                               const std::vector<std::byte>& cache,
                               const OtherRanks* others) const {
  const DeviceArray<std::byte> device_cache(cache);
  const DeviceArray<float> device_residual(residual);
  const DeviceArray<uint16_t> device_delta(delta_in);
  const DeviceArray<uint16_t> delta_out(std::vector<uint16_t>(residual.size(), 0x7FC0));
  const DeviceArray<int32_t> device_position(std::vector<int32_t>{sequence.position}),
      block_table(sequence.block_table);
  const DeviceArray<int64_t> slot(std::vector<int64_t>{sequence.slot(sequence.position)});
  if (others != nullptr) others->enqueue();
  decode_layers({.kind = GetParam().kind,
                 .layers = weights_->layers(),
                 .num_layers = kLayers,
                 .residual = device_residual.data(),
                 .delta_in = others == nullptr ? device_delta.data() : nullptr,
                 .delta_out = delta_out.data(),
                 .eps = static_cast<float>(Shape::kEps),
                 .inner_eps = static_cast<float>(Shape::kEps),
                 .cos_sin = device_cos_sin_.data(),
                 .position = device_position.data(),
                 .slot = slot.data(),
                 .block_table = block_table.data(),
                 .pages = device_cache.data(),
                 .layer_bytes = sequence.layer_bytes,
                 .format = GetParam().format,
                 .softmax_scale = static_cast<float>(kSoftmaxScale),
                 .gate = GetParam().gate(),
                 .exchange = exchange_.data(),
                 .peers = others == nullptr ? PeerRank{} : others->group.rank(others->own)},
                nullptr);
  check(cudaDeviceSynchronize(), "the layers");
  Found found{device_residual.to_host(), widen(delta_out.to_host()), device_cache.to_host(), {}};
  for (int64_t l = 0; l < kLayers; ++l) {
    const auto row =
        found.cache.begin() + static_cast<std::ptrdiff_t>(sequence.row_at(l, sequence.position));
    found.rows.emplace_back(row, row + static_cast<std::ptrdiff_t>(sequence.layout.row_bytes()));
  }
  return found;
}

// others: the ranks that add to the layers' sums; null: none.
void DecodeLayersCuda::compare(int32_t position, OtherRanks* others) {
  const OracleSequence sequence = sequence_at(position);
  const Shape shape = GetParam().shape();
  const double least_margin = GetParam().least_margin();
  std::mt19937 random(static_cast<uint32_t>(position) + 1);
  const std::vector<std::byte>& rows = random_rows(sequence);
  const OracleNeedles no_needles{std::vector<int32_t>(Shape::kHeads, -1)};
  std::vector<std::byte> cache;
  std::vector<float> residual;
  OracleResult expected;
  Found found;
  std::vector<double> sum;
  std::vector<std::vector<double>> other_parts;
  for (int draw = 0; draw < 40 && expected.margin < least_margin; ++draw) {
    residual = random_f32(shape.hidden, 1, random);
    const std::vector<uint16_t> delta_in = random_bf16(shape.hidden, 0.5f, random);
    sum.assign(residual.begin(), residual.end());
    if (others != nullptr) {
      other_parts = others->draw(random);
    } else {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += from_bf16(delta_in[i]);
    }
    cache = rows;
    expected = run_oracle(shape, weights_->oracle(), sum, sequence, needles_for(position), cos_sin_,
                          kSoftmaxScale, least_margin, cache, {}, other_parts);
    if (expected.margin < least_margin) continue;
    found = launch(sequence, residual, delta_in, cache, others);
    expected = run_oracle(shape, weights_->oracle(), sum, sequence, no_needles, cos_sin_,
                          kSoftmaxScale, least_margin, cache, found.rows, other_parts);
  }
  ASSERT_GE(expected.margin, least_margin) << "no token whose experts are sure";

  // Compares what the layers added to the residual; the residual itself would hide errors.
  std::vector<double> added, expected_added;
  for (size_t i = 0; i < sum.size(); ++i) {
    added.push_back(double{found.residual[i]} - sum[i]);
    expected_added.push_back(expected.residual[i] - sum[i]);
  }
  const Error in_residual = error_of(added, expected_added),
              in_delta = error_of(found.delta, expected.delta);
  std::printf("%5d: residual %.4f off, %.4f at most; experts %.4f, %.4f; margin %.4f\n", position,
              in_residual.all, in_residual.most, in_delta.all, in_delta.most, expected.margin);
  EXPECT_LE(in_residual.all, kMostError) << position;
  EXPECT_LE(in_residual.most, kMostErrorOfOne) << position;
  EXPECT_LE(in_delta.all, kMostError) << position;
  EXPECT_LE(in_delta.most, kMostErrorOfOne) << position;

  for (int64_t e = 0; others != nullptr && e < OtherRanks::kExchanges; ++e) {
    const int first = others->own == 0 ? 1 : 0;
    const std::vector<float> received = others->received_by(first, e);
    const Error in_part = error_of(received, expected.parts[static_cast<size_t>(e)]);
    EXPECT_LE(in_part.all, kMostError) << position << ", exchange " << e;
    for (int r = first + 1; r < others->group.size(); ++r) {
      if (r == others->own) continue;
      EXPECT_EQ(others->received_by(r, e), received) << "rank " << r;
    }
  }

  // Each layer's cache row of the token equals the float64 row up to the format's rounding. No
  // other byte is written.
  std::vector<std::byte>& written = found.cache;
  const LatentLayout& layout = sequence.layout;
  const auto row_bytes = static_cast<std::ptrdiff_t>(layout.row_bytes());
  const double most = layout.format == CacheFormat::kBF16   ? 0.01
                      : layout.format == CacheFormat::kE5M2 ? 0.08
                                                            : 0.04;
  for (int64_t l = 0; l < kLayers; ++l) {
    const auto at = static_cast<std::ptrdiff_t>(sequence.row_at(l, position));
    const auto decoded = [&](const std::byte* row) {
      std::vector<float> latent(Shape::kLatent), rope(Shape::kRope);
      decode_row(layout, row, latent.data(), rope.data());
      latent.insert(latent.end(), rope.begin(), rope.end());
      return std::vector<double>(latent.begin(), latent.end());
    };
    const Error in_row = error_of(decoded(found.rows[static_cast<size_t>(l)].data()),
                                  decoded(expected.rows[static_cast<size_t>(l)].data()));
    EXPECT_LE(in_row.all, most) << "position " << position << ", layer " << l;
    std::copy_n(cache.begin() + at, row_bytes, written.begin() + at);
  }
  const auto [first, was] = std::mismatch(written.begin(), written.end(), cache.begin());
  EXPECT_TRUE(first == written.end())
      << "position " << position << ": byte " << first - written.begin() << ", row "
      << (first - written.begin()) / row_bytes << " of all layers' is another";
}

TEST_P(DecodeLayersCuda, EqualFloat64AtAnyLength) {
  for (const int32_t position :
       {0, 1, 2, 15, 16, 17, 63, 64, 127, 128, 129, 1023, 1024, 1025, 2048, 3001, 4094, 4095}) {
    compare(position);
  }
  if (GetParam().is_v3()) return;
  for (const int32_t position : {4096, 4097, 8191, 8192, 10001}) compare(position);
}

// A short case for sanitizers, which are slow.
TEST_P(DecodeLayersCuda, ShortText) { compare(130); }

// Sums over ranks within the launch, in several launches of one group: the layers as with the whole
// sums, and every other rank has this rank's parts.
TEST_P(DecodeLayersCuda, SumsOverRanks) {
  if (!GetParam().is_v3()) GTEST_SKIP() << "V2-Lite's launch meets no ranks";
  for (const auto& [ranks, own] : {std::pair{2, 1}, {4, 0}, {8, 5}}) {
    OtherRanks others(ranks, own, GetParam().shape().hidden);
    for (const int32_t position : {130, 17, 1024}) {
      SCOPED_TRACE(testing::Message() << "rank " << own << " of " << ranks);
      compare(position, &others);
      ASSERT_FALSE(others.group.stopped());
    }
  }
}

constexpr DecodeLayersKind kV3 = DecodeLayersKind::kV3Eighth,
                           kV2Bf16 = DecodeLayersKind::kV2LiteBf16,
                           kV2E4M3 = DecodeLayersKind::kV2LiteE4M3;

INSTANTIATE_TEST_SUITE_P(
    Formats, DecodeLayersCuda,
    testing::Values(Form{"V3EighthFp8Scaled", kV3, CacheFormat::kFp8Scaled},
                    Form{"V3EighthBf16", kV3, CacheFormat::kBF16},
                    Form{"V3EighthE4M3", kV3, CacheFormat::kE4M3},
                    Form{"V3EighthE5M2", kV3, CacheFormat::kE5M2},
                    Form{"V2LiteInBf16Bf16", kV2Bf16, CacheFormat::kBF16},
                    Form{"V2LiteInBf16Fp8Scaled", kV2Bf16, CacheFormat::kFp8Scaled},
                    Form{"V2LiteInBf16E4M3", kV2Bf16, CacheFormat::kE4M3},
                    Form{"V2LiteInBf16E5M2", kV2Bf16, CacheFormat::kE5M2},
                    Form{"V2LiteInE4M3Bf16", kV2E4M3, CacheFormat::kBF16},
                    Form{"V2LiteInE4M3Fp8Scaled", kV2E4M3, CacheFormat::kFp8Scaled},
                    Form{"V2LiteInE4M3E4M3", kV2E4M3, CacheFormat::kE4M3},
                    Form{"V2LiteInE4M3E5M2", kV2E4M3, CacheFormat::kE5M2}),
    [](const auto& form) { return std::string(form.param.name); });

}  // namespace
}  // namespace fathom::cuda
