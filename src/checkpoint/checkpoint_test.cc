#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>

#include <ctime>

#include "checkpoint/inventory.h"
#include "checkpoint/test_files.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kBundled = std::string(FATHOM_SOURCE_DIR) + "/models/fathom-tiny";

// Links to the bundled model's files, so that a test writes only the file it damages.
void link_bundled(const TestFolder& folder) {
  for (const auto& file : fs::directory_iterator(kBundled)) {
    fs::create_symlink(file.path(), folder / file.path().filename().string());
  }
}

void replace(const TestFolder& folder, const std::string& name, std::string_view text) {
  fs::remove(folder / name);
  folder.write(name, text);
}

void expect_refused(const std::string& model, std::string_view part) {
  const std::clock_t before = std::clock();  // CPU time, since the machine may be busy
  const auto opened = Checkpoint::open(model);
  ASSERT_FALSE(opened) << part;
  EXPECT_THAT(opened.error().message, HasSubstr(std::string(part)));
  EXPECT_EQ(opened.error().message.find('\n'), std::string::npos);
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC) << part;
}

TEST(Checkpoint, OpensTheBundledModel) {
  const auto opened = Checkpoint::open(kBundled);
  ASSERT_TRUE(opened) << opened.error().message;
  EXPECT_EQ(opened->files().size(), 3u);
  EXPECT_EQ(opened->tensors().size(), 973u);
  EXPECT_EQ(opened->config().num_layers, 8);
  EXPECT_EQ(opened->generation_defaults().temperature, 0.6);
  EXPECT_EQ(opened->generation_defaults().eos_ids, std::vector<int32_t>{1});
  const TensorEntry* entry = opened->find("model.layers.0.self_attn.kv_a_proj_with_mqa.weight");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->dtype, DType::kF8E4M3);
  EXPECT_EQ(entry->shape, (std::vector<int64_t>{576, 256}));
  EXPECT_EQ(opened->find("no.such"), nullptr);
  const Inventory inventory = take_inventory(*opened);
  EXPECT_EQ(inventory.unused.tensors, 0);
  EXPECT_EQ(inventory.of(WeightGroup::kMtp).tensors, 68);
}

TEST(Checkpoint, RefusesWhatIsNoModel) {
  const TestFolder folder;
  expect_refused("", "empty");
  expect_refused(folder.path(), "config.json");
  expect_refused("/no/such/place", "no such directory");
  expect_refused(kBundled + "/config.json", "give the directory");
  folder.write("config.json", "{}");
  expect_refused(folder.path(), "config.json: model_type is missing");
}

TEST(Checkpoint, RefusesOtherFormats) {
  const struct {
    const char* file;
    const char* part;
  } cases[] = {{"pytorch_model.bin", "can run code"},
               {"model.pt", "can run code"},
               {"consolidated.00.pth", "can run code"},
               {"model-q4.gguf", "GGUF"},
               {"model-00001-of-00002.safetensors", "incomplete download?"},
               {"README.md", "neither model.safetensors nor model.safetensors.index.json"}};
  for (const auto& other : cases) {
    const TestFolder folder;
    folder.write("config.json", file_text(kBundled + "/config.json"));
    folder.write(other.file, "x");
    expect_refused(folder.path(), other.part);
  }
}

TEST(Checkpoint, RefusesADamagedSet) {
  const std::string first = "model-00001-of-00003.safetensors";
  const std::string second = "model-00002-of-00003.safetensors";
  const std::string index_name = "model.safetensors.index.json";
  const std::string index_text = file_text(kBundled + "/" + index_name);
  {
    const TestFolder folder;
    link_bundled(folder);
    fs::remove(folder / second);
    expect_refused(folder.path(), "\"" + second + "\", which is not there");
  }
  {
    const TestFolder folder;
    link_bundled(folder);
    fs::remove(folder / second);
    fs::create_symlink(second, folder / second);
    expect_refused(folder.path(), second + ": cannot be read");
  }
  {
    const TestFolder folder;
    link_bundled(folder);
    fs::remove(folder / second);
    fs::create_symlink(kBundled + "/" + first, folder / second);
    expect_refused(folder.path(), "is also in");
  }
  {
    const TestFolder folder;
    link_bundled(folder);
    const std::string bytes = file_text(kBundled + "/" + first);
    replace(folder, first, std::string_view(bytes).substr(0, bytes.size() / 2));
    expect_refused(folder.path(), "truncated?");
  }
  // The index contradicts the shards: a tensor in the wrong shard, one in none, one not listed.
  auto index = *parse_json(index_text, "index");
  json::object& map = index.as_object()["weight_map"].as_object();
  const json::value right = map.at("lm_head.weight");
  {
    const TestFolder folder;
    link_bundled(folder);
    map["lm_head.weight"] = right.as_string() == first ? second : first;
    replace(folder, index_name, json::serialize(index));
    expect_refused(folder.path(), "tensor \"lm_head.weight\" is said to be in");
    map.erase("lm_head.weight");
    replace(folder, index_name, json::serialize(index));
    expect_refused(folder.path(), "tensor \"lm_head.weight\" is not in the index");
    map["lm_head.weight"] = right;
    map["lm_head.bias"] = first;
    replace(folder, index_name, json::serialize(index));
    expect_refused(folder.path(), "tensor \"lm_head.bias\" is said to be in");
    map["lm_head.bias"] = "../x.safetensors";
    replace(folder, index_name, json::serialize(index));
    expect_refused(folder.path(), "not the plain name");
  }
}

TEST(Checkpoint, NamesTheTensorThatConfigCallsFor) {
  const TestFolder folder;
  folder.write("config.json", file_text(kBundled + "/config.json"));
  folder.write("model.safetensors", shard_of({{"model.norm.weight", "F32", {1}, "abcd"}}));
  expect_refused(folder.path(),
                 "tensor \"model.embed_tokens.weight\", which config.json calls for");
}

TEST(Checkpoint, NamesTheTensorThatDoesNotFitConfig) {
  const std::string text = file_text(kBundled + "/config.json");
  auto config = *parse_json(text, "config.json");
  // Sizes that are within limits but do not match the weights: nothing may be allocated for them.
  for (const char* field : {"hidden_size", "vocab_size", "intermediate_size",
                            "moe_intermediate_size", "kv_lora_rank", "q_lora_rank"}) {
    const TestFolder folder;
    link_bundled(folder);
    auto changed = config;
    changed.as_object()[field] = config.at(field).as_int64() * 8;
    replace(folder, "config.json", json::serialize(changed));
    expect_refused(folder.path(), ", config.json calls for [");
  }
}

// A tensor left over in a model of unknown type may belong to a part that Fathom does not compute.
TEST(Checkpoint, RefusesTensorsLeftOverOfAnUnknownType) {
  const std::string golden = std::string(FATHOM_SOURCE_DIR) + "/tests/goldens/youtu/";
  const TestFolder folder;
  fs::create_symlink(golden + "model.safetensors", folder / "model.safetensors");
  auto config = *parse_json(file_text(golden + "config.json"), "config.json");
  config.as_object()["model_type"] = "something_new";
  folder.write("config.json", json::serialize(config));
  const auto opened = Checkpoint::open(folder.path());
  ASSERT_TRUE(opened) << opened.error().message;
  config.as_object()["num_hidden_layers"] = 2;  // so the third layer's are left over
  replace(folder, "config.json", json::serialize(config));
  expect_refused(folder.path(), "model_type \"something_new\" is not known");
  config.as_object()["model_type"] = "youtu";
  replace(folder, "config.json", json::serialize(config));
  EXPECT_TRUE(Checkpoint::open(folder.path()));
}

// Kimi K2.5 has its language model's tensors under a prefix, and some that are for pictures.
TEST(Checkpoint, OpensALanguageModelInALargerOne) {
  const auto opened = Checkpoint::open(std::string(FATHOM_SOURCE_DIR) + "/tests/goldens/kimi_k25");
  ASSERT_TRUE(opened) << opened.error().message;
  EXPECT_NE(opened->find("model.layers.1.mlp.experts.383.up_proj.weight"), nullptr);
  EXPECT_NE(opened->find("lm_head.weight"), nullptr);
  EXPECT_EQ(opened->find("language_model.lm_head.weight"), nullptr);
  EXPECT_EQ(take_inventory(*opened).unused.tensors, 2);
}

// Sets an environment variable during one test.
class Environment {
 public:
  Environment(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    setenv(name, value.c_str(), 1);
  }
  ~Environment() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(Checkpoint, FindsAHubId) {
  const TestFolder home;
  const Environment hf_home("HF_HOME", home.path());
  const Environment hub_cache("HF_HUB_CACHE", "");
  expect_refused("org/tiny-model", "hf download org/tiny-model");
  expect_refused("../escape", "no such directory");
  expect_refused("a/b/c", "no such directory");
  expect_refused("org/..", "no such directory");

  // huggingface_hub's layout: the snapshot's files are links into blobs.
  const std::string base = "hub/models--org--tiny-model";
  const std::string blobs = base + "/blobs/";
  fs::create_directories(home / blobs);
  fs::create_directories(home / (base + "/snapshots/0123abcd"));
  expect_refused("org/tiny-model", "refs/main");
  home.write(base + "/refs/main", "0123abcd\n");
  int blob = 0;
  for (const auto& file : fs::directory_iterator(kBundled)) {
    const std::string name = std::to_string(++blob);
    fs::create_symlink(file.path(), home / (blobs + name));
    fs::create_symlink("../../blobs/" + name,
                       home / (base + "/snapshots/0123abcd/" + file.path().filename().string()));
  }
  const auto opened = Checkpoint::open("org/tiny-model");
  ASSERT_TRUE(opened) << opened.error().message;
  EXPECT_EQ(opened->directory(), home / (base + "/snapshots/0123abcd"));
  {
    const Environment direct("HF_HUB_CACHE", home / "hub");
    const Environment elsewhere("HF_HOME", "/nowhere");
    EXPECT_TRUE(Checkpoint::open("org/tiny-model"));
  }
  home.write(base + "/refs/main", "ffff");
  expect_refused("org/tiny-model", "snapshots/ffff");
  home.write(base + "/refs/main", "../../../etc");
  expect_refused("org/tiny-model", "not the name of a snapshot");
}

}  // namespace
}  // namespace fathom
