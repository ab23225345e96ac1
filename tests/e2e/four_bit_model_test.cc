// A model with experts in four bits against the same model whose weights were multiplied out: in
// fp32 within 1e-4, alone and with tensor-parallel ranks; shards that would cut a group are
// refused.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "checkpoint/quantize_checkpoint.h"
#include "checkpoint/random_checkpoint.h"
#include "e2e/rank_harness.h"

namespace fathom {
namespace {

using testing::HasSubstr;

struct Made {
  TestFolder folder;
  std::string stored, wide;  // four bits, and their values in fp32
};

// The values of a checkpoint's weights as a checkpoint in fp32.
void write_wide(const std::string& from, const std::string& config, const TestFolder& folder,
                const std::string& name) {
  const auto checkpoint = Checkpoint::open(from);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  std::vector<TestTensor> tensors;
  LoadOptions options;
  options.show_progress = false;
  options.num_threads = 1;
  std::vector<TensorRequest> requests;
  WeightNames(checkpoint->config()).for_each_weight([&](const PublishedTensor& tensor) {
    requests.push_back(
        {tensor.name, tensor.shape, [&, tensor](const ScaledMatrix& matrix) -> Result<> {
           std::vector<float> values;
           for (int64_t r = 0; r < matrix.rows(); ++r) {
             for (int64_t c = 0; c < matrix.cols(); ++c) {
               values.push_back(matrix.at(r, c));
             }
           }
           tensors.push_back({tensor.name, "F32", tensor.shape, bytes_of(values)});
           return {};
         }});
    return true;
  });
  const auto loaded = load_tensors(*checkpoint, requests, options);
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  folder.write(name + "/config.json", config);
  folder.write(name + "/model.safetensors", shard_of(tensors));
}

std::unique_ptr<Made> make(const char* format) {
  auto made = std::make_unique<Made>();
  const std::string config = small_v3_config(128);
  write_random_checkpoint(config, made->folder, "source");
  const auto source = Checkpoint::open(made->folder / "source");
  FATHOM_CHECK(source.has_value(), "{}", source.error().message);
  QuantizeOptions options;
  options.format = *quantize_format_named(format);
  options.output = made->stored = made->folder / "stored";
  options.show_progress = false;
  const auto done = quantize_checkpoint(*source, options);
  FATHOM_CHECK(done.has_value(), "{}", done.error().message);
  made->wide = made->folder / "wide";
  write_wide(made->stored, config, made->folder, "wide");
  return made;
}

std::vector<int32_t> prompt() {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 60; ++i) ids.push_back(i * 37 % 131);
  return ids;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return worst;
}

class FourBitModel : public testing::TestWithParam<const char*> {};

TEST_P(FourBitModel, EqualsItsDequantizedValues) {
  const auto made = make(GetParam());
  ModelOptions options;
  options.compute = DType::kF32;
  ModelHarness four_bit(made->stored, options, CacheFormat::kF32);
  ModelHarness wide(made->wide, options, CacheFormat::kF32);
  for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{2048}, {50, 1, 9}}) {
    const auto logits = four_bit.run({{prompt(), chunks}})[0];
    EXPECT_LT(largest_difference(logits, wide.run({{prompt(), chunks}})[0]), 1e-4);
  }
  // The quantized experts matter: the source's logits are elsewhere.
  ModelHarness source(made->folder / "source", options, CacheFormat::kF32);
  EXPECT_GT(largest_difference(four_bit.run({{prompt(), {2048}}})[0],
                               source.run({{prompt(), {2048}}})[0]),
            1e-3);
}

TEST_P(FourBitModel, RanksHaveWholeGroupsOrAreRefused) {
  const auto made = make(GetParam());
  const auto checkpoint = Checkpoint::open(made->stored);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const auto load = [&](int tp) {
    return RankTeam::load(*checkpoint,
                          {.placement = {.tp = tp},
                           .model = {.compute = DType::kF32, .max_rows = 256, .attention = {}},
                           .cache_format = CacheFormat::kF32,
                           .num_pages = kPages,
                           .num_threads = tp,
                           .load = {.show_progress = false},
                           .group = {}});
  };
  if (std::string_view(GetParam()) == "int4-g128") {
    const auto refused = load(2);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().message,
                HasSubstr("columns 0 to 64 of 128 are not whole groups of 128"));
    EXPECT_THAT(refused.error().message, HasSubstr("down_proj"));
    return;
  }
  const Form form;
  Ranks one(*checkpoint, {.tp = 1}, form, nullptr), two(*checkpoint, {.tp = 2}, form, nullptr);
  const Outcome alone = one.run(), split = two.run();
  for (size_t s = 0; s < kSequences; ++s) {
    EXPECT_LT(largest_difference(alone.logits[s], split.logits[s]), 1e-4) << s;
  }
}

TEST(FourBitDummy, WeightsOfFourBits) {
  const TestFolder folder;
  std::string config = small_v3_config(128);
  config.insert(config.rfind('}'), R"(, "quantization_config": {"quant_method":
      "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups":
      {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}})");
  folder.write("model/config.json", config);
  const auto checkpoint = Checkpoint::open_dummy(folder / "model");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const auto team = RankTeam::load(*checkpoint, {.placement = {.tp = 1},
                                                 .model = {.max_rows = 64, .attention = {}},
                                                 .num_pages = kPages,
                                                 .num_threads = 1,
                                                 .load = {.show_progress = false},
                                                 .group = {}});
  ASSERT_TRUE(team) << team.error().message;
}

INSTANTIATE_TEST_SUITE_P(Formats, FourBitModel, testing::Values("int4-g32", "int4-g128", "mxfp4"));

}  // namespace
}  // namespace fathom
