#include "checkpoint/quantize_checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <map>
#include <random>
#include <thread>

#include "base/math.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"
#include "tensor/quantize_weight.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int kShards = 4;

// A dense layer, a MoE layer and an MTP layer, with partial blocks at the edges.
constexpr const char* kSmallConfig = R"({
  "model_type": "deepseek_v3",
  "vocab_size": 40,
  "hidden_size": 192,
  "num_hidden_layers": 2,
  "num_nextn_predict_layers": 1,
  "first_k_dense_replace": 1,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-6,
  "num_attention_heads": 2,
  "q_lora_rank": 96,
  "kv_lora_rank": 160,
  "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 16,
  "v_head_dim": 48,
  "rope_theta": 10000.0,
  "intermediate_size": 300,
  "moe_intermediate_size": 130,
  "n_routed_experts": 4,
  "n_shared_experts": 1,
  "num_experts_per_tok": 2,
  "n_group": 2,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "scoring_func": "sigmoid",
  "norm_topk_prob": true,
  "routed_scaling_factor": 2.5,
  "torch_dtype": "bfloat16"
}
)";

std::string shard_name(int i) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, kShards);
}

std::string random_data(const std::string& name, const TensorEntry& entry) {
  std::mt19937 random(std::hash<std::string>()(name));
  std::normal_distribution<float> normal(0, 0.05f);
  std::string data;
  for (int64_t i = 0; i < entry.bytes / size_of(entry.dtype); ++i) {
    const float value = normal(random);
    if (entry.dtype == DType::kF32) {
      data += bytes_of<float>({value});
    } else {
      data += bytes_of<bf16>({to_bf16(value)});
    }
  }
  return data;
}

// The contents of all files of a directory, by name.
std::map<std::string, std::string> all_files(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& file : fs::directory_iterator(directory)) {
    files[file.path().filename().string()] = file_text(file.path().string());
  }
  return files;
}

class Quantize : public testing::Test {
 protected:
  Quantize() {
    source_.write("config.json", kSmallConfig);
    source_.write("tokenizer.json", "{\"not\": \"read here\"}");
    source_.write("LICENSE", "MIT");
    source_.write("pytorch_model.bin", "left behind");
    source_.write("pytorch_model.bin.index.json", "this too");
    const auto form = Checkpoint::open_dummy(source_.path());
    EXPECT_TRUE(form) << form.error().message;
    int i = 0;
    for (const auto& [name, entry] : form->tensors()) {
      const char* dtype = entry.dtype == DType::kF32 ? "F32" : "BF16";
      shards_[static_cast<size_t>(i++ % kShards)].push_back(
          {name, dtype, entry.shape, random_data(name, entry)});
    }
    for (int shard = 0; shard < kShards; ++shard) write_shard(shard);
    write_index();
  }

  void write_shard(int shard) const {
    source_.write(shard_name(shard), shard_of(shards_[static_cast<size_t>(shard)]));
  }

  void write_index() const {
    json::object map;
    for (int shard = 0; shard < kShards; ++shard) {
      for (const TestTensor& tensor : shards_[static_cast<size_t>(shard)]) {
        map[tensor.name] = shard_name(shard);
      }
    }
    source_.write("model.safetensors.index.json",
                  json::serialize(json::object{{"metadata", {}}, {"weight_map", map}}));
  }

  QuantizeOptions to(const std::string& name) const {
    QuantizeOptions options;
    options.output = folder_ / name;
    options.num_threads = 2;
    options.show_progress = false;
    return options;
  }

  Result<QuantizeSummary> run(const QuantizeOptions& options) const {
    const auto checkpoint = Checkpoint::open(source_.path());
    EXPECT_TRUE(checkpoint) << checkpoint.error().message;
    return quantize_checkpoint(*checkpoint, options);
  }

  // The files that an uninterrupted run writes.
  std::map<std::string, std::string> whole(QuantizeOptions options) const {
    options.output = folder_ / "whole";
    fs::remove_all(options.output);
    const auto done = run(options);
    EXPECT_TRUE(done) << done.error().message;
    return all_files(options.output);
  }

  // Damages a shard's matrix so that quantizing it fails, or repairs it, and keeps the file's time.
  void damage(int shard, bool broken) {
    for (TestTensor& tensor : shards_[static_cast<size_t>(shard)]) {
      if (!tensor.name.ends_with("_proj.weight") || tensor.name.find("eh_") != std::string::npos) {
        continue;
      }
      const uint16_t first = broken ? 0x7FC0 : 0x3C00;
      std::memcpy(tensor.data.data(), &first, 2);
      break;
    }
    const std::string path = source_ / shard_name(shard);
    struct stat before {};
    ASSERT_EQ(stat(path.c_str(), &before), 0);
    write_shard(shard);
    const timespec times[] = {before.st_atim, before.st_mtim};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }

  TestFolder source_, folder_;
  std::vector<TestTensor> shards_[kShards];
};

TEST_F(Quantize, WritesThePublishedForm) {
  for (const ScaleForm form : {ScaleForm::kF32, ScaleForm::kPowerOfTwo}) {
    QuantizeOptions options = to(form == ScaleForm::kF32 ? "float" : "ue8m0");
    options.format.scale_form = form;
    const auto done = run(options);
    ASSERT_TRUE(done) << done.error().message;
    const auto source = Checkpoint::open(source_.path());
    const auto made = Checkpoint::open(options.output);
    ASSERT_TRUE(made) << made.error().message;
    const QuantizationConfig& config = made->config().quantization;
    EXPECT_EQ(config.kind, QuantizationConfig::Kind::kFp8Block);
    EXPECT_EQ(config.scales_are_powers_of_two, form == ScaleForm::kPowerOfTwo);
    EXPECT_FALSE(config.static_activations);
    // Names, types and shapes are exactly those of the published form.
    const auto table = Checkpoint::open_dummy(options.output);
    ASSERT_TRUE(table) << table.error().message;
    EXPECT_EQ(made->tensors().size(), table->tensors().size());
    for (const auto& [name, wanted] : table->tensors()) {
      const TensorEntry* entry = made->find(name);
      ASSERT_NE(entry, nullptr) << name;
      EXPECT_EQ(entry->dtype, wanted.dtype) << name;
      EXPECT_EQ(entry->shape, wanted.shape) << name;
      EXPECT_EQ(entry->offset % size_of(entry->dtype), 0) << name;
    }
    // Values are quantized matrix by matrix, or unchanged.
    const auto files = all_files(options.output);
    const auto bytes_in = [&](const TensorEntry& entry) {
      return files.at(fs::path(made->file_of(entry)).filename().string())
          .substr(static_cast<size_t>(entry.offset), static_cast<size_t>(entry.bytes));
    };
    int64_t quantized = 0;
    for (int shard = 0; shard < kShards; ++shard) {
      for (const TestTensor& tensor : shards_[static_cast<size_t>(shard)]) {
        const TensorEntry& entry = *made->find(tensor.name);
        EXPECT_EQ(fs::path(made->file_of(entry)).filename(), shard_name(shard));
        if (entry.dtype != DType::kF8E4M3) {
          EXPECT_EQ(bytes_in(entry), tensor.data) << tensor.name;
          continue;
        }
        ++quantized;
        const int64_t rows = entry.shape[0], cols = entry.shape[1];
        std::vector<e4m3> values(static_cast<size_t>(rows * cols));
        const int64_t grid_rows = ceil_div(rows, 128), grid_cols = ceil_div(cols, 128);
        std::vector<float> scales(static_cast<size_t>(grid_rows * grid_cols));
        ASSERT_TRUE(
            quantize_weights(ConstTensorView(tensor.data.data(), DType::kBF16, {rows, cols}), form,
                             TensorView(values.data(), {rows, cols}),
                             TensorView(scales.data(), {grid_rows, grid_cols})));
        EXPECT_EQ(bytes_in(entry), bytes_of(values)) << tensor.name;
        EXPECT_EQ(bytes_in(*made->find(tensor.name + "_scale_inv")), bytes_of(scales));
      }
    }
    EXPECT_EQ(done->quantized, quantized);
    EXPECT_EQ(done->kept, 0);
    // No other files but the small ones; config.json's other lines are unchanged.
    EXPECT_EQ(files.size(), 4u + kShards);
    EXPECT_EQ(files.at("tokenizer.json"), file_text(source_ / "tokenizer.json"));
    EXPECT_EQ(files.at("LICENSE"), "MIT");
    const std::string before(kSmallConfig, std::string_view(kSmallConfig).rfind("\n}"));
    EXPECT_TRUE(files.at("config.json").starts_with(before + ",\n  \"quantization_config\""));
  }
}

TEST_F(Quantize, IsWhatLoadingQuantises) {
  ASSERT_TRUE(run(to("made")));
  const auto source = Checkpoint::open(source_.path());
  const auto made = Checkpoint::open(folder_ / "made");
  const auto load = [](const Checkpoint& checkpoint, const Checkpoint& names, bool quantize) {
    std::map<std::string, std::string> loaded;
    std::vector<TensorRequest> requests;
    for (const auto& [name, entry] : names.tensors()) {
      requests.push_back({name, entry.shape, [&loaded, key = name](const ScaledMatrix& matrix) {
                            const auto append = [&](const ConstTensorView& view) {
                              loaded[key].append(
                                  static_cast<const char*>(view.raw()),
                                  static_cast<size_t>(view.num_elements() * size_of(view.dtype())));
                            };
                            append(matrix.values);
                            if (!matrix.scales.empty()) append(matrix.scales);
                            return Result<>();
                          }});
    }
    LoadOptions options;
    options.num_threads = 1;
    options.show_progress = false;
    options.quantize_fp8 = quantize;
    const auto done = load_tensors(checkpoint, requests, options);
    EXPECT_TRUE(done) << done.error().message;
    return loaded;
  };
  EXPECT_EQ(load(*source, *source, true), load(*made, *source, false));
}

TEST_F(Quantize, ThreadsDoNotChangeABit) {
  const auto wanted = whole(to(""));
  for (const int threads : {0, 1, 7}) {
    QuantizeOptions options = to(fmt::format("threads-{}", threads));
    options.num_threads = threads;
    ASSERT_TRUE(run(options));
    EXPECT_EQ(all_files(options.output), wanted);
  }
}

// With many pieces per tensor, as in real models.
TEST_F(Quantize, PiecesDoNotChangeABit) {
  for (const ScaleForm form : {ScaleForm::kF32, ScaleForm::kPowerOfTwo}) {
    QuantizeOptions options = to(form == ScaleForm::kF32 ? "float" : "ue8m0");
    options.format.scale_form = form;
    const auto wanted = whole(options);
    options.piece_bytes = 1000;  // less than 128 rows of some matrices
    const auto done = run(options);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_TRUE(all_files(options.output) == wanted);
  }
}

TEST_F(Quantize, CutsShardsAnew) {
  QuantizeOptions options = to("cut");
  options.max_shard_bytes = 200'000;
  const auto done = run(options);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_GT(done->shards, 3);
  const auto files = all_files(options.output);
  EXPECT_TRUE(files.contains(fmt::format("model-00001-of-{:05}.safetensors", done->shards)));
  for (const auto& [name, text] : files) {
    if (name.ends_with(".safetensors")) {
      EXPECT_LT(text.size(), 220'000u);
    }
  }
  const auto made = Checkpoint::open(options.output);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->tensors().size(), Checkpoint::open_dummy(options.output)->tensors().size());
  options = to("one");
  options.max_shard_bytes = int64_t{1} << 40;
  ASSERT_TRUE(run(options));
  EXPECT_TRUE(fs::exists(options.output + "/model.safetensors"));
  EXPECT_FALSE(fs::exists(options.output + "/model.safetensors.index.json"));
  ASSERT_TRUE(Checkpoint::open(options.output));
}

TEST_F(Quantize, GoesOnAfterAnErrorInEachShard) {
  for (int shard = 0; shard < kShards; ++shard) damage(shard, false);
  const auto wanted = whole(to(""));
  for (int shard = 0; shard < kShards; ++shard) {
    const QuantizeOptions options = to(fmt::format("failed-{}", shard));
    damage(shard, true);
    const auto failed = run(options);
    ASSERT_FALSE(failed);
    EXPECT_THAT(failed.error().message, HasSubstr(source_ / shard_name(shard)));
    EXPECT_THAT(failed.error().message, HasSubstr("_proj.weight\" holds nan at [0, 0]"));
    for (int other = 0; other < kShards; ++other) {
      EXPECT_EQ(fs::exists(options.output + "/" + shard_name(other)), other < shard);
    }
    EXPECT_FALSE(Checkpoint::open(options.output));  // an incomplete model does not open
    damage(shard, false);
    const auto done = run(options);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_EQ(done->kept, shard);
    EXPECT_EQ(all_files(options.output), wanted);
  }
}

TEST_F(Quantize, GoesOnAfterBeingKilledAtAnyTime) {
  const auto start = std::chrono::steady_clock::now();
  const auto wanted = whole(to(""));
  const auto whole_time = std::chrono::steady_clock::now() - start;
  std::mt19937 random(3);
  int interrupted = 0;
  for (int round = 0; round < 24; ++round) {
    const QuantizeOptions options = to(fmt::format("killed-{}", round));
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(run(options) ? 0 : 1);
    std::this_thread::sleep_for(whole_time * static_cast<int>(random() % 100) / 100);
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
    } else {
      ++interrupted;
      const bool ended = fs::exists(options.output + "/config.json") &&
                         !fs::exists(options.output + "/.fathom-quantize");
      if (!ended) {
        const auto done = run(options);
        ASSERT_TRUE(done) << done.error().message;
      }
    }
    ASSERT_EQ(all_files(options.output), wanted) << round;
  }
  RecordProperty("interrupted", interrupted);
}

TEST_F(Quantize, WritesDamagedShardsAnew) {
  damage(kShards - 1, false);
  const auto wanted = whole(to(""));
  const QuantizeOptions options = to("damaged");
  damage(kShards - 1, true);
  ASSERT_FALSE(run(options));
  damage(kShards - 1, false);
  fs::resize_file(options.output + "/" + shard_name(0), 1000);
  std::ofstream(options.output + "/" + shard_name(3) + ".partial") << "torn";
  const auto done = run(options);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->kept, kShards - 2);
  EXPECT_EQ(all_files(options.output), wanted);
}

// A shard of the right size may have another header; one with the right header may be truncated.
TEST_F(Quantize, WritesOthersShardsAnew) {
  damage(kShards - 1, false);
  const auto wanted = whole(to(""));
  const QuantizeOptions options = to("others");
  damage(kShards - 1, true);
  ASSERT_FALSE(run(options));
  damage(kShards - 1, false);
  const std::string first = options.output + "/" + shard_name(0);
  std::string other = file_text(first);
  const size_t name = other.find("model.");
  ASSERT_LT(name, other.size());
  other[name] = 'n';
  std::ofstream(first, std::ios::binary) << other;
  const std::string second = options.output + "/" + shard_name(1);
  fs::resize_file(second, fs::file_size(second) - 1);
  const auto done = run(options);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->kept, kShards - 3);
  EXPECT_TRUE(all_files(options.output) == wanted);
}

TEST_F(Quantize, RefusesToGoOnWithSomethingElse) {
  const QuantizeOptions options = to("begun");
  damage(2, true);
  ASSERT_FALSE(run(options));
  QuantizeOptions others = options;
  others.format.scale_form = ScaleForm::kPowerOfTwo;
  EXPECT_THAT(run(others).error().message,
              HasSubstr("begun otherwise: \"scale_fmt float\", now \"scale_fmt ue8m0\""));
  others = options;
  others.max_shard_bytes = 1 << 20;
  EXPECT_THAT(run(others).error().message, HasSubstr("max shard bytes"));
  source_.write(shard_name(1), file_text(source_ / shard_name(1)));  // with a new modification time
  const auto changed = run(options);
  ASSERT_FALSE(changed);
  EXPECT_THAT(changed.error().message, HasSubstr(options.output + ": an unfinished run"));
  EXPECT_THAT(changed.error().message, HasSubstr("\"" + shard_name(1) + " has "));
}

TEST_F(Quantize, RefusesOutputsThatAreNotItsOwn) {
  const QuantizeOptions options = to("taken");
  folder_.write("taken/model.safetensors", "mine");
  EXPECT_THAT(run(options).error().message,
              HasSubstr(options.output + ": is not empty, there is \"model.safetensors\""));
  EXPECT_EQ(file_text(options.output + "/model.safetensors"), "mine");
  // Neither a finished run nor the source is overwritten.
  ASSERT_TRUE(run(to("finished")));
  EXPECT_THAT(run(to("finished")).error().message, HasSubstr("is not empty"));
  QuantizeOptions in_place = options;
  in_place.output = source_.path();
  EXPECT_THAT(run(in_place).error().message, HasSubstr("is not empty"));
  folder_.write("file", "");
  EXPECT_THAT(run(to("file")).error().message, HasSubstr("/file: cannot be"));
}

TEST_F(Quantize, OneRunAtATime) {
  const QuantizeOptions options = to("locked");
  fs::create_directories(options.output);
  const int other = open(options.output.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  const auto refused = run(options);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("another `fathom quantize` is writing there"));
  close(other);
  EXPECT_TRUE(run(options));
}

// A file size limit stands in for a full disk: the same calls fail, with another error number.
TEST_F(Quantize, GoesOnWhenThereIsRoomAgain) {
  const auto wanted = whole(to(""));
  const QuantizeOptions options = to("full");
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 20'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto failed = run(options);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, old_action);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kTooLarge);
  EXPECT_THAT(failed.error().message, HasSubstr(options.output + "/" + shard_name(0)));
  EXPECT_THAT(failed.error().message, HasSubstr(" bytes"));
  EXPECT_FALSE(fs::exists(options.output + "/" + shard_name(0) + ".partial"));
  const auto done = run(options);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(all_files(options.output), wanted);
}

TEST(QuantizePlan, RefusesWhatIsQuantisedAlready) {
  const std::string root = FATHOM_SOURCE_DIR;
  for (const auto& [folder, form] :
       {std::pair("/models/fathom-tiny", "to FP8 with scales by blocks of 128x128"),
        {"/tests/goldens/v2_fp8_tensor", "to FP8 with one scale a tensor"},
        {"/tests/goldens/v2_ct_channel", "to FP8 with one scale a row"}}) {
    const auto checkpoint = Checkpoint::open(root + folder);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const auto refused = plan_quantize(*checkpoint, QuantizeFormat(), 0);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().message, HasSubstr(root + folder));
    EXPECT_THAT(refused.error().message, HasSubstr(std::string("quantised already, ") + form));
  }
}

TEST(QuantizePlan, RefusesAModelWithoutExpertsForFourBits) {
  const auto checkpoint = Checkpoint::open(FATHOM_SOURCE_DIR "/tests/goldens/youtu");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const auto format = quantize_format_named("int4-g32");
  ASSERT_TRUE(format);
  const auto refused = plan_quantize(*checkpoint, *format, 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("no routed experts"));
}

TEST(QuantizePlan, ConfigsThatHaveAnOpinion) {
  EXPECT_THAT(quantized_config(R"({"a": 1, "quantization_config": null})", QuantizeFormat(), "c")
                  .error()
                  .message,
              HasSubstr("c: quantization_config is there already, with null"));
  EXPECT_FALSE(quantized_config("[]", QuantizeFormat(), "c"));
  EXPECT_FALSE(quantized_config("{}", QuantizeFormat(), "c"));
  EXPECT_TRUE(quantized_config("{\"a\":{}}  \n", QuantizeFormat(), "c")
                  ->starts_with("{\"a\":{},\n  \"quantization_config\": {\n"));
}

}  // namespace
}  // namespace fathom
