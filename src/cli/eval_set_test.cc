#include "cli/eval_set.h"

#include <gtest/gtest.h>

#include <fstream>

namespace fathom {
namespace {

std::string write(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

constexpr const char* kGood =
    R"({"messages": [{"role": "user", "content": "1+1"}], "thinking": true, "check": "number", "expected": "2"})";

TEST(EvalSet, ReadsItemsAndStopsAtTheLimit) {
  const std::string path =
      write("eval.jsonl", std::string(kGood) + "\n\n" + kGood + "\r\n" + kGood);
  const auto all = load_eval_set(path, 0);
  ASSERT_TRUE(all.has_value()) << all.error().message;
  EXPECT_EQ(all->name, "eval");
  ASSERT_EQ(all->items.size(), 3u);
  EXPECT_EQ(all->items[1].line, 3);
  EXPECT_TRUE(all->items[0].conversation.thinking);
  EXPECT_EQ(all->items[0].check, EvalCheck::kNumber);
  EXPECT_EQ(load_eval_set(path, 2)->items.size(), 2u);
}

TEST(EvalSet, ErrorsNameFileLineAndField) {
  const auto message = [](const std::string& line) {
    const auto set = load_eval_set(write("bad.jsonl", std::string(kGood) + "\n" + line), 0);
    return set ? std::string("accepted") : set.error().message;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find("bad.jsonl line 2") != std::string::npos &&
           text.find(part) != std::string::npos;
  };
  const std::string start = R"({"messages": [{"role": "user", "content": "x"}], )";
  EXPECT_TRUE(has(message("{"), "not valid JSON")) << message("{");
  EXPECT_TRUE(has(message("7"), "expected an object")) << message("7");
  EXPECT_TRUE(has(message(start + R"("expected": 1})"), "check is missing"));
  EXPECT_TRUE(has(message(start + R"("check": "guess", "expected": 1})"), "guess"));
  EXPECT_TRUE(has(message(start + R"("check": "number"})"), "expected is missing"));
  EXPECT_TRUE(has(message(start + R"("check": "number", "expected": "x"})"), "integer"));
  EXPECT_TRUE(has(message(R"({"check": "number", "expected": 1})"), "messages"));
}

TEST(EvalSet, RefusesOtherFiles) {
  EXPECT_FALSE(load_eval_set("/nonexistent/x.jsonl", 0).has_value());
  EXPECT_FALSE(load_eval_set(write("set.csv", "a,b"), 0).has_value());
  EXPECT_FALSE(load_eval_set(write("empty.jsonl", "\n"), 0).has_value());
  EXPECT_FALSE(load_eval_set(write("empty.txt", ""), 0).has_value());
  EXPECT_FALSE(load_eval_set(testing::TempDir(), 0).has_value());
}

TEST(EvalSet, TheBundledOnesAreWhole) {
  const std::map<std::string, size_t> sizes = {
      {"arithmetic", 500}, {"retrieval", 200}, {"json", 200}, {"tools", 100}, {"prose", 0}};
  const auto paths = bundled_eval_sets();
  ASSERT_TRUE(paths.has_value());
  ASSERT_EQ(paths->size(), sizes.size());
  for (const std::string& path : *paths) {
    const auto set = load_eval_set(path, 0);
    ASSERT_TRUE(set.has_value()) << set.error().message;
    EXPECT_EQ(set->items.size(), sizes.at(set->name)) << path;
    EXPECT_EQ(set->is_prose(), set->name == "prose");
  }
}

}  // namespace
}  // namespace fathom
