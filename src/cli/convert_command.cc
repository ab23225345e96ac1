// `fathom convert MODEL DIR --to mla`: makes a model of latent attention of one with grouped
// queries.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>

#include "base/json.h"
#include "base/utf8.h"
#include "checkpoint/output_directory.h"
#include "cli/command.h"
#include "cli/model_flags.h"
#include "convert/calibration.h"
#include "convert/convert_checkpoint.h"
#include "model/layer_options.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

using mla::Calibration;
using mla::MlaShape;

constexpr int64_t kMaxConvertThreads = 1024;
constexpr int64_t kMaxTextBytes = 64 << 20;

struct ConvertFlags {
  ModelFlags model;  // only its `model` is used
  std::string output;
  std::string to;
  std::string calibration;
  std::string dtype = "bfloat16";
  mla::MlaRequest request;
  int64_t threads = 0;
  bool quiet = false;
};

// The text's tokens, as many as a calibration takes.
Result<std::vector<int32_t>> read_calibration(const Checkpoint& checkpoint,
                                              const std::string& path) {
  FATHOM_TRY(const std::string text, read_text_file(path, kMaxTextBytes));
  if (!is_valid_utf8(text)) return invalid("--calibration {}: is not UTF-8 text", path);
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    return invalid("--calibration {}: has no text", path);
  }
  FATHOM_TRY(const auto tokenizer, Tokenizer::load(checkpoint.directory()));
  std::vector<int32_t> ids = tokenizer->encode_ordinary(text);
  constexpr auto kMost = static_cast<size_t>(mla::kWindowTokens * mla::kMostWindows);
  if (ids.size() > kMost) ids.resize(kMost);
  if (ids.size() < 2) {
    return invalid("--calibration {}: has {} token; a loss takes two or more", path, ids.size());
  }
  const int64_t vocab = checkpoint.config().vocab_size;
  for (const int32_t id : ids) {
    if (id < vocab) continue;
    return invalid("{}: the tokenizer has token {}, config.json's vocab_size is {}",
                   checkpoint.directory(), id, vocab);
  }
  return ids;
}

void print_layers(const std::vector<mla::LayerReport>& layers) {
  fmt::print("{:>5} {:>22} {:>18}\n", "layer", "keys that keep RoPE", "kept in the latent");
  for (size_t i = 0; i < layers.size(); ++i) {
    fmt::print("{:>5} {:>20.2f} % {:>16.2f} %\n", i, layers[i].rope_energy * 100,
               layers[i].latent_energy * 100);
  }
}

std::string loss_text(const Calibration& calibration) {
  return fmt::format("{:.4f} nats a token (perplexity {:.3f})", calibration.loss,
                     std::exp(calibration.loss));
}

Result<int> run_convert(const ConvertFlags& flags) {
  FATHOM_TRY(const std::string model, resolve_model_flag(flags.model));
  FATHOM_TRY(const Checkpoint source, Checkpoint::open(model));
  FATHOM_TRY(const MlaShape shape, mla::plan_mla_shape(source.config(), flags.request));
  mla::CalibrationOptions run;
  run.compute = flags.dtype == "float32" ? DType::kF32 : DType::kBF16;
  run.num_threads = static_cast<int>(flags.threads);
  run.show_progress = !flags.quiet;
  mla::ConvertOptions options;
  options.output = flags.output;
  options.num_threads = run.num_threads;
  options.show_progress = run.show_progress;

  std::vector<int32_t> ids;
  Calibration before;
  if (!flags.calibration.empty()) {
    FATHOM_TRY(ids, read_calibration(source, flags.calibration));
    FATHOM_TRY(options.calibration, describe_file(flags.calibration));
    options.calibration = flags.dtype + ", " + options.calibration;
    FATHOM_TRY(before, mla::calibrate(source, ids, run));
  }
  FATHOM_TRY(const mla::ConvertSummary summary,
             mla::convert_checkpoint(source, shape, before.moments, options));
  before.moments.clear();

  FATHOM_TRY(const Checkpoint converted, Checkpoint::open(flags.output));
  print_layers(summary.layers);
  const int64_t cache_before = cache_token_bytes(source.config(), CacheFormat::kBF16);
  const int64_t cache_after = cache_token_bytes(converted.config(), CacheFormat::kBF16);
  fmt::print(
      "{}: kv_lora_rank {}, qk_rope_head_dim {}{}\n"
      "cache: {} bytes a token in bf16, {} before ({:.1f} %)\n"
      "weights: {:.3f} GiB, {:.3f} GiB before{}\n",
      flags.output, shape.rank, shape.rope_dim, shape.is_lossless() ? ", without loss" : "",
      cache_after, cache_before,
      100 * static_cast<double>(cache_after) / static_cast<double>(cache_before),
      static_cast<double>(summary.bytes) / (1 << 30),
      static_cast<double>(summary.source_bytes) / (1 << 30),
      summary.kept > 0 ? fmt::format("; {} layers from an earlier run", summary.kept) : "");
  if (ids.empty()) return 0;
  FATHOM_TRY(const Calibration after, mla::calibrate(converted, ids, run));
  fmt::print("loss on {} tokens of {}: {}, {} before\n", before.tokens, flags.calibration,
             loss_text(after), loss_text(before));
  return 0;
}

}  // namespace

void add_convert_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<ConvertFlags>();
  CLI::App* command =
      app.add_subcommand("convert", "Make a Llama- or Qwen2-form model one of latent attention");
  command->footer(
      "TransMLA without fine-tuning: expect a loss of quality (docs/convert.md says how large).\n"
      "The model is written as deepseek_v3 without a norm on the latent, and runs in Fathom.\n"
      "With --calibration the rotations follow a text of the model's own kind, which runs through\n"
      "the model before and after: its weights are in memory. Without, they follow the weights\n"
      "alone. The same command resumes an interrupted run.\n"
      "\n"
      "  fathom convert ./Qwen2.5-7B ./Qwen2.5-7B-MLA --to mla --calibration wiki.txt\n"
      "  fathom convert ./Llama-3.2-1B ./Llama-MLA --to mla --rank 192 --freqfold 4\n"
      "  fathom run ./Qwen2.5-7B-MLA \"Hello\"");
  add_model_positional(*command, &flags->model);
  add_output_positional(*command, &flags->output);
  FlagGroup group(*command, "Conversion");
  group.choice("--to", &flags->to, {"mla"}, "What to make: multi-head latent attention")
      ->required();
  group.count("--rank", &flags->request.rank, 1, 1 << 16, "kv_lora_rank",
              "512, or all that there is if that is less");
  group.count("--rope-dim", &flags->request.rope_dim, 2, 1 << 16,
              "qk_rope_head_dim: of head_dim a divisor, or a multiple for more of the KV heads",
              "64, or head_dim");
  group.count("--freqfold", &flags->request.fold, 1, 1 << 14,
              "Neighbouring frequencies that are treated as one", "head_dim / --rope-dim, or 1");
  group.text("--calibration", &flags->calibration, "FILE",
             "A text file: its first 32,768 tokens in windows of 256");
  group.choice("--dtype", &flags->dtype, {"bfloat16", "float32"},
               "Arithmetic of the runs over the calibration text");
  group.count("-t,--threads", &flags->threads, 1, kMaxConvertThreads, "CPU threads",
              "one per core; layers at once: as many, at most 4");
  group.toggle("-q,--quiet", &flags->quiet, "No progress on stderr");
  command->callback([flags, chosen] { *chosen = [flags] { return run_convert(*flags); }; });
}

}  // namespace fathom
