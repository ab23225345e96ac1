#include "engine/stop_filter.h"

#include <gtest/gtest.h>

#include <random>

namespace fathom {
namespace {

struct Outcome {
  std::string text;
  std::optional<size_t> matched;
  bool operator==(const Outcome&) const = default;
};

Outcome filter(const std::vector<std::string>& stop, bool include,
               const std::vector<std::string>& pieces) {
  StopFilter filter(stop, include);
  Outcome outcome;
  for (const std::string& piece : pieces) {
    outcome.matched = filter.push(piece, outcome.text);
    if (outcome.matched) return outcome;
  }
  filter.flush(outcome.text);
  return outcome;
}

// The rule, stated directly: the first position where any stop string is complete; the longest
// there.
Outcome expected(const std::vector<std::string>& stop, bool include, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<size_t> best;
    for (size_t i = 0; i < stop.size(); ++i) {
      if (text.substr(0, end).ends_with(stop[i]) &&
          (!best || stop[i].size() > stop[*best].size())) {
        best = i;
      }
    }
    if (best) return {text.substr(0, include ? end : end - stop[*best].size()), best};
  }
  return {text, std::nullopt};
}

TEST(StopFilter, EveryCutOfRandomTexts) {
  std::mt19937 random(3);
  const auto random_text = [&](size_t length) {
    std::string text;
    while (text.size() < length) text += "abc"[random() % 3];
    return text;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stop;
    for (size_t i = 1 + random() % 3; i > 0; --i) stop.push_back(random_text(1 + random() % 6));
    const std::string text = random_text(1 + random() % 14);
    const bool include = random() % 2 == 0;
    const Outcome want = expected(stop, include, text);
    for (size_t first = 0; first <= text.size(); ++first) {
      for (size_t second = first; second <= text.size(); ++second) {
        const Outcome got = filter(
            stop, include,
            {text.substr(0, first), text.substr(first, second - first), text.substr(second)});
        ASSERT_EQ(got.text, want.text) << text << " cut at " << first << ", " << second;
        ASSERT_EQ(got.matched.has_value(), want.matched.has_value());
        if (got.matched) {
          ASSERT_EQ(stop[*got.matched], stop[*want.matched]);
        }
      }
    }
  }
}

TEST(StopFilter, HoldsBackOnlyWhatMayBecomeAStop) {
  const std::vector<std::string> stop = {"</end>"};
  StopFilter filter(stop, false);
  std::string out;
  EXPECT_FALSE(filter.push("hello </e", out));
  EXPECT_EQ(out, "hello ");
  EXPECT_FALSE(filter.push("x<", out));
  EXPECT_EQ(out, "hello </ex");
  EXPECT_TRUE(filter.push("/end>never shown", out));
  EXPECT_EQ(out, "hello </ex");
}

TEST(StopFilter, PassedTextIsNotSearched) {
  const std::vector<std::string> stop = {"ab"};
  StopFilter filter(stop, false);
  std::string out;
  filter.pass("xaba", out);
  EXPECT_EQ(out, "xaba");
  EXPECT_FALSE(filter.push("b", out)) << "a match does not begin in passed text";
  EXPECT_TRUE(filter.push("ab", out));
  EXPECT_EQ(out, "xabab");
}

}  // namespace
}  // namespace fathom
