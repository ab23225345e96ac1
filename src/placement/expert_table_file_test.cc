#include "placement/expert_table_file.h"

#include <gmock/gmock.h>

#include "checkpoint/file_writer.h"
#include "checkpoint/test_files.h"
#include "placement/eplb.h"

namespace fathom {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kSmall =
    "{\n"
    "  \"format\": \"fathom-expert-placement\",\n"
    "  \"version\": 1,\n"
    "  \"num_experts\": 3,\n"
    "  \"num_ranks\": 2,\n"
    "  \"layers\": [\n"
    "    [[0, 1], [2, 0]],\n"
    "    [[], [2, 1, 0]]\n"
    "  ]\n"
    "}\n";

// kSmall with one text replaced by another.
std::string with(const std::string& text, const std::string& other) {
  std::string changed = kSmall;
  const size_t at = changed.find(text);
  EXPECT_NE(at, std::string::npos) << text;
  return changed.replace(at, text.size(), other);
}

void expect_refused(const std::string& text, const std::string& sentence) {
  const auto table = parse_expert_table(text, "p.json");
  ASSERT_FALSE(table) << sentence;
  EXPECT_EQ(table.error().code, Code::kInvalidArgument);
  EXPECT_EQ(table.error().message, "p.json: " + sentence);
}

TEST(ExpertTableFile, ReadsAndWritesWhatIsDocumented) {
  const auto document =
      read_text_file(std::string(FATHOM_SOURCE_DIR) + "/docs/placement.md", 1 << 20);
  ASSERT_TRUE(document) << document.error().message;
  EXPECT_THAT(*document, HasSubstr(fmt::format("```json\n{}```", kSmall)));
  const auto table = parse_expert_table(kSmall, "p.json");
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_EQ(table->lists(), (ExpertLists{{{0, 1}, {2, 0}}, {{}, {2, 1, 0}}}));
  EXPECT_EQ(expert_table_text(*table), kSmall);
}

TEST(ExpertTableFile, RoundTripThroughAFile) {
  const TestFolder folder;
  std::vector<double> loads(14'848);  // 58 layers of 256 experts
  for (size_t i = 0; i < loads.size(); ++i) loads[i] = static_cast<double>(i * 7919 % 1009);
  const BalanceShape shape{.experts = 256, .replicas = 288, .gpus = 32};
  const auto balanced = balance_experts(loads, 58, shape, BalancePolicy::kGlobal);
  ASSERT_TRUE(balanced) << balanced.error().message;
  for (const ExpertTable& table :
       {ExpertTable::contiguous(1, 1, 1), ExpertTable::contiguous(3, 11, 4, 5), *balanced}) {
    const std::string path = folder / "placement.json";
    ASSERT_TRUE(write_whole_file(path, expert_table_text(table)));
    const auto read = read_expert_table(path);
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, table);
  }
}

TEST(ExpertTableFile, RefusesFieldsByNameValueAndLimit) {
  expect_refused(with("fathom-expert-placement", "other"),
                 "format is \"other\", expected \"fathom-expert-placement\"");
  expect_refused(with("\"version\": 1", "\"version\": 2"), "version is 2, allowed are 1 to 1");
  expect_refused(with("  \"version\": 1,\n", ""), "version is missing");
  expect_refused(with("\"num_experts\": 3", "\"num_experts\": 3.5"),
                 "num_experts is 3.5E0, expected an integer from 1 to 16384");
  expect_refused(with("\"num_experts\": 3", "\"num_experts\": 0"),
                 "num_experts is 0, allowed are 1 to 16384");
  expect_refused(with("\"num_ranks\": 2", "\"num_ranks\": 1025"),
                 "num_ranks is 1025, allowed are 1 to 1024");
  expect_refused(with("\"num_ranks\": 2", "\"num_ranks\": 3"),
                 "layers[0] has 2 ranks, num_ranks is 3");
  expect_refused(with("\"num_ranks\": 2", "\"num_rank\": 2"),
                 "\"num_rank\" is not a field; there are format, version, num_experts, num_ranks, "
                 "layers");
  const std::string text = kSmall;
  expect_refused(text.substr(0, text.find(",\n  \"layers\"")) + "}", "layers is missing");
}

TEST(ExpertTableFile, RefusesListsByPlaceValueAndLimit) {
  expect_refused(with("[2, 0]", "[3, 0]"), "layers[0][1][0] is 3, expected an expert from 0 to 2");
  expect_refused(with("[2, 0]", "[2, -1]"),
                 "layers[0][1][1] is -1, expected an expert from 0 to 2");
  expect_refused(with("[2, 0]", "[2, 1.0]"),
                 "layers[0][1][1] is 1E0, expected an expert from 0 to 2");
  expect_refused(with("[2, 0]", "[2, 4294967296]"),
                 "layers[0][1][1] is 4294967296, expected an expert from 0 to 2");
  expect_refused(with("[2, 0]", "[2, \"0\"]"),
                 "layers[0][1][1] is \"0\", expected an expert from 0 to 2");
  expect_refused(with("[2, 0]", "2"), "layers[0][1] is 2, expected an array");
  expect_refused(with("[[0, 1], [2, 0]]", "null"), "layers[0] is null, expected an array");
  expect_refused(with("[2, 1, 0]", "[2, 1]"),
                 "layers[1] has no copy of expert 0, each of the 3 needs one");
}

TEST(ExpertTableFile, RefusesWhatIsNoPlacement) {
  expect_refused("[]", "expected an object, this is an array");
  expect_refused(with("[2, 0]", "[[2], 0]"), "JSON nested deeper than 4 levels");
  const auto cut = parse_expert_table(std::string_view(kSmall).substr(0, 100), "p.json");
  ASSERT_FALSE(cut);
  EXPECT_THAT(cut.error().message, StartsWith("p.json: not valid JSON"));
  const TestFolder folder;
  const auto missing = read_expert_table(folder / "none.json");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("none.json"));
}

}  // namespace
}  // namespace fathom
