// `fathom quantize MODEL DIR`: converts a checkpoint in bf16, f16 or f32 to FP8 or four bits.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "checkpoint/quantize_checkpoint.h"
#include "cli/command.h"
#include "cli/model_flags.h"

namespace fathom {
namespace {

constexpr int64_t kMaxQuantizeThreads = 1024;

struct QuantizeFlags {
  ModelFlags model;  // only its `model` is used
  std::string output;
  std::string format = "fp8";
  std::string scale_format = "float";
  int64_t max_shard_bytes = 0;
  int64_t threads = 0;
  bool quiet = false;
};

double gib_of(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

Result<int> quantize(const QuantizeFlags& flags) {
  FATHOM_TRY(const std::string model, resolve_model_flag(flags.model));
  FATHOM_TRY(const Checkpoint checkpoint, Checkpoint::open(model));
  QuantizeOptions options;
  options.output = flags.output;
  options.format = *quantize_format_named(flags.format);
  if (flags.scale_format == "ue8m0") {
    if (options.format.is_four_bit()) {
      return invalid("--scale-fmt ue8m0 is of --format fp8, not of {}", flags.format);
    }
    options.format.scale_form = ScaleForm::kPowerOfTwo;
  }
  options.max_shard_bytes = flags.max_shard_bytes;
  options.num_threads = static_cast<int>(flags.threads);
  options.show_progress = !flags.quiet;
  FATHOM_TRY(const QuantizeSummary summary, quantize_checkpoint(checkpoint, options));
  fmt::print("{}: {} of {} tensors in {}, {:.2f} GiB of weights to {:.2f} GiB in {} shards{}\n",
             flags.output, summary.quantized, summary.tensors,
             options.format.is_four_bit() ? flags.format : "e4m3", gib_of(summary.source_bytes),
             gib_of(summary.bytes), summary.shards,
             summary.kept > 0 ? fmt::format(", {} of them from an earlier run", summary.kept) : "");
  return 0;
}

}  // namespace

void add_quantize_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<QuantizeFlags>();
  CLI::App* command = app.add_subcommand("quantize", "Convert a checkpoint to FP8 or four bits");
  command->footer(
      "fp8 is DeepSeek-V3's form as published: e4m3 weights of the linear layers with block-wise\n"
      "128x128 fp32 scales (weight_scale_inv); embedding, head, norms and router are unchanged.\n"
      "int4-g32, int4-g128 and mxfp4 quantise the routed experts alone, in groups of 32 or 128\n"
      "columns, and write compressed-tensors' pack-quantized form, as Kimi K2-Thinking has it.\n"
      "Activations are quantised at run time: there is nothing to calibrate.\n"
      "\n"
      "The same command resumes an interrupted run. It takes 24 MiB of memory per thread.\n"
      "`--quantization fp8` quantises to bitwise identical weights while a model is loaded.\n"
      "\n"
      "  fathom quantize ./DeepSeek-V2-Lite ./DeepSeek-V2-Lite-FP8\n"
      "  fathom quantize ./DeepSeek-V2-Lite ./DeepSeek-V2-Lite-INT4 --format int4-g32\n"
      "  fathom run ./DeepSeek-V2-Lite-FP8 \"Hello\"");
  add_model_positional(*command, &flags->model);
  add_output_positional(*command, &flags->output);
  FlagGroup group(*command, "Quantisation");
  group.choice("--format", &flags->format, {"fp8", "int4-g32", "int4-g128", "mxfp4"},
               "What to write: e4m3 linear layers, or experts in four bits");
  group.choice("--scale-fmt", &flags->scale_format, {"float", "ue8m0"},
               "Scales: any fp32 number, or powers of two as in DeepSeek-V3.1");
  group.count("--max-shard-size", &flags->max_shard_bytes, 1 << 20, int64_t{1} << 50,
              "Largest shard in bytes: 5g, 5G", "mirrors the source's shards");
  group.count("-t,--threads", &flags->threads, 1, kMaxQuantizeThreads, "CPU threads",
              "one per core");
  group.toggle("-q,--quiet", &flags->quiet, "No progress on stderr");
  command->callback([flags, chosen] { *chosen = [flags] { return quantize(*flags); }; });
}

}  // namespace fathom
