#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>

#include <ctime>

#include "checkpoint/safetensors_index.h"
#include "checkpoint/test_files.h"

namespace fathom {
namespace {

using testing::HasSubstr;

struct BadHeader {
  const char* what;
  std::string header;
  int64_t data_bytes;
  const char* sentence;  // a substring of the error
};

std::string one(const std::string& fields) { return R"({"w":{)" + fields + "}}"; }

const BadHeader kBadHeaders[] = {
    {"not an object", "[1]", 0, "does not begin with '{'"},
    {"leading space", " {}", 0, "does not begin with '{'"},
    {"empty", "", 0, "does not begin with '{'"},
    {"cut", R"({"w":{"dtype":"F32")", 4, "not valid JSON"},
    {"two values", R"({} {})", 0, "something follows"},
    {"bad UTF-8 in a name", "{\"w\xFF\":{}}", 0, "not valid JSON"},
    {"bad UTF-8, overlong", "{\"\xC0\xAF\":{}}", 0, "not valid JSON"},
    {"too deep", R"({"w":{"shape":[[[[[[[1]]]]]]]}})", 0, "w"},
    {"tensor twice",
     R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
     R"("w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
     2, "tensor \"w\" is listed twice"},
    {"field twice", one(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])"), 1,
     "has dtype twice"},
    {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__"},
    {"metadata of numbers", R"({"__metadata__":{"a":1}})", 0, "__metadata__ must map strings"},
    {"metadata is a list", R"({"__metadata__":["a"]})", 0, "__metadata__"},
    {"a tensor is a number", R"({"w":5})", 0, "\"w\" is 5"},
    {"unknown field", one(R"("dtype":"U8","size":1)"), 1, "unknown field \"size\""},
    {"no dtype", one(R"("shape":[1],"data_offsets":[0,1])"), 1, "no dtype"},
    {"no shape", one(R"("dtype":"U8","data_offsets":[0,1])"), 1, "no shape"},
    {"no offsets", one(R"("dtype":"U8","shape":[1])"), 1, "no data_offsets"},
    {"unknown dtype", one(R"("dtype":"F4","shape":[2],"data_offsets":[0,1])"), 1, "dtype \"F4\""},
    {"dtype is a number", one(R"("dtype":4,"shape":[1],"data_offsets":[0,1])"), 1, "dtype holds 4"},
    {"dtype is a list", one(R"("dtype":["U8"],"shape":[1],"data_offsets":[0,1])"), 1, "dtype"},
    {"shape is a number", one(R"("dtype":"U8","shape":1,"data_offsets":[0,1])"), 1, "shape"},
    {"shape of strings", one(R"("dtype":"U8","shape":["1"],"data_offsets":[0,1])"), 1, "shape"},
    {"fraction", one(R"("dtype":"U8","shape":[1.5],"data_offsets":[0,1])"), 1, "shape holds 1.5"},
    {"negative dimension", one(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), 1,
     "-1 shape, which is negative"},
    {"huge dimension", one(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1])"),
     1, "shape holds 18446744073709551615"},
    {"product overflow",
     one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"), 4,
     "exceeds 64 bits"},
    {"size overflow", one(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4])"), 4,
     "exceeds 64 bits"},
    {"too many dimensions", one(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1])"),
     1, "more than 8 dimensions"},
    {"bytes too few", one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4, "takes 8 bytes"},
    {"bytes too many", one(R"("dtype":"U8","shape":[2],"data_offsets":[0,4])"), 4, "takes 2 bytes"},
    {"offsets reversed", one(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), 1,
     "the end before the beginning"},
    {"one offset", one(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), 1, "exactly two"},
    {"three offsets", one(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,2])"), 1, "exactly two"},
    {"negative offset", one(R"("dtype":"U8","shape":[1],"data_offsets":[-1,0])"), 1, "negative"},
    {"beyond the end", one(R"("dtype":"U8","shape":[9],"data_offsets":[0,9])"), 8,
     "ends at byte 9 of the data, the file has 8"},
    {"bytes left over", one(R"("dtype":"U8","shape":[8],"data_offsets":[0,8])"), 9,
     "end at byte 8 of the data, the file has 9"},
    {"hole at the beginning", one(R"("dtype":"U8","shape":[4],"data_offsets":[4,8])"), 8,
     "bytes 0 to 4 belong to no tensor"},
    {"hole",
     R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
     5, "a hole before tensor \"b\""},
    {"overlap",
     R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
     4, "inside the tensor before it"},
    {"same place",
     R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
     2, "inside the tensor before it"},
    {"empty one inside",
     R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
     R"("b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})",
     2, "inside the tensor before it"},
    {"long name", "{\"" + std::string(600, 'x') + R"(":{}})", 0, "600 bytes"},
};

TEST(SafetensorsHeader, RefusesWhatIsWrongByName) {
  for (const BadHeader& bad : kBadHeaders) {
    const auto parsed = parse_safetensors_header(bad.header, bad.data_bytes, "x.safetensors");
    ASSERT_FALSE(parsed) << bad.what;
    EXPECT_TRUE(parsed.error().message.starts_with("x.safetensors: ")) << parsed.error().message;
    EXPECT_THAT(parsed.error().message, HasSubstr(bad.sentence)) << bad.what;
    EXPECT_EQ(http_status(parsed.error().code), 400) << bad.what;
  }
}

TEST(SafetensorsHeader, ReadsWhatIsRight) {
  const auto parsed = parse_safetensors_header(
      R"({"__metadata__":{"format":"pt","w":"x"},"b":{"shape":[],"data_offsets":[12,16],)"
      R"("dtype":"F32"},"a":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},)"
      R"("zero":{"dtype":"F32","shape":[0,9223372036854775807,3],"data_offsets":[12,12]}}    )",
      16, "x");
  ASSERT_TRUE(parsed) << parsed.error().message;
  ASSERT_EQ(parsed->size(), 3u);
  EXPECT_EQ(parsed->at("a").dtype, DType::kBF16);
  EXPECT_EQ(parsed->at("a").shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(parsed->at("b").begin, 12);
  EXPECT_TRUE(parsed->at("b").shape.empty());
  // Names are compared unescaped, so escapes cannot hide a duplicate.
  EXPECT_FALSE(
      parse_safetensors_header(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                               R"("\u0077":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                               2, "x"));
}

std::string with_length(uint64_t length, std::string_view rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes.append(rest);
}

TEST(SafetensorsFile, RefusesWhatIsWrongByName) {
  const TestFolder folder;
  const std::string good = shard_of({{"w", "U8", {64}, std::string(64, 'x')}});
  const struct {
    const char* what;
    std::string bytes;
    const char* sentence;
  } cases[] = {
      {"empty", "", "too short"},
      {"seven bytes", "1234567", "too short"},
      {"N = 0", with_length(0, "{}"), "the header length is 0"},
      {"N > file", with_length(100, "{}"), "the file has 2 bytes after it"},
      {"N > file by one byte", with_length(3, "{}"), "the file has 2 bytes after it"},
      {"N > cap", with_length(100'000'001, "{}"), "limit is 100000000"},
      {"N = 2^64 - 1", with_length(~uint64_t{0}, "{}"), "limit is 100000000"},
      {"N = 2^63", with_length(uint64_t{1} << 63, "{}"), "limit is 100000000"},
      {"truncated data", good.substr(0, good.size() - 1), "truncated?"},
      {"one byte more", good + "x", "the file has 65"},
      {"a ZIP (torch.save)", "PK\x03\x04 and so on and on", "not a safetensors file?"},
  };
  for (const auto& bad : cases) {
    folder.write("x.safetensors", bad.bytes);
    const std::clock_t before = std::clock();  // CPU time, since the machine may be busy
    const auto read = read_safetensors_file(folder / "x.safetensors");
    ASSERT_FALSE(read) << bad.what;
    EXPECT_TRUE(read.error().message.starts_with(folder / "x.safetensors: "))
        << read.error().message;
    EXPECT_THAT(read.error().message, HasSubstr(bad.sentence)) << bad.what;
    EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC) << bad.what;
  }
  folder.write("x.safetensors", good);
  const auto read = read_safetensors_file(folder / "x.safetensors");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->data_offset + 64, static_cast<int64_t>(good.size()));
}

TEST(SafetensorsFile, RefusesWhatIsNoFile) {
  const TestFolder folder;
  EXPECT_EQ(read_safetensors_file(folder / "none").error().code, Code::kNotFound);
  std::filesystem::create_symlink("b", folder / "a");
  std::filesystem::create_symlink("a", folder / "b");
  EXPECT_THAT(read_safetensors_file(folder / "a").error().message, HasSubstr("symbolic links"));
  EXPECT_THAT(read_safetensors_file(folder.path()).error().message, HasSubstr("not a regular"));
  EXPECT_THAT(read_safetensors_file("/dev/zero").error().message, HasSubstr("not a regular"));
}

TEST(SafetensorsIndex, RefusesWhatIsWrongByName) {
  const struct {
    const char* text;
    const char* sentence;
  } cases[] = {
      {"", "not valid JSON"},
      {"[]", "not an object"},
      {"5", "not an object"},
      {"{}", "weight_map is missing"},
      {R"({"weight_map":{}})", "weight_map is empty"},
      {R"({"weight_map":5})", "weight_map is 5"},
      {R"({"weight_map":["a"]})", "weight_map is an array"},
      {R"({"weight_map":"a"})", "weight_map is a string"},
      {R"({"weight_map":{"w":5}})", "\"w\" is said to be in 5"},
      {R"({"weight_map":{"w":{"x":"y"}}})", "an object"},
      {R"({"weight_map":{"w":"a.safetensors","w":"b.safetensors"}})", "listed twice"},
      {R"({"weight_map":{},"weight_map":{}})", "weight_map is there twice"},
      {R"({"weight_map":{"w":"../a.safetensors"}})", "not the plain name"},
      {R"({"weight_map":{"w":"/etc/a.safetensors"}})", "not the plain name"},
      {R"({"weight_map":{"w":"b/a.safetensors"}})", "not the plain name"},
      {R"({"weight_map":{"w":"..\\a.safetensors"}})", "not the plain name"},
      {R"({"weight_map":{"w":"a\u0000.safetensors"}})", "not the plain name"},
      {R"({"weight_map":{"w":".safetensors"}})", "not the plain name"},
      {R"({"weight_map":{"w":""}})", "not the plain name"},
      {R"({"weight_map":{"w":"pytorch_model.bin"}})", "not the plain name"},
  };
  for (const auto& bad : cases) {
    const auto parsed = parse_safetensors_index(bad.text, "i.json");
    ASSERT_FALSE(parsed) << bad.text;
    EXPECT_TRUE(parsed.error().message.starts_with("i.json: ")) << parsed.error().message;
    EXPECT_THAT(parsed.error().message, HasSubstr(bad.sentence)) << bad.text;
  }
  const auto good =
      parse_safetensors_index(R"({"metadata":{"total_size":-5,"x":[{"weight_map":1}]},)"
                              R"("weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})",
                              "i.json");
  ASSERT_TRUE(good) << good.error().message;
  EXPECT_EQ(good->at("b"), "m-2.safetensors");
}

}  // namespace
}  // namespace fathom
