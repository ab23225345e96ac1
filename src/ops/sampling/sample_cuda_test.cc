// The sampler on the GPU against the CPU's: the same tokens for the same logits, every time.
#include "ops/sampling/sample_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/sampling/noise_trial_cuda.h"
#include "ops/sampling/sample.h"
#include "ops/sampling/sample_batch.h"

namespace fathom::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kDenormal = 5e-324, kLargerDenormal = 1e-310;

// One sequence's sampling of one row of logits.
struct Wish {
  SampleOptions options = {};
  std::vector<int32_t> prompt = {}, output = {}, masked = {};
  std::vector<uint32_t> allowed = {};
  uint64_t position = 0;
  int num_logprobs = -1;
  int32_t given_id = -1;
  bool is_draft = false;  // the token of draft_token()

  TokenHistory history() const {
    TokenHistory made;
    made.add_prompt(prompt);
    for (const int32_t id : output) made.add_output(id);
    return made;
  }
  SampleRow row(int64_t i, const TokenHistory& history) const {
    return {.row = i,
            .options = &options,
            .history = &history,
            .masked = masked,
            .allowed = allowed,
            .position = position,
            .num_logprobs = num_logprobs,
            .given_id = given_id};
  }
};

template <typename T>
std::vector<T> copied(std::span<const T> values) {
  std::vector<T> copy(values.begin(), values.end());
  copy.resize(std::max<size_t>(1, copy.size()));
  return copy;
}

// Logits on the device; one row for each wish.
class OnGpu {
 public:
  OnGpu(const std::vector<float>& logits, int64_t vocab, const std::vector<Wish>& wishes)
      : vocab_(vocab), stride_(round_up(vocab, 4)), logits_(std::ssize(wishes) * stride_) {
    // The gaps between the rows must not matter.
    std::vector<float> strided(static_cast<size_t>(logits_.size()), kInf);
    for (size_t i = 0; i < wishes.size(); ++i) {
      std::copy_n(logits.begin() + static_cast<int64_t>(i) * vocab, vocab,
                  strided.begin() + static_cast<int64_t>(i) * stride_);
    }
    logits_.copy_from(strided);
  }

  std::vector<SampledToken> sample_all(const std::vector<Wish>& wishes) {
    SampleBatch batch(vocab_);
    for (size_t i = 0; i < wishes.size(); ++i) {
      const TokenHistory history = wishes[i].history();
      const SampleRow row = wishes[i].row(static_cast<int64_t>(i), history);
      if (wishes[i].is_draft) {
        batch.add_draft(row.row, *row.options, row.position);
      } else {
        batch.add(row);
      }
    }
    const int64_t rows = std::ssize(wishes);
    const DeviceArray<DeviceSampleRow> device_rows(copied(batch.rows()));
    const DeviceArray<int32_t> bias_ids(copied(batch.bias_ids())),
        masked(copied(batch.masked_ids())), ids(rows), top_ids(rows * kDeviceTopLogprobs);
    const DeviceArray<float> bias_values(copied(batch.bias_values())), logprobs(rows),
        top_logprobs(rows * kDeviceTopLogprobs);
    const DeviceArray<SeenToken> seen(copied(batch.seen()));
    const DeviceArray<uint32_t> allowed(copied(batch.allowed()));
    check(cudaMemset(ids.data(), 0xFF, ids.bytes()), "poisoning");
    check(cudaMemset(logprobs.data(), 0xFF, logprobs.bytes()), "poisoning");
    check(cudaMemset(top_ids.data(), 0x55, top_ids.bytes()), "poisoning");
    check(cudaMemset(top_logprobs.data(), 0xFF, top_logprobs.bytes()), "poisoning");
    cuda::sample({.logits = logits_.data(),
                  .logits_stride = stride_,
                  .vocab = vocab_,
                  .rows = device_rows.data(),
                  .num_rows = rows,
                  .bias_ids = bias_ids.data(),
                  .bias_values = bias_values.data(),
                  .seen = seen.data(),
                  .masked_ids = masked.data(),
                  .allowed = allowed.data(),
                  .ids = ids.data(),
                  .logprobs = logprobs.data(),
                  .top_ids = top_ids.data(),
                  .top_logprobs = top_logprobs.data()},
                 nullptr);
    check(cudaDeviceSynchronize(), "sample");
    const auto host_ids = ids.to_host(), host_top_ids = top_ids.to_host();
    const auto host_logprobs = logprobs.to_host(), host_top_logprobs = top_logprobs.to_host();
    std::vector<SampledToken> tokens;
    for (int64_t i = 0; i < rows; ++i) {
      SampledToken token{.id = host_ids[i]};
      if (wishes[i].num_logprobs >= 0) token.logprob = host_logprobs[i];
      for (int64_t j = i * kDeviceTopLogprobs;
           wishes[i].num_logprobs > 0 && token.id >= 0 && j < (i + 1) * kDeviceTopLogprobs &&
           host_top_ids[j] >= 0;
           ++j) {
        token.top.emplace_back(host_top_ids[j], host_top_logprobs[j]);
      }
      tokens.push_back(token);
    }
    return tokens;
  }

 private:
  int64_t vocab_, stride_;
  DeviceArray<float> logits_;
};

SampledToken on_cpu(std::span<const float> logits, const Wish& wish) {
  const TokenHistory history = wish.history();
  SampleScratch scratch;
  SampledToken token;
  if (wish.is_draft) {
    token.id = draft_token(logits, wish.options, wish.position, scratch);
  } else {
    fathom::sample(logits, wish.row(0, history), scratch, token);
  }
  return token;
}

void expect_equal(const SampledToken& actual, const SampledToken& expected, const Wish& wish) {
  const SampleOptions& o = wish.options;
  ASSERT_EQ(actual.id, expected.id)
      << "T " << o.temperature << " top_p " << o.top_p << " top_k " << o.top_k << " min_p "
      << o.min_p << " repetition " << o.repetition_penalty << " logprobs " << wish.num_logprobs;
  if (expected.id < 0 || wish.num_logprobs < 0) return;
  const auto close = [](float a, float b) { return std::abs(a - b) <= 2e-7 * std::abs(b) + 1e-9; };
  EXPECT_TRUE(close(actual.logprob, expected.logprob)) << actual.logprob << expected.logprob;
  ASSERT_EQ(actual.top.size(), expected.top.size());
  for (size_t i = 0; i < expected.top.size(); ++i) {
    ASSERT_EQ(actual.top[i].first, expected.top[i].first) << "alternative " << i;
    EXPECT_TRUE(close(actual.top[i].second, expected.top[i].second));
  }
}

// Twice: the second time after the first one's tokens.
void compare(const std::vector<float>& logits, int64_t vocab, std::vector<Wish> wishes) {
  OnGpu gpu(logits, vocab, wishes);
  for (int launch = 0; launch < 2; ++launch) {
    const auto tokens = gpu.sample_all(wishes);
    for (int64_t i = 0; i < std::ssize(wishes); ++i) {
      SCOPED_TRACE(testing::Message() << "vocab " << vocab << " row " << i << " launch " << launch);
      const std::span<const float> row{logits.data() + i * vocab, static_cast<size_t>(vocab)};
      expect_equal(tokens[i], on_cpu(row, wishes[i]), wishes[i]);
      if (testing::Test::HasFatalFailure()) return;
      if (tokens[i].id >= 0 && wishes[i].given_id < 0) wishes[i].output.push_back(tokens[i].id);
    }
  }
}

double one_of(std::mt19937& random, std::initializer_list<double> values) {
  return values.begin()[random() % values.size()];
}

Wish random_wish(std::mt19937& random, int64_t vocab) {
  const auto some_id = [&] { return static_cast<int32_t>(random() % vocab); };
  Wish wish;
  wish.options.temperature = one_of(random, {0, 0.3, 0.7, 1, 1, 2});
  wish.options.top_p = one_of(random, {1, 1, 0.1, 0.5, 0.9, 0.999});
  wish.options.min_p = one_of(random, {0, 0, 0.02, 0.3, 1});
  wish.options.top_k = static_cast<int64_t>(
      one_of(random, {0, -1, 1, 2, 40, 200, 900, 3000, static_cast<double>(vocab) - 1, 1e9}));
  wish.options.repetition_penalty = one_of(random, {1, 1, 1.3, 0.8});
  wish.options.presence_penalty = one_of(random, {0, 0, 1.5, -2});
  wish.options.frequency_penalty = one_of(random, {0, 0, 0.7, -0.5});
  wish.options.seed = random();
  wish.options.stream = random() % 4;
  std::set<int32_t> biased;
  for (size_t i = random() % 4; i > 0; --i) biased.insert(some_id());
  for (const int32_t id : biased) {
    wish.options.logit_bias.emplace_back(id, one_of(random, {-100, -1, 2, 5}));
  }
  for (size_t i = random() % 20; i > 0; --i) wish.prompt.push_back(some_id());
  for (size_t i = random() % 20; i > 0; --i) wish.output.push_back(some_id());
  if (!wish.output.empty()) wish.output.push_back(wish.output[0]);
  for (size_t i = random() % 3; i > 0; --i) wish.masked.push_back(some_id());
  wish.position = random() % 1000;
  wish.num_logprobs = std::array{-1, -1, 0, 1, 5, 20}[random() % 6];
  if (random() % 16 == 0) wish.given_id = some_id();
  return wish;
}

std::vector<uint32_t> random_mask(std::mt19937& random, int64_t vocab) {
  std::vector<uint32_t> allowed(static_cast<size_t>(vocab / 32 + random() % 3));
  if (allowed.empty()) allowed.resize(1);
  const double share = one_of(random, {0.0005, 0.01, 0.5, 0.99, 1});
  for (uint32_t& word : allowed) {
    for (int bit = 0; bit < 32; ++bit) {
      const bool allows = std::uniform_real_distribution<>()(random) < share;
      word |= uint32_t{allows} << bit;
    }
  }
  return allowed;
}

std::vector<float> random_logits(std::mt19937& random, int64_t rows, int64_t vocab) {
  std::vector<float> logits;
  for (int64_t row = 0; row < rows; ++row) {
    const auto spread = static_cast<float>(one_of(random, {0.001, 0.1, 2, 3, 6}));
    // A thousand different values, or as many as there are tokens.
    auto values = random_f32(vocab, spread, random);
    std::normal_distribution<float> normal(0, spread);
    for (float& value : values) value = row % 2 ? value : normal(random);
    logits.insert(logits.end(), values.begin(), values.end());
  }
  return logits;
}

TEST(SampleCuda, NoiseHasTheBitsOfTheHost) {
  std::mt19937_64 random(5);
  std::vector<uint64_t> numbers;
  for (uint64_t i = 0; i < 1000; ++i) {
    numbers.push_back(2 * i + 1);
    numbers.push_back(~uint64_t{0} - 2 * i);
    numbers.push_back((uint64_t{1} << 52) + 2 * i - 999);
    numbers.push_back((uint64_t{3} << 62) + 2 * i - 999);
  }
  while (numbers.size() < 1'000'000) numbers.push_back((random() >> random() % 64) | 1);
  const int64_t count = std::ssize(numbers);
  const DeviceArray<uint64_t> device_numbers(numbers);
  const DeviceArray<double> noise(count), gumbels(count);
  for (const uint64_t position : {uint64_t{0}, uint64_t{77}, (uint64_t{9} << 40) + 3}) {
    const NoiseKey key = noise_key(random(), 3, position);
    compute_noise(key, device_numbers.data(), count, noise.data(), gumbels.data(), nullptr);
    check(cudaDeviceSynchronize(), "noise");
    const auto host_noise = noise.to_host(), host_gumbels = gumbels.to_host();
    for (int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<int32_t>(i);
      const PhiloxWords words = noise_words(key, static_cast<uint32_t>(id / kNoiseGroup));
      ASSERT_EQ(host_noise[i], token_noise(key, id, words.words[id % kNoiseGroup])) << id;
      ASSERT_EQ(host_gumbels[i], gumbel(numbers[i])) << numbers[i];
    }
  }
}

TEST(SampleCuda, EveryMixtureOfOptions) {
  std::mt19937 random(11);
  for (const auto& [vocab, rows] : {std::pair<int64_t, int64_t>{1, 100},
                                    {2, 200},
                                    {63, 400},
                                    {97, 400},
                                    {255, 400},
                                    {257, 400},
                                    {1000, 600},
                                    {5000, 800},
                                    {8192, 400},
                                    {32003, 200}}) {
    const auto logits = random_logits(random, rows, vocab);
    std::vector<Wish> wishes;
    for (int64_t i = 0; i < rows; ++i) {
      wishes.push_back(random_wish(random, vocab));
      if (random() % 3 == 0) wishes.back().allowed = random_mask(random, vocab);
    }
    compare(logits, vocab, wishes);
  }
}

TEST(SampleCuda, VocabulariesOfRealModels) {
  std::mt19937 random(12);
  for (const int64_t vocab : {102'400, 129'280}) {
    constexpr int64_t kRows = 150;
    const auto logits = random_logits(random, kRows, vocab);
    std::vector<Wish> wishes;
    for (int64_t i = 0; i < kRows; ++i) {
      wishes.push_back(random_wish(random, vocab));
      if (i % 2 == 0) {
        Wish plain;
        plain.options.temperature = one_of(random, {0.6, 1});
        plain.options.top_p = one_of(random, {1, 0.95, 0.8});
        plain.options.top_k = static_cast<int64_t>(one_of(random, {0, 50}));
        plain.options.seed = random();
        wishes.back() = plain;
      }
    }
    compare(logits, vocab, wishes);
  }
}

TEST(SampleCuda, LimitsOfOptions) {
  constexpr double kSmallest = std::numeric_limits<double>::min();
  constexpr int64_t kVocab = 997, kRows = 1500;
  std::mt19937 random(23);
  std::vector<Wish> wishes;
  std::vector<float> logits;
  for (int64_t i = 0; i < kRows; ++i) {
    Wish wish = random_wish(random, kVocab);
    SampleOptions& options = wish.options;
    options.temperature = one_of(random, {-0.0, kDenormal, kLargerDenormal, kSmallest,
                                          kGreedyTemperature, 1, std::nextafter(2.0, 0.0), 2});
    options.top_p = one_of(
        random, {kDenormal, kLargerDenormal, kSmallest, 0.5, std::nextafter(1.0, 0.0), 1, 1});
    options.min_p = one_of(
        random, {0, -0.0, kDenormal, kLargerDenormal, kSmallest, std::nextafter(1.0, 0.0), 1});
    options.top_k = std::array<int64_t, 3>{0, 1, std::numeric_limits<int64_t>::max()}[i % 3];
    options.repetition_penalty = one_of(random, {1, 0.01, 10, std::nextafter(1.0, 2.0)});
    options.presence_penalty = one_of(random, {-0.0, kDenormal, -kLargerDenormal, 2, -2});
    options.frequency_penalty = one_of(random, {-0.0, -kDenormal, kLargerDenormal, 2, -2});
    for (auto& [id, bias] : options.logit_bias) {
      bias = static_cast<float>(one_of(random, {-0.0, kDenormal, 1e-40, -1e-40, 100, -100}));
    }
    const auto spread = static_cast<float>(one_of(random, {3, 1e4, 1e30, 1e-40, 1e-45}));
    const auto row = random_f32(kVocab, spread, random);
    logits.insert(logits.end(), row.begin(), row.end());
    wishes.push_back(wish);
  }
  compare(logits, kVocab, wishes);
}

// A thousand and more equals at the border, which no candidate list holds.
TEST(SampleCuda, EqualLogits) {
  std::mt19937 random(31);
  for (const int64_t vocab : {500, 20'000, 102'400}) {
    constexpr int64_t kRows = 48;
    std::vector<float> logits;
    std::vector<Wish> wishes;
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t id = 0; id < vocab; ++id) {
        // All the same; or two, three, thirty values; zeros of both signs.
        const uint32_t kinds = std::array{1u, 2u, 3u, 30u}[i % 4];
        const float value = static_cast<float>(random() % kinds) - 1;
        logits.push_back(value == 0 && random() % 2 ? -0.0f : value);
      }
      Wish wish{.options = {.temperature = one_of(random, {0, 0.5, 1}),
                            .top_p = one_of(random, {1, 0.3, 0.95}),
                            .top_k = static_cast<int64_t>(one_of(random, {0, 3, 170, 4000})),
                            .seed = random()},
                .num_logprobs = static_cast<int>(one_of(random, {-1, 20}))};
      wishes.push_back(wish);
    }
    compare(logits, vocab, wishes);
  }
}

// Flat rows, where the two best scores of some are closer than estimates tell apart, and words at
// the ends of their range win.
TEST(SampleCuda, CloseRaces) {
  std::mt19937 random(41);
  for (const auto& [vocab, rows] :
       {std::pair<int64_t, int64_t>{40, 4000}, {1000, 6000}, {102'400, 500}}) {
    std::vector<float> logits;
    std::vector<Wish> wishes;
    for (int64_t i = 0; i < rows; ++i) {
      const auto values = random_f32(vocab, i % 2 ? 0.01f : 0.3f, random);
      logits.insert(logits.end(), values.begin(), values.end());
      Wish wish{.options = {.min_p = one_of(random, {0, 0, 0.9}), .seed = random()},
                .position = random()};
      wish.is_draft = i % 5 == 0;
      wishes.push_back(wish);
    }
    compare(logits, vocab, wishes);
  }
}

TEST(SampleCuda, DraftsTakeNoNoticeOfFilters) {
  std::mt19937 random(43);
  constexpr int64_t kRows = 400;
  for (const int64_t vocab : {7, 3000}) {
    const auto logits = random_logits(random, kRows, vocab);
    std::vector<Wish> wishes;
    for (int64_t i = 0; i < kRows; ++i) {
      Wish wish = random_wish(random, vocab);
      wish.num_logprobs = wish.given_id = -1;
      wish.is_draft = true;
      wishes.push_back(wish);
    }
    compare(logits, vocab, wishes);
  }
}

TEST(SampleCuda, NoFiniteLogitIsReported) {
  constexpr int64_t kVocab = 1000;
  std::vector<float> logits(4 * kVocab, std::nanf(""));
  std::fill_n(logits.begin() + kVocab, kVocab, -kInf);
  std::fill_n(logits.begin() + 2 * kVocab, kVocab, 0.0f);
  logits[2 * kVocab + 7] = kInf;
  logits[3 * kVocab + 999] = -3;
  for (const double temperature : {0.0, 1.0}) {
    for (const int num_logprobs : {-1, 2}) {
      for (const int32_t given_id : {-1, 3}) {
        const Wish wish{.options = {.temperature = temperature, .top_p = 0.9},
                        .num_logprobs = num_logprobs,
                        .given_id = given_id};
        std::vector<Wish> wishes(4, wish);
        wishes[3].given_id = -1;
        compare(logits, kVocab, wishes);
      }
    }
  }
}

// Small shapes for racecheck, which takes a minute.
TEST(SampleCuda, OneShortRow) {
  std::mt19937 random(7);
  compare(random_logits(random, 1, 300), 300,
          {{.options = {.temperature = 0.8, .top_p = 0.9, .top_k = 40}}});
}

// As many seen tokens as a long sequence has, in each CTA's part of the vocabulary.
TEST(SampleCuda, PenaltiesOfLongHistories) {
  std::mt19937 random(3);
  for (const int64_t vocab : {301, 102'400}) {
    constexpr int64_t kRows = 40;
    const auto logits = random_f32(kRows * vocab, 2, random);
    std::vector<Wish> wishes;
    for (int64_t i = 0; i < kRows; ++i) {
      Wish wish;
      wish.options.temperature = static_cast<double>(i % 2);
      wish.options.repetition_penalty = 1.2;
      wish.options.presence_penalty = 0.4;
      wish.options.frequency_penalty = 0.3;
      wish.options.seed = random();
      for (int k = 0; k < 5000; ++k) {
        auto& text = k % 3 == 0 ? wish.prompt : wish.output;
        text.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
      }
      wishes.push_back(wish);
    }
    compare(logits, vocab, wishes);
  }
}

}  // namespace
}  // namespace fathom::cuda
