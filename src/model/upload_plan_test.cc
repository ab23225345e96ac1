// The way from the spec to a GPU's memory, without a GPU: names, slices, forms and places.
#include "model/upload_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/math.h"
#include "checkpoint/tensor_names.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"
#include "model/gpu_support.h"
#include "ops/moe/plans/four_bit_tiles.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {
namespace {

constexpr const char* kBlocks =
    R"(, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]})";
constexpr const char* kSparse =
    R"(, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]})";
constexpr const char* kRow =
    R"(, "quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float",
                                                  "strategy": "channel"}}}})";

// A dense layer and one with five experts, three heads, odd widths. Only its config exists.
class UploadPlanTest : public testing::TestWithParam<const char*> {
 protected:
  UploadPlanTest() : UploadPlanTest(GetParam(), 584, 136) {}
  UploadPlanTest(const char* quantization, int dense, int inter) {
    folder_.write("config.json", fmt::format(R"({{"model_type": "deepseek_v3", "vocab_size": 99,
        "hidden_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 8,
        "rms_norm_eps": 1e-6, "num_attention_heads": 3, "q_lora_rank": 128, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000,
        "intermediate_size": {}, "moe_intermediate_size": {}, "n_routed_experts": 5,
        "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1{}}})",
                                             dense, inter, quantization));
    auto opened = Checkpoint::open_dummy(folder_.path());
    EXPECT_TRUE(opened) << opened.error().message;
    checkpoint_ = std::move(*opened);
  }

  struct Planned {
    ModelSpec spec;
    std::vector<LayerForms> forms = {};
    UploadPlan plan = {};

    const Upload& of(const std::string& name) const {
      const auto found =
          std::find_if(plan.uploads.begin(), plan.uploads.end(),
                       [&](const Upload& upload) { return upload.part.name == name; });
      FATHOM_CHECK(found != plan.uploads.end(), "no upload of {}", name);
      return *found;
    }
  };
  Planned planned(int ranks = 1, int rank = 0) {
    return planned(make_spec(checkpoint_.config(), {.tp = ranks}, rank, nullptr, true));
  }
  Planned planned(ModelSpec spec) {
    Planned out{.spec = std::move(spec)};
    out.forms = layer_forms(out.spec, WeightForms(checkpoint_, StoredFp8::kKept, options_));
    const int64_t bytes = plan_upload(out.spec, out.forms, nullptr).bytes;
    memory_.assign(static_cast<size_t>(bytes), std::byte{0});
    out.plan = plan_upload(out.spec, out.forms, memory_.data());
    EXPECT_EQ(out.plan.bytes, bytes);
    return out;
  }

  TestFolder folder_;
  Checkpoint checkpoint_;
  LoadOptions options_;
  std::vector<std::byte> memory_;
};

TEST_P(UploadPlanTest, UploadsEveryTensorOfTheCheckpointOnce) {
  std::map<std::string, int> uploads;
  for (const Upload& upload : planned().plan.uploads) {
    EXPECT_TRUE(upload.part.is_whole()) << upload.part.name;
    ++uploads[upload.part.name];
  }
  const WeightNames names(checkpoint_.config());
  for (const auto& [name, entry] : checkpoint_.tensors()) {
    if (names.classify(name) == WeightGroup::kScales) continue;
    // The MTP layer's copies of the main model's tensors are not loaded.
    const bool is_copy =
        name.ends_with(tensor_names::kMtpEmbedding) || name.ends_with(tensor_names::kMtpHead);
    EXPECT_EQ(uploads[name], is_copy && name.starts_with("model.layers.2.") ? 0 : 1) << name;
    uploads.erase(name);
  }
  for (const auto& [name, count] : uploads) ADD_FAILURE() << name << " is in no checkpoint";
}

TEST_P(UploadPlanTest, TheMtpLayerIsTheLast) {
  const Planned made = planned();
  const ModelTensors& tensors = *made.plan.tensors;
  ASSERT_EQ(made.forms.size(), 3u);
  ASSERT_EQ(tensors.layers.size(), 3u);
  const Upload& projection = made.of("model.layers.2.eh_proj.weight");
  EXPECT_EQ(projection.matrix, &tensors.mtp.projection);
  EXPECT_EQ(projection.part.cols.count, 512);
  EXPECT_EQ(made.of("model.layers.2.self_attn.o_proj.weight").matrix, &tensors.layers[2].o);
  const std::pair<const char*, const float*> vectors[] = {
      {"enorm", tensors.mtp.embedding_norm},
      {"hnorm", tensors.mtp.hidden_norm},
      {"shared_head.norm", tensors.mtp.head_norm},
      {"input_layernorm", tensors.layers[2].input_norm}};
  for (const auto& [name, values] : vectors) {
    EXPECT_EQ(made.of(fmt::format("model.layers.2.{}.weight", name)).place.values, values) << name;
  }
}

TEST_P(UploadPlanTest, RanksHoldEveryElementOnce) {
  struct Held {
    int64_t whole = 0, elements = 0, next_row = 0, next_col = 0;
  };
  for (const int ranks : {2, 3}) {
    std::map<std::string, Held> tensors;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const Upload& upload : planned(ranks, rank).plan.uploads) {
        const TensorPart& part = upload.part;
        Held& held = tensors[part.name];
        held.whole = part.num_rows * part.num_cols;
        held.elements = part.is_whole() ? held.whole  // ranks hold it alike
                                        : held.elements + part.rows.count * part.cols.count;
        if (part.rows.count < part.num_rows) {
          EXPECT_EQ(part.rows.first, held.next_row) << part.name;
          held.next_row = part.rows.end();
        }
        if (part.cols.count < part.num_cols) {
          EXPECT_EQ(part.cols.first, held.next_col) << part.name;
          held.next_col = part.cols.end();
        }
      }
    }
    for (const auto& [name, held] : tensors) EXPECT_EQ(held.elements, held.whole) << name;
  }
}

TEST_P(UploadPlanTest, PlacesAreApartAndInside) {
  for (const int ranks : {1, 2, 3}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const Planned made = planned(ranks, rank);
      std::vector<std::pair<int64_t, int64_t>> taken;  // bytes from, to
      const auto take = [&](const void* at, int64_t bytes) {
        const int64_t first = static_cast<const std::byte*>(at) - memory_.data();
        taken.emplace_back(first, first + bytes);
      };
      const auto take_place = [&](const WeightPlace& place) {
        take(place.values, place.rows * place.cols * size_of(place.type));
        if (place.scales != nullptr) {
          take(place.scales, ceil_div(place.rows, kScaleBlock) * (place.cols / kScaleBlock) * 4);
        }
        if (place.row_scales != nullptr) take(place.row_scales, place.rows * 4);
        EXPECT_EQ(place.scales != nullptr, place.type == DType::kF8E4M3);
      };
      for (const Upload& upload : made.plan.uploads) {
        EXPECT_GE(upload.place.rows, upload.part.rows.count) << upload.part.name;
        EXPECT_GE(upload.place.cols, upload.part.cols.count) << upload.part.name;
        take_place(upload.place);
        if (!upload.split) continue;
        take_place(upload.split->uk);
        take_place(upload.split->uv);
      }
      std::sort(taken.begin(), taken.end());
      EXPECT_GE(taken.front().first, 0);
      EXPECT_LE(taken.back().second, made.plan.bytes);
      for (size_t i = 1; i < taken.size(); ++i) {
        EXPECT_LE(taken[i - 1].second, taken[i].first) << i;
      }
    }
  }
}

TEST_P(UploadPlanTest, PlacesHaveTheFormsAndWidthsOfTheirMatrices) {
  const Planned made = planned();
  const LayerWeights& dense = made.plan.tensors->layers[0];
  const LayerWeights& moe = made.plan.tensors->layers[1];
  const bool fp8 = made.forms[0].mlps == DType::kF8E4M3;
  EXPECT_EQ(fp8, std::string(GetParam()) != "");
  EXPECT_EQ(dense.q_kv_a.type, made.forms[0].q_kv_a.type);
  EXPECT_EQ(dense.q_kv_a.row_scales != nullptr, made.forms[0].q_kv_a.by_row);
  EXPECT_EQ(dense.uk.type, made.forms[0].kv_b_halves.type);
  EXPECT_EQ(moe.experts.gate_up.type, made.forms[1].mlps);
  EXPECT_EQ(moe.gate_type, made.forms[1].router);
  EXPECT_EQ(moe.gate_type, DType::kBF16);
  EXPECT_EQ(dense.dense.width, 640);
  EXPECT_EQ(moe.experts.width, fp8 ? 256 : 192);
  EXPECT_EQ(moe.shared.width, fp8 ? 384 : 320);
  EXPECT_EQ(made.of("lm_head.weight").place.rows, 104);
  EXPECT_EQ(made.of("model.embed_tokens.weight").place.rows, 99);
}

TEST_P(UploadPlanTest, MatricesOfOneLaunchAreStacked) {
  const Planned made = planned();
  const auto values = [&](const std::string& name) {
    return static_cast<const std::byte*>(made.of("model.layers." + name).place.values);
  };
  const LayerWeights& layer = made.plan.tensors->layers[1];
  const int64_t size = size_of(layer.q_kv_a.type);
  EXPECT_EQ(values("1.self_attn.q_a_proj.weight"), layer.q_kv_a.values);
  const bool is_sparse = checkpoint_.config().indexer.has_value();
  if (is_sparse) {
    EXPECT_EQ(values("1.self_attn.indexer.wk.weight"),
              values("1.self_attn.q_a_proj.weight") + int64_t{128} * 256 * size);
    EXPECT_EQ(layer.indexer.weights.type, DType::kBF16);
  }
  EXPECT_EQ(
      values("1.self_attn.kv_a_proj_with_mqa.weight"),
      values("1.self_attn.q_a_proj.weight") + int64_t{is_sparse ? 128 + 128 : 128} * 256 * size);
  const int64_t matrix = layer.experts.width * 256 * size_of(layer.experts.gate_up.type);
  const auto* const first = static_cast<const std::byte*>(layer.experts.gate_up.values);
  EXPECT_EQ(values("1.mlp.experts.3.gate_proj.weight"), first + 6 * matrix);
  EXPECT_EQ(values("1.mlp.experts.3.up_proj.weight"), first + 7 * matrix);
  EXPECT_EQ(values("1.mlp.experts.3.down_proj.weight"),
            static_cast<const std::byte*>(layer.experts.down.values) + 3 * matrix);
  EXPECT_EQ(made.of("model.layers.1.mlp.experts.3.down_proj.weight").matrix, &layer.experts.down);
  EXPECT_EQ(made.of("model.layers.1.mlp.gate.weight").matrix, nullptr);
}

TEST_P(UploadPlanTest, ARankSplitsItsHeadsOfKvB) {
  const Planned made = planned(2, 1);
  const Upload& upload = made.of("model.layers.1.self_attn.kv_b_proj.weight");
  EXPECT_EQ(upload.part.rows, (Slice{512, 256}));
  ASSERT_TRUE(upload.split.has_value());
  EXPECT_EQ(upload.split->heads, 1);
  EXPECT_EQ(upload.split->kv_b.values, upload.place.values);
  EXPECT_EQ(upload.split->uk.rows, 512);
  EXPECT_EQ(upload.split->uv.rows, 128);
}

// Whole experts, in the order of the table's slots, and the whole shared one.
TEST_P(UploadPlanTest, AnExpertParallelRankHasTheExpertsOfItsSlots) {
  const ModelConfig& config = checkpoint_.config();
  const Placement placement = {.tp = 2, .expert_parallel = true};
  const auto table =
      std::make_shared<const ExpertTable>(ExpertTable::contiguous(config, placement));
  const Planned made = planned(make_spec(config, placement, 1, table));
  const Planned alone = planned(make_spec(config));
  const LayerWeights& layer = made.plan.tensors->layers[1];
  EXPECT_EQ(layer.experts.width, alone.plan.tensors->layers[1].experts.width);
  EXPECT_EQ(layer.shared.width, alone.plan.tensors->layers[1].shared.width);
  const int64_t matrix = layer.experts.width * 256 * size_of(layer.experts.gate_up.type);
  const auto* const first = static_cast<const std::byte*>(layer.experts.gate_up.values);
  const auto experts = table->experts_of(0, 1);
  ASSERT_FALSE(experts.empty());
  for (size_t slot = 0; slot < experts.size(); ++slot) {
    const Upload& upload =
        made.of(fmt::format("model.layers.1.mlp.experts.{}.gate_proj.weight", experts[slot]));
    EXPECT_TRUE(upload.part.is_whole());
    EXPECT_EQ(upload.place.values, first + 2 * static_cast<int64_t>(slot) * matrix);
  }
  int64_t gates = 0;
  for (const Upload& upload : made.plan.uploads) {
    gates += upload.part.name.find("layers.1.mlp.experts.") != std::string::npos &&
                     upload.part.name.ends_with("gate_proj.weight")
                 ? 1
                 : 0;
  }
  EXPECT_EQ(gates, std::ssize(experts));
}

// Half a block is cut into two pieces at most: the third rank has none.
TEST_P(UploadPlanTest, ARankWithoutColumnsHasNoExperts) {
  ModelConfig narrow = checkpoint_.config();
  narrow.moe_intermediate = 64;
  narrow.num_shared_experts = 1;
  const Planned made = planned(make_spec(narrow, {.tp = 3}, 2));
  EXPECT_EQ(made.plan.tensors->layers[1].experts.width, 0);
  for (const Upload& upload : made.plan.uploads) {
    EXPECT_EQ(upload.part.name.find("mlp.experts."), std::string::npos) << upload.part.name;
  }
}

constexpr const char* kFourBits =
    R"(, "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head"], "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int",
        "strategy": "group", "group_size": 32}}}})";

class UploadPlanFourBits : public UploadPlanTest {
 protected:
  UploadPlanFourBits() : UploadPlanTest(GetParam(), 576, 160) {}
};

// Gate's and up's tiles share their memory; the shared expert and attention are dequantized.
TEST_P(UploadPlanFourBits, ExpertsKeepTheirCodes) {
  const Planned made = planned();
  ASSERT_EQ(made.forms[1].four_bit_experts, FourBitCode::kInteger);
  EXPECT_TRUE(made.forms[0].dequantizes_four_bits);
  EXPECT_TRUE(made.forms[1].dequantizes_four_bits);
  const LayerWeights& layer = made.plan.tensors->layers[1];
  EXPECT_EQ(layer.experts.width, 192);
  EXPECT_EQ(layer.experts.gate_up.type, DType::kU8);
  EXPECT_EQ(layer.shared.gate_up.type, DType::kBF16);
  EXPECT_EQ(layer.q_kv_a.type, DType::kBF16);
  EXPECT_EQ(made.plan.tensors->layers[0].dense.gate_up.type, DType::kBF16);
  const auto place = [&](const std::string& name) {
    return made.of("model.layers.1.mlp.experts." + name + "_proj.weight").place;
  };
  const auto at = [](const WeightPlace& of) { return static_cast<const std::byte*>(of.values); };
  const auto* const gate_up = static_cast<const std::byte*>(layer.experts.gate_up.values);
  const auto* const down = static_cast<const std::byte*>(layer.experts.down.values);
  EXPECT_EQ(at(place("3.gate")), gate_up + 3 * four_bit_bytes(384, 256));
  EXPECT_EQ(at(place("3.up")), at(place("3.gate")));
  EXPECT_EQ(at(place("3.down")), down + 3 * four_bit_bytes(256, 192));
  EXPECT_GE(down, gate_up + 5 * four_bit_bytes(384, 256));
  EXPECT_EQ(place("0.gate").tile_rows, WeightPlace::TileRows::kGate);
  EXPECT_EQ(place("0.up").tile_rows, WeightPlace::TileRows::kUp);
  EXPECT_EQ(place("0.down").tile_rows, WeightPlace::TileRows::kAll);
  EXPECT_EQ(place("0.down").rows, 256);
  EXPECT_EQ(place("0.down").cols, 192);
}

TEST_P(UploadPlanFourBits, ARanksColumnsAreWholeGroups) {
  for (int rank = 0; rank < 2; ++rank) {
    const Planned made = planned(2, rank);
    EXPECT_EQ(made.forms[1].four_bit_experts, FourBitCode::kInteger);
    EXPECT_EQ(made.plan.tensors->layers[1].experts.width, rank == 0 ? 128 : 64);
  }
}

INSTANTIATE_TEST_SUITE_P(Integers, UploadPlanFourBits, testing::Values(kFourBits));

std::string form_name(const testing::TestParamInfo<const char*>& form) {
  const char* const names[] = {"bf16", "blocks", "rows", "sparse"};
  return names[form.index];
}

INSTANTIATE_TEST_SUITE_P(Forms, UploadPlanTest, testing::Values("", kBlocks, kRow, kSparse),
                         form_name);

}  // namespace
}  // namespace fathom::cuda
