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
#include <optional>
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
constexpr int kMostDraws = 200;

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
// runs and of pages, each once. `share` of `shares`: the heads of one of several tokens that attend
// to the same sequence.
OracleNeedles needles_for(int32_t position, size_t share = 0, size_t shares = 1) {
  OracleNeedles needles;
  for (const int32_t key :
       {position - 1, position - 2, position - 16, 0, 1, 15, 16, 63, 64, 127, 128, position / 2,
        position / 3, (position - 1) / 64 * 64, (position - 1) / 128 * 128 + 17}) {
    const bool is_new =
        std::find(needles.keys.begin(), needles.keys.end(), key) == needles.keys.end();
    needles.keys.push_back(is_new && key >= 0 && key < position ? key : -1);
  }
  needles.keys.push_back(-1);  // the last head
  for (size_t head = 0; head < needles.keys.size(); ++head) {
    if (head % shares != share) needles.keys[head] = -1;
  }
  needles.far_background = position > 20 && share + 1 == shares;
  return needles;
}

// Launches of ranks wait for one another: nothing may load a kernel meanwhile. Read when the device
// is first used.
[[maybe_unused]] const int kLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 1);

// The other ranks of a group, in which rank `own` runs the layers: what they add to each sum.
struct OtherRanks {
  static constexpr int64_t kExchanges = 2 * kLayers - 1;

  OtherRanks(int ranks, int own_rank, int64_t num_rows, int64_t hidden)
      : own(own_rank),
        rows(num_rows),
        n(hidden),
        group(std::vector<int>(static_cast<size_t>(ranks), 0), rows, hidden,
              std::chrono::seconds(5)),
        parts(ranks * rows * kExchanges * hidden),
        received(parts.size()) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  }
  ~OtherRanks() { cudaStreamDestroy(stream); }
  OtherRanks(const OtherRanks&) = delete;
  OtherRanks& operator=(const OtherRanks&) = delete;

  // Draws parts; returns their sums, [row][exchange][n].
  std::vector<std::vector<std::vector<double>>> draw(std::mt19937& random) {
    const std::vector<uint16_t> bits = random_bf16(parts.size(), 0.3f, random);
    parts.copy_from(bits);
    const std::vector<double> zeros(static_cast<size_t>(n));
    std::vector<std::vector<std::vector<double>>> sums(
        static_cast<size_t>(rows), std::vector<std::vector<double>>(kExchanges, zeros));
    for (int64_t i = 0; i < std::ssize(bits); ++i) {
      const int64_t exchange = i / n % kExchanges, row = i / n / kExchanges % rows;
      if (i / n / kExchanges / rows == own) continue;
      sums[static_cast<size_t>(row)][static_cast<size_t>(exchange)][static_cast<size_t>(i % n)] +=
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
                         .rows = static_cast<int32_t>(rows),
                         .n = static_cast<int32_t>(n)},
                        stream);
  }
  // What rank r has received of one exchange.
  std::vector<float> received_by(int r, int64_t row, int64_t exchange) const {
    const std::vector<float> all = widen(received.to_host());
    const auto begin = all.begin() + ((r * rows + row) * kExchanges + exchange) * n;
    return {begin, begin + n};
  }

  const int own;
  const int64_t rows, n;
  PeerGroup group;
  DeviceArray<uint16_t> parts, received;  // [ranks, rows, exchanges, n]
  cudaStream_t stream = nullptr;
};

// What a launch has left, by token.
struct Found {
  std::vector<float> residual, delta;
  std::vector<std::vector<std::byte>> rows;  // the token's in the cache, of each layer
};

// Tokens of a launch: at the end of their sequences, consecutive ones of a sequence together.
using Tokens = std::vector<OracleSequence>;

bool are_of_one_sequence(const OracleSequence& a, const OracleSequence& b) {
  return a.block_table == b.block_table;
}

// Tokens of token r's sequence: the first one, and how many.
struct Neighbours {
  size_t first = 0, count = 0;
};
Neighbours neighbours_of(const Tokens& tokens, size_t r) {
  Neighbours found{r, 0};
  while (found.first > 0 && are_of_one_sequence(tokens[found.first - 1], tokens[r])) --found.first;
  const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(found.first);
  found.count = static_cast<size_t>(std::count_if(
      begin, tokens.end(), [&](const auto& other) { return are_of_one_sequence(other, *begin); }));
  return found;
}

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

  // number: of sequences() sequences, which have as many pages each.
  OracleSequence sequence_at(int32_t position, int32_t number = 0) const {
    OracleSequence sequence;
    sequence.layout = {GetParam().format, Shape::kLatent, Shape::kRope};
    constexpr auto kPages = static_cast<int32_t>(Form::kPages);
    sequence.layer_bytes = (sequences() * kPages + 1) * sequence.layout.page_bytes();
    // 27 has no factor in common with the number of pages: all but the first are used once.
    for (int32_t page = 0; page < kPages; ++page) {
      sequence.block_table.push_back((page + number * kPages) * 27 % (sequences() * kPages) + 1);
    }
    sequence.position = position;
    return sequence;
  }

  static int32_t sequences() {
    return static_cast<int32_t>(most_decode_layers_rows(GetParam().kind));
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

  // Rewrites the cache.
  std::vector<Found> launch(const Tokens& tokens, const std::vector<std::vector<float>>& residuals,
                            const std::vector<std::vector<uint16_t>>& deltas,
                            std::vector<std::byte>& cache, const OtherRanks* others) const;
  // others: the ranks that add to the layers' sums; null: none. spoilt: of a sequence's tokens,
  // those whose cached keys are NaN.
  void compare_tokens(const Tokens& tokens, OtherRanks* others, const std::vector<bool>& spoilt);
  void compare(int32_t position) { compare({{position, 1}}); }
  // A sequence's first token, and how many follow one another.
  using Lengths = std::vector<std::pair<int32_t, int32_t>>;
  void compare(const Lengths& lengths, OtherRanks* others = nullptr,
               std::optional<size_t> spoilt_sequence = std::nullopt) {
    SCOPED_TRACE(testing::PrintToString(lengths));
    Tokens tokens;
    std::vector<bool> spoilt;
    for (size_t number = 0; number < lengths.size(); ++number) {
      const auto [first, count] = lengths[number];
      for (int32_t i = 0; i < count; ++i) {
        tokens.push_back(sequence_at(first + i, static_cast<int32_t>(number)));
        spoilt.push_back(spoilt_sequence == number);
      }
    }
    compare_tokens(tokens, others, spoilt);
  }

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

template <typename T>
std::vector<T> joined(const std::vector<std::vector<T>>& parts) {
  std::vector<T> all;
  for (const std::vector<T>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Part number `at` of `count` equal ones.
std::vector<float> part_of(const std::vector<float>& all, size_t at, size_t count) {
  const auto size = static_cast<std::ptrdiff_t>(all.size() / count);
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(at) * size;
  return {begin, begin + size};
}

std::vector<Found> DecodeLayersCuda::launch(const Tokens& tokens,
                                            const std::vector<std::vector<float>>& residuals,
                                            const std::vector<std::vector<uint16_t>>& deltas,
                                            std::vector<std::byte>& cache,
                                            const OtherRanks* others) const {
  const DeviceArray<std::byte> device_cache(cache);
  const DeviceArray<float> residual(joined(residuals));
  const DeviceArray<uint16_t> delta_in(joined(deltas)),
      delta_out(std::vector<uint16_t>(static_cast<size_t>(residual.size()), 0x7FC0));
  std::vector<int32_t> positions, tables, starts;
  std::vector<int64_t> slots;
  for (const OracleSequence& token : tokens) {
    positions.push_back(token.position);
    slots.push_back(token.slot(token.position));
    if (starts.empty() || neighbours_of(tokens, starts.size()).first == starts.size()) {
      starts.push_back(static_cast<int32_t>(tables.size()));
      tables.insert(tables.end(), token.block_table.begin(), token.block_table.end());
    } else {
      starts.push_back(starts.back());
    }
  }
  const DeviceArray<int32_t> device_positions(positions), block_tables(tables),
      table_starts(starts);
  const DeviceArray<int64_t> device_slots(slots);
  if (others != nullptr) others->enqueue();
  decode_layers({.kind = GetParam().kind,
                 .layers = weights_->layers(),
                 .num_layers = kLayers,
                 .rows = static_cast<int32_t>(tokens.size()),
                 .residual = residual.data(),
                 .delta_in = others == nullptr ? delta_in.data() : nullptr,
                 .delta_out = delta_out.data(),
                 .eps = static_cast<float>(Shape::kEps),
                 .inner_eps = static_cast<float>(Shape::kEps),
                 .cos_sin = device_cos_sin_.data(),
                 .positions = device_positions.data(),
                 .slots = device_slots.data(),
                 .block_tables = block_tables.data(),
                 .table_starts = table_starts.data(),
                 .pages = device_cache.data(),
                 .layer_bytes = tokens[0].layer_bytes,
                 .format = GetParam().format,
                 .softmax_scale = static_cast<float>(kSoftmaxScale),
                 .gate = GetParam().gate(),
                 .exchange = exchange_.data(),
                 .peers = others == nullptr ? PeerRank{} : others->group.rank(others->own)},
                nullptr);
  check(cudaDeviceSynchronize(), "the layers");
  cache = device_cache.to_host();
  const std::vector<float> residual_out = residual.to_host(), delta = widen(delta_out.to_host());
  std::vector<Found> found;
  for (size_t r = 0; r < tokens.size(); ++r) {
    const OracleSequence& token = tokens[r];
    Found& of = found.emplace_back(
        Found{part_of(residual_out, r, tokens.size()), part_of(delta, r, tokens.size()), {}});
    for (int64_t l = 0; l < kLayers; ++l) {
      const auto row = cache.begin() + static_cast<std::ptrdiff_t>(token.row_at(l, token.position));
      of.rows.emplace_back(row, row + static_cast<std::ptrdiff_t>(token.layout.row_bytes()));
    }
  }
  return found;
}

void put_rows(const OracleSequence& token, const std::vector<std::vector<std::byte>>& rows,
              std::vector<std::byte>& cache) {
  for (size_t l = 0; l < rows.size(); ++l) {
    std::ranges::copy(rows[l], cache.begin() + static_cast<std::ptrdiff_t>(token.row_at(
                                                   static_cast<int64_t>(l), token.position)));
  }
}

// Makes a sequence's rows at positions `first` to `end` - 1 NaN, which all ones are in every
// format.
void spoil_rows(const OracleSequence& sequence, int32_t first, int32_t end,
                std::vector<std::byte>& cache) {
  for (int64_t l = 0; l < kLayers; ++l) {
    for (int32_t key = first; key < end; ++key) {
      const auto at = static_cast<std::ptrdiff_t>(sequence.row_at(l, key));
      std::fill_n(cache.begin() + at, sequence.layout.row_bytes(), std::byte{0xFF});
    }
  }
}

void DecodeLayersCuda::compare_tokens(const Tokens& tokens, OtherRanks* others,
                                      const std::vector<bool>& spoilt) {
  const Shape shape = GetParam().shape();
  const double least_margin = GetParam().least_margin();
  const size_t count = tokens.size();
  std::mt19937 random(static_cast<uint32_t>(tokens[0].position) + 1);
  const std::vector<std::byte>& rows = random_rows(tokens[0]);
  const OracleNeedles no_needles{std::vector<int32_t>(Shape::kHeads, -1)};
  std::vector<std::byte> cache, written;
  std::vector<OracleResult> expected(count);
  std::vector<Found> found;
  std::vector<std::vector<double>> sums(count);
  std::vector<std::vector<std::vector<double>>> other_parts(count);
  double margin = 0;
  // The expected result of token r, whose sequence's later tokens see what they make of its cache
  // row. plants: with its needles.
  const auto expect = [&](size_t r, bool plants, std::vector<std::byte>& seen) {
    const auto [first, shares] = neighbours_of(tokens, r);
    expected[r] =
        run_oracle(shape, weights_->oracle(), sums[r], tokens[r],
                   plants ? needles_for(tokens[r].position, r - first, shares) : no_needles,
                   cos_sin_, kSoftmaxScale, least_margin, seen,
                   plants ? std::vector<std::vector<std::byte>>{} : found[r].rows, other_parts[r]);
    if (shares > 1) put_rows(tokens[r], plants ? expected[r].rows : found[r].rows, seen);
    margin = std::min(margin, expected[r].margin);
    return expected[r].margin >= least_margin;
  };
  for (int draw = 0; draw < kMostDraws && margin < least_margin; ++draw) {
    std::vector<std::vector<float>> residuals(count);
    std::vector<std::vector<uint16_t>> deltas(count);
    if (others != nullptr) other_parts = others->draw(random);
    cache = rows;
    for (size_t r = 0; r < count; ++r) {
      for (int draw_of_token = 0; draw_of_token < kMostDraws; ++draw_of_token) {
        residuals[r] = random_f32(shape.hidden, 1, random);
        deltas[r] = random_bf16(shape.hidden, 0.5f, random);
        sums[r].assign(residuals[r].begin(), residuals[r].end());
        for (size_t i = 0; others == nullptr && i < sums[r].size(); ++i) {
          sums[r][i] += from_bf16(deltas[r][i]);
        }
        if (expect(r, true, cache)) break;
      }
    }
    // Slots that the launch has to write, and those behind them in the last page.
    for (size_t r = 0; r < count; ++r) {
      const int32_t position = tokens[r].position;
      spoil_rows(tokens[r], position, static_cast<int32_t>((position / kPageSize + 1) * kPageSize),
                 cache);
      if (spoilt[r]) spoil_rows(tokens[r], 0, position, cache);
    }
    written = cache;
    found = launch(tokens, residuals, deltas, written, others);
    // A later neighbour's needles have changed what the earlier ones attend to.
    margin = 1e9;
    std::vector<std::byte> seen = cache;
    for (size_t r = 0; r < count && (spoilt[r] || expect(r, false, seen)); ++r) {
    }
  }
  ASSERT_GE(margin, least_margin) << "no tokens whose experts are sure";

  for (size_t r = 0; r < count; ++r) {
    const int32_t position = tokens[r].position;
    SCOPED_TRACE(testing::Message() << "token " << r << " at " << position);
    if (spoilt[r]) {
      EXPECT_TRUE(std::ranges::all_of(found[r].residual, [](float x) { return std::isnan(x); }));
      put_rows(tokens[r], found[r].rows, cache);
      continue;
    }
    // Compares what the layers added to the residual; the residual itself would hide errors.
    std::vector<double> added, expected_added;
    for (size_t i = 0; i < sums[r].size(); ++i) {
      added.push_back(double{found[r].residual[i]} - sums[r][i]);
      expected_added.push_back(expected[r].residual[i] - sums[r][i]);
    }
    const Error in_residual = error_of(added, expected_added),
                in_delta = error_of(found[r].delta, expected[r].delta);
    std::printf("%5d: residual %.4f off, %.4f at most; experts %.4f, %.4f; margin %.4f\n", position,
                in_residual.all, in_residual.most, in_delta.all, in_delta.most, expected[r].margin);
    EXPECT_LE(in_residual.all, kMostError);
    EXPECT_LE(in_residual.most, kMostErrorOfOne);
    EXPECT_LE(in_delta.all, kMostError);
    EXPECT_LE(in_delta.most, kMostErrorOfOne);

    for (int64_t e = 0; others != nullptr && e < OtherRanks::kExchanges; ++e) {
      const auto row = static_cast<int64_t>(r);
      const int first = others->own == 0 ? 1 : 0;
      const std::vector<float> received = others->received_by(first, row, e);
      const Error in_part = error_of(received, expected[r].parts[static_cast<size_t>(e)]);
      EXPECT_LE(in_part.all, kMostError) << "exchange " << e;
      for (int other = first + 1; other < others->group.size(); ++other) {
        if (other == others->own) continue;
        EXPECT_EQ(others->received_by(other, row, e), received) << "rank " << other;
      }
    }

    // Each layer's cache row of the token equals the float64 row up to the format's rounding.
    const LatentLayout& layout = tokens[r].layout;
    const double most = layout.format == CacheFormat::kBF16   ? 0.01
                        : layout.format == CacheFormat::kE5M2 ? 0.08
                                                              : 0.04;
    for (size_t l = 0; l < kLayers; ++l) {
      const auto decoded = [&](const std::byte* row) {
        std::vector<float> latent(Shape::kLatent), rope(Shape::kRope);
        decode_row(layout, row, latent.data(), rope.data());
        latent.insert(latent.end(), rope.begin(), rope.end());
        return std::vector<double>(latent.begin(), latent.end());
      };
      const Error in_row =
          error_of(decoded(found[r].rows[l].data()), decoded(expected[r].rows[l].data()));
      EXPECT_LE(in_row.all, most) << "layer " << l;
    }
    put_rows(tokens[r], found[r].rows, cache);
  }
  // No other byte is written.
  const auto [first, was] = std::mismatch(written.begin(), written.end(), cache.begin());
  EXPECT_TRUE(first == written.end())
      << "position " << tokens[0].position << ": byte " << first - written.begin() << ", row "
      << (first - written.begin()) / tokens[0].layout.row_bytes() << " of all layers' is another";
}

TEST_P(DecodeLayersCuda, EqualFloat64AtAnyLength) {
  for (const int32_t position :
       {0,    1,    2,    15,   16,   17,   63,   64,   127,  128,  129,  1023,
        1024, 1025, 2048, 3001, 4094, 4095, 4096, 4097, 8191, 8192, 10001}) {
    compare(position);
  }
}

// A short case for sanitizers, which are slow.
TEST_P(DecodeLayersCuda, ShortText) { compare(130); }

// Two tokens, of two sequences of any lengths or neighbours of one.
TEST_P(DecodeLayersCuda, TwoTokens) {
  for (const auto& [first, second] :
       {std::pair{0, 1}, {17, 0}, {15, 16}, {130, 63}, {64, 1025}, {2048, 3001}, {6001, 4094}}) {
    compare({{first, 1}, {second, 1}});
  }
  for (const int32_t position : {0, 1, 15, 16, 62, 63, 64, 127, 130, 1023, 3001, 4094}) {
    compare({{position, 2}});
  }
}

// A short case for sanitizers.
TEST_P(DecodeLayersCuda, TwoTokensOfShortText) {
  compare({{130, 2}});
  compare({{17, 1}, {130, 1}});
}

// Three and four tokens of sequences of any lengths, each of which may have several.
TEST_P(DecodeLayersCuda, FourTokens) {
  if (sequences() < 4) GTEST_SKIP() << "the shape's launch takes two tokens";
  for (const Lengths& lengths : {Lengths{{0, 1}, {1, 1}, {15, 1}, {16, 1}},
                                 {{130, 1}, {63, 1}, {17, 1}, {0, 1}},
                                 {{64, 1}, {1025, 1}, {130, 1}, {2048, 1}},
                                 {{6001, 1}, {17, 1}, {3001, 1}, {1023, 1}},
                                 {{130, 1}, {17, 1}, {1025, 1}},
                                 {{0, 1}, {2048, 1}, {63, 1}},
                                 {{130, 2}, {1025, 2}},
                                 {{1025, 2}, {62, 1}},
                                 {{17, 1}, {127, 2}},
                                 {{63, 1}, {130, 3}},
                                 {{1023, 3}, {4095, 1}},
                                 {{16, 1}, {15, 2}, {130, 1}}}) {
    compare(lengths);
  }
  for (const int32_t position : {0, 1, 14, 15, 16, 61, 63, 64, 127, 130, 1023, 2046, 4092}) {
    compare({{position, 3}});
    compare({{position, 4}});
  }
}

// A short case for sanitizers.
TEST_P(DecodeLayersCuda, FourTokensOfShortText) {
  if (sequences() < 4) GTEST_SKIP() << "the shape's launch takes two tokens";
  compare({{130, 3}});
  compare({{17, 1}, {130, 2}, {64, 1}});
}

// A sequence whose cached keys are NaN leaves the launch's other tokens alone.
TEST_P(DecodeLayersCuda, NaNStaysInItsSequence) {
  std::vector<Lengths> all = {{{130, 1}, {17, 1}}, {{63, 1}, {1025, 1}}};
  if (sequences() >= 4) {
    all.push_back({{17, 1}, {130, 1}, {64, 1}, {1025, 1}});
    all.push_back({{130, 2}, {62, 2}});
  }
  for (const Lengths& lengths : all) {
    for (size_t spoilt = 0; spoilt < lengths.size(); ++spoilt) compare(lengths, nullptr, spoilt);
  }
}

// Launches of different numbers of tokens take turns: each has memory of its own.
TEST_P(DecodeLayersCuda, NumbersOfTokensInTurn) {
  for (int turn = 0; turn < 2; ++turn) {
    compare(40);
    compare({{130, 1}, {17, 1}});
    compare(130);
    compare({{130, 2}});
    if (sequences() < 4) continue;
    compare({{40, 1}, {17, 1}, {130, 1}, {64, 1}});
    compare({{40, 3}});
    compare({{130, 4}});
  }
}

// Sums over ranks within the launch, in several launches of one group: the layers as with the whole
// sums, and every other rank has this rank's parts.
TEST_P(DecodeLayersCuda, SumsOverRanks) {
  if (!GetParam().is_v3()) GTEST_SKIP() << "V2-Lite's launch meets no ranks";
  for (const auto& [ranks, own] : {std::pair{2, 1}, {4, 0}, {8, 5}}) {
    SCOPED_TRACE(testing::Message() << "rank " << own << " of " << ranks);
    for (int32_t tokens = 1; tokens <= sequences(); ++tokens) {
      OtherRanks others(ranks, own, tokens, GetParam().shape().hidden);
      for (const int32_t position : {17, 1024}) {
        compare({{position, tokens}}, &others);
        ASSERT_FALSE(others.group.stopped());
      }
    }
  }
}

constexpr DecodeLayersKind kV3 = DecodeLayersKind::kV3Tp8, kV2Bf16 = DecodeLayersKind::kV2LiteBf16,
                           kV2E4M3 = DecodeLayersKind::kV2LiteE4M3;

INSTANTIATE_TEST_SUITE_P(
    Formats, DecodeLayersCuda,
    testing::Values(Form{"V3Tp8Fp8Scaled", kV3, CacheFormat::kFp8Scaled},
                    Form{"V3Tp8Bf16", kV3, CacheFormat::kBF16},
                    Form{"V3Tp8E4M3", kV3, CacheFormat::kE4M3},
                    Form{"V3Tp8E5M2", kV3, CacheFormat::kE5M2},
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
