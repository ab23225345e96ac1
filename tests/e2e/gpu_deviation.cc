#include "e2e/gpu_deviation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "e2e/gpu_fixture.h"
#include "engine/model_runner.h"

namespace fathom {
namespace {

bool operator==(const SampledToken& a, const SampledToken& b) {
  return a.id == b.id && a.logprob == b.logprob && a.top == b.top;
}

}  // namespace

std::unique_ptr<Runner> on_cpu(const Checkpoint& checkpoint, DType compute, CacheFormat format) {
  ModelRunnerOptions options;
  options.compute = compute;
  options.cache_format = format;
  options.max_batched_tokens = 2048;
  options.max_total_tokens = kGpuTestTokens;
  options.load.show_progress = false;
  auto runner = ModelRunner::create(checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  return std::move(*runner);
}

Text random_text(std::mt19937& random, size_t length, std::vector<int64_t> chunks) {
  Text text{{}, std::move(chunks)};
  for (size_t i = 0; i < length; ++i) text.ids.push_back(static_cast<int32_t>(3 + random() % 8000));
  return text;
}

std::vector<Text> random_texts(std::mt19937& random) {
  std::vector<Text> texts;
  const auto add = [&](size_t length, std::vector<int64_t> chunks) {
    texts.push_back(random_text(random, length, std::move(chunks)));
  };
  add(1, {1});
  add(40, {30, 1});         // a prompt, then decode
  add(700, {500, 150, 1});  // over a cached prefix
  add(90, {60, 4, 2, 1});   // a few new tokens over a prefix
  add(300, {299, 1});
  add(65, {64, 1});
  add(130, {7, 8, 9, 100, 1});
  for (int i = 0; i < 20; ++i)
    add(20 + random() % 50, {1 + static_cast<int64_t>(random() % 30), 1});
  return texts;
}

std::vector<std::vector<SampledToken>> run(Runner& runner, const std::vector<Text>& texts) {
  std::vector<int32_t> free(static_cast<size_t>(runner.num_pages()));
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), std::mt19937(7));
  std::vector<std::vector<int32_t>> pages(texts.size());
  size_t max_pages = 0;
  for (size_t t = 0; t < texts.size(); ++t) {
    for (int64_t p = 0; p < ceil_div(std::ssize(texts[t].ids), kPageSize); ++p) {
      pages[t].push_back(free.back());
      free.pop_back();
    }
    max_pages = std::max(max_pages, pages[t].size());
  }
  const SampleOptions greedy{.temperature = 0};
  std::vector<int64_t> done(texts.size(), 0);
  std::vector<std::vector<SampledToken>> results(texts.size());
  for (size_t step = 0;; ++step) {
    ForwardBatch batch;
    batch.max_pages = static_cast<int32_t>(max_pages);
    batch.query_start = {0};
    std::vector<size_t> owners;
    std::vector<SampleRow> rows;
    for (size_t t = 0; t < texts.size(); ++t) {
      const auto& [ids, chunks] = texts[t];
      const int64_t count =
          std::min(std::ssize(ids) - done[t], chunks[std::min(step, chunks.size() - 1)]);
      if (count == 0) continue;
      for (int64_t i = 0; i < count; ++i) {
        batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
        batch.token_ids.push_back(ids[static_cast<size_t>(done[t] + i)]);
        batch.positions.push_back(static_cast<int32_t>(done[t] + i));
        rows.push_back({.row = std::ssize(rows), .options = &greedy, .num_logprobs = 20});
        owners.push_back(t);
      }
      batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
      batch.context_lens.push_back(static_cast<int32_t>(done[t]));
      batch.prompt_lens.push_back(static_cast<int32_t>(ids.size()));
      for (size_t p = 0; p < max_pages; ++p) {
        batch.block_tables.push_back(p < pages[t].size() ? pages[t][p] : -1);
      }
      done[t] += count;
    }
    if (owners.empty()) return results;
    const auto begun = runner.begin({&batch, 1}, rows);
    FATHOM_CHECK(begun.has_value(), "{}", begun.error().message);
    const auto tokens = runner.finish();
    FATHOM_CHECK(tokens.has_value(), "{}", tokens.error().message);
    for (size_t i = 0; i < owners.size(); ++i) results[owners[i]].push_back((*tokens)[i]);
  }
}

void expect_equal(const std::vector<std::vector<SampledToken>>& actual,
                  const std::vector<std::vector<SampledToken>>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t text = 0; text < expected.size(); ++text) {
    ASSERT_EQ(actual[text].size(), expected[text].size());
    for (size_t i = 0; i < expected[text].size(); ++i) {
      ASSERT_TRUE(actual[text][i] == expected[text][i]) << "text " << text << ", position " << i;
    }
  }
}

Deviation deviation(const std::vector<std::vector<SampledToken>>& actual,
                    const std::vector<std::vector<SampledToken>>& expected, const char* what) {
  int64_t positions = 0, others = 0, pairs = 0;
  double sum = 0, most = 0;
  for (size_t t = 0; t < expected.size(); ++t) {
    EXPECT_EQ(actual[t].size(), expected[t].size());
    for (size_t i = 0; i < expected[t].size(); ++i) {
      ++positions;
      others += actual[t][i].id != expected[t][i].id;
      const std::map<int32_t, float> values(actual[t][i].top.begin(), actual[t][i].top.end());
      for (size_t k = 0; k < 5; ++k) {
        const auto [id, logprob] = expected[t][i].top[k];
        const auto found = values.find(id);
        // At the end of the list tokens may swap ranks: the token is then at most as likely as the
        // last one listed.
        const float value = found == values.end() ? actual[t][i].top.back().second : found->second;
        const double error = std::abs(value - logprob);
        ++pairs;
        sum += error;
        most = std::max(most, error);
      }
    }
  }
  const Deviation result{static_cast<double>(others) / static_cast<double>(positions),
                         sum / static_cast<double>(pairs)};
  std::printf(
      "%s: %ld positions, %.2f %% another token; log-probabilities %.4f off on average, "
      "%.3f at most\n",
      what, positions, 100 * result.other_tokens, result.logprobs, most);
  return result;
}

}  // namespace fathom
