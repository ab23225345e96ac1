#include "cli/foreign_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/flags.h"

namespace fathom {
namespace {

constexpr const char* kHeading = "Of other engines (accepted, without effect)";

struct ForeignFlag {
  const char* names;
  bool takes_value;
  const char* instead;  // what holds here, the end of "--flag has no effect: …"
};

constexpr const char* kCompiled = "the kernels are compiled";
constexpr const char* kNoPython = "no code of a checkpoint is ever run";
constexpr const char* kOneProcess = "one process of threads serves the model";
constexpr const char* kCacheSize = "--max-total-tokens sets the size of the cache";
constexpr const char* kByModel = "the format follows from the model, --chat-format overrides it";
constexpr const char* kAlwaysOn = "it is always on";
constexpr const char* kOwnScheduler = "long prompts are always computed in chunks beside what runs";

constexpr ForeignFlag kForeignFlags[] = {
    {"--trust-remote-code", false, kNoPython},
    {"--enable-torch-compile", false, kCompiled},
    {"--torch-compile-max-bs", true, kCompiled},
    {"--cuda-graph-max-bs,--max-seq-len-to-capture", true, kCompiled},
    {"--compilation-config", true, kCompiled},
    {"--attention-backend", true, "--attention chooses the form of attention"},
    {"--gpu-memory-utilization,--mem-fraction-static", true, kCacheSize},
    {"--swap-space", true, "--kv-offload-gib gives host memory to the cache"},
    {"--cpu-offload-gb", true, "weights are held once, in host memory"},
    {"--reasoning-parser", true, kByModel},
    {"--tool-call-parser", true, kByModel},
    {"--enable-auto-tool-choice", false, kAlwaysOn},
    {"--enable-reasoning", false, kAlwaysOn},
    {"--enable-metrics", false, kAlwaysOn},
    {"--enable-cache-report,--enable-prompt-tokens-details", false, kAlwaysOn},
    {"--enable-chunked-prefill", false, kAlwaysOn},
    {"--no-enable-chunked-prefill", false, kOwnScheduler},
    {"--enable-mixed-chunk", false, kOwnScheduler},
    {"--schedule-policy,--scheduling-policy", true, "requests run by priority, then in order"},
    {"--schedule-conservativeness", true, "sequences are preempted when the cache is full"},
    {"--guided-decoding-backend,--grammar-backend", true, "XGrammar makes the masks"},
    {"--disable-log-stats", false, "figures are at /metrics only"},
    {"--uvicorn-log-level", true, "--log-level is the one level of all lines"},
    {"--tokenizer-mode", true, "there is one tokenizer"},
    {"--distributed-executor-backend", true, kOneProcess},
    {"--api-server-count", true, kOneProcess},
    {"--stream-interval", true, "tokens are sent as they come"},
};

// Of which this engine has one value so far; the others are refused.
struct FixedFlag {
  const char* names;
  int64_t only;
  const char* refusal;
};

constexpr FixedFlag kFixedFlags[] = {
    {"--tensor-parallel-size,--tp,--tp-size", 1, "parallelism over devices is not there yet"},
    {"--pipeline-parallel-size,--pp,--pp-size", 1, "parallelism over devices is not there yet"},
    {"--data-parallel-size,--dp,--dp-size", 1, "parallelism over devices is not there yet"},
    {"--ep,--ep-size", 1, "parallelism over devices is not there yet"},
    {"--nnodes", 1, "parallelism over machines is not there yet"},
    {"--block-size,--page-size", 64, "pages of the cache have 64 tokens"},
};

}  // namespace

void add_foreign_flags(CLI::App& command, std::vector<std::string>* notes) {
  for (const ForeignFlag& flag : kForeignFlags) {
    const std::string names = flag.names;
    const auto note = [notes, instead = flag.instead, name = names.substr(0, names.find(','))] {
      notes->push_back(fmt::format("{} has no effect: {}", name, instead));
    };
    if (flag.takes_value) {
      command
          .add_option_function<std::string>(
              names, [note](const std::string&) { note(); }, flag.instead)
          ->group(kHeading)
          ->type_name("X");
    } else {
      // "--flag=false", or false in a file, is as if it were not there.
      const auto count = [note](int64_t balance) {
        if (balance > 0) note();
      };
      command.add_flag_function(names, count, flag.instead)->group(kHeading);
    }
  }
  for (const FixedFlag& flag : kFixedFlags) {
    const std::string names = flag.names;
    const auto check = [flag, name = names.substr(0, names.find(','))](const std::string& text) {
      if (const auto value = parse_count(text); value && *value == flag.only) return;
      throw CLI::ValidationError(
          fmt::format("{} is \"{}\", allowed is {}: {}", name, text, flag.only, flag.refusal));
    };
    command
        .add_option_function<std::string>(names, check,
                                          fmt::format("{} only: {}", flag.only, flag.refusal))
        ->group(kHeading)
        ->type_name("N");
  }
}

}  // namespace fathom
