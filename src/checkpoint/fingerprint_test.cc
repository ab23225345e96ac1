#include "checkpoint/fingerprint.h"

#include "checkpoint/test_files.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

const std::string kBundledModel = std::string(FATHOM_SOURCE_DIR) + "/models/fathom-tiny";

std::string fingerprint_of(const std::string& directory) {
  const auto opened = Checkpoint::open(directory);
  if (!opened) return opened.error().message;
  const auto text = fingerprint(*opened);
  return text ? *text : text.error().message;
}

void copy_bundled(const TestFolder& folder) {
  for (const auto& file : fs::directory_iterator(kBundledModel)) {
    fs::copy_file(file.path(), folder / file.path().filename().string());
  }
}

// Overwrites bytes of the folder's shards in the middle of a tensor.
void train(const TestFolder& folder, const std::string& name) {
  const auto opened = Checkpoint::open(folder.path());
  ASSERT_TRUE(opened) << opened.error().message;
  const TensorEntry* const tensor = opened->find(name);
  ASSERT_NE(tensor, nullptr);
  std::fstream file(opened->file_of(*tensor), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(tensor->offset + tensor->bytes / 2);
  file.write("\x11\x12\x13\x14", 4);
  ASSERT_TRUE(file.good());
}

TEST(Fingerprint, ACopyElsewhereHasTheSame) {
  const TestFolder folder;
  copy_bundled(folder);
  const std::string own = fingerprint_of(kBundledModel);
  EXPECT_EQ(own.size(), 32) << own;
  EXPECT_EQ(own.find_first_not_of("0123456789abcdef"), std::string::npos) << own;
  EXPECT_EQ(fingerprint_of(folder.path()), own);
}

TEST(Fingerprint, AnotherTrainingOfTheSameShapesHasAnother) {
  const TestFolder folder;
  copy_bundled(folder);
  const std::string before = fingerprint_of(folder.path());
  // The first tensor by name is among those that are sampled.
  train(folder, "lm_head.weight");
  EXPECT_NE(fingerprint_of(folder.path()), before);
}

TEST(Fingerprint, AnotherConfigurationHasAnother) {
  const TestFolder folder;
  copy_bundled(folder);
  const std::string before = fingerprint_of(folder.path());
  std::ifstream file(folder / "config.json");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string key = "\"rms_norm_eps\": ";
  const size_t at = text.find(key);
  ASSERT_NE(at, std::string::npos);
  text.replace(at, text.find(',', at) - at, key + "0.001");
  folder.write("config.json", text);
  EXPECT_NE(fingerprint_of(folder.path()), before);
}

TEST(Fingerprint, RandomWeightsAreTheirConfiguration) {
  const auto whole = Checkpoint::open_dummy(kBundledModel),
             part = Checkpoint::open_dummy(kBundledModel, 3);
  ASSERT_TRUE(whole && part);
  EXPECT_EQ(fingerprint(*whole).value(),
            fingerprint(*Checkpoint::open_dummy(kBundledModel)).value());
  EXPECT_NE(fingerprint(*whole).value(), fingerprint(*part).value());
}

}  // namespace
}  // namespace fathom
